"""Batches of which some images cannot be decoded: named, and left out where that is asked for."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlib.loading import Batch, loader_of

ON_CORRUPT = ("raise", "skip")
NAMED = 20  # corrupt images that are warned about one by one


class CorruptImage(OSError):
    """An image that cannot be decoded; the message says its index, its file where that is known, and why."""


class Made(NamedTuple):
    """What became of a share of images. images: (b, 3, height, width) of those that could be decoded, targets
    (b,) and indices likewise; corrupt: why the others could not. Where none could, `images` is one blank
    image, and `indices` is empty.
    """

    images: Tensor
    targets: Tensor
    indices: list[int]
    corrupt: dict[int, str]


class Share(NamedTuple):
    """What one process wants for one step. what: whatever `deliver`'s `make` makes images of; weight: as in
    `atlib.loading.Batch`."""

    what: Sequence
    weight: float


class Gaps:
    """What cannot be decoded: an error with on_corrupt="raise", noted with "skip". corrupt: {index: why} of
    the current epoch."""

    def __init__(self, on_corrupt: str):
        self.on_corrupt, self.corrupt, self.warned = on_corrupt, {}, set()

    def note(self, found: dict[int, str]) -> None:
        """Add to `corrupt`, with a warning for each of the first `NAMED` images, and one when there are more.
        Raises `CorruptImage` with on_corrupt="raise"."""
        self.corrupt |= found
        if found and self.on_corrupt == "raise":
            index, why = next(iter(found.items()))
            raise CorruptImage(f"image {index} cannot be decoded ({why}); on_corrupt='skip' leaves it out")
        for index in sorted(found.keys() - self.warned):  # once for each image, in however many epochs
            if len(self.warned) < NAMED:
                warnings.warn(
                    f"image {index} cannot be decoded and is left out ({found[index]})", stacklevel=3
                )
            elif len(self.warned) == NAMED:
                warnings.warn(f"more than {NAMED} images cannot be decoded: others are counted", stacklevel=3)
            self.warned.add(index)


def deliver(
    make: Callable[[Sequence], Made], shares: Iterable[Share], gaps: Gaps, *, workers: int
) -> Iterator[Batch]:
    """One batch per share, in their order, made by `workers` processes ahead of time (0: by this one),
    without what cannot be decoded (`Gaps`): its weight falls to the part of the share that is left, so that
    over all processes every image counts as much as in a step without a gap."""
    planned: list[Share] = []  # handed to workers, not yet delivered

    def drawn() -> Iterator[Sequence]:
        for share in shares:
            planned.append(share)
            yield share.what

    for made in loader_of(make, drawn(), workers, workers > 0 and torch.cuda.is_available()):
        share = planned.pop(0)
        gaps.note(made.corrupt)
        left = len(made.indices) / len(share.what) if share.what else 0.0
        yield Batch(made.images, made.targets, made.indices, share.weight * left)
