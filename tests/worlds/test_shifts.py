"""Shifts of the built-in world: where a dial begins, which scenes are shown, what the hardest is."""

import numpy as np
import pytest

from atbook.worlds.glyphs import Glyphs, World, generate
from atbook.worlds.shifts import SHIFTS, shifted

SIZE = 60


def same_glyphs(left: Glyphs, right: Glyphs) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", SHIFTS)
def test_severity_0_is_the_distribution_of_training(name):
    split = "resample" if name == "harder resample" else "test"
    assert same_glyphs(shifted(name, 0, size=SIZE, seed=1), generate(split, SIZE, 1))


@pytest.mark.parametrize("name", [name for name in SHIFTS if name != "harder resample"])
def test_the_same_scenes_under_every_severity(name):
    plain = generate("test", SIZE, 3)
    for severity in (1, 5):
        drawn = shifted(name, severity, size=SIZE, seed=3)
        for part in ("shape", "hue", "cell"):
            assert np.array_equal(getattr(drawn, part), getattr(plain, part))
        if name != "rendering":  # an inverted glyph is its own scene's opposite; that test is below
            both = drawn.images / 255, plain.images / 255
            flat = [(x - x.mean((1, 2, 3), keepdims=True)).reshape(SIZE, -1) for x in both]
            # a shifted image is most like its own scene
            assert ((flat[0] @ flat[1].T).argmax(1) == np.arange(SIZE)).mean() > 0.9


def test_rendering_is_a_share_of_the_images():
    size = 1000
    worlds = (World(rendering=name) for name in ("filled", "inverted", "dotted"))
    plain, inverted, dotted = (generate("test", size, 0, world).images for world in worlds)

    def which(severity):
        drawn = shifted("rendering", severity, size=size)
        ways = (plain, inverted, dotted)
        return np.stack([[np.array_equal(a, b) for a, b in zip(drawn.images, way)] for way in ways])

    before = np.zeros(size, dtype=bool)
    for severity in (1, 3, 5):
        ways = which(severity)
        assert (ways.sum(0) == 1).all(), "each image is drawn in one of the three ways"
        share = severity / 5
        for share_drawn, expected in zip(ways.mean(1), (1 - share, share / 2, share / 2)):
            assert abs(share_drawn - expected) <= 4 * (expected * (1 - expected) / size) ** 0.5
        changed = ~ways[0]
        assert (before <= changed).all(), "what was changed at a lower severity is changed at a higher one"
        before = changed
    assert before.all()


def stands_out(clean):
    """How far the pixels of a cell are from the background, the mean over them."""
    return np.abs(clean / 255 - 0.1).mean()


def test_the_harder_resample_is_the_faintest_tenth_of_every_shape_of_a_new_draw():
    size = 80
    hardest, drawn = shifted("harder resample", 5, size=size, seed=1), generate("resample", 10 * size, 1)
    chosen = {image.tobytes() for image in hardest.images}
    kept = [index for index, image in enumerate(drawn.images) if image.tobytes() in chosen]
    # the draw's own order
    assert len(kept) == size and same_glyphs(hardest, Glyphs(*(part[kept] for part in drawn)))
    faint = [stands_out(clean) for clean in drawn.clean]
    for shape in range(8):
        same = [index for index in range(10 * size) if drawn.shape[index] == shape]
        taken, left = ([index for index in same if (index in kept) == wanted] for wanted in (True, False))
        # a tenth of this shape, so that the classes stay as they were
        assert abs(len(taken) - len(same) / 10) <= 1
        assert max(faint[index] for index in taken) <= min(faint[index] for index in left) + 1e-9
    assert not chosen & {image.tobytes() for image in generate("test", 200, 1).images}
