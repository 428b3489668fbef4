"""What the project wants to reach with ViT-B/16, and whether a run did."""

from collections.abc import Iterator
from typing import NamedTuple


class Target(NamedTuple):
    """figure: in words; tokens: the N it holds for; at_most: whether smaller is better; cpu: 2 threads,
    float32; cuda: one GPU, bf16."""

    figure: str
    tokens: tuple[int, ...]
    at_most: bool
    cpu: float
    cuda: float


TARGETS = {
    "distill_step": Target("Distill (3/4 of the layers) step / fine-tuning step", (197,), True, 1.28, 1.25),
    "copy_step": Target("Copy step / fine-tuning step", (197,), True, 1.15, 1.15),
    "distill_memory": Target(
        "Distill (3/4 of the layers) peak / (fine-tuning's + teacher run)", (197,), True, 1.06, 1.06
    ),
    "dense_step_197": Target("dense Distill step / our Distill step", (197,), False, 1.10, 3.0),
    "dense_step_785": Target("dense Distill step / our Distill step", (785,), False, 1.35, 6.0),
    "loss_memory_growth": Target(
        "peak memory of the loss alone, N = 785 / N = 197", (197, 785), True, 4.5, 4.5
    ),
}


def compare(figures: dict[str, float], tokens: int, device: str) -> dict[str, dict]:
    """{target: the wanted and the measured figure, whether it was hit, by what share it was missed} for a run
    with this N."""
    compared = {}
    for name, target in TARGETS.items():
        if tokens not in target.tokens:
            continue
        wanted, found = getattr(target, device), figures[name]
        excess = found / wanted - 1 if target.at_most else wanted / found - 1
        compared[name] = {"wanted": wanted, "found": found, "hit": excess <= 0, "missed_by": max(0.0, excess)}
    return compared


def describe(compared: dict[str, dict]) -> Iterator[str]:
    """One line per target."""
    for name, one in compared.items():
        sign = "<=" if TARGETS[name].at_most else ">="
        verdict = "hit" if one["hit"] else f"missed by {one['missed_by']:.1%}"
        yield f"{TARGETS[name].figure:60} {one['found']:6.3f}  wanted {sign} {one['wanted']:.2f}  {verdict}"
