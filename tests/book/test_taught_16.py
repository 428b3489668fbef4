"""What notebook 16 writes out, a dial, the line of effective robustness and adversarial filtration, is what
atlib computes, on other inputs."""

import numpy as np
import pytest
import torch

from atlib.analysis import effective_robustness, fit_line
from atlib.analysis.subsets import adversarially_filtered
from atlib.data import Images, shifts
from tests.book.test_taught import taught

NAME = "16-out-of-distribution"


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
    found = taught(NAME).shift_by_hand(factor, hardest, severity, 7)
    expected = shifts.shifted(shift, severity, size=7)
    for ours, theirs in zip(found, expected, strict=True):
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


def test_filtered_by_hand():
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8)
    images = Images(pixels, torch.randint(0, 5, (40,)), "abcde")
    reference = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 5))
    kept = taught(NAME).filtered_by_hand(reference(images.take(range(40))[0]), images.targets)
    assert 0 < len(kept) < 40
    assert torch.equal(images.pixels[kept], adversarially_filtered(images, reference).images.pixels)
