"""Ensembles, calibration, intervals and BLEU, against loops, closed forms and a count by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap

from atfamily.measures.bleu import bleu
from atfamily.measures.predictions import ensemble_accuracy, expected_calibration_error, paired_bootstrap


def probabilities(n=60, classes=4):
    return (2 * torch.randn(n, classes)).softmax(1)


def test_the_ensemble_adds_probabilities_not_votes():
    # image 0: a surely right, b barely wrong; image 1: the other way round; 2: both wrong; 3: both right
    p_a = torch.tensor([[0.9, 0.1], [0.45, 0.55], [0.2, 0.8], [0.3, 0.7]])
    p_b = torch.tensor([[0.4, 0.6], [0.95, 0.05], [0.4, 0.6], [0.1, 0.9]])
    labels = torch.tensor([0, 0, 0, 1])
    assert ensemble_accuracy(p_a, p_b, labels) == 0.75
    assert ensemble_accuracy(p_a, p_a, labels) == 0.5


def test_calibration_equals_the_longhand():
    p, labels = probabilities(300), torch.randint(0, 4, (300,))
    p[0] = torch.tensor([0.6, 0.4, 0, 0])  # 9 / 15: the upper end of a bin
    expected = 0.0
    for bin in range(15):
        inside = [i for i in range(300) if bin / 15 < p[i].double().max().item() <= (bin + 1) / 15]
        if inside:
            accuracy = np.mean([int(p[i].argmax()) == int(labels[i]) for i in inside])
            confidence = np.mean([p[i].max().item() for i in inside])
            expected += len(inside) / 300 * abs(accuracy - confidence)
    assert expected_calibration_error(p, labels) == pytest.approx(expected, rel=1e-6)


def test_the_paired_bootstrap_equals_scipys():
    correct_a = torch.rand(400) < 0.8
    correct_b = torch.where(torch.rand(400) < 0.7, correct_a, torch.rand(400) < 0.6)
    interval = paired_bootstrap(correct_a, correct_b, samples=20_000, level=0.9)
    both = correct_a.double().numpy(), correct_b.double().numpy()
    options = {"paired": True, "n_resamples": 20_000, "confidence_level": 0.9, "method": "percentile"}
    expected = bootstrap(both, lambda a, b, axis: a.mean(axis) - b.mean(axis), rng=1, **options)
    assert interval.mean == pytest.approx((correct_a.sum() - correct_b.sum()).item() / 400)
    assert (interval.low, interval.high) == pytest.approx(tuple(expected.confidence_interval), abs=0.003)
    assert interval.low < interval.mean < interval.high


SAID = "the cat sat on the the mat".split()
MEANT = "the cat sat on the mat and slept".split()


def test_bleu_by_hand():
    """Of seven words all are there but one "the"; of six pairs all but "the the"; of five triples and of four
    quadruples all but the two across that pair. They are seven words for eight: a penalty of exp(1 - 8/7)."""
    expected = math.exp(1 - 8 / 7) * (6 / 7 * 5 / 6 * 3 / 5 * 2 / 4) ** (1 / 4)
    assert bleu([SAID], [MEANT]) == pytest.approx(expected, abs=1e-15)
