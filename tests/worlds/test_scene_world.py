"""Scenes are what they say: boxes hold the ink, factors change alone, splits are other scenes."""

import numpy as np
import pytest

from atbook.worlds.glyphs import BITMAPS, SPLITS
from atbook.worlds.scenes import SceneWorld, generate_scenes

CLEAR = SceneWorld(noise=0.0, background=0.2)  # a level of 51, where 0.1 lies between 25 and 26
FACTORS = {"noise": 0.0, "background": 0.5, "contrast": 0.5, "blur": 1.0, "saturation": 0.0}
FACTORS |= {"hue_shift": 0.3, "texture": 0.8}


@pytest.fixture(scope="module")
def drawn():
    return generate_scenes("train", 250, world=CLEAR)


def test_an_independent_reader_finds_every_object_in_the_pixels(drawn):
    """Each object is one colour: its pixels, cut to their box and scaled to 6 x 6, are its bitmap."""
    for image, shape, boxes, instances in zip(drawn.images, drawn.shape, drawn.boxes, drawn.instances):
        k = (shape >= 0).sum()
        assert (shape[:k] >= 0).all() and (shape[k:] == -1).all() and (boxes[k:] == 0).all()
        background = (image == 51).all(0)
        assert (background == (instances == 0)).all()
        for i in range(k):
            mask = instances == i + 1
            colours = image[:, mask]
            assert (colours == colours[:, :1]).all()
            left, top, right, bottom = boxes[i].astype(int)
            down, across = np.nonzero(mask)
            assert (left, top, right, bottom) == (across.min(), down.min(), across.max() + 1, down.max() + 1)
            side = right - left
            assert side == bottom - top and 12 <= side <= 28
            middle = ((2 * np.arange(6) + 1) * side) // 12
            assert (mask[top:bottom, left:right][np.ix_(middle, middle)] == BITMAPS[shape[i]]).all()


def test_objects_are_as_many_and_as_apart_as_the_world_says(drawn):
    counts = (drawn.shape >= 0).sum(1)
    assert set(counts) <= {1, 2, 3, 4, 5} and (counts >= 2).mean() > 0.97
    world = SceneWorld(fewest=8, most=8, smallest=6, largest=10, noise=0)
    crowded = generate_scenes("train", 100, world=world)
    assert (crowded.shape >= 0).sum(1).mean() > 7.5
    areas = (drawn.boxes[..., 2:] - drawn.boxes[..., :2]).prod(-1)
    assert (np.diff(areas, axis=1) <= 0).all(), "the largest first"
    for boxes, k in zip(drawn.boxes, counts):
        for a in range(k):
            for b in range(a):
                shared = np.minimum(boxes[a, 2:], boxes[b, 2:]) - np.maximum(boxes[a, :2], boxes[b, :2])
                assert shared.clip(0).prod() == 0


def test_objects_may_hide_each_other_and_then_boxes_hold_what_is_visible():
    world = SceneWorld(fewest=5, most=8, smallest=20, overlap=0.3, noise=0)
    drawn, apart = (generate_scenes("train", 100, world=one) for one in (world, SceneWorld()))
    assert (drawn.shape >= 0).sum() > (apart.shape >= 0).sum()
    for shape, boxes, instances in zip(drawn.shape, drawn.boxes, drawn.instances):
        k = (shape >= 0).sum()
        assert set(np.unique(instances)) <= set(range(k + 1)) and instances.max() == k
        for i in range(k):
            down, across = np.nonzero(instances == i + 1)
            assert (boxes[i] == [across.min(), down.min(), across.max() + 1, down.max() + 1]).all()


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_changes_the_picture_and_nothing_else(factor):
    world = SceneWorld(**{factor: FACTORS[factor]})
    plain, other = generate_scenes("test", 30), generate_scenes("test", 30, world=world)
    assert (plain.images != other.images).any()
    for name in ("shape", "boxes", "instances"):
        assert (getattr(plain, name) == getattr(other, name)).all()


def test_the_first_scenes_are_the_same_whatever_the_size_and_streams_differ():
    few, many = generate_scenes("train", 5), generate_scenes("train", 130)
    assert (few.images == many.images[:5]).all() and (few.boxes == many.boxes[:5]).all()
    firsts = [generate_scenes(split, 20, seed).images for split in SPLITS for seed in (0, 1)]
    assert all((a != b).any(axis=(1, 2, 3)).all() for i, a in enumerate(firsts) for b in firsts[:i])
    again = generate_scenes("train", 130)
    assert all((left == right).all() for left, right in zip(many, again))
