"""Do two models make the same mistakes? Disagreement, ensembles, calibration, intervals of differences."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atfamily.measures.checks import check_labels, check_probabilities, check_scores


class Interval(NamedTuple):
    """A mean and the ends of its interval."""

    mean: float
    low: float
    high: float


def disagreement(logits_a: Tensor, logits_b: Tensor) -> float:
    """Share of images whose most likely class differs; logits or probabilities of the same images, (n,
    classes) each."""
    check_scores(logits_a, "logits_a")
    check_scores(logits_b, "logits_b")
    _require_same_images(logits_a, logits_b)
    return (logits_a.argmax(1).cpu() != logits_b.argmax(1).cpu()).double().mean().item()


def _require_same_images(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:  # one row would be broadcast
        raise ValueError(f"predictions of other images or classes: {tuple(a.shape)}, {tuple(b.shape)}")


def ensemble_logits(logits: Sequence[Tensor]) -> Tensor:
    """The logarithm of the mean of several models' class probabilities, (n, classes) for logits (n, classes)
    each: an ensemble's logits, in float64. Source: arXiv 2411.09702, section on ensembles."""
    for index, one in enumerate(logits):
        check_scores(one, f"logits[{index}]")
    log_p = torch.stack([one.double().log_softmax(1) for one in logits])
    return log_p.logsumexp(0) - math.log(len(logits))


def ensemble_accuracy(p_a: Tensor, p_b: Tensor, labels: Tensor) -> float:
    """Accuracy of the mean of two models' class probabilities, (p_a + p_b) / 2; p: (n, classes), labels: (n,)
    integers. Source: arXiv 2411.09702, section on ensembles."""
    check_probabilities(p_a, "p_a")
    check_probabilities(p_b, "p_b")
    _require_same_images(p_a, p_b)
    check_labels(labels, *p_a.shape)
    return ((p_a.double() + p_b.double()).argmax(1).cpu() == labels.cpu()).double().mean().item()


def expected_calibration_error(p: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Mean distance between confidence and accuracy: Σ over bins of the share of images times `abs(accuracy -
    mean confidence)`, 0 to 1.

    p: probabilities (n, classes); labels: (n,) integers, of one class too. Bins of equal width on the largest
    probability, each with its upper end. Source: Guo et al. 2017 (arXiv 1706.04599), equation 3.
    """
    check_probabilities(p, "p")
    check_labels(labels, *p.shape)
    confidence, guess = p.double().max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=p.device)[1:-1]
    surplus = (guess == labels.to(p.device)).double() - confidence
    of_bins = surplus.new_zeros(bins).index_add_(0, torch.bucketize(confidence, edges), surplus)
    return (of_bins.abs().sum() / len(p)).item()


def paired_bootstrap(
    correct_a: Tensor, correct_b: Tensor, seed: int = 0, samples: int = 2000, level: float = 0.95
) -> Interval:
    """The difference of two models' accuracies on the same images, a less b, and its percentile interval over
    resampled images.

    correct: (n,) whether each image was classified rightly, true or false; of several runs of each model
    (runs, n), whose mean accuracies are compared. It says how far other images could move the difference, not
    other training seeds. Source: Efron and Tibshirani 1993, chapter 13.
    """
    a, b = _truths(correct_a, "correct_a"), _truths(correct_b, "correct_b")
    if a.shape != b.shape:
        raise ValueError(f"correct_a has {a.shape}, correct_b {b.shape}: they must be of the same images")
    runs, n = a.shape
    difference = a.sum(0) - b.sum(0)
    # Few values are possible, so drawing n images is drawing how many there are of each.
    values = np.arange(-runs, runs + 1)
    shares = np.array([(difference == value).mean() for value in values])
    counts = np.random.default_rng(seed).multinomial(n, shares, size=samples)
    means = counts @ values / (n * runs)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(difference.mean().item() / runs, low.item(), high.item())


def _truths(correct: Tensor, name: str) -> np.ndarray:
    values = torch.atleast_2d(torch.as_tensor(correct).cpu().double())
    if values.ndim != 2 or not ((values == 0) | (values == 1)).all():
        raise ValueError(f"{name} says of each image whether it was right, (n,) of true and false")
    return values.numpy()
