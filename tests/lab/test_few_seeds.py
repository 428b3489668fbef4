"""What a few seeds say of what more of them say: counted by hand."""

import numpy as np
import pytest
from scipy import stats

from atbook.lab.few_seeds import gaps, stories, stories_of
from atbook.lab.verdicts import DOES_NOT_HOLD, HOLDS
from atbook.records import pack_bits
from tests.toy import recorded


def one_image(*differences):
    """One number a seed, so that the rule is the t test."""
    return np.array(differences, dtype=float)[:, None]


def test_verdicts_by_hand():
    """Four seeds gain 10, 11, 12, 30: t = 3.30, p = 0.046; 10 11 12 have t = 19, others p > 0.09."""
    told = stories(one_image(10, 11, 12, 30))
    assert told.verdict == HOLDS and told.whole.mean == 15.75
    assert (told.choices, told.other_sign, told.missed, told.invented) == (4, 0.0, 0.75, 0.0)
    assert stories(-one_image(10, 11, 12, 30)).verdict == DOES_NOT_HOLD


@pytest.mark.parametrize("few", [2, 4])
def test_against_scipy(few):
    rng = np.random.default_rng(few)
    differences = rng.normal(0.8, 1.0, (7, 1))
    told = stories(differences, few)
    whole = stats.ttest_1samp(differences[:, 0], 0)
    assert told.whole.p == pytest.approx(whole.pvalue)
    chosen = [row for row in np.ndindex(*[7] * few) if list(row) == sorted(set(row))]
    parts = [stats.ttest_1samp(differences[list(row), 0], 0) for row in chosen]
    sure = np.mean([part.pvalue < 0.05 for part in parts])
    assert told.choices == len(chosen)
    assert (1 - told.missed if whole.pvalue < 0.05 else told.invented) == pytest.approx(sure)


def test_methods_are_compared_within_the_seeds_that_both_have(tmp_path):
    right = {"copy": (90, 80, 70, 99), "scratch": (50, 60, 75)}
    for method, counts in right.items():
        for seed, count in enumerate(counts):
            results = {"test_right": pack_bits(np.arange(100) < count)}
            recorded(tmp_path, "transfer", "find", method, seed, results)
    told = stories_of("find", "copy", "scratch", few=2, results=tmp_path)
    assert told.whole.of_seeds == pytest.approx((0.4, 0.2, -0.05))
    assert (told.choices, told.other_sign) == (3, 0.0)


def test_gaps_by_hand():
    """Of 0, 1, 2, 10 in groups of two: 0 1 against 2 10, 0 2 against 1 10, 0 10 against 1 2."""
    assert gaps([10, 1, 0, 2], few=2).tolist() == [3.5, 4.5, 5.5]
    assert len(gaps(range(7), few=3)) == 7 * 20 // 2, "whoever is left out, 20 / 2 ways to part the others"
    with pytest.raises(ValueError, match="two groups of 3 need 6 runs, got 5"):
        gaps(range(5))
