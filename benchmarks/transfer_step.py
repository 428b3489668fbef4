"""The cost of one optimiser step of attention transfer: `python benchmarks/transfer_step.py [--model base]
[--tokens 197] [--help]`.

For every method: seconds, peak memory, images per second and FLOPs of forward, backward, AdamW step and
dropping the gradients, each as a ratio to fine-tuning, next to the fewest FLOPs the method can need
(`flops.py`) and to a dense implementation (`dense_baseline.py`). Every repetition runs each method once, in
turn; ratios are taken within a repetition, the table shows their median and range. One student, one teacher
(both freshly initialised) and one optimiser serve all methods; peak memory is measured before, with models
and optimiser built again for each method: it counts everything that the method holds, including the optimiser
and the part of the teacher that it keeps. It is compared with fine-tuning's peak (x), and with that peak plus
the weights of the teacher's blocks that run (x+t). Prints the table and writes it to
results/benchmarks.jsonl.
"""

import argparse
import gc
import time
from pathlib import Path

import loss_alone
import targets
import torch
from flops import counter, shape_of
from memory import peak_allocated
from methods import Step, known_methods, loss_of, make_step, optimise
from recording import leave, require_positive
from timing import interleave, ratio, spread

from atlib.cast_once import CastOnce

IMAGE_SIZE = {197: 224, 785: 448}  # 14 x 14 or 28 x 28 patches, and the class token
IN_MEMORY_BY_BATCH = ("fine-tune", "copy", "distill-part", "dense-distill-part")


def main(arguments: list[str] | None = None) -> dict:
    """Measure, print, write; returns the record's results."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    device, start = torch.device(options.device), time.perf_counter()
    memory = {
        batch: measure_memory(options, batch, device)
        for batch in dict.fromkeys([options.batch, *options.memory_batches])
    }
    results, rounds = measure_steps(options, device)
    fine_tuning = memory[options.batch]["fine-tune"]
    for name, row in results["methods"].items():
        row["peak_memory_mb"] = memory[options.batch][name]
        row["memory_ratio"] = row["peak_memory_mb"] / fine_tuning
        row["memory_ratio_with_teacher"] = row["peak_memory_mb"] / (fine_tuning + row["teacher_mb"])
    results["memory_by_batch"] = {str(batch): peaks for batch, peaks in memory.items()}
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    results["loss"] = loss_alone.measure(
        min(8, options.batch), *results.pop("heads"), device, dtype, options.repetitions
    )
    results["targets"] = targets.compare(figures_of(results, options.tokens), options.tokens, device.type)

    print(table(options, results), loss_alone.table(results["loss"]), sep="\n\n")
    print(
        "\nTargets are for ViT-B/16 and batch 8 or more,"
        f" {'2 threads, float32' if device.type == 'cpu' else 'bf16'}; this run: {options.model}, batch"
        f" {options.batch}"
    )
    print(*targets.describe(results["targets"]), sep="\n")
    leave(name_of(options), vars(options), results, rounds, start, options.out, options.device)
    return results


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model",
        choices=("tiny", "small", "base", "large"),
        default="base",
        help="ViT with patches of 16 x 16 pixels",
    )
    parser.add_argument(
        "--tokens", type=int, choices=IMAGE_SIZE, default=197, help="N: images of 224 or 448 pixels"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--memory-batches",
        type=int,
        nargs="*",
        default=[],
        help="measure peak memory with these batch sizes as well",
    )
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bf16"), default="float32", help="bf16: autocast; weights stay float32"
    )
    parser.add_argument(
        "--out", type=Path, help="file that the record is added to (default: results/benchmarks.jsonl)"
    )
    options = parser.parse_args(arguments)
    require_positive(parser, options, "batch", "repetitions", "threads")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch sees no CUDA device here; leave --device out to measure on the CPU"
        )
    return options


def build(options: argparse.Namespace, batch: int, device: torch.device, teacher: bool) -> Step:
    """Models, optimiser and batch as the command line asks for them."""
    return make_step(
        f"vit_{options.model}_patch16_224",
        IMAGE_SIZE[options.tokens],
        batch,
        device,
        teacher=teacher,
        autocast=options.dtype == "bf16",
    )


def measure_memory(options: argparse.Namespace, batch: int, device: torch.device) -> dict[str, float]:
    """Peak memory in MB of building everything that a method needs and taking two steps: AdamW's moments
    exist from the second step on."""

    def run(name: str) -> None:
        step = build(options, batch, device, teacher=name != "fine-tune")
        module = known_methods(len(step.student.blocks))[name].build(step.teacher, step.student).train()
        step = step._replace(teacher=None)  # what the method does not hold of it goes
        cast = CastOnce(module)
        for _ in range(2):
            optimise(step, module, cast)

    wanted = known_methods(12) if batch == options.batch else IN_MEMORY_BY_BATCH
    return {name: peak_allocated(lambda name=name: run(name), device) / 1e6 for name in wanted}


def measure_steps(options: argparse.Namespace, device: torch.device) -> tuple[dict, list]:
    """Seconds and FLOPs of every method, and the seconds of every repetition."""
    gc.collect()
    step = build(options, options.batch, device, teacher=True)
    shape, methods = shape_of(step.student), known_methods(len(step.student.blocks))
    modules = {name: method.build(step.teacher, step.student).train() for name, method in methods.items()}
    counted = {name: count_flops(step, module) / options.batch for name, module in modules.items()}
    actions = {
        name: lambda module=module, cast=CastOnce(module): optimise(step, module, cast)
        for name, module in modules.items()
    }
    interleave(actions, 1)  # warm-up
    rounds = interleave(actions, options.repetitions)
    least = {name: method.least(shape) for name, method in methods.items()}
    results = {
        name: {
            "title": method.title,
            **spread(rounds, name),
            **ratio(rounds, name, "fine-tune"),
            "images_per_second": options.batch / spread(rounds, name)["seconds"],
            "flops_per_image": counted[name],
            "flops_ratio": counted[name] / counted["fine-tune"],
            "least_flops_per_image": least[name],
            "least_flops_ratio": least[name] / least["fine-tune"],
            "teacher_mb": megabytes(step.teacher.blocks[: method.teacher_blocks]),
        }
        for name, method in methods.items()
    }
    attention = step.student.blocks[0].attn
    return {
        "methods": results,
        "dense_over_ours": {
            "copy": ratio(rounds, "dense-copy", "copy"),
            "distill-part": ratio(rounds, "dense-distill-part", "distill-part"),
        },
        "heads": (attention.num_heads, attention.head_dim),
    }, rounds


def megabytes(module: torch.nn.Module) -> float:
    """The megabytes that a module's weights take."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters()) / 1e6


