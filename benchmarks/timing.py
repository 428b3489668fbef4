"""Time several actions in turn, so that a machine that slows down slows all of them, and compare them within
each turn."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Rounds = Sequence[Mapping[str, float]]  # seconds of every action, one mapping per repetition


def interleave(
    actions: Mapping[str, Callable[[], object]],
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, float]]:
    """Seconds of every action, each run once per repetition, in the given order. The caller warms up. clock:
    `time.process_time` for those of the processor, which other programs on the machine do not add to."""
    return [{name: seconds(action, clock) for name, action in actions.items()} for _ in range(repetitions)]


def seconds(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, by default on the wall clock; the GPU's queue is empty before and after."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = clock()
    action()
    wait()
    return clock() - start


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
