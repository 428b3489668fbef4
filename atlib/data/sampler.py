"""Which image goes into which step of which process: one order for any number of them, found again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class ShardSpec(NamedTuple):
    """What one process asks of one epoch. batch_size: images of a step over all processes; `start`: steps of
    this epoch to leave out, because they are done; `repeats`: how often an image comes in an epoch that has
    it (repeated augmentation).
    """

    seed: int
    epoch: int
    batch_size: int
    rank: int = 0
    world: int = 1
    start: int = 0
    repeats: int = 1


class Batch(NamedTuple):
    """One process's images of one step. images: float (b, 3, height, width); targets: (b, ...); indices:
    their places in the data.

    weight: the factor on this process's *mean* loss with which the mean over processes is the mean over the
    whole step's images: 1 but where processes have unequal numbers of them, 0 for a process that was left
    without one and got a stand-in.
    """

    images: Tensor
    targets: Tensor
    indices: list[int]
    weight: float


class TrainingData(Protocol):
    """What `atlib.train.train` takes: `Images`, `Photos` and `PhotoStream` are such, and anything else may
    be.

    An epoch has `steps_per_epoch(len(data), part.batch_size)` batches, less those that `part` leaves out;
    `workers`: processes that may make them ahead of time. corrupt: {index: why} of the images that could not
    be decoded.
    """

    corrupt: Mapping[int, str]

    def __len__(self) -> int: ...

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]: ...


class EvaluationData(Protocol):
    """What `atlib.train.evaluate` takes, such as `Images` and `Photos`: labelled images in a fixed order."""

    targets: Tensor

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def loader(self, batch_size: int) -> Iterable[tuple[Tensor, Tensor]]: ...


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Steps in which each of `count` images, or as many repeats, comes once; the last step may have fewer
    than `batch_size`."""
    return -(-count // batch_size)


def epoch_order(count: int, seed: int, epoch: int, repeats: int = 1) -> list[int]:
    """The order of an epoch (from 0) by seed: the indices of `count` images, shuffled.

    It is the order that a torch `RandomSampler` with a generator of that seed gives in its epoch-th pass.
    With `repeats`, the first count / repeats images of that order come `repeats` times in a row, so that an
    epoch has as many steps as without (repeated augmentation: Hoffer et al. 2020, arXiv 1901.09335; Berman et
    al. 2019, arXiv 1902.05509; as DeiT, arXiv 2012.12877, uses it).
    """
    states, generator = _generator_states(count, seed), torch.Generator()
    while len(states) <= epoch:  # a pass draws two permutations, the second for a remainder that is empty
        generator.set_state(states[-1])
        torch.randperm(count, generator=generator), torch.randperm(count, generator=generator)
        states.append(generator.get_state())
    generator.set_state(states[epoch])
    order = torch.randperm(count, generator=generator)
    return order.repeat_interleave(repeats)[:count].tolist()


def my_batches(count: int, part: ShardSpec) -> list[tuple[list[int], float]]:
    """This process's share of every step of the epoch from `part.start` on, as (indices, weight).

    A step's images are dealt out in turn, so over all processes each image comes exactly once, and repeats of
    one image go to different processes. A process that is left without an image gets the step's first one
    with weight 0. Raises `ValueError` for a batch size below 1, and for a rank that does not exist.
    """
    order = epoch_order(count, part.seed, part.epoch, part.repeats)
    return [
        ([order[position] for position in positions], weight)
        for positions, weight in my_positions(count, part)
    ]


def my_repeats(count: int, part: ShardSpec) -> list[list[int]]:
    """Beside the indices of `my_batches`: how often each image came before in this epoch, from 0."""
    return [[position % part.repeats for position in positions] for positions, _ in my_positions(count, part)]


def my_positions(count: int, part: ShardSpec) -> list[tuple[Sequence[int], float]]:
    """`my_batches` as places in the epoch's order, for data that are read in an order of their own."""
    if part.batch_size < 1 or part.repeats < 1:
        raise ValueError(f"batch_size and repeats must be above 0, got {part.batch_size} and {part.repeats}")
    if not 0 <= part.rank < part.world:
        raise ValueError(f"rank {part.rank} does not exist: there are {part.world} processes, from 0 on")
    shares = []
    for first in range(part.start * part.batch_size, count, part.batch_size):
        step = range(first, min(first + part.batch_size, count))
        mine = step[part.rank :: part.world]
        shares.append((mine, len(mine) * part.world / len(step)) if mine else (step[:1], 0.0))
    return shares


@lru_cache(maxsize=4)
def _generator_states(count: int, seed: int) -> list[Tensor]:
    """The state before each pass so far, remembered: to find the 300th anew takes a minute on ImageNet."""
    return [torch.Generator().manual_seed(seed).get_state()]
