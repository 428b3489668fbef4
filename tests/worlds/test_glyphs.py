"""The built-in world: the same images everywhere, splits apart, one factor at a time, and labels that are in
the picture."""

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
    return [
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        for row in range(4)
        for column in range(4)
    ]


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
    """numpy may change its random streams in a new version (NEP 19). The records in results/ then come from
    other images, and this says so."""
    images = generate("train", 64, 0).images
    assert images.dtype == np.uint8 and images.shape == (64, 3, 32, 32)
    assert (
        hashlib.sha256(images.tobytes()).hexdigest()
        == "2ea0aae6f2f445e19b7410d82eb5bd84613c8ca7c78ded85d81082f630483c38"
    )


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


CHANGES = dict(
    task="match",
    noise=0.5,
    background=0.4,
    contrast=0.3,
    blur=1.0,
    saturation=0.0,
    hue_shift=1 / 3,
    clutter=3,
    cue=0.2,
    jitter=0,
    scale=4 / 3,
    rendering="dotted",
    decoy=0.6,
    texture=1.0,
    pointer=1,
    offset=4,
)


def drawn_with(size=60, **changes):
    return generate("test", size, 0, replace(CLEAN, **changes))


@pytest.mark.parametrize("factor", CHANGES)
def test_a_factor_changes_the_picture_and_no_choice(factor):
    plain, changed = drawn_with(), drawn_with(**{factor: CHANGES[factor]})
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


def test_background_and_cue_change_their_pixels_only():
    plain, brighter, dimmer = drawn_with(), drawn_with(background=0.4), drawn_with(cue=0.2)
    for index, cell in enumerate(plain.cell):
        for place, (a, b, c) in enumerate(
            zip(*(cells_of(drawn.images[index]) for drawn in (plain, brighter, dimmer)))
        ):
            ink = inked(a)
            assert np.array_equal(a[:, ink], b[:, ink])
            away = ~ink
            away[[0, 0, -1, -1], [0, -1, 0, -1]] = False
            assert (b[:, away] == round(0.4 * 255)).all()
            a, c = a.copy(), c.copy()
            if place == cell:
                assert (corners(c) == round(255 * (0.1 + 0.2 * 0.9))).all()
                c[:, [0, 0, -1, -1], [0, -1, 0, -1]] = corners(a)
            assert np.array_equal(a, c)
    assert (corners(drawn_with(cue=0.0).clean[0]) == BACKGROUND).all()


@pytest.mark.parametrize("twin", [None, *TWINS])
@pytest.mark.parametrize("offset", [1, 7])
def test_an_offset_moves_all_cells(twin, offset):
    plain, moved = (generate("test", 20, 1, replace(CLEAN, offset=some), twin) for some in (0, offset))
    assert np.array_equal(np.roll(plain.images, (offset, offset), (2, 3)), moved.images)
    assert np.array_equal(plain.shape, moved.shape)


def test_an_offset_leaves_the_noise_where_it_is():
    empty = {"background": 0.5, "cue": 0.0, "clutter": 0}
    plain, moved = (drawn_with(offset=some, **empty).images for some in (0, 4))
    noise = [drawn_with(offset=some, noise=0.05, **empty).images.astype(int) for some in (0, 4)]
    ground = (plain == 128) & (moved == 128)
    assert ground.mean() > 0.8 and np.array_equal(noise[0][ground], noise[1][ground])


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


def test_clutter_counts_the_distractors():
    filled = {}
    for clutter in (0, 1, 7, 15):
        drawn = drawn_with(clutter=clutter)
        filled[clutter] = [
            {place for place, cell in enumerate(cells_of(image)) if inked(cell).any()}
            for image in drawn.images
        ]
        assert all(len(places) == clutter + 1 for places in filled[clutter])
        assert all(cell in places for cell, places in zip(drawn.cell, filled[clutter]))
        for image, full, places in zip(drawn.images, drawn_with().images, filled[clutter]):
            assert all(
                np.array_equal(a, b)
                for place, (a, b) in enumerate(zip(cells_of(image), cells_of(full)))
                if place in places
            )
    assert all(few <= many for few, many in zip(filled[1], filled[7]))


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
    """Never on the marked cell, never with the lower right dot, and nothing else in the picture is
    touched."""
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
    assert counts[0] == 0 and counts[1:].min() >= 6 and counts[1:].max() <= 40, (
        "each of the 15 others, about 20 times"
    )


def striped(direction):
    """The pixels that stripes of a direction leave, the long way."""
    number = {
        "across": lambda row, column: row,
        "down": lambda row, column: column,
        "falling": lambda row, column: (row - column) // 2,
        "rising": lambda row, column: (row + column) // 2,
    }[direction]
    return np.array([[number(row, column) % 2 == 0 for column in range(8)] for row in range(8)])


DIRECTIONS = ("across", "down", "falling", "rising")


def test_texture_cuts_stripes_into_the_glyph():
    """What is left has the colours it had, lies where the glyph lay, and is the glyph through one of four
    gratings, all of which occur."""
    plain, half, cut = drawn_with(200), drawn_with(200, texture=0.5), drawn_with(200, texture=1.0)
    seen = []
    for index in range(200):
        for a, b, c in zip(*(cells_of(drawn.images[index]) for drawn in (plain, half, cut))):
            kept = inked(c)
            assert (kept <= inked(a)).all() and np.array_equal(a[:, kept], c[:, kept])
            fits = [
                direction for direction in DIRECTIONS if np.array_equal(kept, inked(a) & striped(direction))
            ]
            assert fits
            seen += fits if len(fits) == 1 else []
            middle = (a.astype(float) + c) / 2
            assert np.abs(b - middle).max() <= 1, "half the depth"
    shares = [seen.count(direction) / len(seen) for direction in DIRECTIONS]
    assert all(0.2 < share < 0.3 for share in shares)
