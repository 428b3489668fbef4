"""Mixup and CutMix: what is in the mixed images is what the targets say, decided by seed and step alone."""

import numpy as np
import pytest
import torch

from atlib.data import UNLABELLED
from atlib.objectives import mixed
from atlib.recipe import Recipe


def solid(count):
    """Image i is i everywhere, so that a mixed pixel says what it is made of."""
    numbers = torch.arange(count)
    return numbers.float().view(-1, 1, 1, 1).expand(-1, 3, 32, 32).clone(), numbers


@pytest.mark.parametrize("count", [6, 7])
def test_mixup_is_the_blend_that_the_targets_say(count):
    for step in range(5):
        images, shares = mixed(*solid(count), Recipe(mixup=0.8), 8, (0, step))
        assert images.shape == (count, 3, 32, 32) and shares.shape == (count, 8)
        torch.testing.assert_close(shares.sum(1), torch.ones(count))
        torch.testing.assert_close(images.mean((1, 2, 3)), shares @ torch.arange(8.0), rtol=1e-5, atol=1e-5)
        assert (images.std((1, 2, 3)) < 1e-5).all(), "mixup blends whole images"
        even = count - count % 2
        for i in range(even):  # only the image itself and the one from the other end
            assert set(shares[i].nonzero().flatten().tolist()) <= {i, even - 1 - i}
        if count % 2:
            assert shares[-1, -2] == 1 and (images[-1] == count - 1).all()


def test_cutmix_is_the_area_that_the_targets_say():
    changed = 0
    for step in range(5):
        images, shares = mixed(*solid(6), Recipe(cutmix=1.0), 6, (0, step))
        for i in range(6):
            own = (images[i, 0] == i).float().mean().item()
            assert shares[i, [i, 5 - i]].tolist() == pytest.approx([own, 1 - own], abs=1e-6)
            assert set(images[i].unique().tolist()) <= {i, 5 - i}, "pixels come from one image or the other"
        changed += shares[0, 0].item() < 1
    assert changed > 2


def test_both_are_used_in_turn():
    recipe = Recipe(mixup=0.8, cutmix=1.0)
    kinds = {len(mixed(*solid(2), recipe, 2, (0, step))[0][0].unique()) for step in range(20)}
    assert kinds == {1, 2}, "a blend is one value, a cut is two"


def test_it_depends_on_the_numbers_alone_and_leaves_chance_alone():
    recipe = Recipe(mixup=0.8, cutmix=1.0)
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    first = mixed(*solid(4), recipe, 4, (3, 7, 0))
    assert (np.random.get_state()[1] == state).all()
    np.random.seed(1)
    again, later, other = (mixed(*solid(4), recipe, 4, draw) for draw in ((3, 7, 0), (3, 8, 0), (3, 7, 1)))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[1], later[1]) and not torch.equal(first[1], other[1])


@pytest.mark.parametrize(
    "labels, classes",
    [(torch.zeros(4), 5), (torch.tensor([0, 1, UNLABELLED, 1]), 5)],
    ids=["float", "unlabelled"],
)
def test_targets_that_cannot_be_mixed(labels, classes):
    with pytest.raises(ValueError):
        mixed(solid(4)[0], labels, Recipe(mixup=0.1), classes, (0,))
