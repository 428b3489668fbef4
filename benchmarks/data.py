"""How fast images come out of files, compared with decoding alone and with training: `python
benchmarks/data.py`.

`Photos` gives epochs of a parquet file's images, with the augmentation of a published recipe, made by 0, 1, 2
... worker processes. The same turn also measures decoding the same images and nothing else in one process,
optimiser steps of a ViT-S/16 on such images, and the book's "glyphs" model with the loader of its images in
memory. All ratios are ratios of images per second, taken within each turn: above 1, a loader keeps up with
its reference. On a machine with few cores, workers and a training step share them; here only one thing runs
at a time.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from recording import leave, require_positive
from timing import interleave

from atbook.worlds import marked_glyphs
from atlib import create_vit
from atlib.loading import ShardSpec
from atrun.data.decoding import decode
from atrun.data.hub import open_rows_of
from atrun.data.natural_shifts import IMAGENET
from atrun.data.photos import Photos, undecoded
from atrun.recipes import published

RECIPE = "copy-vit-large"  # whose augmentation is measured
SAMPLES = Path(__file__).resolve().parents[2] / "shared" / "data" / "imagenet_samples256"
GLYPHS = 1024  # images of the built-in world in one turn


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=SAMPLES, help="a parquet file or a folder of them")
    parser.add_argument(
        "--label-column", default="wnid", help="'wnid' holds WordNet ids, anything else class indices"
    )
    parser.add_argument("--count", type=int, default=512, help="images of one turn")
    parser.add_argument("--batch", type=int, default=32, help="images of a batch of the loader")
    parser.add_argument("--step-batch", type=int, default=8, help="images of a step of the ViT")
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of the training steps")
    parser.add_argument(
        "--out", type=Path, help="file that the record is added to (default: results/benchmarks.jsonl)"
    )
    options = parser.parse_args(arguments)
    require_positive(parser, options, "count", "batch", "step_batch", "repetitions", "threads")
    return options


def open_samples(options: argparse.Namespace) -> Photos:
    rows, image_column, label_column, _ = open_rows_of(
        options.images, None, "train+validation", label_column=options.label_column
    )
    rows = rows.select(range(min(options.count, len(rows))))
    stored = rows[label_column][:]
    return Photos(
        undecoded(rows, image_column),
        image_column,
        torch.tensor(IMAGENET.indices(stored) if label_column == "wnid" else stored),
        IMAGENET.names,
        augmentation=published(RECIPE).augmentation,
    )


def drain(data, batch_size: int, workers: int = 0) -> None:
    for _ in data.epoch(ShardSpec(seed=0, epoch=0, batch_size=batch_size), workers):
        pass


def make_step(name: str, batch: int, device: torch.device):
    """A function that takes one optimiser step at every call, on images that are already there."""
    vit = create_vit(name).to(device).train()
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-4)
    images = torch.randn(batch, 3, *vit.patch_embed.img_size, device=device)
    labels = torch.randint(vit.num_classes, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(vit(images), labels).backward()
        optimizer.step()

    return step


def measure(options: argparse.Namespace, photos: Photos, device: torch.device) -> list[dict[str, float]]:
    """Images per second of everything that is measured, one mapping per turn."""
    files = [row[photos.image_column] for row in photos.rows]
    glyphs = marked_glyphs(size=GLYPHS)
    actions = {"decoding alone": (len(files), lambda: [decode(file) for file in files])}
    actions |= {
        f"Photos, {workers} workers": (
            len(photos),
            lambda workers=workers: drain(photos, options.batch, workers),
        )
        for workers in options.workers
    }
    actions[f"step of {options.model}"] = (
        options.step_batch,
        make_step(options.model, options.step_batch, device),
    )
    actions["Images of glyphs"] = (GLYPHS, lambda: drain(glyphs, 128))
    actions["step of glyphs"] = (128, make_step("glyphs", 128, device))
    what = {name: action for name, (_, action) in actions.items()}
    interleave(what, 1)  # warm-up
    return [
        {name: actions[name][0] / seconds for name, seconds in seconds_of.items()}
        for seconds_of in interleave(what, options.repetitions)
    ]


def compared(rounds: list[dict[str, float]], above: str, below: str) -> dict[str, float]:
    """The ratio of two figures in images per second, taken within each turn: median, smallest, largest."""
    ratios = [speeds[above] / speeds[below] for speeds in rounds]
    return {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    start = time.perf_counter()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    photos = open_samples(options)
    pictures = [decode(photos.rows[index][photos.image_column]).size for index in range(len(photos))]
    size = {
        "kilobytes": statistics.mean(len(row[photos.image_column]["bytes"]) for row in photos.rows) / 1000,
        "pixels": statistics.mean(width * height for width, height in pictures),
    }
    rounds = measure(options, photos, device)
    loaders = [f"Photos, {workers} workers" for workers in options.workers]
    speed = {name: statistics.median(speeds[name] for speeds in rounds) for name in rounds[0]}
    ratios = {
        f"{name} / {reference}": compared(rounds, name, reference)
        for name in loaders
        for reference in ("decoding alone", f"step of {options.model}")
    }
    ratios["Images of glyphs / step of glyphs"] = compared(rounds, "Images of glyphs", "step of glyphs")

    print(
        f"{len(photos)} images of {size['kilobytes']:.0f} kB, {size['pixels']:,.0f} pixels on average;"
        f" augmentation of {RECIPE}; {device}, {options.threads} threads, {os.cpu_count()} cores,"
        f" {options.repetitions} turns"
    )
    for name, images in speed.items():
        print(f"{name:36} {images:9.1f} images/s")
    for name, ratio in ratios.items():
        print(f"{name:60} {ratio['ratio']:7.3f} ({ratio['ratio_low']:.3f} to {ratio['ratio_high']:.3f})")
    config = {
        "images": len(photos),
        "batch": options.batch,
        "step_batch": options.step_batch,
        "model": options.model,
        "workers": options.workers,
        "repetitions": options.repetitions,
        "augmentation": published(RECIPE).augmentation.describe(),
        "cores": os.cpu_count(),
    }
    results = {"images_per_second": speed, "ratios": ratios, "file": size}
    leave("data", config, results, rounds, start, options.out)


if __name__ == "__main__":
    main()
