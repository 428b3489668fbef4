"""Everything that is asked of one CUDA GPU, in calls of a few minutes that go on where the last one stopped;
called by `make gpu`.

The parts, in order: what a step of attention transfer costs; runs that are stopped and taken up again, in
bf16 and fp16; the teachers of the scale "cifar10", and whether the first of them is worth anything; its
students. Each is a process, and is done when its records are there. One whose time is up gets SIGTERM: a
teacher is then kept as it is, of anything else the run in progress is begun anew.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from atlib._util import STOPPED
from atlib.lab.scales import scales
from atlib.record import read_file

ROOT = Path(__file__).resolve().parent.parent
GRACE = 30  # seconds of a call for a process to keep what it has, after SIGTERM
NEEDED = 90  # seconds that must be left of a call for another part to begin: one alone takes about as long
SEEDS = 3
JOBS = 3  # students side by side: each alone leaves the GPU waiting for Python


class Part(NamedTuple):
    """One part. says: what it is; command: of its process; file, keys: the records that it leaves
    (`Record.key`)."""

    says: str
    command: list[str]
    file: Path
    keys: set[tuple]

    @property
    def done(self) -> bool:
        return self.keys <= {record.key for record in read_file(self.file)}


def parts(given: argparse.Namespace) -> list[Part]:
    """All parts, in order; the seeds' teachers come with scratch and fine-tuning, one process at a time."""
    if given.toy:
        small = ["--batch", "1", "--repetitions", "1", "--threads", "1"]
        return [
            benchmark(given, "transfer_step", "transfer_step-tiny-197-cpu", ["--model", "tiny", *small]),
            benchmark(
                given,
                "resumed_run",
                "resumed_run-glyphs-cpu-bf16",
                ["--model", "glyphs", "--steps", "4", "--batch", "8"],
            ),
            experiment(given, "teachers and students", "cifar10-toy", 1, 1, []),
        ]
    return [
        step_cost(given, "base", 197, 64),
        step_cost(given, "base", 785, 16),
        step_cost(given, "large", 197, 32),
        step_cost(given, "large", 785, 8),
        resumed_run(given, "bf16"),
        resumed_run(given, "fp16"),
        experiment(given, "teachers", "cifar10", SEEDS, 1, ["scratch", "fine-tune"]),
        experiment(given, "students", "cifar10", SEEDS, JOBS, []),
    ]


def step_cost(given: argparse.Namespace, model: str, tokens: int, batch: int) -> Part:
    """What a step of each method costs on the GPU, in bf16."""
    options = ["--model", model, "--tokens", str(tokens), "--batch", str(batch), "--repetitions", "3"]
    options += ["--device", "cuda", "--dtype", "bf16"]
    return benchmark(given, "transfer_step", f"transfer_step-{model}-{tokens}-cuda-bf16", options)


def resumed_run(given: argparse.Namespace, dtype: str) -> Part:
    """A run on the GPU that is stopped and taken up again."""
    options = ["--device", "cuda", "--dtype", dtype]
    return benchmark(given, "resumed_run", f"resumed_run-cifar-cuda-{dtype}", options)


def benchmark(given: argparse.Namespace, script: str, record: str, options: list[str]) -> Part:
    """One script of benchmarks/, which leaves one record."""
    file = given.out / "benchmarks.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *options, "--out", str(file)]
    return Part(record, command, file, {("run", record, 0, None)})


def experiment(
    given: argparse.Namespace, says: str, scale: str, seeds: int, jobs: int, methods: list[str]
) -> Part:
    """The central experiment with these methods (none: all of the scale), and what they need."""
    command = [sys.executable, "-m", "atlib", "experiment", "transfer", "--scale", scale]
    command += [
        "--seeds",
        str(seeds),
        "--jobs",
        str(jobs),
        "--out",
        str(given.out),
        "--work",
        str(given.work),
    ]
    command += ["--data", str(given.data)] if given.data else []
    command += ["--methods", *methods] if methods else []
    keys = {
        ("run", method, seed, None) for method in methods or scales()[scale].methods for seed in range(seeds)
    }
    return Part(f"{says}, {scale}", command, given.out / "transfer" / f"{scale}.jsonl", keys)


def main(arguments: list[str] | None = None) -> int:
    """Do what is left, as far as this call's minutes go: 0 when all is recorded, 75 when there is more to do,
    1 when something failed, as a teacher has that is worth nothing."""
    start, given = time.monotonic(), parse(arguments)
    if not given.toy and not torch.cuda.is_available():
        print(
            "make gpu needs a CUDA GPU, and torch sees none here; with ARGS=--toy it is tried on the CPU, at"
            " a size that means nothing",
            file=sys.stderr,
        )
        return 1
    # whoever ends this process ends its part too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    return work_off(parts(given), start + 60 * given.minutes - GRACE)


def work_off(every: list[Part], deadline: float) -> int:
    """Do the parts that are not done, in order, until the deadline (of `time.monotonic`); one that fails
    keeps back only those that share records with it. Returns as `main` does."""
    waiting = [part for part in every if not part.done]
    failed: list[Part] = []
    print(f"make gpu: {len(every) - len(waiting)} of {len(every)} parts are recorded", flush=True)
    for place, part in enumerate(waiting):
        if any(part.keys & other.keys for other in failed):
            continue  # it begins with what has failed
        left = deadline - time.monotonic()
        if place == 0 or left >= NEEDED:
            print(f"make gpu: {part.says}, {left:.0f} seconds left of this call", flush=True)
            code = run_for(part.command, left)
        else:
            code = None
        if code is None or code == STOPPED:
            left_over = len(waiting) - place + len(failed)
            print(f"make gpu: call again, {left_over} of {len(every)} parts are left", flush=True)
            return STOPPED
        if code or not part.done:
            print(f"make gpu: {part.says} failed, see above", file=sys.stderr)
            failed.append(part)
    if failed:
        print(f"make gpu: what failed: {'; '.join(part.says for part in failed)}", file=sys.stderr)
        return 1
    print("make gpu: all parts are recorded", flush=True)
    return 0


def run_for(command: list[str], seconds: float) -> int | None:
    """Run a command to its end and return its exit status; None where it was stopped because the time was
    up. However this ends, no process is left."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.terminate()  # nothing, for one that has ended
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked; paths are absolute."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9, help="that this call may take (default: 9)")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's parquet files (default: the hub)")
    parser.add_argument("--out", type=Path, help="folder of the records (default: results)")
    parser.add_argument("--work", type=Path, help="folder for weights and checkpoints (default: runs/gpu)")
    parser.add_argument(
        "--toy", action="store_true", help="on the CPU, as small as can be; records go to WORK/results"
    )
    given = parser.parse_args(arguments)
    if not given.minutes >= 2:
        parser.error(f"--minutes must be at least 2, got {given.minutes:g}: a part alone takes up to two")
    if given.data is not None and not given.data.is_dir():
        parser.error(f"--data {given.data} is no folder; leave it out to read CIFAR-10 from the hub")
    given.data = given.data and given.data.resolve()
    given.work = (given.work or ROOT / "runs" / ("gpu-toy" if given.toy else "gpu")).resolve()
    given.out = (given.out or (given.work if given.toy else ROOT) / "results").resolve()
    return given


if __name__ == "__main__":
    sys.exit(main())
