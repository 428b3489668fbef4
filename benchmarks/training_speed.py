"""Images a second of training itself, at the speeds that `--speed` names: `python
benchmarks/training_speed.py [--model small] [--methods scratch copy] [--speeds bf16 compiled] [--help]`.

`atlib.train.train` learns from noise that lies on the device and is cropped and mirrored there: all of a step
counts, from its images to its log. The figure is the median over a run's second half. On a GPU torch.profiler
then says in how many of a step's milliseconds the device was at work. Prints the figures and writes
them to results/benchmarks.jsonl.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from recording import leave, require_positive
from torch.profiler import ProfilerActivity, profile

from atlib import AttentionTransfer, Plan, create_vit
from atlib.data import Images, crop_and_flip
from atlib.recipe import Recipe
from atlib.train import train
from atrun.commands import SPEEDS

# timm's name, arguments, images of a step, and the layers of Distill: all, or the paper's three quarters
MODELS = {
    "small": ("vit_small_patch14_dinov2", {"img_size": 56, "init_values": 0}, 1000, None),
    "base": ("vit_base_patch16_224", {}, 64, range(9)),
    "glyphs": ("glyphs", {}, 8, None),
}
CLASSES = 10
PROFILED = 10  # steps


def main(arguments: list[str] | None = None) -> dict:
    """Measure, print, write; returns the record's results."""
    options, start = parse(arguments), time.perf_counter()
    results = {
        method: {speed: measured(method, speed, options) for speed in options.speeds}
        for method in options.methods
    }
    name = f"training_speed-{options.model}-{options.device}"
    leave(name, vars(options), results, [], start, options.out, options.device)
    return results


def measured(method: str, speed: str, options: argparse.Namespace) -> dict:
    """{"images_per_second", "ms" of a step, "busy_ms" of these with a kernel (None on a CPU), "batch"}."""
    torch.manual_seed(0)
    torch.compiler.reset()
    name, arguments, batch, layers = MODELS[options.model]
    device = torch.device(options.device)
    with device:
        teacher, student = (create_vit(name, num_classes=CLASSES, **arguments) for _ in range(2))
        side = student.patch_embed.img_size[0]
        pixels = torch.randint(0, 256, (4 * batch, 3, side, side), dtype=torch.uint8)
        targets = torch.randint(CLASSES, (len(pixels),))
    images = Images(pixels, targets).with_augment(crop_and_flip(side // 8))
    precision, compiled = SPEEDS[speed]["mixed_precision"], SPEEDS[speed]["compile"] == "true"
    steps = options.steps + PROFILED + 1
    recipe = Recipe(steps=steps, batch_size=batch, mixed_precision=precision, compile=compiled)
    rates: list[float] = []
    profiler = profile(activities=[ProfilerActivity.CUDA])

    def note(entry: dict) -> None:
        if entry["event"] == "step" and entry["step"] <= options.steps:
            rates.append(entry["images_per_second"])
        if device.type == "cuda" and entry["event"] == "step":
            if entry["step"] == options.steps:
                profiler.start()
            elif entry["step"] == options.steps + PROFILED:
                torch.cuda.synchronize()
                profiler.stop()

    plan = Plan(how=method, layers=layers if method == "distill" else None) if method != "scratch" else None
    module = student if plan is None else AttentionTransfer(teacher, student, plan)
    train(module, images, recipe, progress=None, log=note, cpu=device.type == "cpu")
    rate, busy = median(rates[len(rates) // 2 :]), None
    if device.type == "cuda":
        kernels = [event for event in profiler.key_averages() if not event.is_user_annotation]
        busy = sum(event.self_device_time_total for event in kernels) / 1e3 / PROFILED
    row = {"images_per_second": rate, "ms": 1e3 * batch / rate, "busy_ms": busy, "batch": batch}
    at_work = "" if busy is None else f", {busy:.2f} of them with a kernel"
    print(
        f"{options.model}, {method}, {speed}: {rate:,.0f} images/s, {row['ms']:.2f} ms{at_work}", flush=True
    )
    return row


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    methods = ("scratch", "copy", "distill")
    parser.add_argument("--model", choices=MODELS, default="small", help="small: 56 pixels, 17 tokens")
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods, metavar="METHOD")
    parser.add_argument("--speeds", nargs="+", choices=SPEEDS, default=tuple(SPEEDS), metavar="SPEED")
    parser.add_argument("--steps", type=int, default=60, help="that are timed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, help="file of the record (default: results/benchmarks.jsonl)")
    options = parser.parse_args(arguments)
    require_positive(parser, options, "steps")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu measures on the CPU")
    return options


if __name__ == "__main__":
    main()
