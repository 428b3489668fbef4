"""Which image goes into which step of which process, with which random numbers: one order for any number of
processes and workers, found again when a run goes on."""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader


class ShardSpec(NamedTuple):
    """What one process asks of one epoch. batch_size: images of a step over all processes; `start`: steps of
    this epoch to leave out, because they are done; `repeats`: how often an image comes in an epoch that has
    it (repeated augmentation)."""

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
    """What `atlib.train.train` takes, such as `Images`, `Photos` and `PhotoStream`.

    An epoch has `steps_per_epoch(len(data), part.batch_size)` batches, less those that `part` leaves out;
    `workers`: processes that may make them ahead of time. corrupt: {index: why} of the images that could not
    be decoded.
    """

    corrupt: Mapping[int, str]

    def __len__(self) -> int: ...

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]: ...


class EvaluationData(Protocol):
    """What `atlib.evaluate` takes, such as `Images` and `Photos`: labelled images in a fixed order."""

    targets: Tensor

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def loader(self, batch_size: int) -> Iterable[tuple[Tensor, Tensor]]: ...


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Steps in which each of `count` images, or as many repeats, comes once; the last step may have fewer
    than `batch_size`."""
    return -(-count // batch_size)


def epoch_order(count: int, seed: int, epoch: int, repeats: int = 1) -> list[int]:
    """The order of an epoch (from 0) by seed: the indices of `count` images, shuffled as a torch
    `RandomSampler` with a generator of that seed does in its epoch-th pass.

    With `repeats`, the first count / repeats images come `repeats` times in a row, in as many steps (repeated
    augmentation: Hoffer et al. 2020, arXiv 1901.09335; Berman et al. 2019, arXiv 1902.05509; as in DeiT,
    arXiv 2012.12877).
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
    with weight 0.
    """
    order = epoch_order(count, part.seed, part.epoch, part.repeats)
    mine = my_positions(count, part)
    return [([order[position] for position in positions], weight) for positions, weight in mine]


def my_repeats(count: int, part: ShardSpec) -> list[list[int]]:
    """Beside the indices of `my_batches`: how often each image came before in this epoch, from 0."""
    return [[position % part.repeats for position in positions] for positions, _ in my_positions(count, part)]


def my_positions(count: int, part: ShardSpec) -> list[tuple[Sequence[int], float]]:
    """`my_batches` as places in the epoch's order, for data that are read in an order of their own."""
    if part.batch_size < 1 or part.repeats < 1 or not 0 <= part.rank < part.world:
        raise ValueError(f"{part}: batch_size and repeats are above 0, rank is below world")
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


# --- Randomness that hangs on what it is for, and on nothing that was drawn before ---


# What an experiment draws, each from a stream of its own. The position of a name is part of its stream:
# append only. With the order of images go their augmentation and stochastic depth: `train` has one seed.
ROLES = ("teacher", "teacher order", "student", "head", "labels", "order", "unlabelled", "untrained", "twins")


def seed_for(seed: int, role: str, again: int = 0) -> int:
    """The seed of what plays `role` in the run of a seed, from 0 to 2³² - 1: two roles share no stream, so no
    student starts from its teacher's first weights. again: another number for another draw of the same."""
    return int(np.random.SeedSequence([seed, ROLES.index(role), again]).generate_state(1)[0])


def augmentation_seeds(part: ShardSpec, indices: Tensor, repeats: Tensor) -> Tensor:
    """The seeds of images' augmentation, for int64 indices and repeats (B,), on their device: int64 (B,),
    from 0 on. They hang on run, epoch, image and repeat, not on which process makes them, when, or beside
    which others."""
    run = np.random.SeedSequence([part.seed, part.epoch]).generate_state(1, np.uint64).view(np.int64)[0]
    return _shifted(splitmix64(splitmix64(indices + int(run)) + repeats), 1)


def draw_below(seeds: Tensor, number: int, below: int) -> Tensor:
    """The `number`-th draw of each seed's own stream: int64 (B,), evenly from 0 to `below` - 1, for `below`
    up to 2^31."""
    return (_shifted(splitmix64(seeds + _signed(number * _GAMMA)), 32) * below) >> 32


def splitmix64(state: Tensor) -> Tensor:
    """What the generator SplitMix64 gives from each state of int64 (B,): its 64 bits, as int64. The same bits
    on every device. Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators";
    constants of S. Vigna's splitmix64.c."""
    z = state + _signed(_GAMMA)  # products and sums of int64 wrap around, as those of uint64 do
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


_GAMMA = 0x9E3779B97F4A7C15  # from one state of SplitMix64 to the next


def _signed(word: int) -> int:
    """The lowest 64 bits of a whole number, as int64 has them."""
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word


def _shifted(words: Tensor, bits: int) -> Tensor:
    """int64 shifted to the right as uint64 would be: zeros come in, not the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


@contextmanager
def rng_put_back() -> Iterator[None]:
    """After the block the global generators of Python, NumPy and torch (on the CPU) are as they were before:
    for other people's code, which draws from them and can be seeded in no other way."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(seed: int | Sequence[int]) -> None:
    """Let the global generators of Python, NumPy and torch (on the CPU) start from a seed, one or several
    integers from 0 on; to be called within `rng_put_back`."""
    # Three words, so that the three do not start from one number; they are the same on every machine.
    for_python, for_numpy, for_torch = map(int, np.random.SeedSequence(seed).generate_state(3))
    random.seed(for_python)
    np.random.seed(for_numpy)
    # torch.manual_seed would reseed a GPU's generators
    torch.default_generator.manual_seed(for_torch)


# --- Workers ---


def loader_of(
    function: Callable,
    wanted: Iterable,
    workers: int,
    pin_memory: bool = False,
    initialise: Callable[[int], None] | None = None,
) -> DataLoader:
    """A DataLoader of `function(each)` for each wanted, made by `workers` processes (0: by this one), in each
    of which `initialise` is called with its number first."""
    # A generator of its own: a DataLoader draws from one when it begins, and the global one is the run's.
    return DataLoader(
        Called(function),
        sampler=wanted,
        batch_size=None,
        collate_fn=as_is,
        num_workers=workers,
        generator=torch.Generator(),
        pin_memory=pin_memory,
        worker_init_fn=partial(in_a_group_of_its_own, initialise),
    )


def in_a_group_of_its_own(initialise: Callable[[int], None] | None, worker: int) -> None:
    """For a DataLoader's workers: a SIGTERM to the whole process group, as launchers send it, must not take
    them from a run that is about to save. Then `initialise`."""
    if hasattr(os, "setpgid"):  # not on Windows
        os.setpgid(0, 0)
    if initialise is not None:
        initialise(worker)


class Called:
    """Lets a DataLoader make whatever its sampler yields."""

    def __init__(self, function: Callable):
        self.function = function

    def __getitem__(self, what):
        return self.function(what)


def as_is(batch):
    """What a DataLoader shall make of a batch: nothing."""
    return batch
