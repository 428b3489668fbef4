"""The built-in world: the same images everywhere, splits apart, one factor at a time, true labels."""

import colorsys
import hashlib
from dataclasses import replace

import numpy as np
import pytest

from atbook.worlds.glyphs import SHAPES, World, generate

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
