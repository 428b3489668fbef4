"""Batches of which some images cannot be decoded: named, and left out where that is asked for."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def deliver(
    make: Callable[[Sequence], Made],
    shares: Iterable[Share],
    *,
    workers: int,
    on_corrupt: str,
    corrupt: dict[int, str],
    warned: set[int] | None = None,
    initialise: Callable[[int], None] | None = None,
) -> Iterator[Batch]:
    """One batch per share, in their order, made by `workers` processes ahead of time (0: by this one, when
    asked for). initialise: as in `loader_of`.

    Shares are drawn in this process, so their order does not hang on the number of workers. What cannot
    be decoded is noted in `corrupt` (warned: of which images it was said before); with on_corrupt="raise"
    it is a `CorruptImage`, with "skip" the batch goes without it, and its weight falls to the part of the
    share that is left, so that over all processes every image counts as much as in a step without a gap.
    """
    warned = set() if warned is None else warned
    planned: list[Share] = []  # handed to workers, not yet delivered

    def drawn() -> Iterator[Sequence]:
        for share in shares:
            planned.append(share)
            yield share.what

    pin_memory = workers > 0 and torch.cuda.is_available()
    for made in loader_of(make, drawn(), workers, pin_memory, initialise):
        share = planned.pop(0)
        if made.corrupt and on_corrupt == "raise":
            corrupt.update(made.corrupt)
            raise corrupt_image(made.corrupt)
        note_left_out(made.corrupt, corrupt, warned)
        left = len(made.indices) / len(share.what) if share.what else 0.0
        yield Batch(made.images, made.targets, made.indices, share.weight * left)


def corrupt_image(corrupt: Mapping[int, str]) -> CorruptImage:
    """The error that names the first of some corrupt images."""
    index, why = next(iter(corrupt.items()))
    return CorruptImage(f"image {index} cannot be decoded ({why}); on_corrupt='skip' leaves such images out")


def note_left_out(found: Mapping[int, str], corrupt: dict[int, str], warned: set[int]) -> None:
    """Add what cannot be decoded to `corrupt`, with a warning for each of the first `NAMED` and one when
    there are more; those in `warned` had theirs."""
    for index, why in found.items():
        if index not in warned and len(warned) < NAMED:
            warnings.warn(f"image {index} cannot be decoded and is left out ({why})", stacklevel=3)
        elif index not in warned and len(warned) == NAMED:
            warnings.warn(
                f"more than {NAMED} images cannot be decoded: the others are left out without a warning, and"
                " counted",
                stacklevel=3,
            )
        corrupt[index] = why
        warned.add(index)
