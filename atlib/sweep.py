"""What matters in Attention Distillation: its weight λ, and which layers it reaches. One thing is changed at a time."""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from atlib.checkpoint import load_vit
from atlib.experiment import Place, chosen, make_teacher, run_each, scale_of, teach, write_run
from atlib.transfer import AttentionTransfer, Plan

STEPS_SHARE = 0.4  # of the central experiment's steps: there are thirty-five runs here
WEIGHTS = (1.0, 3.0, 10.0, 30.0)  # λ; the paper (arXiv 2411.09702) distills with 3


@dataclass(frozen=True)
class Variant:
    """One way to distill: a name, a plan, and changes to the distill recipe that the central experiment chose."""

    name: str
    plan: Plan
    changes: dict = field(default_factory=dict)


def variants(depth: int) -> list[Variant]:
    """λ from 1 to 30 with all layers; then, at the chosen λ, the first half, the last half and the last layer alone."""
    half, whole = depth // 2, Plan(how="distill")
    return [*(Variant(f"weight {value:g}", whole, {"transfer_weight": value}) for value in WEIGHTS),
            Variant("first half", Plan(how="distill", layers=range(half))),
            Variant("last half", Plan(how="distill", layers=range(half, depth))),
            Variant("last layer", Plan(how="distill", layers=[depth - 1]))]


def run_sweep(transfer: Place, records: Path, seeds: int, jobs: int = 1) -> list[Path]:
    """Run every variant for seeds 0 to seeds - 1, with the teachers of the central experiment, and return the records' paths.

    What already has a record is not run again. Raises `FileNotFoundError` when `transfer.records` does not hold the central
    experiment's tuning of distill, which says what recipe to start from.
    """
    chosen(transfer, "distill")  # before hours are spent: its records must be there
    run_each(make_teacher, [(transfer, seed) for seed in range(seeds)], jobs)
    depth = len(scale_of(transfer).student.build().blocks)
    tasks = [(transfer, records, variant, seed) for variant in variants(depth) for seed in range(seeds)]
    run_each(_run, tasks, jobs)
    return [_path(records, variant, seed) for _, _, variant, seed in tasks]


def _path(records: Path, variant: Variant, seed: int) -> Path:
    return records / f"{variant.name.replace(' ', '-')}-seed{seed}.json"


def _run(transfer: Place, records: Path, variant: Variant, seed: int) -> None:
    path = _path(records, variant, seed)
    if path.exists():
        return
    scale = scale_of(transfer)
    recipe = scale.recipe(scale.tuning["distill"][chosen(transfer, "distill")])
    recipe = replace(recipe, steps=round(STEPS_SHARE * recipe.steps), **variant.changes)
    teacher = load_vit(transfer.work / f"teacher-seed{seed}.safetensors")
    torch.manual_seed(seed)
    student = AttentionTransfer(copy.deepcopy(teacher), scale.student.build(), variant.plan)
    results, history, seconds = teach(student, scale, recipe, seed, "test", variant.name)
    described = recipe.describe() | {"layers": list(student.layers)}
    write_run("distillation", scale, variant.name, seed, described, results, history, seconds, path)
