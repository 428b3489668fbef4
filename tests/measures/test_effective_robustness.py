"""The line on logit axes against SciPy's regression, and accuracy above it."""

import numpy as np
import pytest
from scipy.stats import linregress

from atfamily.measures.robustness import effective_robustness, fit_line

POOL = np.array([0.55, 0.62, 0.7, 0.74, 0.81, 0.86, 0.9])


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def logit(p):
    return np.log(p / (1 - p))


def on_the_line(accuracy, slope=1.2, intercept=-0.8):
    return sigmoid(slope * logit(np.asarray(accuracy)) + intercept)


def noisy(seed=0):
    return sigmoid(logit(on_the_line(POOL)) + np.random.default_rng(seed).normal(0, 0.1, len(POOL)))


def test_effective_robustness_is_the_distance_from_the_line():
    on_it = on_the_line(0.8).item()
    robustness = effective_robustness(0.8, on_it + 0.05, POOL, on_the_line(POOL))
    assert (robustness.value, robustness.expected) == pytest.approx((0.05, on_it), rel=1e-9)
    # Every sample of a perfect pool has the same line.
    assert (robustness.low, robustness.high) == pytest.approx((0.05, 0.05), rel=1e-6)
    below, fitted = effective_robustness(0.8, 0.1, POOL, noisy()), linregress(logit(POOL), logit(noisy()))
    expected = sigmoid(fitted.intercept + fitted.slope * logit(0.8))
    assert below.value == pytest.approx(0.1 - expected, rel=1e-9) and below.value < 0


def test_the_interval_equals_a_loop_over_samples():
    def found_with(level, seed=0):
        return effective_robustness(0.8, 0.6, POOL, noisy(), samples=4000, level=level, seed=seed)

    interval, wider = found_with(0.8), found_with(0.99)
    generator, values, x, y = np.random.default_rng(7), [], logit(POOL), logit(noisy())
    for _ in range(4000):
        drawn = generator.integers(len(POOL), size=len(POOL))
        if len(set(drawn)) > 1:
            slope, intercept = np.polyfit(x[drawn], y[drawn], 1)
            values.append(0.6 - sigmoid(intercept + slope * logit(0.8)))
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(values, [0.1, 0.9])), abs=0.002)
    assert interval.low < interval.value < interval.high
    assert interval == found_with(0.8) != found_with(0.8, seed=1)
    assert wider.low < interval.low and interval.high < wider.high
    three = effective_robustness(0.8, 0.6, POOL[::3], noisy()[::3])
    assert all(np.isfinite(three[:4])), "samples of one model have no line, and are left out"


def test_clip_is_half_an_image():
    pool = [0.0, *POOL[:3], 1.0]
    with pytest.raises(ValueError):
        fit_line(pool, pool)
    clipped = [0.005, *POOL[:3], 0.995]
    expected = fit_line(clipped, clipped[::-1])
    assert fit_line(pool, pool[::-1], clip=0.005) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError):
        effective_robustness(1.0, 0.5, POOL, noisy())
    # Only the line needs logits: a model may fail on every shifted image.
    assert effective_robustness(0.8, 0.0, POOL, noisy()).value < 0
