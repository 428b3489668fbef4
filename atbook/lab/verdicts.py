"""The rule by which the book's claims are judged; it was fixed before the runs of the two worlds' tables.

Every claim compares two methods within seeds, image by image. It is uncertain because of its seeds and of
its test images, which all seeds share: a t test with one degree of freedom less than there are seeds.

The twelve primary claims are judged together: the chance that any of their verdicts is wrong is at most 5 %
(Holm 1979). All others are secondary and have a q value (Benjamini and Hochberg 1995): of the verdicts with q
below 0.05, about 5 % at most are wrong. Where neither decides, it is said whether all seeds lie on one side,
and else whether the interval is narrow, so that a difference would be small.

The rule was changed twice. On 24 November 2026, before the records of a real teacher, it lost Satterthwaite's
degrees of freedom, with which simulated families of 16 true null claims had a wrong verdict in 25 % of all
cases, where 5 % were asked for. On 28 November 2026, before the records of `controls` and of jigsaws, the
primary claims were named. Until then Holm's procedure went over all 116 claims of the chapters and asked
a t above 10.7 of five seeds, so that every new study raised the bar for the old claims; of 60 claims that
were "too small to tell", 23 had every seed on one side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import optimize, special, stats

from atbook.lab.searches import did_not_learn
from atbook.records import read_records, unpack_bits
from atlib._util import require_known
from atrun.record import Record

VERDICTS = (
    "holds",
    "does not hold",
    "in all seeds",
    "in no seed",
    "too small to tell",
    "cannot be seen",
    "not recorded",
)
HOLDS, DOES_NOT_HOLD, IN_ALL, IN_NONE, TOO_SMALL, UNSEEN, NOT_RECORDED = VERDICTS
FEWEST_SEEDS = 3
LEVEL = 0.05  # of any wrong verdict among the primary claims, and of q among the secondary ones
NARROW = 0.05  # half of a 95 % interval of "too small to tell"; of "cannot be seen" it is wider


Metric = Callable[[Record], float]


def on_test(figure: str) -> Metric:
    """A figure that was measured on test images as a whole, such as "ap" or "iou", of a record."""
    return partial(_on_test, f"test_{figure}")


def _on_test(name: str, record: Record) -> float:
    require_known("figure", name, record.results)
    return record.results[name]


@dataclass(frozen=True)
class Side:
    """What one side of a comparison measured. study: of its records. methods: their mean, such as of three
    scratch students a seed. metric: record -> one number; None: the accuracy on the test images, image by
    image."""

    study: str
    methods: tuple[str, ...]
    metric: Metric | None = None

    def values(self, records: Sequence[Record]) -> dict[int, np.ndarray]:
        """{seed: (images,)}, or (1,) of a single number, for the seeds in which all methods are among the
        study's records."""
        of_seed: dict[int, dict[str, np.ndarray]] = {}
        for record in records:
            if record.method not in self.methods:
                continue
            if self.metric is not None:
                value = np.array([self.metric(record)])
            elif "test_right" in record.results:
                value = unpack_bits(record.results["test_right"])
            else:  # recorded before 22 November 2026, under the faults that the results page lists
                continue
            of_seed.setdefault(record.seed, {})[record.method] = value.astype(float)
        return {
            seed: np.mean([values[method] for method in self.methods], 0)
            for seed, values in of_seed.items()
            if values.keys() == {*self.methods}
        }


@dataclass(frozen=True)
class Claim:
    """A sentence that a reader could ask about, which is that `higher` is above `lower`, but for a `margin`:
    with 0.01 it is that it is not more than one point below.

    Fields are those of `claims.toml`, which says what each of them is.
    """

    id: str
    chapter: str
    sentence: str
    higher: Side
    lower: Side
    scales: tuple[str, ...]
    paper: str = ""
    margin: float = 0.0
    factor: float = 100
    exploratory: tuple[str, ...] = ()
    primary: tuple[str, ...] = ()


class Estimate(NamedTuple):
    """A mean, such as of a difference within seeds, with an interval."""

    mean: float
    #: Where the interval begins and ends.
    low: float
    high: float
    #: Two-sided, of the mean being -margin.
    p: float
    #: That it is a mean of.
    seeds: int
    images: int
    #: The mean of each seed: what the interval hides where seeds end in two ways.
    of_seeds: tuple[float, ...] = ()
    #: Of an accuracy: how many trials its search had, if none left guessing.
    unlearned: int = 0


