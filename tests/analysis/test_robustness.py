"""The line on logit axes against SciPy's regression, and accuracy above it."""

import numpy as np
import pytest
import torch
from scipy.stats import linregress

from atlib.analysis import AccuracyLine, effective_robustness, fit_line

POOL = np.array([0.55, 0.62, 0.7, 0.74, 0.81, 0.86, 0.9])


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def logit(p):
    return np.log(p / (1 - p))


def on_the_line(accuracy, slope=1.2, intercept=-0.8):
    return sigmoid(slope * logit(np.asarray(accuracy)) + intercept)


def noisy(seed=0):
    return sigmoid(logit(on_the_line(POOL)) + np.random.default_rng(seed).normal(0, 0.1, len(POOL)))


def test_a_line_is_found_again():
    line = fit_line(POOL, on_the_line(POOL))
    assert line == pytest.approx((1.2, -0.8), rel=1e-10)
    assert line.expected(0.77) == pytest.approx(on_the_line(0.77).item(), rel=1e-10)
    assert AccuracyLine(1, 0).expected(0.3) == pytest.approx(0.3) and AccuracyLine(0, 0).expected(
        0.9
    ) == pytest.approx(0.5)


def test_the_fit_equals_scipys():
    expected = linregress(logit(POOL), logit(noisy()))
    for kind in (np.array, list, torch.tensor):
        assert fit_line(kind(POOL), kind(noisy())) == pytest.approx(
            (expected.slope, expected.intercept), rel=1e-10
        )


def test_effective_robustness_is_the_distance_from_the_line():
    found = effective_robustness(0.8, on_the_line(0.8).item() + 0.05, POOL, on_the_line(POOL))
    assert found.value == pytest.approx(0.05, rel=1e-9) and found.expected == pytest.approx(
        on_the_line(0.8).item(), rel=1e-9
    )
    assert (found.low, found.high) == pytest.approx((0.05, 0.05), rel=1e-6), (
        "every sample of a perfect pool has the same line"
    )
    below = effective_robustness(0.8, 0.1, POOL, noisy())
    fitted = linregress(logit(POOL), logit(noisy()))
    assert (
        below.value == pytest.approx(0.1 - sigmoid(fitted.intercept + fitted.slope * logit(0.8)), rel=1e-9)
        and below.value < 0
    )


def test_the_interval_equals_a_loop_over_samples():
    found = effective_robustness(0.8, 0.6, POOL, noisy(), samples=4000, level=0.8)
    generator, values = np.random.default_rng(7), []
    for _ in range(4000):
        drawn = generator.integers(len(POOL), size=len(POOL))
        if len(set(drawn)) > 1:
            line = linregress(logit(POOL[drawn]), logit(noisy()[drawn]))
            values.append(0.6 - sigmoid(line.intercept + line.slope * logit(0.8)))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(values, [0.1, 0.9])), abs=0.002)
    assert found.low < found.value < found.high
    again = effective_robustness(0.8, 0.6, POOL, noisy(), samples=4000, level=0.8)
    assert found == again != effective_robustness(0.8, 0.6, POOL, noisy(), samples=4000, level=0.8, seed=1)
    wider = effective_robustness(0.8, 0.6, POOL, noisy(), samples=4000, level=0.99)
    assert wider.low < found.low and found.high < wider.high


def test_a_pool_of_three_has_samples_without_a_line():
    found = effective_robustness(0.8, 0.6, POOL[::3], noisy()[::3])
    assert all(np.isfinite(found[:4]))


def test_clip_is_half_an_image():
    pool = [0.0, *POOL[:3], 1.0]
    with pytest.raises(ValueError, match="accuracy is exactly 0, whose logit is infinite.*clip=0.5 / number"):
        fit_line(pool, pool)
    clipped = [0.005, *POOL[:3], 0.995]
    assert fit_line(pool, pool[::-1], clip=0.005) == pytest.approx(
        fit_line(clipped, clipped[::-1]), rel=1e-12
    )
    with pytest.raises(ValueError, match="clip=0.5"):
        fit_line(pool, pool, clip=0.5)
    with pytest.raises(ValueError, match="in_distribution is exactly 1"):
        effective_robustness(1.0, 0.5, POOL, noisy())
    assert effective_robustness(0.8, 0.0, POOL, noisy()).value < 0, (
        "only the line needs logits: a model may fail on every shifted image"
    )


def test_bad_input():
    for wrong in (71.2, -0.1, float("nan")):
        for arguments in (
            (wrong, 0.5, POOL, noisy()),
            (0.5, wrong, POOL, noisy()),
            (0.5, 0.5, [*POOL[1:], wrong], noisy()),
            (0.5, 0.5, POOL, [*POOL[1:], wrong]),
        ):
            with pytest.raises(ValueError, match=f"{wrong} is not between 0 and 1: divide percent by 100"):
                effective_robustness(*arguments)
    with pytest.raises(
        ValueError, match="2 in-distribution and 2 shifted accuracies: one pair a model, and at least 3"
    ):
        effective_robustness(0.5, 0.5, POOL[:2], POOL[:2])
    with pytest.raises(ValueError, match="7 in-distribution and 6 shifted"):
        fit_line(POOL, POOL[1:])
    with pytest.raises(ValueError, match="all 4 models of the pool have the in-distribution accuracy 0.7"):
        effective_robustness(0.5, 0.5, [0.7] * 4, POOL[:4])
    with pytest.raises(ValueError, match="at least 2 models"):
        fit_line([], [])
    with pytest.raises(ValueError, match="give one number a model"):
        fit_line(POOL[None], POOL[None])
    with pytest.raises(ValueError, match="level=95"):
        effective_robustness(0.5, 0.5, POOL, POOL, level=95)
