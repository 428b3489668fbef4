"""The world Match, and the twins of both worlds: what is drawn evenly, what a twin shares."""

import colorsys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from atbook.worlds.glyphs import SHAPES, SPLITS, TWINS, World, generate, marked_cell
from tests.worlds.test_glyphs import BACKGROUND, cells_of, inked, shapes_in

CLEAN = World(task="match", noise=0)
WORLDS = {"find": World(), "match": World(task="match")}


def hue_of(cell):
    """The hue of a cell's ink; the mark's corners, and the frame of a key, do not count."""
    ink = inked(cell)
    if (cell == cell[0, 0, 0])[:, [0, -1]].all():  # a whole row of one level above and below: a frame
        ink[[0, -1], :] = ink[:, [0, -1]] = False
    row, column = np.argwhere(ink)[0]
    turns = colorsys.rgb_to_hsv(*(cell[:, row, column] / 255))[0]
    return round(turns * 6) % 6


def read(image):
    """(key, target, hue, shape) from the pixels of a scene: the frame, its hue, the one glyph of that hue."""
    rim = np.ones((8, 8), bool)
    rim[1:-1, 1:-1] = False
    bright = round(255 * (0.1 + 0.9 * 0.9))
    cells = cells_of(image)
    (key,) = [index for index, cell in enumerate(cells) if (cell[:, rim] == bright).all()]
    hue = hue_of(cells[key])
    (target,) = [index for index, cell in enumerate(cells) if index != key and hue_of(cell) == hue]
    (shape,) = shapes_in(inked(cells[target]))
    return key, target, hue, SHAPES.index(shape)


def test_match_can_be_read_off_the_pixels():
    drawn = generate("train", 300, 0, CLEAN)
    for image, key, cell, hue, shape in zip(drawn.images, drawn.key, drawn.cell, drawn.hue, drawn.shape):
        assert read(image) == (key, cell, hue, shape)


@pytest.mark.parametrize("task", WORLDS)
def test_splits_seeds_and_twins_share_no_image(task):
    """Compared without noise: it is the scenes that differ, not only the noise on top."""
    world, seen = replace(WORLDS[task], noise=0), set()
    for split, seed, twin in product(SPLITS, (0, 1, 100), (None, *TWINS)):
        images = {image.tobytes() for image in generate(split, 200, seed, world, twin).images}
        assert len(images) == 200 and not images & seen
        seen |= images


@pytest.mark.parametrize("task", WORLDS)
def test_what_a_twin_shares(task):
    world, n = WORLDS[task], 1600
    scene = generate("train", n, 3, world)
    routing, message, distractors, unrelated = (generate("train", n, 3, world, twin) for twin in TWINS)
    for name in ("cell", "hue", "key"):
        assert np.array_equal(getattr(routing, name), getattr(scene, name))
    assert np.array_equal(message.shape, scene.shape)
    for name in {*scene._fields} - {"images"}:
        assert np.array_equal(getattr(distractors, name), getattr(scene, name))
    # What is not shared is even, whatever the scene has: the pairs of both are.
    for left, right, count in (
        (scene.shape, routing.shape, 8),
        (scene.cell, message.cell, 16),
        (scene.shape, unrelated.shape, 8),
        (scene.cell, unrelated.cell, 16),
    ):
        assert chisquare(np.bincount(left * count + right, minlength=count**2)).pvalue > 1e-3
    if task == "match":
        assert chisquare(np.bincount(scene.key * 16 + message.key, minlength=256)).pvalue > 1e-3


@pytest.mark.parametrize("steps", [1, 3])
def test_a_pointer_stands_left_of_what_it_names(steps):
    drawn = generate("train", 60, 0, World(noise=0, pointer=steps))
    row, column = drawn.cell // 4, drawn.cell % 4
    expected = row * 4 + (column - steps) % 4
    assert np.array_equal(marked_cell(torch.from_numpy(drawn.images)).numpy(), expected)
    plain = generate("train", 60, 0, World(noise=0))
    assert np.array_equal(drawn.shape, plain.shape) and np.array_equal(drawn.cell, plain.cell)
    for image, cell, shape in zip(drawn.images, drawn.cell, drawn.shape):
        assert SHAPES[shape] in shapes_in(inked(cells_of(image)[cell]))


def test_a_false_mark_is_never_the_pointers():
    drawn = generate("train", 500, 0, World(noise=0, pointer=1, decoy=0.9, clutter=0, cue=0.5, jitter=0))
    true = marked_cell(torch.from_numpy(drawn.images)).numpy()
    dots = np.stack([np.stack([cell[0, 0, 0] for cell in cells_of(image)]) for image in drawn.images])
    assert ((dots > BACKGROUND + 12).sum(1) == 2).all() and (dots[np.arange(500), true] > BACKGROUND).all()
