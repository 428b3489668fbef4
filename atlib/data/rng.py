"""Randomness that hangs on what it is for, and on nothing that was drawn before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from atlib.data.sampler import ShardSpec


def augmentation_seed(part: ShardSpec, index: int, repeat: int) -> int:
    """The seed of one image's augmentation: it hangs on run, epoch and image, not on who makes it or when."""
    words = np.random.SeedSequence([part.seed, part.epoch, index, repeat]).generate_state(1, np.uint64)
    return int(words[0])


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
