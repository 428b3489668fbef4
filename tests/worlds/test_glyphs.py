"""The built-in world: the same images everywhere, splits apart, one factor at a time, true labels."""

import colorsys
import hashlib
from dataclasses import replace

import numpy as np
import pytest

from atbook.worlds.glyphs import SHAPES, SPLITS, TWINS, World, generate

CLEAN = World(noise=0)
BACKGROUND = 26  # World.background = 0.1 as a byte
CHOICES = ("shape", "hue", "cell")

# The eight shapes once more, drawn for these tests: what atlib calls a plus must look like this one.
DRAWN = {
    "plus": ["..##..", "..##..", "######", "######", "..##..", "..##.."],
    "ring": ["######", "#....#", "#....#", "#....#", "#....#", "######"],
    "cross": ["#....#", ".#..#.", "..##..", "..##..", ".#..#.", "#....#"],
    "tee": ["######", "######", "..##..", "..##..", "..##..", "..##.."],
    "ell": ["##....", "##....", "##....", "##....", "######", "######"],
    "wedge": ["#.....", "##....", "###...", "####..", "#####.", "######"],
    "bars": ["######", "......", "######", "######", "......", "######"],
    "cup": ["##..##", "##..##", "##..##", "##..##", "######", "######"],
}
BITMAPS = {name: np.array([[c == "#" for c in row] for row in rows]) for name, rows in DRAWN.items()}


def cells_of(image):
    """The 16 cells (3, 8, 8) of an image, rows first."""
    places = range(0, 32, 8)
    return [image[:, row : row + 8, column : column + 8] for row in places for column in places]


def corners(cell):
    return cell[:, [0, 0, -1, -1], [0, -1, 0, -1]]


def inked(cell):
    """Where a cell is not background (its corners left out: they may hold the mark)."""
    mask = (np.abs(cell.astype(int) - BACKGROUND) > 12).any(0)
    mask[[0, 0, -1, -1], [0, -1, 0, -1]] = False
    return mask


def shapes_in(mask, jitter=1):
    """All shapes that, at some displacement, make exactly this mask."""
    names = set()
    for name, bitmap in BITMAPS.items():
        for row in range(1 - jitter, 2 + jitter):
            for column in range(1 - jitter, 2 + jitter):
                canvas = np.zeros((8, 8), dtype=bool)
                canvas[row : row + 6, column : column + 6] = bitmap
                canvas[[0, 0, -1, -1], [0, -1, 0, -1]] = False
                if (canvas == mask).all():
                    names.add(name)
    return names


def test_a_fixed_draw_has_a_fixed_hash():
    """numpy may change its random streams (NEP 19); the records in results/ are of these images."""
    images = generate("train", 64, 0).images
    assert images.dtype == np.uint8 and images.shape == (64, 3, 32, 32)
    recorded = "2ea0aae6f2f445e19b7410d82eb5bd84613c8ca7c78ded85d81082f630483c38"
    assert hashlib.sha256(images.tobytes()).hexdigest() == recorded


def test_choices_are_balanced():
    drawn = generate("unlabelled", 8000)
    for name, count in (("shape", 8), ("hue", 6), ("cell", 16)):
        shares = np.bincount(getattr(drawn, name), minlength=count) / 8000
        assert np.abs(shares - 1 / count).max() < 0.02
    together = np.bincount(drawn.shape * 16 + drawn.cell, minlength=128) / 8000
    assert together.max() < 2 / 128, "the label does not depend on the place"


def test_no_scene_is_in_two_splits_or_two_seeds():
    """Compared without noise: it is the scenes that differ, not only the noise on top."""
    seen = {}
    for split in SPLITS:
        for seed in (0, 1, 100):
            for image in generate(split, 600, seed, CLEAN).images:
                where = seen.setdefault(image.tobytes(), (split, seed))
                assert where == (split, seed), f"an image of {split} seed {seed} is also in {where}"
    assert len(seen) == 600 * 3 * len(SPLITS), "nor does one occur twice"


def test_the_label_is_the_glyph_in_the_marked_cell():
    drawn = generate("train", 600, 0, CLEAN)
    dot = round(255 * (0.1 + 0.9 * 0.9))
    for image, clean, shape, hue, cell in zip(drawn.images, drawn.clean, drawn.shape, drawn.hue, drawn.cell):
        cells = cells_of(image)
        assert [index for index, pixels in enumerate(cells) if (corners(pixels) == dot).all()] == [cell]
        marked = cells[cell]
        assert shapes_in(inked(marked)) == {SHAPES[shape]}
        row, column = np.argwhere(inked(marked))[0]
        turns = colorsys.rgb_to_hsv(*(marked[:, row, column] / 255))[0]
        # the background level shows through and pulls a little
        assert abs((turns - hue / 6 + 0.5) % 1 - 0.5) < 0.08
        assert np.abs(marked.astype(int) - clean).max() <= 1  # the background, 0.1, lies between two bytes


