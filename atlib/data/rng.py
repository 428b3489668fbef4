"""Randomness that hangs on what it is for, and on nothing that was drawn before."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from atlib._util import require_known
from atlib.data.sampler import ShardSpec

# What an experiment draws, each from a stream of its own. The position of a name is part of its stream:
# append only. With the order of images go their augmentation and stochastic depth: `train` has one seed.
ROLES = ("teacher", "teacher order", "student", "head", "labels", "order", "unlabelled", "untrained", "twins")


def seed_for(seed: int, role: str, again: int = 0) -> int:
    """The seed of what plays `role` in the run of a seed, from 0 to 2³² - 1: two roles share no stream, so no
    student starts from its teacher's first weights. again: another number for another draw of the same.

    Raises `ValueError` for an unknown role.
    """
    require_known("role", role, ROLES)
    return int(np.random.SeedSequence([seed, ROLES.index(role), again]).generate_state(1)[0])


def augmentation_seeds(part: ShardSpec, indices: Tensor, repeats: Tensor) -> Tensor:
    """The seeds of images' augmentation, for int64 indices and repeats (B,), on their device: int64 (B,),
    from 0 on.

    They hang on run, epoch, image and repeat, not on which process makes them, when, or beside which others.
    """
    run = np.random.SeedSequence([part.seed, part.epoch]).generate_state(1, np.uint64).view(np.int64)[0]
    return _shifted(splitmix64(splitmix64(indices + int(run)) + repeats), 1)


def draw_below(seeds: Tensor, number: int, below: int) -> Tensor:
    """The `number`-th draw of each seed's own stream: int64 (B,), evenly from 0 to `below` - 1, for `below`
    up to 2^31."""
    return (_shifted(splitmix64(seeds + _signed(number * _GAMMA)), 32) * below) >> 32


def splitmix64(state: Tensor) -> Tensor:
    """What the generator SplitMix64 gives from each state of int64 (B,): its 64 bits, as int64. The same bits
    on every device.

    Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"; constants of S.
    Vigna's splitmix64.c.
    """
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
