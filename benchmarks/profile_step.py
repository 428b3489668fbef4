"""What a step's milliseconds are: `python benchmarks/profile_step.py [--model base] [--tokens 197] [--device
cuda] [--help]`.

torch.profiler counts some optimiser steps of fine-tuning and of Distill (3/4 of the layers). Of each it lists
the kernels that take longest (on a CPU: the operations), with their milliseconds a step and how often they
are called, and the milliseconds in which the device had nothing to do. Prints the tables and writes them to
results/benchmarks.jsonl.
"""

import argparse
import time
from pathlib import Path

import torch
from methods import Step, known_methods, make_step, optimise
from recording import leave, require_positive
from torch.profiler import ProfilerActivity, profile
from transfer_step import IMAGE_SIZE

from atlib.cast_once import CastOnce

METHODS = ("fine-tune", "distill-part")


def main(arguments: list[str] | None = None) -> dict:
    """Measure, print, write; returns the record's results."""
    options, start = parse(arguments), time.perf_counter()
    device = torch.device(options.device)
    step = make_step(
        f"vit_{options.model}_patch16_224",
        IMAGE_SIZE[options.tokens],
        options.batch,
        device,
        teacher=True,
        autocast=options.dtype == "bf16",
    )
    methods = known_methods(len(step.student.blocks))
    results = {
        name: profiled(step, methods[name].build(step.teacher, step.student).train(), options)
        for name in METHODS
    }
    print(*(table(name, results[name]) for name in METHODS), sep="\n\n")
    name = f"profile_step-{options.model}-{options.tokens}-{options.device}-{options.dtype}"
    leave(name, vars(options), results, [], start, options.out, options.device)
    return results


def profiled(step: Step, module: torch.nn.Module, options: argparse.Namespace) -> dict:
    """{"ms": of a step on the wall clock, "idle_ms": of these without a kernel, "kernels": [{"name", "ms",
    "calls"} a step, the longest first]}."""
    on_gpu = step.images.is_cuda
    cast = CastOnce(module)
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(3):  # what is made in the first steps: moments, kernels, plans
        optimise(step, module, cast)
    wait()
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]
    with profile(activities=activities) as profiler:
        start = time.perf_counter()
        for _ in range(options.steps):
            optimise(step, module, cast)
        wait()
        seconds = time.perf_counter() - start
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = [event for event in profiler.key_averages() if getattr(event, field) > 0]
    if on_gpu:  # operations carry their kernels' time too
        on_card = torch.autograd.DeviceType.CUDA
        events = [event for event in events if event.device_type == on_card and not event.is_user_annotation]
    events.sort(key=lambda event: -getattr(event, field))
    total = sum(getattr(event, field) for event in events) / 1e3
    return {
        "ms": 1e3 * seconds / options.steps,
        "idle_ms": max(0.0, 1e3 * seconds - total) / options.steps,
        "kernels": [
            {
                "name": event.key[:100],
                "ms": getattr(event, field) / 1e3 / options.steps,
                "calls": event.count / options.steps,
            }
            for event in events[: options.kernels]
        ],
    }


def table(name: str, results: dict) -> str:
    """One method's kernels as text."""
    lines = [f"{name}: {results['ms']:.2f} ms a step, {results['idle_ms']:.2f} ms of them without a kernel"]
    return "\n".join(
        [*lines, *(f"{row['ms']:9.3f} ms {row['calls']:7.1f} x  {row['name']}" for row in results["kernels"])]
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=("tiny", "small", "base", "large"), default="base")
    parser.add_argument("--tokens", type=int, choices=IMAGE_SIZE, default=197)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="that are profiled")
    parser.add_argument("--kernels", type=int, default=25, help="that are listed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bf16"), default="bf16")
    parser.add_argument("--out", type=Path, help="file of the record (default: results/benchmarks.jsonl)")
    options = parser.parse_args(arguments)
    require_positive(parser, options, "batch", "steps", "kernels")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu measures on the CPU")
    return options


if __name__ == "__main__":
    main()