# A factor's other value, and the first digits of what its 60 images hash to: the records are of these.
CHANGES = {
    "task": ("match", "65335474fc0d"),
    "noise": (0.5, "2709df7f64e6"),
    "background": (0.4, "d9aa05b36d82"),
    "contrast": (0.3, "7f94edc38985"),
    "blur": (1.0, ""),  # sums of floats: see its test
    "saturation": (0.0, "e72cd8d085bd"),
    "hue_shift": (1 / 3, "209e20667906"),
    "clutter": (3, "6e13b3618352"),
    "cue": (0.2, "0fca7632e70a"),
    "jitter": (0, "98ea3acb193e"),
    "scale": (4 / 3, "a31012dc6d30"),
    "rendering": ("dotted", "0254dc0ba07a"),
    "decoy": (0.6, "2cda39a97e9c"),
    "texture": (1.0, "e602e9ab9ddd"),
    "pointer": (1, "4fff05dab121"),
    "offset": (4, "0597ac384e5e"),
}


def drawn_with(size=60, **changes):
    return generate("test", size, 0, replace(CLEAN, **changes))


@pytest.mark.parametrize("factor", CHANGES)
def test_a_factor_changes_the_picture_and_no_choice(factor):
    plain, changed = drawn_with(), drawn_with(**{factor: CHANGES[factor][0]})
    assert hashlib.sha256(changed.images.tobytes()).hexdigest().startswith(CHANGES[factor][1])
    assert not np.array_equal(plain.images, changed.images)
    for name in CHOICES:
        assert np.array_equal(getattr(plain, name), getattr(changed, name))
    # these come after the cells have been drawn, or lie elsewhere
    if factor in ("noise", "contrast", "blur", "decoy", "offset"):
        assert np.array_equal(plain.clean, changed.clean)


def test_noise_is_added_with_its_standard_deviation():
    empty = {"background": 0.4, "cue": 0.0, "clutter": 3}
    plain = drawn_with(**empty).images.astype(float) / 255
    little, twice = (drawn_with(noise=level, **empty).images / 255 - plain for level in (0.04, 0.08))
    untouched = plain == 0.4
    assert little[untouched].std() == pytest.approx(0.04, rel=0.02) and abs(little[untouched].mean()) < 0.001
    assert np.abs(twice - 2 * little)[untouched].max() < 2 / 255, "the same noise, only stronger"


@pytest.mark.parametrize("twin", [None, *TWINS])
@pytest.mark.parametrize("offset", [1, 7])
def test_an_offset_moves_all_cells(twin, offset):
    plain, moved = (generate("test", 20, 1, replace(CLEAN, offset=some), twin) for some in (0, offset))
    assert np.array_equal(np.roll(plain.images, (offset, offset), (2, 3)), moved.images)
    assert np.array_equal(plain.shape, moved.shape)


def test_contrast_scales_around_mid_grey():
    plain, flat = drawn_with().images / 255, drawn_with(contrast=0.3).images / 255
    assert np.abs(flat - (0.5 + 0.3 * (plain - 0.5))).max() <= 1 / 255


def test_blur_is_a_gaussian_with_repeated_edges():
    plain, blurred = drawn_with(2).images.astype(float), drawn_with(2, blur=1.0).images
    kernel = np.array([np.exp(-0.5 * offset**2) for offset in range(-3, 4)])
    kernel /= kernel.sum()
    for row, column in [(0, 0), (0, 17), (9, 31), (31, 31), (16, 16), (5, 24)]:
        expected = sum(
            kernel[i + 3] * kernel[j + 3] * plain[:, :, min(max(row + i, 0), 31), min(max(column + j, 0), 31)]
            for i in range(-3, 4)
            for j in range(-3, 4)
        )
        assert np.abs(blurred[:, :, row, column] - expected).max() <= 1


@pytest.mark.parametrize("scale, size", [(0.5, 3), (1.0, 6), (4 / 3, 8)])
def test_scale_sizes_the_bitmap(scale, size):
    drawn = drawn_with(jitter=0, scale=scale)
    for clean, shape in zip(drawn.clean, drawn.shape):
        expected = np.zeros((8, 8), dtype=bool)
        for row in range(size):
            for column in range(size):
                expected[(8 - size) // 2 + row, (8 - size) // 2 + column] = BITMAPS[SHAPES[shape]][
                    row * 6 // size, column * 6 // size
                ]
        expected[[0, 0, -1, -1], [0, -1, 0, -1]] = False
        assert np.array_equal(inked(clean), expected)


@pytest.mark.parametrize("level", [0.3, 0.9])
def test_a_decoy_is_three_dots_on_another_cell(level):
    """Never on the marked cell, never with the lower right dot, and nothing else is touched."""
    plain, changed = drawn_with(300), drawn_with(300, decoy=level)
    away = []
    for before, after, cell in zip(plain.images, changed.images, plain.cell):
        before, after = cells_of(before), cells_of(after)
        different = [place for place in range(16) if not np.array_equal(before[place], after[place])]
        assert len(different) == 1 and different != [cell]
        expected = before[different[0]].copy()
        for row, column in ((0, 0), (0, 7), (7, 0)):
            expected[:, row, column] = round(255 * (0.1 + level * 0.9))
        assert np.array_equal(after[different[0]], expected)
        away.append((different[0] - cell) % 16)
    counts = np.bincount(away, minlength=16)
    assert (
        counts[0] == 0 and counts[1:].min() >= 6 and counts[1:].max() <= 40
    )  # each other one about 20 times
