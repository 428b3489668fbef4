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
    """What one process asks of one epoch."""

    seed: int
    epoch: int
    batch_size: int  #: Images of a step over all processes.
    rank: int = 0
    world: int = 1
    start: int = 0  #: Steps that are done already.
    repeats: int = 1  #: How often an image comes that the epoch has.


class Batch(NamedTuple):
    """One process's images of one step."""

    images: Tensor  #: Float (b, 3, height, width).
    targets: Tensor  #: (b, ...).
    indices: list[int]  #: Places in the data.
    #: The factor on this process's *mean* loss with which the mean over processes is that over the step's
    #: images: 1 for equal numbers of them, 0 for a stand-in of a process that was left without one.
    weight: float


class TrainingData(Protocol):
    """What `atlib.train.train` takes. An epoch has `steps_per_epoch(len(data), part.batch_size)` batches,
    less those that `part` leaves out. corrupt: {index: why} of the images that could not be decoded."""

    corrupt: Mapping[int, str]

    def __len__(self) -> int: ...

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]: ...


class EvaluationData(Protocol):
    """What `atlib.evaluate` takes: labelled images in a fixed order."""

    targets: Tensor

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def loader(self, batch_size: int) -> Iterable[tuple[Tensor, Tensor]]: ...


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Steps in which each of `count` images comes once; the last may have fewer than `batch_size`."""
    return -(-count // batch_size)


def in_order(count: int, batch_size: int) -> list[range]:
    """The indices of `count` images in order, in batches of which the last may have fewer."""
    return [range(count)[first : first + batch_size] for first in range(0, count, batch_size)]


def epoch_order(count: int, seed: int, epoch: int, repeats: int = 1) -> list[int]:
    """The indices of `count` images in the order of an epoch (from 0), shuffled as a torch `RandomSampler` of
    that seed does. With `repeats`, the first count / repeats images come `repeats` times in a row (Hoffer et
    al. 2020, arXiv 1901.09335; as in DeiT, arXiv 2012.12877)."""
    states, generator = _generator_states(count, seed), torch.Generator()
    while len(states) <= epoch:  # a pass draws two permutations, the second for a remainder that is empty
        generator.set_state(states[-1])
        torch.randperm(count, generator=generator), torch.randperm(count, generator=generator)
        states.append(generator.get_state())
    generator.set_state(states[epoch])
    order = torch.randperm(count, generator=generator)
    return order.repeat_interleave(repeats)[:count].tolist()


def my_batches(count: int, part: ShardSpec) -> list[tuple[list[int], float]]:
    """This process's share of every step from `part.start` on, as (indices, weight). A step's images are
    dealt out in turn, so repeats of one go to different processes; one that is left without an image gets the
    step's first with weight 0."""
    order = epoch_order(count, part.seed, part.epoch, part.repeats)
    shares = my_positions(count, part)
    return [([order[position] for position in positions], weight) for positions, weight in shares]


def my_repeats(count: int, part: ShardSpec) -> list[list[int]]:
    """Beside the indices of `my_batches`: how often each image came before in this epoch, from 0."""
    return [[position % part.repeats for position in positions] for positions, _ in my_positions(count, part)]


def my_seeded_batches(count: int, part: ShardSpec) -> Iterator[tuple[list[tuple[int, int]], float]]:
    """`my_batches` with the seed of each image's augmentation, as ([(index, seed), ...], weight)."""
    for (indices, weight), repeats in zip(my_batches(count, part), my_repeats(count, part)):
        seeds = augmentation_seeds(part, torch.tensor(indices), torch.tensor(repeats))
        yield [*zip(indices, seeds.tolist())], weight


