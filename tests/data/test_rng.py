"""The seeds of augmentation: SplitMix64 as its authors publish it, even, and each image's own."""

from itertools import product

import numpy as np
import pytest
import torch

from atlib.loading import ShardSpec, augmentation_seeds, draw_below, splitmix64

WORD = 2**64


def published(state):
    """splitmix64.c in Python's whole numbers: the output from a state, and the next state."""
    state = (state + 0x9E3779B97F4A7C15) % WORD
    z = state
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31), state


def signed(words):
    return torch.tensor(np.array(words, np.uint64).view(np.int64))


def test_splitmix64_gives_the_published_bits():
    state, expected = 1234567, []
    for _ in range(3):
        output, state = published(state)
        expected.append(output)
    # of the published implementation, as others test theirs
    assert expected == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    starts = [0, 1, 1234567, 2**63 - 1, 2**63, WORD - 1]
    assert torch.equal(splitmix64(signed(starts)), signed([published(state)[0] for state in starts]))


@pytest.mark.parametrize("below", [2, 9, 1000])
def test_draws_are_the_generators_own_and_even(below):
    seeds = torch.arange(90_000) * 3
    for number in range(3):
        found = draw_below(seeds, number, below)
        assert found.dtype == torch.int64 and found.min() >= 0 and found.max() < below
        for place in (0, 77, 89_999):
            state = 3 * place
            for _ in range(number + 1):
                output, state = published(state)
            assert found[place] == (output >> 32) * below >> 32
        counts, expected = np.bincount(found, minlength=below), 90_000 / below
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_squared - (below - 1)) < 5 * np.sqrt(2 * max(below - 1, 8)), (number, chi_squared)


def test_a_seed_hangs_on_run_epoch_image_and_repeat_alone():
    seen = set()
    indices, repeats = (torch.tensor(column) for column in zip(*product(range(100), range(3))))
    for seed, epoch in product((0, 1, 2**32 - 1), (0, 1, 800)):
        part = ShardSpec(seed, epoch, 8)
        found = augmentation_seeds(part, indices, repeats)
        assert found.dtype == torch.int64 and found.min() >= 0
        elsewhere = part._replace(rank=1, world=2, start=3)
        assert torch.equal(found, augmentation_seeds(elsewhere, indices, repeats))
        assert torch.equal(found[7:8], augmentation_seeds(part, indices[7:8], repeats[7:8]))
        seen |= set(found.tolist())
    assert len(seen) == 9 * 300, "no two alike"
