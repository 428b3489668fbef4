"""Whether a run that was stopped and resumed ends where an uninterrupted run ends: `python
benchmarks/resumed_run.py [--dtype bf16] [--device cuda] [--help]`.

The same distillation on generated images runs three times: without a stop; stopped half-way by SIGTERM, as a
cluster stops it; and resumed from the checkpoint that was then kept. On a CPU the bits are the same; on a GPU
sums may be taken in a different order. Prints the figures and writes them to results/benchmarks.jsonl.
"""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from recording import leave
from torch import nn

from atbook.worlds import glyph_images, glyphs
from atlib import AttentionTransfer, Plan
from atlib.data import crop_and_flip
from atlib.recipe import Recipe
from atlib.train import Preempted, train
from atlib.vit import create_vit
from atrun.checkpoint_manager import CheckpointManager


def main(arguments: list[str] | None = None) -> dict:
    """Measure, print, write; returns the record's results."""
    options, start = parse(arguments), time.perf_counter()
    recipe = Recipe(steps=options.steps, batch_size=options.batch, mixed_precision=options.dtype)
    images = glyph_images(glyphs.generate("train", 5 * options.batch)).with_augment(crop_and_flip())
    images, half = images.to(options.device), options.steps // 2

    def run(keeper: CheckpointManager | None, log: Callable[[dict], None]) -> tuple[nn.Module, float]:
        """Run from the beginning or from the checkpoint: the student, and the loss of the last step."""
        torch.manual_seed(0)
        teacher, student = (create_vit(options.model) for _ in range(2))
        pair, losses = AttentionTransfer(teacher, student, Plan(how="distill")), []

        def note(entry: dict) -> None:
            if entry["event"] == "step":
                losses.append(entry["loss"])
                log(entry)

        train(pair, images, recipe, keeper=keeper, log=note, progress=None, cpu=options.device == "cpu")
        return pair.student, losses[-1]

    def stop_half_way(entry: dict) -> None:
        if entry["step"] == half:
            os.kill(os.getpid(), signal.SIGTERM)

    speeds: list[float] = []
    straight, loss = run(None, lambda entry: speeds.append(entry["images_per_second"]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(CheckpointManager(folder, every=options.steps), stop_half_way)
        except Preempted as stopped:
            print(stopped)
        left: list[int] = []
        resumed, loss_of_resumed = run(
            CheckpointManager(folder, every=options.steps), lambda entry: left.append(entry["step"])
        )
    weights = [
        nn.utils.parameters_to_vector(student.parameters()).detach() for student in (straight, resumed)
    ]
    results = {
        "steps": options.steps,
        "resumed_at": left[0] - 1,
        "final_loss": loss,
        "final_loss_resumed": loss_of_resumed,
        "weights_apart": ((weights[0] - weights[1]).norm() / weights[0].norm()).item(),
        "images_per_second": median(speeds[half:]),  # the first steps prepare what the others use
    }
    print(*(f"{name}: {value:g}" for name, value in results.items()), sep="\n")
    config = vars(options) | {"recipe": recipe.describe()}
    leave(name_of(options), config, results, [], start, options.out, options.device)
    return results


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model", choices=("glyphs", "cifar-small", "cifar"), default="cifar", help="preset of atlib.vit"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("no", "bf16", "fp16"), default="bf16", help="mixed precision")
    parser.add_argument(
        "--out", type=Path, help="file that the record is added to (default: results/benchmarks.jsonl)"
    )
    options = parser.parse_args(arguments)
    if options.steps < 4 or options.batch < 1:
        parser.error(f"at least 4 steps of 1 image are needed, got {options.steps} of {options.batch}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here; leave --device out to run on the CPU")
    if options.device == "cpu" and options.dtype == "fp16":
        parser.error("--dtype fp16 needs a GPU: add --device cuda, or take bf16")
    return options


def name_of(options: argparse.Namespace) -> str:
    """resumed_run-MODEL-DEVICE-PRECISION, which tells its record from others."""
    return f"resumed_run-{options.model}-{options.device}-{options.dtype}"


if __name__ == "__main__":
    main()
