"""Disagreement, ensembles, calibration and intervals, against loops and closed forms."""

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap

from atlib.analysis import (
    disagreement,
    ensemble_accuracy,
    ensemble_gain,
    expected_calibration_error,
    paired_bootstrap,
)


def probabilities(n=60, classes=4):
    return (2 * torch.randn(n, classes)).softmax(1)


def test_disagreement_is_the_share_of_other_classes():
    a = torch.tensor([[2.0, 1, 0], [0, 3, 1], [5, 4, 6], [1, 0, 0]])
    b = torch.tensor([[9.0, 1, 0], [0, 3, 4], [5, 7, 6], [1, 0, 0]])
    assert disagreement(a, b) == 0.5 and disagreement(a, a) == 0
    assert disagreement(a.softmax(1), b) == 0.5, "probabilities are as good as logits"


def test_the_ensemble_adds_probabilities_not_votes():
    # image 0: a is surely right, b barely wrong; image 1: the other way round; image 2: both wrong; image 3:
    # both right
    p_a = torch.tensor([[0.9, 0.1], [0.45, 0.55], [0.2, 0.8], [0.3, 0.7]])
    p_b = torch.tensor([[0.4, 0.6], [0.95, 0.05], [0.4, 0.6], [0.1, 0.9]])
    labels = torch.tensor([0, 0, 0, 1])
    assert ensemble_accuracy(p_a, p_b, labels) == 0.75
    assert ensemble_gain(p_a, p_b, labels) == (0.75, 0.5, 0.25)
    assert ensemble_gain(p_a, p_a, labels) == (0.5, 0.5, 0)
    gain = ensemble_gain(p_a, 1 - p_a, torch.tensor([0, 1, 1, 1])).gain
    assert gain < 0, "the better one may be better alone"


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


def test_calibration_in_closed_form():
    p = torch.tensor([[0.8, 0.2]]).repeat(10, 1)
    labels, zeros = torch.tensor([0] * 8 + [1] * 2), torch.zeros(10, dtype=torch.long)
    assert expected_calibration_error(p, labels) == pytest.approx(0, abs=1e-7)
    assert expected_calibration_error(p, zeros) == pytest.approx(0.2, rel=1e-6), "one class is enough here"
    assert expected_calibration_error(torch.eye(2)[labels], 1 - labels) == 1
    mixed = torch.cat([p, 1 - p]), torch.cat([zeros, zeros])  # right at 0.8 and wrong at 0.8: 0.5 on average
    assert expected_calibration_error(*mixed) == pytest.approx(0.3, rel=1e-6)
    # + 0.2 and - 0.6: they cancel only within a bin
    sharper = torch.tensor([[0.8, 0.2], [0.6, 0.4]]), torch.tensor([0, 1])
    assert expected_calibration_error(*sharper, bins=2) == pytest.approx(0.2, rel=1e-6)
    assert expected_calibration_error(*sharper, bins=15) == pytest.approx(0.4, rel=1e-6)


def test_the_paired_bootstrap_equals_scipys():
    correct_a = torch.rand(400) < 0.8
    correct_b = torch.where(torch.rand(400) < 0.7, correct_a, torch.rand(400) < 0.6)
    interval = paired_bootstrap(correct_a, correct_b, samples=20_000, level=0.9)
    expected = bootstrap(
        (correct_a.double().numpy(), correct_b.double().numpy()),
        lambda a, b, axis: a.mean(axis) - b.mean(axis),
        paired=True,
        n_resamples=20_000,
        confidence_level=0.9,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(1),
    )
    assert interval.mean == pytest.approx((correct_a.sum() - correct_b.sum()).item() / 400)
    assert (interval.low, interval.high) == pytest.approx(tuple(expected.confidence_interval), abs=0.003)
    assert interval.low < interval.mean < interval.high


