"""Where a training run is: its steps, its history, and the batch that waits; everything a resumed run needs besides the weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from atlib.chance import chance, restore_chance
from atlib.feed import Batch


@dataclass
class Position:
    """step: steps done in all, the last one at the rate `lr`; epoch: passes done; done: steps done of the pass in progress, `total`, the sum
    of their losses, and `corrupt`, the images in it that could not be decoded before the run was last taken up; history: one entry per pass
    that was completed."""

    total: Tensor
    step: int = 0
    epoch: int = 0
    done: int = 0
    lr: float = 0.0
    corrupt: list[int] = field(default_factory=list)
    history: list[dict] = field(default_factory=list)

    def count(self, loss: Tensor, lr: float) -> None:
        """A step was done, at that rate."""
        self.total, self.step, self.done, self.lr = self.total + loss, self.step + 1, self.done + 1, lr

    def entry(self) -> dict:
        """What the history says about the pass in progress."""
        return {"epoch": self.epoch + 1, "step": self.step, "loss": (self.total / self.done).item(), "lr": self.lr}

    def close(self, entry: dict) -> None:
        """The pass is over."""
        self.history.append(entry)
        self.total, self.epoch, self.done, self.corrupt = torch.zeros((), device=self.total.device), self.epoch + 1, 0, []

    def facts(self) -> dict:
        """The position as JSON values; `total` is not among them, being a tensor."""
        return {"step": self.step, "epoch": self.epoch, "done": self.done, "lr": self.lr, "corrupt": self.corrupt, "history": self.history}


class Ahead(NamedTuple):
    """A batch, whether it is the last of its pass, and the state of chance in which the one after it, which waits already, was made."""

    batch: Batch
    last: bool
    before_next: dict[str, Tensor]


def ahead(batches: Iterator[Batch], before: Mapping[str, Tensor] | None = None) -> Iterator[Ahead]:
    """The batches of a pass, each made one step ahead of its use, as Accelerate's loader does and as runs were recorded.

    A run that goes on in the middle of a pass gives `before`: what chance was when the first of `batches` was made the first time.
    Raises `ValueError` when there is no batch at all.
    """
    now = chance()
    if before is not None:
        restore_chance(before)
    batch = next(batches, None)
    if batch is None:
        raise ValueError("the data gave no batch: there is nothing to train on")
    if before is not None:
        restore_chance(now)
    while batch is not None:
        before_next = chance()
        following = next(batches, None)
        yield Ahead(batch, following is None, before_next)
        batch = following