def count_flops(step: Step, module: torch.nn.Module) -> int:
    """FLOPs of the matrix products that forward and backward of one batch really do, including those that
    fused attention computes twice."""
    with counter() as counted:
        loss_of(step, module, CastOnce(module)).backward()
    step.optimizer.zero_grad(set_to_none=True)
    return counted.get_total_flops()


def figures_of(results: dict, tokens: int) -> dict[str, float]:
    """The figures that have targets."""
    methods = results["methods"]
    return {
        "distill_step": methods["distill-part"]["ratio"],
        "copy_step": methods["copy"]["ratio"],
        "distill_memory": methods["distill-part"]["memory_ratio_with_teacher"],
        f"dense_step_{tokens}": results["dense_over_ours"]["distill-part"]["ratio"],
        "loss_memory_growth": results["loss"]["growth"]["map-free"],
    }


def table(options: argparse.Namespace, results: dict) -> str:
    """All methods, one in each line; every x is a ratio to fine-tuning."""
    lines = [
        (
            f"One optimiser step: ViT-{options.model}/16, N = {options.tokens}, batch {options.batch},"
            f" {options.dtype}, {options.device}, {options.threads} threads,"
            f" {options.repetitions} repetitions, torch {torch.__version__}"
        ),
        (
            f"{'':36} {'seconds':>8} {'least':>8} {'x':>6} {'(range)':>13} {'images/s':>9} {'peak MB':>8}"
            f" {'x':>6} {'x+t':>6} {'GFLOP':>7} {'x':>6} {'bound x':>8}"
        ),
    ]
    for row in results["methods"].values():
        lines.append(
            f"{row['title']:36} {row['seconds']:8.3f} {row['seconds_min']:8.3f} {row['ratio']:6.3f}"
            f" ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}) {row['images_per_second']:8.2f}"
            f" {row['peak_memory_mb']:8.0f} {row['memory_ratio']:6.3f}"
            f" {row['memory_ratio_with_teacher']:6.3f} {row['flops_per_image'] / 1e9:7.1f}"
            f" {row['flops_ratio']:6.3f} {row['least_flops_ratio']:8.3f}"
        )
    lines.append(
        "GFLOP: per image, matrix products really done; bound: the fewest that the method can need, also as a"
        " ratio to fine-tuning's."
    )
    for batch, peaks in results["memory_by_batch"].items():
        if int(batch) != options.batch:
            lines.append(
                f"peak memory at batch {batch}: "
                + ", ".join(
                    f"{name} {mb:.0f} MB (x {mb / peaks['fine-tune']:.3f})" for name, mb in peaks.items()
                )
            )
    return "\n".join(lines)


def name_of(options: argparse.Namespace) -> str:
    """transfer_step-MODEL-TOKENS-DEVICE, which tells its record from those of other set-ups; a precision
    other than the default is named too."""
    name = f"transfer_step-{options.model}-{options.tokens}-{options.device}"
    return name + ("-bf16" if options.dtype == "bf16" else "")


if __name__ == "__main__":
    main()
