"""The speed-up from a second process, and the bytes that many would have to send: `python
benchmarks/processes.py [--help]`.

It measures optimiser steps per second of attention distillation on the built-in images, on one process and on
two that divide every step's images (gloo, one thread each, so that two cores are needed); every repetition
runs both in turn, and the speed-up is taken within it. It computes the bytes that every GPU sends per step
when 8 to 64 of them train ViT-L, and the seconds that this takes. Prints the table and writes it to
results/benchmarks.jsonl.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accelerate import debug_launcher
from recording import leave
from timing import ratio, spread

from atbook.worlds import glyph_images
from atbook.worlds.glyphs import generate
from atlib import AttentionTransfer, Plan, create_vit
from atlib.loading import steps_per_epoch
from atlib.recipe import Recipe
from atlib.train import train
from atrun.data.catalogue import CATALOGUE
from atrun.estimate import PAPER_EPOCHS, PAPER_GPU_HOURS
from atrun.recipes import published

GPUS = (8, 16, 32, 64)
WARM_UP = 3  # steps
IMAGES = 1024


def main(arguments: list[str] | None = None) -> dict:
    """Measure, print, write; returns the record's results."""
    options = parse(arguments)
    torch.set_num_threads(1)
    start = time.perf_counter()
    rounds = [
        {name: seconds_per_step(processes, options) for name, processes in (("1", 1), ("2", 2))}
        for _ in range(options.repetitions)
    ]
    measured = {
        name: {**spread(rounds, name), "steps_per_second": 1 / spread(rounds, name)["seconds"]}
        for name in ("1", "2")
    }
    results = {
        "measured": measured,
        "speed_up": ratio(rounds, "1", "2"),
        "parameters": weights_of(student()),
        "large": large(options.link),
    }
    print(table(options, results))
    leave("processes", vars(options), results, rounds, start, options.out)
    return results


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128, help="images of a step, over all processes")
    parser.add_argument(
        "--steps", type=int, default=20, help=f"steps that are timed, after {WARM_UP} that are not"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--link",
        type=float,
        default=50.0,
        help="10^9 bytes per second that a GPU can send to the others (50: a network of 400 Gbit/s a GPU)",
    )
    parser.add_argument(
        "--out", type=Path, help="file that the record is added to (default: results/benchmarks.jsonl)"
    )
    options = parser.parse_args(arguments)
    for name in ("batch", "steps", "repetitions", "link"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name} must be above 0, got {getattr(options, name)}")
    return options


def student() -> torch.nn.Module:
    """The ViT of the built-in worlds."""
    return create_vit("glyphs")


def distill(batch: int, steps: int, place: Path) -> None:
    """One process's part of the run; the main one leaves the moments at which its steps ended in `place`."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    moments: list[float] = []
    train(
        AttentionTransfer(student(), student(), Plan(how="distill")),
        glyph_images(generate("train", IMAGES)),
        Recipe(steps=WARM_UP + steps, batch_size=batch),
        progress=None,
        cpu=True,
        log=lambda entry: moments.append(time.perf_counter()) if entry["event"] == "step" else None,
    )
    if moments:  # of the main process only
        place.write_text(json.dumps(moments))


def seconds_per_step(processes: int, options: argparse.Namespace) -> float:
    """The median over the timed steps of a separate run, in forked processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = options.batch, options.steps, Path(folder, "moments.json")
        if processes == 1:
            alone = multiprocessing.get_context("fork").Process(target=distill, args=arguments)
            alone.start()
            alone.join()
        else:
            debug_launcher(distill, arguments, num_processes=processes)
        moments = json.loads(arguments[-1].read_text())
    return statistics.median(
        later - earlier for earlier, later in zip(moments[WARM_UP - 1 :], moments[WARM_UP:])
    )


def weights_of(module: torch.nn.Module) -> int:
    """The number of a module's weights."""
    return sum(parameter.numel() for parameter in module.parameters())


def all_reduced(weights: int, gpus: int) -> float:
    """Bytes that each of `gpus` sends per step to average float32 gradients in a ring: every one passes on 2
    (n - 1) pieces of 1/n.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    return 4 * weights * 2 * (gpus - 1) / gpus


def divided(weights: int, twice: int, gpus: int) -> float:
    """The same for FSDP2 as in configs/accelerate: all weights are gathered once and gradients scattered
    once; `twice` of the weights are released after the forward pass and gathered again."""
    return 4 * (2 * weights + twice) * (gpus - 1) / gpus


def large(link: float) -> dict:
    """ViT-L with the paper's batch: what every GPU sends per step, and how long it computes, from the paper's
    own GPU-hours."""
    source, images = published("distill-vit-large"), CATALOGUE["imagenet-1k"].images["train"]
    with torch.device("meta"):
        vit = create_vit(source.model, num_classes=CATALOGUE["imagenet-1k"].classes)
    batch_size = source.recipe.batch_size
    weights, in_mlps = weights_of(vit), sum(weights_of(block.mlp) for block in vit.blocks)
    gpu_seconds = PAPER_GPU_HOURS * 3600 / (PAPER_EPOCHS * steps_per_epoch(images, batch_size))
    rows = {}
    for gpus in GPUS:
        sent = {"all_reduce": all_reduced(weights, gpus), "fsdp2": divided(weights, in_mlps, gpus)}
        rows[str(gpus)] = {
            "images_per_gpu": batch_size / gpus,
            "compute_seconds": gpu_seconds / gpus,
            **{f"{name}_bytes": count for name, count in sent.items()},
            **{f"{name}_seconds": count / (1e9 * link) for name, count in sent.items()},
        }
    return {"weights": weights, "weights_in_mlps": in_mlps, "gpu_seconds_per_step": gpu_seconds, "gpus": rows}


def table(options: argparse.Namespace, results: dict) -> str:
    """The measured figures, then the computed ones, one line for each number of GPUs."""
    speed, measured = results["speed_up"], results["measured"]
    lines = [
        (
            f"Attention distillation on the built-in images, batch {options.batch}, one thread a process:"
            f" {measured['1']['steps_per_second']:.2f} steps/s on one process,"
            f" {measured['2']['steps_per_second']:.2f} on two: x {speed['ratio']:.2f}"
            f" ({speed['ratio_low']:.2f} to {speed['ratio_high']:.2f})"
        ),
        (
            f"Computed for ViT-L ({results['large']['weights'] / 1e6:.1f} million weights), the paper's batch"
            f" and GPU-hours, {options.link:g} GB/s a GPU, nothing overlapped; the teacher is never sent:"
        ),
        (
            f"{'GPUs':>5} {'images each':>12} {'computes s':>11} {'all-reduce GB':>14} {'s':>7}"
            f" {'FSDP2 GB':>9} {'s':>7}"
        ),
    ]
    for gpus, row in results["large"]["gpus"].items():
        lines.append(
            f"{gpus:>5} {row['images_per_gpu']:12g} {row['compute_seconds']:11.2f}"
            f" {row['all_reduce_bytes'] / 1e9:14.2f} {row['all_reduce_seconds']:7.3f}"
            f" {row['fsdp2_bytes'] / 1e9:9.2f} {row['fsdp2_seconds']:7.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
