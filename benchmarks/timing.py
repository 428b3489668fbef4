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
    """Wall-clock seconds of one call; the GPU's queue is empty before and after."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - start


def spread(rounds: Rounds, name: str) -> dict[str, float]:
    """Seconds of one action over the repetitions: the median and the smallest."""
    return {
        "seconds": statistics.median(seconds_of[name] for seconds_of in rounds),
        "seconds_min": min(seconds_of[name] for seconds_of in rounds),
    }


def ratio(rounds: Rounds, above: str, below: str) -> dict[str, float]:
    """The ratio of two actions' seconds, taken within each repetition: median, smallest and largest."""
    ratios = [seconds_of[above] / seconds_of[below] for seconds_of in rounds]
    return {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
