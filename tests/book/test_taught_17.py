"""What notebook 17 writes out, a long tail of labels and the groups of classes, is what atlib computes, on
other inputs."""

import pytest
import torch

from atlib.analysis.subsets import class_groups, long_tail
from atlib.data import glyph_images, glyphs
from tests.book.test_taught import taught

NAME = "17-when-are-features-needed"


GLYPHS = glyph_images(glyphs.generate("train", 1500, seed=9))
# class 1 has less than its share
FEW = [i for i, label in enumerate(GLYPHS.targets.tolist()) if label != 1 or i < 50]


@pytest.mark.parametrize("factor, seed", [(1.0, 0), (7.5, 3), (50.0, 1)])
@pytest.mark.parametrize("images", [GLYPHS, GLYPHS.select(FEW)], ids=["all", "few of class 1"])
def test_long_tail_by_hand_keeps_the_same_images(images, factor, seed):
    kept = taught(NAME).long_tail_by_hand(images.targets.tolist(), len(glyphs.SHAPES), factor, seed)
    theirs = long_tail(images, factor, seed)
    assert torch.equal(images.pixels[kept], theirs.pixels)
    assert torch.equal(images.targets[kept], theirs.targets)


@pytest.mark.parametrize("counts", [[500, 101, 100, 20, 19, 1], [300, 200], [50, 60], [5, 500, 5]])
def test_groups_by_hand(counts):
    assert taught(NAME).groups_by_hand(counts) == class_groups(counts)
