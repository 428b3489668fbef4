"""What chapter 9 writes out, a dial and the line of effective robustness, is what atlib computes, on other
inputs."""

import numpy as np
import pytest

from atbook.worlds import shifts
from atbook.worlds.glyphs import World, generate
from atfamily.measures.robustness import effective_robustness, fit_line
from tests.book.test_taught import taught

NAME = "09-when-the-images-change"


@pytest.mark.parametrize(
    "shift, factor, hardest, severity",
    [
        ("noise", "noise", 0.6, 5),
        ("clutter", "clutter", 0, 2),
        ("position", "jitter", 3, 2.5),
        ("contrast", "contrast", 0.3, 1),
        ("hue", "hue_shift", 1 / 12, 4),
        ("blur", "blur", 0.8, 0),
    ],
)
def test_shift_by_hand(shift, factor, hardest, severity):
    drawn = taught(NAME).shift_by_hand(factor, hardest, severity, 7)
    expected = shifts.shifted(shift, severity, size=7)
    for ours, theirs in zip(drawn, expected, strict=True):
        assert np.array_equal(ours, theirs)


def test_shift_by_hand_in_match():
    drawn = taught(NAME).shift_by_hand("noise", 0.6, 2.5, 7, "match")
    expected = generate("test", 7, world=World(task="match", noise=0.4))
    for ours, theirs in zip(drawn, expected, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_line_and_what_lies_above_it(seed):
    draw = np.random.default_rng(seed)
    pool, shifted = draw.uniform(0.2, 0.95, 9), draw.uniform(0.1, 0.9, 9)
    slope, intercept = taught(NAME).line_by_hand(pool.tolist(), shifted.tolist())
    line = fit_line(pool, shifted)
    assert (slope, intercept) == pytest.approx((line.slope, line.intercept), abs=1e-12)
    expected = effective_robustness(0.8, 0.6, pool, shifted, samples=20).value
    assert taught(NAME).above_the_line(0.8, 0.6, slope, intercept) == pytest.approx(expected, abs=1e-12)