def my_positions(count: int, part: ShardSpec) -> list[tuple[Sequence[int], float]]:
    """`my_batches` as places in the epoch's order, for data that are read in an order of their own."""
    if part.batch_size < 1 or part.repeats < 1 or not 0 <= part.rank < part.world:
        raise ValueError(f"{part}: batch_size and repeats are above 0, rank is below world")
    shares = []
    for first in range(part.start * part.batch_size, count, part.batch_size):
        step = range(first, min(first + part.batch_size, count))
        positions = step[part.rank :: part.world]
        shares.append((positions, len(positions) * part.world / len(step)) if positions else (step[:1], 0.0))
    return shares


@lru_cache(maxsize=4)
def _generator_states(count: int, seed: int) -> list[Tensor]:
    """The state before each pass so far, remembered: to find the 300th anew takes a minute on ImageNet."""
    return [torch.Generator().manual_seed(seed).get_state()]


# --- Randomness that hangs on what it is for, and on nothing that was drawn before ---


# What an experiment draws, each from a stream of its own, of which the position here is part: append only.
ROLES = ("teacher", "teacher order", "student", "head", "labels", "order", "unlabelled", "untrained", "twins")


def seed_for(seed: int, role: str, again: int = 0) -> int:
    """The seed of what plays `role` in the run of a seed, below 2³²; `again` numbers its draws. Two roles
    share no stream, so no student starts from its teacher's first weights."""
    return int(np.random.SeedSequence([seed, ROLES.index(role), again]).generate_state(1)[0])


def augmentation_seeds(part: ShardSpec, indices: Tensor, repeats: Tensor) -> Tensor:
    """The seeds of images' augmentation for int64 indices and repeats (B,): int64 (B,), from 0 on. They hang
    on run, epoch, image and repeat alone."""
    run = np.random.SeedSequence([part.seed, part.epoch]).generate_state(1, np.uint64).view(np.int64)[0]
    return _shifted(splitmix64(splitmix64(indices + int(run)) + repeats), 1)


def draw_below(seeds: Tensor, number: int, below: int) -> Tensor:
    """The `number`-th draw of each seed's stream: int64 (B,), evenly from 0 to `below` - 1, at most 2^31."""
    return (_shifted(splitmix64(seeds + _signed(number * _GAMMA)), 32) * below) >> 32


def splitmix64(state: Tensor) -> Tensor:
    """What SplitMix64 gives from each state, int64 (B,), the same bits on every device. Source: Steele, Lea &
    Flood 2014, "Fast splittable pseudorandom number generators"; constants of S. Vigna's splitmix64.c."""
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
    """After the block the global generators of Python, NumPy and torch (CPU) are as they were before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_generators(seed: int | Sequence[int]) -> None:
    """Let these generators start from a seed, one or several integers from 0 on."""
    # three words, so that the three do not start from one number
    for_python, for_numpy, for_torch = map(int, np.random.SeedSequence(seed).generate_state(3))
    random.seed(for_python)
    np.random.seed(for_numpy)
    # torch.manual_seed would reseed a GPU's generators
    torch.default_generator.manual_seed(for_torch)


def loader_of(
    function: Callable,
    wanted: Iterable,
    workers: int,
    pin: bool = False,
    initialise: Callable[[int], None] | None = None,
) -> DataLoader:
    """A DataLoader of `function(each)` for each wanted, made by `workers` processes (0: by this one), each of
    which calls `initialise` with its number first. pin: the memory of what workers make, for a GPU."""
    # A generator of its own: a DataLoader draws from one when it begins, and the global one is the run's.
    return DataLoader(
        Called(function),
        sampler=wanted,
        batch_size=None,
        collate_fn=as_is,
        num_workers=workers,
        generator=torch.Generator(),
        pin_memory=pin and workers > 0 and torch.cuda.is_available(),
        worker_init_fn=partial(in_a_group_of_its_own, initialise),
    )


def in_a_group_of_its_own(initialise: Callable[[int], None] | None, worker: int) -> None:
    """A SIGTERM to the process group, as launchers send it, must not take the workers from a run that is
    about to save."""
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
