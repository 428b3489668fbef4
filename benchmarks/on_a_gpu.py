"""What a GPU is asked for, in parts of less than nine minutes: `python benchmarks/on_a_gpu.py [--parts NAME
...] [--out FOLDER] [--help]`.

A card is often lent for minutes, and taken away without a word. So a part ends within its time, its commands
write records as they end, and what has ended is not run again: `OUT/on_a_gpu.jsonl` says of every command
whether it went well and in how many seconds. Call it again for what is left. `--small` runs the same commands
on a CPU with tiny sizes, which a test does.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
SECONDS = 540  # of one part
PARTS = {
    "tests": "the tests that need a device",
    "steps": "seconds and memory of the methods' steps and of the loss alone",
    "speeds": "images a second of training at each of the speeds that `--speed` names",
    "profile": "what a step's milliseconds are",
    "study": "the study real-long: goes on where it was, as often as it is called",
    "resumed": "whether a run that was stopped ends as one that was not",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that are asked for; returns the number of commands that did not end well."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    log, failed = options.out / "on_a_gpu.jsonl", 0
    for part in options.parts:
        end = time.monotonic() + options.seconds
        for command in commands(part, options):
            if [part, command] in ended(log):
                continue
            left = end - time.monotonic()
            if left <= 0:
                print(f"{part}: its {options.seconds} s are over; call it again for what is left")
                break
            print(f"\n{part}: {' '.join(command)}", flush=True)
            entry = {"part": part, "command": command, **run(command, left)}
            with log.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(f"{part}: {entry['ended']} after {entry['seconds']} s", flush=True)
            failed += entry["ended"] != "well"
    return failed


def commands(part: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """The arguments to Python of a part's commands, one after the other."""
    small, out = options.small, str(options.out / "benchmarks.jsonl")
    device = ["--device", "cpu" if small else "cuda", "--out", out]
    if part == "tests":
        yield ["-m", "pytest", "-q", "tests/device", "-p", "no:cacheprovider"]
    elif part == "steps":
        shapes = [("tiny", 197, 1)] if small else [("base", 197, 64), ("base", 785, 16), ("large", 197, 64)]
        for model, tokens, batch in shapes:
            sizes = ["--model", model, "--tokens", str(tokens), "--batch", str(batch)]
            few = (
                ["--repetitions", "1", "--threads", "1"]
                if small
                else ["--repetitions", "20", "--dtype", "bf16"]
            )
            yield ["benchmarks/transfer_step.py", *sizes, *few, *device]
    elif part == "speeds":
        for model in ["glyphs"] if small else ["small", "base"]:
            few = ["--steps", "2", "--speeds", "tf32"] if small else []
            yield ["benchmarks/training_speed.py", "--model", model, *few, *device]
    elif part == "profile":
        for tokens, batch in [(197, 1)] if small else [(197, 64), (785, 16)]:
            sizes = ["--tokens", str(tokens), "--batch", str(batch)]
            few = ["--model", "tiny", "--steps", "1"] if small else []
            yield ["benchmarks/profile_step.py", *sizes, *few, *device]
    elif part == "study":
        folders = ["--out", str(options.out), "--work", str(options.out / "work")]
        data = [] if options.data is None else ["--data", str(options.data)]
        if small:  # the command alone: its data and its teacher are not everywhere
            yield ["-m", "atbook", "experiments"]
        else:
            for seeds in ("1", "5"):
                study = ["real-long", "--scale", "real-cifar10-long", "--seeds", seeds, "--jobs", "4"]
                yield ["-m", "atbook", "experiment", *study, *folders, *data]
    else:
        few = ["--model", "glyphs", "--steps", "4", "--batch", "8"] if small else []
        yield ["benchmarks/resumed_run.py", *few, *device]


def run(command: list[str], seconds: float) -> dict:
    """Run a command for so long at most: {"ended": "well", "in time" or "badly", "seconds"}."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        how = "well" if process.wait(timeout=seconds) == 0 else "badly"
    except subprocess.TimeoutExpired:
        process.terminate()  # a run writes a checkpoint then
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        how = "in time"
    return {"ended": how, "seconds": round(time.monotonic() - start, 1)}


def ended(log: Path) -> list[list]:
    """[part, command] of what has ended well."""
    lines = log.read_text().splitlines() if log.exists() else []
    entries = [json.loads(line) for line in lines]
    return [[entry["part"], entry["command"]] for entry in entries if entry["ended"] == "well"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="parts: " + "; ".join(f"{name}: {what}" for name, what in PARTS.items()),
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("results/on_a_gpu"), help="folder of all records")
    parser.add_argument(
        "--seconds", type=int, default=SECONDS, help="that a part may take (default: %(default)s)"
    )
    parser.add_argument("--data", type=Path, help="as of `python -m atbook experiment`")
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU: a rehearsal")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    if not options.small and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --small rehearses on a CPU")
    return options


if __name__ == "__main__":
    sys.exit(main())
