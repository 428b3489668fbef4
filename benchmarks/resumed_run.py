"""Whether a run that was stopped and taken up again ends where one does that went straight through: `python
benchmarks/resumed_run.py [--dtype bf16] [--device cuda] [--help]`.

Distillation on generated images, three times the same: straight through; stopped by SIGTERM half-way, as a
cluster stops it; and gone on from the checkpoint that was then kept. On a CPU the bits are the same, on a GPU
sums may be taken in another order. Prints the figures and writes them to results/benchmarks.jsonl.
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
from atlib.train.checkpoint_manager import CheckpointManager
from atlib.train.loop import train
from atlib.train.recipe import Recipe
from atlib.train.trainer import Preempted
from atlib.vit import create_vit


def main(arguments: list[str] | None = None) -> dict:
    """Measure, print, write; returns the record's results."""
    given, start = parse(arguments), time.perf_counter()
    recipe = Recipe(steps=given.steps, batch_size=given.batch, mixed_precision=given.dtype)
    images = glyph_images(glyphs.generate("train", 5 * given.batch)).with_augment(crop_and_flip())
    images, half = images.to(given.device), given.steps // 2

    def run(keeper: CheckpointManager | None, log: Callable[[dict], None]) -> tuple[nn.Module, float]:
        """A run from its beginning, or from where it was kept: its student, and the loss of its last step."""
        torch.manual_seed(0)
        teacher, student = (create_vit(given.model) for _ in range(2))
        pair, losses = AttentionTransfer(teacher, student, Plan(how="distill")), []

        def note(entry: dict) -> None:
            if entry["event"] == "step":
                losses.append(entry["loss"])
                log(entry)

        train(pair, images, recipe, keeper=keeper, log=note, progress=None, cpu=given.device == "cpu")
        return pair.student, losses[-1]

    def stop_half_way(entry: dict) -> None:
        if entry["step"] == half:
            os.kill(os.getpid(), signal.SIGTERM)

    speeds: list[float] = []
    straight, loss = run(None, lambda entry: speeds.append(entry["images_per_second"]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(CheckpointManager(folder, every=given.steps), stop_half_way)
        except Preempted as stopped:
            print(stopped)
        left: list[int] = []
        resumed, loss_of_resumed = run(
            CheckpointManager(folder, every=given.steps), lambda entry: left.append(entry["step"])
        )
    weights = [nn.utils.parameters_to_vector(each.parameters()).detach() for each in (straight, resumed)]
    results = {
        "steps": given.steps,
        "resumed_at": left[0] - 1,
        "final_loss": loss,
        "final_loss_resumed": loss_of_resumed,
        "weights_apart": ((weights[0] - weights[1]).norm() / weights[0].norm()).item(),
        "images_per_second": median(speeds[half:]),  # the first steps prepare what the others use
    }
    print(*(f"{name}: {value:g}" for name, value in results.items()), sep="\n")
    config = vars(given) | {"recipe": recipe.describe()}
    leave(name_of(given), config, results, [], start, given.out, given.device)
    return results


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
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
    given = parser.parse_args(arguments)
    if given.steps < 4 or given.batch < 1:
        parser.error(f"at least 4 steps of 1 image are needed, got {given.steps} of {given.batch}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here; leave --device out to run on the CPU")
    if given.device == "cpu" and given.dtype == "fp16":
        parser.error("--dtype fp16 needs a GPU: add --device cuda, or take bf16")
    return given


def name_of(given: argparse.Namespace) -> str:
    """resumed_run-MODEL-DEVICE-PRECISION, which tells its record from others."""
    return f"resumed_run-{given.model}-{given.device}-{given.dtype}"


if __name__ == "__main__":
    main()
