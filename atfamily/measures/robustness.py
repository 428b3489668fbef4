"""Is a model robust, or only good? Effective robustness: accuracy under a shift beyond what accuracy without
it predicts. Source: Taori et al. 2020, "Measuring Robustness to Natural Distribution Shifts in Image
Classification" (arXiv 2007.00644)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit

from atfamily.measures.predictions import check_sampling


class AccuracyLine(NamedTuple):
    """A line on logit axes: logit(shifted accuracy) = intercept + slope · logit(in-distribution accuracy)."""

    slope: float
    intercept: float

    def expected(self, in_distribution: float, clip: float | None = None) -> float:
        """The accuracy under the shift, from 0 to 1, of a model with this in-distribution accuracy; `clip` as
        in `fit_line`."""
        (x,) = _logits("in_distribution", [in_distribution], clip)
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
    x, y = _pool(in_distribution, shifted, clip, 2)
    slope, intercept = _least_squares(x, y)
    return AccuracyLine(slope.item(), intercept.item())


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
    the pool: how far another pool could move the line. It leaves out the chance in the model's own two
    accuracies. Samples that drew a single in-distribution accuracy have no line and are left out. `clip` as
    in `fit_line`. Source: Taori et al. 2020, section 2.
    """
    check_sampling(samples, level)
    x, y = _pool(pool_in_distribution, pool_shifted, clip, 3)
    own_x = _logits("in_distribution", [in_distribution], clip)
    shifted = _accuracies("shifted", [shifted]).item()
    line = AccuracyLine(*(number.item() for number in _least_squares(x, y)))
    drawn = np.random.default_rng(seed).integers(len(x), size=(samples, len(x)))
    drawn = drawn[np.ptp(x[drawn], axis=1) > 0]
    if len(drawn) == 0:
        raise ValueError(f"no sample of {samples} had two in-distribution accuracies: take more")
    slopes, intercepts = _least_squares(x[drawn], y[drawn])
    expected = line.expected(in_distribution, clip)
    low, high = np.quantile(shifted - expit(intercepts + slopes * own_x), [(1 - level) / 2, (1 + level) / 2])
    return EffectiveRobustness(shifted - expected, low.item(), high.item(), expected, line)


def _least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slope and intercept over the last axis, (..., m) each: many samples of a pool at once."""
    mean_x, mean_y = x.mean(-1, keepdims=True), y.mean(-1, keepdims=True)
    slope = ((x - mean_x) * (y - mean_y)).sum(-1) / ((x - mean_x) ** 2).sum(-1)
    return slope, mean_y[..., 0] - slope * mean_x[..., 0]


def _pool(
    in_distribution: Sequence[float], shifted: Sequence[float], clip: float | None, least: int
) -> tuple[np.ndarray, np.ndarray]:
    x = _logits("the pool's in-distribution accuracy", in_distribution, clip)
    y = _logits("the pool's shifted accuracy", shifted, clip)
    if len(x) != len(y) or len(x) < least:
        raise ValueError(f"the pool has {len(x)} and {len(y)} accuracies: one pair a model, at least {least}")
    if np.ptp(x) == 0:
        raise ValueError(f"all {len(x)} models have the accuracy {expit(x[0]):.6g}: no line")
    return x, y


def _logits(name: str, accuracies: Sequence[float], clip: float | None) -> np.ndarray:
    values = _accuracies(name, accuracies)
    if clip is not None:
        if not 0 < clip < 0.5:
            raise ValueError(f"clip={clip}: a number between 0 and 0.5, such as 0.5 / number of test images")
        return logit(values.clip(clip, 1 - clip))
    for value in values[(values == 0) | (values == 1)]:
        raise ValueError(f"{name} is {value:.0f}, whose logit is infinite: leave it out, or clip=")
    return logit(values)


def _accuracies(name: str, accuracies: Sequence[float]) -> np.ndarray:
    values = np.asarray(accuracies, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"{name} has shape {values.shape}: give one number a model")
    for value in values[~((values >= 0) & (values <= 1))]:  # NaN among them
        raise ValueError(f"{name} {value:.6g} is not between 0 and 1: divide percent by 100")
    return values