class Judged(NamedTuple):
    """A claim at one scale."""

    claim: Claim
    scale: str
    #: What was measured. Its interval is the 95 % one; of a primary claim that of the level at which Holm's
    #: procedure has judged it. None with fewer than `FEWEST_SEEDS` seeds.
    estimate: Estimate | None
    #: One of `VERDICTS`.
    verdict: str
    #: Holm's p of a primary claim, q of a secondary one.
    adjusted: float = 1.0

    @property
    def primary(self) -> bool:
        """Whether it is one of the twelve."""
        return self.scale in self.claim.primary

    @property
    def seeds_for(self) -> int:
        """In how many seeds the difference is on the claim's side."""
        return sum(value > -self.claim.margin for value in self.estimate.of_seeds)

    @property
    def words(self) -> str:
        """The verdict as a sentence says it: "cannot be seen with 5 seeds"."""
        return f"{UNSEEN} with {self.estimate.seeds} seeds" if self.verdict == UNSEEN else self.verdict


def estimate(differences: np.ndarray, margin: float = 0.0, level: float = LEVEL) -> Estimate:
    """The mean of differences (seeds, images), and how uncertain it is for other seeds and other images: an
    interval that misses the true mean with probability `level`.

    Two-way analysis of variance with random seeds and random images, each seed seeing the same images: the
    variance of the mean is (MS of seeds + MS of images - MS of what is left) / (S n). Interval and p are
    Student's with S - 1 degrees of freedom, however many images there are: images say nothing about how
    seeds spread. With one number a seed it is the t test. Raises `ValueError` for fewer than two seeds.
    """
    S, n = differences.shape
    mean, error = _mean_and_error(differences)
    of_seeds = tuple(differences.mean(1).tolist())
    if error == 0:
        return Estimate(mean, mean, mean, float(mean + margin == 0), S, n, of_seeds)
    reach = stats.t.ppf(1 - level / 2, S - 1) * error
    p = 2 * stats.t.sf(abs(mean + margin) / error, S - 1)
    return Estimate(mean, float(mean - reach), float(mean + reach), float(p), S, n, of_seeds)


def proportion(values: np.ndarray) -> Estimate:
    """The mean of proportions or of right and wrong answers (seeds, images), with a 95 % interval that stays
    between 0 and 1: that of `estimate` on the scale of logits, where the standard error is divided by
    mean · (1 - mean). p, of the mean being 0, has no use here and is nan."""
    S, n = values.shape
    mean, error = _mean_and_error(values)
    spread, of_seeds = mean * (1 - mean), tuple(values.mean(1).tolist())
    if error == 0 or spread <= 0:
        return Estimate(mean, mean, mean, np.nan, S, n, of_seeds)
    reach = stats.t.ppf(1 - LEVEL / 2, S - 1) * error / spread
    low, high = special.expit(special.logit(mean) + np.array([-reach, reach]))
    return Estimate(mean, float(low), float(high), np.nan, S, n, of_seeds)


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """The mean of values (seeds, images), and its standard error for other seeds and other images."""
    S, n = values.shape
    if S < 2:
        raise ValueError(f"{S} seed says nothing about its spread: at least 2 are needed")
    mean, of_seeds, of_images = values.mean(), values.mean(1), values.mean(0)
    seeds, images, rest = n * of_seeds.var(ddof=1), 0.0, 0.0  # mean squares
    if n > 1:
        left = values - of_seeds[:, None] - of_images + mean
        images, rest = S * of_images.var(ddof=1), (left**2).sum() / ((S - 1) * (n - 1))
    # not below what one source alone gives, where the estimate of the other is negative by chance
    total = max(seeds + images - rest, seeds, images)
    return float(mean), float(np.sqrt(total / (S * n)))


class Share(NamedTuple):
    """How much of one difference another is, with its 95 % interval; its ends are infinite where the whole is
    not told from nothing."""

    value: float
    low: float
    high: float


def share_of(part: np.ndarray, whole: np.ndarray) -> Share:
    """What share of the differences `whole` (seeds, images) the differences `part` are, such as of Copy's
    gain what a student keeps that sees a blank image.

    The interval holds every share s for which part - s · whole could be nothing by the rule of `estimate`
    (Fieller 1954, "Some problems in interval estimation"), so that the uncertainty of the whole counts too.
    """
    value = part.mean() / whole.mean()

    def told_from(s: float) -> float:
        """Above 0: the rule tells the part from that share."""
        difference = estimate(part - s * whole)
        return max(difference.low, -difference.high)

    def end(direction: int) -> float:
        reach = 1.0
        while told_from(value + direction * reach) < 0:
            reach *= 2
            if reach > 1e6:
                return direction * np.inf
        return optimize.brentq(lambda by: told_from(value + direction * by), 0, reach) * direction + value

    return Share(float(value), float(end(-1)), float(end(1)))


