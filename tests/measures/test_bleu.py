"""BLEU against a count by hand, and against another library's where that is installed."""

import math

import pytest

from atfamily.measures.bleu import bleu

SAID = "the cat sat on the the mat".split()
MEANT = "the cat sat on the mat and slept".split()


def test_by_hand():
    """Of seven words all are there but one "the"; of six pairs all but "the the"; of five triples and of four
    quadruples all but the two across that pair. They are seven words for eight: a penalty of exp(1 - 8/7)."""
    expected = math.exp(1 - 8 / 7) * (6 / 7 * 5 / 6 * 3 / 5 * 2 / 4) ** (1 / 4)
    assert bleu([SAID], [MEANT]) == pytest.approx(expected, abs=1e-15)