def test_the_paired_bootstrap_of_several_runs_equals_resampled_images():
    """Images are drawn, with the answers of all three runs of both models."""
    first, second = (torch.rand(3, 40, generator=torch.Generator().manual_seed(i)) < 0.6 for i in (0, 1))
    found = paired_bootstrap(first, second, samples=20_000)
    of_images = (first.double() - second.double()).mean(0).numpy()
    drawn = np.random.default_rng(5).integers(40, size=(20_000, 40))
    assert found.mean == pytest.approx(of_images.mean())
    assert (found.low, found.high) == pytest.approx(
        np.quantile(of_images[drawn].mean(1), [0.025, 0.975]), abs=0.01
    )


def test_the_paired_bootstrap_in_closed_form():
    correct = torch.arange(10_000) % 2 == 0
    other = correct.clone()
    other[:1000] = ~other[:1000]  # 500 gained, 500 lost: variance of a difference 0.1
    interval = paired_bootstrap(correct, other, samples=20_000)
    half = 1.96 * (0.1 / 10_000) ** 0.5
    assert interval == pytest.approx((0, -half, half), rel=0.05)
    assert paired_bootstrap(correct, correct) == (0, 0, 0), "what both get right or wrong is no uncertainty"
    again = paired_bootstrap(correct, other, samples=20_000)
    assert interval == again != paired_bootstrap(correct, other, samples=20_000, seed=1)
    wide, narrow = paired_bootstrap(correct, other, level=0.99), paired_bootstrap(correct, other, level=0.5)
    assert wide.low < narrow.low < narrow.high < wide.high


P, LABELS = probabilities(6), torch.tensor([0, 1, 2, 3, 0, 1])
NOT_A_NUMBER = P.clone().index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(torch.nan))
RIGHT = torch.tensor([True, False, True])


@pytest.mark.parametrize(
    "compute, arguments, named",
    [
        (disagreement, (P, NOT_A_NUMBER), "logits_b .*NaN .* 4"),
        (disagreement, (P, P[:5]), r"\(6, 4\) and \(5, 4\)"),
        (disagreement, (P[:0], P[:0]), r"logits_a .*\(0, 4\)"),
        (ensemble_accuracy, (NOT_A_NUMBER, P, LABELS), "p_a .*NaN .* 4"),
        (ensemble_accuracy, (P, 2 * P, LABELS), r"p_b .*row 0.*softmax"),
        (ensemble_accuracy, (P, P, LABELS + 1), "4.*0 to 3"),
        (ensemble_gain, (P, P.log(), LABELS), r"p_b .*row 0.*softmax"),
        (ensemble_gain, (P, P, torch.full((6,), 2)), "6 .*class 2"),
        (expected_calibration_error, (P + torch.tensor([1.0, -1, 0, 0]), LABELS), "^p .*softmax"),
        (expected_calibration_error, (P, LABELS.float()), r"\(6,\).*torch.float32"),
        (expected_calibration_error, (P, LABELS, 0), "bins=0"),
        (paired_bootstrap, (RIGHT, RIGHT[:2]), "correct_a .*3.*correct_b .*2"),
        (paired_bootstrap, (RIGHT[:1], RIGHT[:1]), "^1 images"),
        (paired_bootstrap, (RIGHT, torch.tensor([0.3, 1, 0])), "correct_b"),
        (paired_bootstrap, (RIGHT, torch.tensor([torch.nan, 1, 0])), "correct_b"),
        (paired_bootstrap, (RIGHT, torch.ones(3, 2)), "correct_b"),
        (paired_bootstrap, (RIGHT, RIGHT, 0, 2000, 95), "level=95"),
        (paired_bootstrap, (RIGHT, RIGHT, 0, 0), "samples=0"),
    ],
)
def test_bad_input(compute, arguments, named):
    with pytest.raises(ValueError, match=named):
        compute(*arguments)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_probabilities_of_a_model_in_half_precision(kind):
    logits, labels = torch.randn(50, 10), torch.arange(50) % 10
    p = [(factor * logits).softmax(-1) for factor in (1, 2)]
    in_half = ensemble_accuracy(*(probabilities.to(kind) for probabilities in p), labels)
    assert in_half == pytest.approx(ensemble_accuracy(*p, labels), abs=0.05)
