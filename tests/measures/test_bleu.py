"""BLEU against a count by hand, and against another library's where that is installed."""

import math

import numpy as np
import pytest

from atfamily.measures.bleu import bleu

SAID = "the cat sat on the the mat".split()
MEANT = "the cat sat on the mat and slept".split()


def test_by_hand():
    """Of seven words all are there but one "the"; of six pairs all but "the the"; of five triples and of four
    quadruples all but the two across that pair. They are seven words for eight: a penalty of exp(1 - 8/7)."""
    expected = math.exp(1 - 8 / 7) * (6 / 7 * 5 / 6 * 3 / 5 * 2 / 4) ** (1 / 4)
    assert bleu([SAID], [MEANT]) == pytest.approx(expected, abs=1e-15)


def test_with_another_library():
    metric = pytest.importorskip("torchmetrics.functional.text")
    rng = np.random.default_rng(0)
    meant = [rng.integers(6, size=rng.integers(4, 12)).tolist() for _ in range(30)]
    said = [[word if rng.random() < 0.8 else 7 for word in words[: rng.integers(3, 12)]] for words in meant]
    text = [[" ".join(map(str, words)) for words in sentences] for sentences in (said, meant)]
    expected = metric.bleu_score(text[0], [[one] for one in text[1]]).item()
    assert 0.2 < expected < 0.9 and bleu(said, meant) == pytest.approx(expected, abs=1e-6)
