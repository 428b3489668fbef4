"""Randomness that hangs on what it is for, and on nothing that was drawn before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

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
