"""Time several actions in turn, so that a machine that slows down slows all of them, and compare them within
each turn."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Rounds = Sequence[Mapping[str, float]]  # seconds of every action, one mapping per repetition


def interleave(actions: Mapping[str, Callable[[], object]], repetitions: int) -> list[dict[str, float]]:
    """Wall-clock seconds of every action, each run once per repetition, in the given order. The caller warms
    up."""
    return [{name: seconds(action) for name, action in actions.items()} for _ in range(repetitions)]


def seconds(action: Callable[[], object]) -> float:
    """Wall-clock seconds of one call, with the GPU's queue empty before and after."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - start


def spread(rounds: Rounds, name: str) -> dict[str, float]:
    """Seconds of one action over the repetitions: median and least."""
    return {
        "seconds": statistics.median(one[name] for one in rounds),
        "seconds_min": min(one[name] for one in rounds),
    }


def ratio(rounds: Rounds, above: str, below: str) -> dict[str, float]:
    """The ratio of two actions' seconds, taken within each repetition: median, smallest and largest."""
    ratios = [one[above] / one[below] for one in rounds]
    return {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
