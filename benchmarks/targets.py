"""The figures that the project wants to reach with ViT-B/16, and whether a run reached them."""

from collections.abc import Iterator
from typing import NamedTuple


class Target(NamedTuple):
    """A figure that a benchmark measures, and the values that the project wants."""

    # The figure in words.
    figure: str
    # The numbers of tokens for which it is wanted.
    tokens: tuple[int, ...]
    # Whether smaller is better.
    at_most: bool
    # The value on two threads of a CPU, in float32.
    cpu: float
    # The value on one GPU, in bf16.
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
    """{target: the wanted and the measured value, whether it was hit, and by what share it was missed} for a
    run with this N."""
    compared = {}
    for name, target in TARGETS.items():
        if tokens not in target.tokens:
            continue
        wanted, value = getattr(target, device), figures[name]
        excess = value / wanted - 1 if target.at_most else wanted / value - 1
        compared[name] = {"wanted": wanted, "found": value, "hit": excess <= 0, "missed_by": max(0.0, excess)}
    return compared


def describe(compared: dict[str, dict]) -> Iterator[str]:
    """One line per target."""
    for name, row in compared.items():
        sign = "<=" if TARGETS[name].at_most else ">="
        verdict = "hit" if row["hit"] else f"missed by {row['missed_by']:.1%}"
        yield f"{TARGETS[name].figure:60} {row['found']:6.3f}  wanted {sign} {row['wanted']:.2f}  {verdict}"
