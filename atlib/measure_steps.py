"""Time a few training steps on random numbers, and say from them how long a step of any size takes."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlib.feed import Batch, Part
from atlib.run import RunConfig
from atlib.run_parts import loss_of
from atlib.train import train

STEPS = 4  # timed; the first is thrown away
SAFE_SHARE = 0.6  # of the memory that is free
EFFICIENCY = 0.4  # of a large matrix product's speed that a ViT's training step reaches, a guess that only chooses how much is timed


class Timing(NamedTuple):
    """Seconds of a step, measured with two batch sizes. batches: both (the same twice where the whole batch was timed); on: device and threads."""

    batches: tuple[int, int]
    measured: tuple[float, float]
    on: str

    @property
    def whole(self) -> bool:
        """Whether a step of the run's own size was timed."""
        return self.batches[0] == self.batches[1]

    def seconds(self, batch: int) -> float:
        """Seconds of a step of `batch` images: measured, or on the line through the two that were, a part for each image and one for the optimiser."""
        (small, large), (first, second) = self.batches, self.measured
        if self.whole:
            return second * batch / large
        each = max((second - first) / (large - small), 0.5 * second / large)  # noise must not make images free
        return second + each * (batch - large)


class RandomImages:
    """A data set of noise that notes when each step is asked for."""

    def __init__(self, shape: tuple[int, ...], targets: Callable[[int], Tensor], batch: int, steps: int):
        self.shape, self.target_of, self.batch, self.steps = shape, targets, batch, steps
        self.targets = targets(1)
        self.classes: tuple[str, ...] = ()
        self.times: list[float] = []

    def __len__(self) -> int:
        return self.batch * self.steps

    def epoch(self, part: Part, workers: int = 0) -> Iterator[Batch]:
        images, targets = torch.randn(self.batch, *self.shape), self.target_of(self.batch)
        for step in range(part.start, self.steps):
            self._note()
            yield Batch(images, targets, list(range(self.batch)), 1.0)
        self._note()

    def _note(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a GPU's step is over later than the call that asked for it
        self.times.append(time.perf_counter())


def time_steps(config: RunConfig, make: Callable[[], nn.Module], outputs: int, flops: int | None, at_rest: int, each: int, limit: float) -> Timing | None:
    """Time steps of the run's recipe with batches that fit into memory and into about `limit` seconds; None where one image does not.

    make: builds the model to train. flops: of one image, None where not known (then a step of two images is tried first). at_rest, each: bytes that
    the model takes between steps, and in a step for each image.
    """
    room, whole = SAFE_SHARE * free_memory() - at_rest, config.recipe.batch_size
    if room < 0:
        return None
    model = None
    if flops is None:
        model = make()
        in_time = max(2, int(limit / (STEPS * _step(config, model, outputs, 2))))
    else:
        in_time = int(limit * EFFICIENCY * speed() / (2 * STEPS * flops))
    batch = min(whole, in_time, int(room / max(each, 1)) * (config.recipe.accumulate if in_time >= whole else 1))
    if batch < 1:
        return None
    model = make() if model is None else model
    while True:
        batches = (whole, whole) if batch == whole else (max(1, batch // 2), max(2, batch))
        try:
            measured = [_step(config, model, outputs, each) for each in dict.fromkeys(batches)]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            batch //= 2
            if batch < 1:
                return None
            continue
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
        return Timing(batches, (measured[0], measured[-1]), where)


def speed() -> float:
    """FLOPs a second of a large matrix product on this machine, float32."""
    size = 8192 if torch.cuda.is_available() else 1024
    left, right = (torch.randn(size, size, device="cuda" if torch.cuda.is_available() else "cpu") for _ in range(2))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        float((left @ right)[0, 0])  # reading a number waits for a GPU
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def free_memory() -> float:
    """Bytes that are free on the GPU where there is one, else in this machine; infinite where the system does not say."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return float("inf")


def _step(config: RunConfig, model: nn.Module, outputs: int, batch: int) -> float:
    """Seconds of one step of `batch` images: the median of a few, the first left out."""
    accumulate = config.recipe.accumulate if batch == config.recipe.batch_size else 1
    recipe = replace(config.recipe, steps=STEPS, batch_size=batch, accumulate=accumulate, repeats=1)
    size = config.skeleton(outputs).patch_embed.img_size
    images = RandomImages((3, *size), lambda count: made_up(config, outputs, count), batch, STEPS)
    train(model, images, recipe, loss=loss_of(config.method), progress=None)
    return statistics.median(after - before for before, after in zip(images.times[1:], images.times[2:]))


def made_up(config: RunConfig, outputs: int, count: int) -> Tensor:
    """Targets of the kind that a method learns, without meaning."""
    return torch.rand(count, outputs) if config.method == "retrieval" else torch.randint(outputs, (count,))