def accuracies(
    study: str,
    scale: str,
    of: Mapping[str, tuple[str, ...]] = {},
    results: Path | None = None,
    figure: str | None = None,
) -> dict[str, Estimate]:
    """{method: test accuracy} of a study's methods of which at least two seeds are recorded image by image.

    of: the methods that a name is the mean of, where it is not that method alone. results: the folder of the
    records, by default the book's. figure: of the test images, such as "ap" or "iou", in place of accuracy,
    of the methods that have it.
    """
    records = read_records(study, scale, results=results)
    records = [record for record in records if figure is None or f"test_{figure}" in record.results]
    unlearned = did_not_learn(study, scale, results) if figure is None else {}
    estimates = {}
    for method in dict.fromkeys(record.method for record in records):
        values = Side(study, of.get(method, (method,)), figure and on_test(figure)).values(records)
        if len(values) > 1:
            accuracy = proportion(np.stack([values[seed] for seed in sorted(values)]))
            estimates[method] = accuracy._replace(unlearned=unlearned.get(method, 0))
    return estimates


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted for being asked together, in the order given (Holm 1979): the smallest times their
    number, the next times one less, and none below the one before."""
    adjusted, floor = [0.0] * len(p), 0.0
    for rank, index in enumerate(np.argsort(p, kind="stable")):
        floor = max(floor, min(1.0, p[index] * (len(p) - rank)))
        adjusted[index] = floor
    return adjusted


def judge(claims: Sequence[Claim], results: Path | None = None) -> list[Judged]:
    """What the records say of every claim at each of its scales, of all claims that are judged together.

    A claim holds, or does not, by its sign where its adjusted p is below `LEVEL`: Holm's among the primary
    claims, those not recorded among them, Benjamini and Hochberg's q among the secondary ones. results: the
    folder of the records, by default the book's.
    """
    asked = [(claim, scale) for claim in claims for scale in claim.scales]
    studies = {(side.study, scale) for claim, scale in asked for side in (claim.higher, claim.lower)}
    records = {which: read_records(*which, results=results) for which in studies}
    measured = [_differences(claim, scale, records) for claim, scale in asked]
    p = [1.0 if d is None else estimate(d, claim.margin).p for d, (claim, _) in zip(measured, asked)]
    primary = [index for index, (claim, scale) in enumerate(asked) if scale in claim.primary]
    first = [p[index] for index in primary]
    second = [i for i, differences in enumerate(measured) if differences is not None and i not in primary]
    adjusted = dict(zip(primary, holm(first)))
    adjusted |= zip(second, map(float, stats.false_discovery_control([p[index] for index in second])))
    level = dict(zip(primary, levels(first)))
    judged = []
    for index, ((claim, scale), differences) in enumerate(zip(asked, measured)):
        if differences is None:
            judged.append(Judged(claim, scale, None, NOT_RECORDED))
            continue
        shown = estimate(differences, claim.margin, level.get(index, LEVEL))
        verdict = _verdict(estimate(differences, claim.margin), claim.margin, adjusted[index])
        judged.append(Judged(claim, scale, shown, verdict, adjusted[index]))
    return judged


def _verdict(plain: Estimate, margin: float, adjusted: float) -> str:
    """By an adjusted p, else by the seeds, else by the 95 % interval `plain`."""
    if adjusted < LEVEL:
        return HOLDS if plain.mean > -margin else DOES_NOT_HOLD
    if min(plain.of_seeds) > -margin:
        return IN_ALL
    if max(plain.of_seeds) < -margin:
        return IN_NONE
    return TOO_SMALL if plain.high - plain.mean <= NARROW else UNSEEN


def levels(p: Sequence[float]) -> list[float]:
    """The level at which Holm's procedure judges each of these p values: `LEVEL` divided by their number for
    the smallest, by one less for the next, and so on, up to the first that is not below its level; all larger
    ones share that one's."""
    by_size, divisor, judged = np.argsort(p, kind="stable"), len(p), [0.0] * len(p)
    for index in by_size:
        judged[index] = LEVEL / divisor
        divisor -= p[index] < LEVEL / divisor
    return judged


def _differences(claim: Claim, scale: str, records: Mapping) -> np.ndarray | None:
    """Of a claim's two sides within seeds: (seeds, images); None with fewer than `FEWEST_SEEDS` seeds."""
    higher, lower = (side.values(records[side.study, scale]) for side in (claim.higher, claim.lower))
    shared = sorted(higher.keys() & lower.keys())
    return np.stack([higher[seed] - lower[seed] for seed in shared]) if len(shared) >= FEWEST_SEEDS else None
