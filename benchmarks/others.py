"""CPU seconds of a training step beside other libraries, from one teacher to one smaller student: `python
benchmarks/others.py [--help]`.

Scratch, Distill, timm's distillation of features and of logits (`timm.task`) and, where it can be imported,
torchdistill: its distillation of logits, and maps by its hooks with fused attention off. Each has its own
student with the same first weights. Every repetition takes a step of each in turn, and the table has the
median and the range of the ratios to scratch within a repetition. The seconds are the processor's, which
other programs on the machine add little to. torchdistill need not be in the environment: `pip install
--no-deps --target FOLDER torchdistill`, and PYTHONPATH=FOLDER.
"""

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from recording import leave, require_positive
from timing import interleave, ratio, spread
from timm.task import FeatureDistillationTask, LogitDistillationTask
from torch import Tensor, nn

from atlib import AttentionTransfer, create_student, create_vit
from atlib.pair import IMAGENET, attach
from atlib.recipe import Recipe
from atlib.train import make_optimizer
from atrun.derived_plan import derive_plan

TEACHER, PIXELS, CLASSES = "vit_small_patch14_dinov2", 98, 10
RECIPE = Recipe(lr=1e-9)
Loss = Callable[[Tensor, Tensor], Tensor]


def ours(teacher: nn.Module, student: nn.Module) -> tuple[nn.Module, Loss]:
    """By the plan that `transfer` derives."""
    pair = AttentionTransfer(teacher, student, derive_plan(teacher, student)).train()

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        logits, transfer_loss = pair(images)
        return nn.functional.cross_entropy(logits, labels) + RECIPE.transfer_weight * transfer_loss

    return pair, loss


def timms(kind: type[nn.Module], teacher: nn.Module, student: nn.Module) -> tuple[nn.Module, Loss]:
    """A task of timm with its default weights."""
    task = kind(student, teacher, criterion=nn.CrossEntropyLoss(), verbose=False).train()
    return task.trainable_module, lambda images, labels: task(images, labels)["loss"]


def torchdistill_logits(teacher: nn.Module, student: nn.Module) -> tuple[nn.Module, Loss]:
    """Its `KDLoss`, with soft and hard labels."""
    from torchdistill.core.forward_hook import ForwardHookManager
    from torchdistill.losses.mid_level import KDLoss

    compare, hooks = KDLoss("head", "output", "head", "output", temperature=1.0, alpha=0.5), []
    for model in (student, teacher):
        hooks.append(ForwardHookManager("cpu"))
        hooks[-1].add_hook(model, "head", requires_input=False, requires_output=True)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        student(images)
        with torch.no_grad():
            teacher(images)
        of_student, of_teacher = (manager.pop_io_dict() for manager in hooks)
        return compare(of_student, of_teacher, labels)

    return student, loss


def torchdistill_maps(teacher: nn.Module, student: nn.Module) -> tuple[nn.Module, Loss]:
    """Softmax maps of the layers that `ours` pairs, by its hooks; the mean over heads, and a cross-entropy,
    are written here, since it has no loss for them."""
    from torchdistill.core.forward_hook import ForwardHookManager

    plan, hooks = derive_plan(teacher, student), []
    layers = plan.layers_of(len(student.blocks))
    for model in (student, teacher):
        hooks.append(ForwardHookManager("cpu"))
        for layer in layers:
            model.blocks[layer].attn.fused_attn = False
            path = f"blocks.{layer}.attn.attn_drop"
            hooks[-1].add_hook(model, path, requires_input=False, requires_output=True)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        logits = student(images)
        with torch.no_grad():
            teacher(images)
        maps = [[value["output"].mean(1) for value in manager.pop_io_dict().values()] for manager in hooks]
        apart = sum(-(p_t * p_s.clamp(min=1e-9).log()).sum(-1).mean() for p_s, p_t in zip(*maps))
        return nn.functional.cross_entropy(logits, labels) + RECIPE.transfer_weight * apart

    return student, loss


METHODS = {
    "atlib, Distill": ours,
    "timm, features": partial(timms, FeatureDistillationTask),
    "timm, logits": partial(timms, LogitDistillationTask),
    "torchdistill, logits": torchdistill_logits,
    "torchdistill, maps by hooks": torchdistill_maps,
}


def measure(batch: int, repetitions: int) -> tuple[dict, list]:
    """Seconds of a step of each, and the ratios to scratch; and the seconds of every repetition."""
    torch.manual_seed(0)
    teacher = create_vit(TEACHER, img_size=PIXELS, num_classes=CLASSES).eval()
    student = create_student(teacher, CLASSES, "tiny").train()
    for model in (teacher, student):
        attach(model, IMAGENET)  # timm's tasks ask the student too
    images, labels = torch.randn(batch, 3, PIXELS, PIXELS), torch.randint(CLASSES, (batch,))

    def scratch(_, student: nn.Module) -> tuple[nn.Module, Loss]:
        return student, lambda images, labels: nn.functional.cross_entropy(student(images), labels)

    def step(model: nn.Module, loss: Loss) -> Callable[[], None]:
        optimizer = make_optimizer(model, RECIPE)

        def action() -> None:
            loss(images, labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return action

    methods = {"scratch": scratch} | METHODS
    if find_spec("torchdistill") is None:
        methods = {name: build for name, build in methods.items() if not name.startswith("torchdistill")}
    actions = {
        name: step(*build(copy.deepcopy(teacher), copy.deepcopy(student))) for name, build in methods.items()
    }
    interleave(actions, 1)  # warm-up
    rounds = interleave(actions, repetitions, time.process_time)
    return {name: spread(rounds, name) | ratio(rounds, name, "scratch") for name in actions}, rounds


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, leave the record."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="file of the record (default: results/benchmarks.jsonl)")
    options = parser.parse_args(arguments)
    require_positive(parser, options, "batch", "repetitions", "threads")
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    methods, rounds = measure(options.batch, options.repetitions)
    for name, row in methods.items():
        low, high = row["ratio_low"], row["ratio_high"]
        print(f"{name:28} {row['seconds']:7.3f} CPU s  x {row['ratio']:.2f} ({low:.2f} to {high:.2f})")
    versions = {name: version(name) if find_spec(name) else None for name in ("timm", "torchdistill")}
    results = {"methods": methods, "versions": versions, "teacher": TEACHER, "pixels": PIXELS}
    leave("others", vars(options), results, rounds, start, options.out)


if __name__ == "__main__":
    main()
