"""The study of augmentation: what is changed, what is left, and that nothing else differs."""

import pytest
import torch

from atbook.lab.as_pictures import as_pictures
from atbook.lab.augmented import rand_augment, three_augment
from atbook.worlds import glyphs

DRAWN = glyphs.generate("train", 300)
SCENES, SEEDS = torch.from_numpy(DRAWN.images), torch.arange(300) * 7919


def mark_found(images):
    return (glyphs.marked_cell(images).numpy() == DRAWN.cell).mean()


@pytest.mark.parametrize("make", [three_augment, rand_augment])
def test_the_mark_stays_where_it_is(make):
    changed = as_pictures(make())(SCENES, SEEDS)
    different = (changed != SCENES).flatten(1).any(1)
    assert mark_found(changed) >= 0.99 and different.float().mean() > 0.5


def test_one_of_two_operations_a_picture():
    """Grey pictures have three equal channels; blurred ones have the same means, but less noise."""
    changed = as_pictures(three_augment())(SCENES, SEEDS).float()
    grey = (changed == changed.mean(1, keepdim=True)).flatten(1).all(1)
    assert 110 < grey.sum() < 190
    blurred, before = changed[~grey], SCENES[~grey].float()
    assert (blurred.mean((2, 3)) - before.mean((2, 3))).abs().max() < 3
    assert (blurred.flatten(1).std(1) < before.flatten(1).std(1) + 0.1).all(), "levels are whole"
