"""Disagreement, ensembles, calibration and intervals, against loops and closed forms."""

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap

from atlib.analysis import (
    disagreement,
    disagreement_matrix,
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


def test_disagreement_matrix_is_every_pair():
    models = {name: probabilities() for name in ("copy", "distill", "scratch")}
    found = disagreement_matrix(models)
    for i, a in enumerate(models.values()):
        for j, b in enumerate(models.values()):
            assert found[i, j].item() == pytest.approx(
                sum(
                    max(range(4), key=list(p).__getitem__) != max(range(4), key=list(q).__getitem__)
                    for p, q in zip(a.tolist(), b.tolist())
                )
                / 60
            )
    assert torch.equal(found, found.T) and found[0, 1] > 0.3


def test_the_ensemble_adds_probabilities_not_votes():
    # image 0: a is surely right, b barely wrong; image 1: the other way round; image 2: both wrong; image 3:
    # both right
    p_a = torch.tensor([[0.9, 0.1], [0.45, 0.55], [0.2, 0.8], [0.3, 0.7]])
    p_b = torch.tensor([[0.4, 0.6], [0.95, 0.05], [0.4, 0.6], [0.1, 0.9]])
    labels = torch.tensor([0, 0, 0, 1])
    assert ensemble_accuracy(p_a, p_b, labels) == 0.75
    assert ensemble_gain(p_a, p_b, labels) == (0.75, 0.5, 0.25)
    assert ensemble_gain(p_a, p_a, labels) == (0.5, 0.5, 0)
    worse = 1 - p_a
    assert ensemble_gain(p_a, worse, torch.tensor([0, 1, 1, 1])).gain < 0, (
        "the better one may be better alone"
    )


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
    labels = torch.tensor([0] * 8 + [1] * 2)
    assert expected_calibration_error(p, labels) == pytest.approx(0, abs=1e-7)
    assert expected_calibration_error(p, torch.zeros(10, dtype=torch.long)) == pytest.approx(0.2, rel=1e-6), (
        "one class is enough here"
    )
    assert expected_calibration_error(torch.eye(2)[labels], 1 - labels) == 1
    mixed = (
        torch.cat([p, 1 - p]),
        torch.cat([torch.zeros(10, dtype=torch.long)] * 2),
    )  # right at 0.8 and wrong at 0.8: 0.5 on average
    assert expected_calibration_error(*mixed) == pytest.approx(0.3, rel=1e-6)
    sharper = (
        torch.tensor([[0.8, 0.2], [0.6, 0.4]]),
        torch.tensor([0, 1]),
    )  # + 0.2 and - 0.6: they cancel only within a bin
    assert expected_calibration_error(*sharper, bins=2) == pytest.approx(0.2, rel=1e-6)
    assert expected_calibration_error(*sharper, bins=15) == pytest.approx(0.4, rel=1e-6)


def test_the_paired_bootstrap_equals_scipys():
    correct_a = torch.rand(400) < 0.8
    correct_b = torch.where(torch.rand(400) < 0.7, correct_a, torch.rand(400) < 0.6)
    found = paired_bootstrap(correct_a, correct_b, samples=20_000, level=0.9)
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
    assert found.mean == pytest.approx((correct_a.sum() - correct_b.sum()).item() / 400)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval), abs=0.003)
    assert found.low < found.mean < found.high


def test_the_paired_bootstrap_in_closed_form():
    correct = torch.arange(10_000) % 2 == 0
    other = correct.clone()
    other[:1000] = ~other[:1000]  # 500 gained, 500 lost: variance of a difference 0.1
    found = paired_bootstrap(correct, other, samples=20_000)
    assert found.mean == 0
    assert (found.low, found.high) == pytest.approx(
        (-1.96 * (0.1 / 10_000) ** 0.5, 1.96 * (0.1 / 10_000) ** 0.5), rel=0.05
    )
    assert paired_bootstrap(correct, correct) == (0, 0, 0), (
        "what both get right or wrong is no uncertainty of the difference"
    )
    assert (
        paired_bootstrap(correct, other)
        == paired_bootstrap(correct, other)
        != paired_bootstrap(correct, other, seed=1)
    )
    wide, narrow = paired_bootstrap(correct, other, level=0.99), paired_bootstrap(correct, other, level=0.5)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_bad_input():
    p, labels = probabilities(6), torch.tensor([0, 1, 2, 3, 0, 1])
    spoilt = p.clone()
    spoilt[4, 1] = torch.nan
    with pytest.raises(ValueError, match="logits_b is NaN for image 4"):
        disagreement(p, spoilt)
    with pytest.raises(ValueError, match="p_a is NaN for image 4"):
        ensemble_accuracy(spoilt, p, labels)
    with pytest.raises(ValueError, match="same images and classes.*'logits_b': \\(5, 4\\)"):
        disagreement(p, p[:5])
    with pytest.raises(ValueError, match="both at least 1, got \\(0, 4\\)"):
        disagreement(p[:0], p[:0])
    with pytest.raises(ValueError, match="no predictions"):
        disagreement_matrix({})
    for compute in (lambda: ensemble_gain(p, p.log(), labels), lambda: ensemble_accuracy(p, 2 * p, labels)):
        with pytest.raises(ValueError, match=r"p_b holds no probabilities: row 0.*\.softmax\(-1\)"):
            compute()
    with pytest.raises(ValueError, match=r"p holds no probabilities.*\.softmax\(-1\)"):
        expected_calibration_error(p + torch.tensor([1.0, -1, 0, 0]), labels)
    with pytest.raises(ValueError, match="label 4 is out of range: the model knows 4 classes"):
        ensemble_accuracy(p, p, labels + 1)
    with pytest.raises(ValueError, match=r"labels are \(6,\) integers.*torch.float32"):
        expected_calibration_error(p, labels.float())
    with pytest.raises(ValueError, match="all 6 labels are class 2"):
        ensemble_gain(p, p, torch.full((6,), 2))
    with pytest.raises(ValueError, match="bins=0"):
        expected_calibration_error(p, labels, bins=0)


def test_bad_input_of_the_bootstrap():
    correct = torch.tensor([True, False, True])
    with pytest.raises(ValueError, match="correct_a has 3 images, correct_b 2"):
        paired_bootstrap(correct, correct[:2])
    with pytest.raises(ValueError, match="1 images cannot be resampled"):
        paired_bootstrap(correct[:1], correct[:1])
    for wrong in (torch.tensor([0.3, 1, 0]), torch.tensor([torch.nan, 1, 0]), torch.ones(3, 2)):
        with pytest.raises(ValueError, match="correct_b says for each image whether it was right"):
            paired_bootstrap(correct, wrong)
    with pytest.raises(ValueError, match="level=95"):
        paired_bootstrap(correct, correct, level=95)
    with pytest.raises(ValueError, match="samples=0"):
        paired_bootstrap(correct, correct, samples=0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_probabilities_of_a_model_in_half_precision(kind):
    logits, labels = torch.randn(50, 10), torch.arange(50) % 10
    p = [(factor * logits).softmax(-1) for factor in (1, 2)]
    assert ensemble_accuracy(*(each.to(kind) for each in p), labels) == pytest.approx(
        ensemble_accuracy(*p, labels), abs=0.05
    )
