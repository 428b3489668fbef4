"""Is a model robust, or only good? Effective robustness: accuracy under a shift beyond what accuracy without
it predicts. Source: Taori et al. 2020, "Measuring Robustness to Natural Distribution Shifts in Image
Classification" (arXiv 2007.00644)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit


class AccuracyLine(NamedTuple):
    """A line on logit axes: logit(shifted accuracy) = intercept + slope · logit(in-distribution accuracy)."""

    slope: float
    intercept: float

    def expected(self, in_distribution: float, clip: float | None = None) -> float:
        """The accuracy under the shift, from 0 to 1, of a model with this in-distribution accuracy; `clip` as
        in `fit_line`."""
        (x,) = _logits([in_distribution], clip)
        return expit(self.intercept + self.slope * x).item()


class EffectiveRobustness(NamedTuple):
    """`value`: accuracy under the shift less the `expected` one; `low`, `high`: its interval; `line`: what
    expects."""

    value: float
    low: float
    high: float
    expected: float
    line: AccuracyLine


def fit_line(
    in_distribution: Sequence[float], shifted: Sequence[float], clip: float | None = None
) -> AccuracyLine:
    """The least-squares line through a pool of models, one pair of accuracies each, on logit axes. The logit
    of 0 or 1 is infinite: such accuracies are refused, unless `clip` moves all to [clip, 1 - clip]; half an
    image, 0.5 / number of test images, is the usual choice."""
    x, y = _logits(in_distribution, clip), _logits(shifted, clip)
    if len(x) != len(y):  # a single one would be broadcast
        raise ValueError(f"accuracies of {len(x)} models in distribution, of {len(y)} under the shift")
    return AccuracyLine(*(number.item() for number in _least_squares(x, y)))


def effective_robustness(
    in_distribution: float,
    shifted: float,
    pool_in_distribution: Sequence[float],
    pool_shifted: Sequence[float],
    *,
    seed: int = 0,
    samples: int = 2000,
    level: float = 0.95,
    clip: float | None = None,
) -> EffectiveRobustness:
    """A model's accuracy under a shift above what the pool's line expects of its in-distribution accuracy;
    accuracies from 0 to 1.

    The model does not belong in the pool. The interval is the percentile interval over resampled models of
    the pool. Samples of a single in-distribution accuracy have no line and are left out. `clip` as in
    `fit_line`. Source: Taori et al. 2020, section 2.
    """
    x, y = _logits(pool_in_distribution, clip), _logits(pool_shifted, clip)
    own_x = _logits([in_distribution], clip)
    shifted = _accuracies([shifted]).item()
    line = fit_line(pool_in_distribution, pool_shifted, clip)
    drawn = np.random.default_rng(seed).integers(len(x), size=(samples, len(x)))
    drawn = drawn[np.ptp(x[drawn], axis=1) > 0]
    slopes, intercepts = _least_squares(x[drawn], y[drawn])
    expected = line.expected(in_distribution, clip)
    low, high = np.quantile(shifted - expit(intercepts + slopes * own_x), [(1 - level) / 2, (1 + level) / 2])
    return EffectiveRobustness(shifted - expected, low.item(), high.item(), expected, line)


def _least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slope and intercept over the last axis, (..., m) each: many samples of a pool at once."""
    mean_x, mean_y = x.mean(-1, keepdims=True), y.mean(-1, keepdims=True)
    slope = ((x - mean_x) * (y - mean_y)).sum(-1) / ((x - mean_x) ** 2).sum(-1)
    return slope, mean_y[..., 0] - slope * mean_x[..., 0]


def _logits(accuracies: Sequence[float], clip: float | None) -> np.ndarray:
    values = _accuracies(accuracies)
    if clip is not None:
        return logit(values.clip(clip, 1 - clip))
    if ((values == 0) | (values == 1)).any():
        raise ValueError("the logit of an accuracy of 0 or 1 is infinite: leave it out, or clip=")
    return logit(values)


def _accuracies(accuracies: Sequence[float]) -> np.ndarray:
    values = np.asarray(accuracies, dtype=np.float64)
    for value in values[~((values >= 0) & (values <= 1))]:  # NaN among them
        raise ValueError(f"accuracy {value:.6g} is not between 0 and 1: divide percent by 100")
    return values
