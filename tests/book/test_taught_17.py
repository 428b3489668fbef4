"""What notebook 17 writes out, a long tail of labels and the groups of classes, is what atlib computes, on
other inputs."""

import pytest
import torch

from atlib.analysis.subsets import class_counts, class_groups, long_tail
from atlib.data import Images, glyph_images, glyphs
from tests.book.test_taught import taught

NAME = "17-when-are-features-needed"


@pytest.mark.parametrize("factor, seed", [(1.0, 0), (7.5, 3), (50.0, 1)])
def test_long_tail_by_hand_keeps_the_same_images(factor, seed):
    images = glyph_images(glyphs.generate("train", 1500, seed=9))
    kept = taught(NAME).long_tail_by_hand(images.targets.tolist(), len(glyphs.SHAPES), factor, seed)
    theirs = long_tail(images, factor, seed)
    assert torch.equal(images.pixels[kept], theirs.pixels)
    assert torch.equal(images.targets[kept], theirs.targets)


def test_long_tail_by_hand_keeps_what_the_formula_says():
    labels = torch.arange(3).repeat(100)  # 100 images of each class: 100, 100 / √10, 10
    kept = taught(NAME).long_tail_by_hand(labels.tolist(), 3, 10.0)
    assert torch.bincount(labels[kept]).tolist() == [100, 31, 10]
    pixels = torch.zeros(300, 3, 2, 2, dtype=torch.uint8)
    assert class_counts(long_tail(Images(pixels, labels, ("a", "b", "c")), 10.0)) == [100, 31, 10]


def test_a_class_with_less_than_its_share_keeps_all_it_has():
    labels = [0] * 100 + [1] * 8 + [2] * 100
    kept = taught(NAME).long_tail_by_hand(labels, 3, 4.0)
    assert [sum(labels[i] == label for i in kept) for label in range(3)] == [100, 8, 25]


@pytest.mark.parametrize("counts", [[500, 101, 100, 20, 19, 1], [300, 200], [50, 60], [5, 500, 5]])
def test_groups_by_hand(counts):
    assert taught(NAME).groups_by_hand(counts) == class_groups(counts)
