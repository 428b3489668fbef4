"""The rule by which the book's claims are judged; it was fixed before the runs of the two worlds' tables.

Every claim compares two methods within seeds, image by image. It is uncertain because of its seeds and of
its test images, which all seeds share; claims of one chapter are judged together (Holm 1979), and there are
three verdicts, one of which says that the experiment was too small.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from atbook.records import read_records, unpack_bits
from atlib._util import require_known
from atlib.train.record import Record

VERDICTS = ("holds", "does not hold", "too small to tell", "not recorded")
HOLDS, DOES_NOT_HOLD, TOO_SMALL, NOT_RECORDED = VERDICTS
FEWEST_SEEDS = 3
LEVEL = 0.05  # of a chapter's wrong verdicts


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
        of_seed: dict[int, list[np.ndarray]] = {}
        for record in records:
            if record.method not in self.methods:
                continue
            if self.metric is not None:
                value = np.array([self.metric(record)])
            elif "test_right" in record.results:
                value = unpack_bits(record.results["test_right"])
            else:  # recorded before 22 November 2026, under the faults that the results page lists
                continue
            of_seed.setdefault(record.seed, []).append(value.astype(float))
        number = len(self.methods)
        return {seed: np.mean(values, 0) for seed, values in of_seed.items() if len(values) == number}


@dataclass(frozen=True)
class Claim:
    """A sentence that a reader could ask about, which is that `higher` is above `lower`, but for a `margin`:
    with 0.01 it is that it is not more than one point below.

    chapter: the number of its notebook. scales: where it is asked. paper: its figures and whose they are, ""
    for a question of this book. factor: what differences are shown in, 100 for points of accuracy.
    """

    chapter: str
    sentence: str
    higher: Side
    lower: Side
    scales: tuple[str, ...]
    paper: str = ""
    margin: float = 0.0
    factor: float = 100


class Estimate(NamedTuple):
    """A mean, such as of a difference within seeds, with its 95 % interval. p: two-sided, of the mean being
    -margin; seeds, images: that it is a mean of."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    images: int


class Judged(NamedTuple):
    """A claim at one scale: what was measured (None with fewer than `FEWEST_SEEDS` seeds), and one of
    `VERDICTS`."""

    claim: Claim
    scale: str
    estimate: Estimate | None
    verdict: str


def estimate(differences: np.ndarray, margin: float = 0.0) -> Estimate:
    """The mean of differences (seeds, images), and how uncertain it is for other seeds and other images.

    Two-way analysis of variance with random seeds and random images, each seed seeing the same images: the
    variance of the mean is (MS of seeds + MS of images - MS of what is left) / (S n), with Satterthwaite's
    degrees of freedom; interval and p are Student's. With one number a seed it is the t test. A bootstrap
    over both (Owen 2007, "The pigeonhole bootstrap") agrees, but counts what is left three times, so that
    with few seeds it finds too little. Raises `ValueError` for fewer than two seeds.
    """
    S, n = differences.shape
    if S < 2:
        raise ValueError(f"{S} seed says nothing about its spread: at least 2 are needed")
    mean, of_seeds, of_images = differences.mean(), differences.mean(1), differences.mean(0)
    left = differences - of_seeds[:, None] - of_images + mean
    squares = np.array([n * of_seeds.var() * S / (S - 1), 0.0, 0.0])
    freedom = np.array([S - 1, max(n - 1, 1), max((S - 1) * (n - 1), 1)])
    if n > 1:
        squares[1:] = S * of_images.var() * n / (n - 1), (left**2).sum() / freedom[2]
    # not below what one source alone gives, where the estimate of the other is negative by chance
    total = max(squares @ (1, 1, -1), *squares[:2])
    if total == 0:
        sure = float(mean + margin == 0)
        return Estimate(float(mean), float(mean), float(mean), sure, S, n)
    error, degrees = np.sqrt(total / (S * n)), total**2 / (squares**2 / freedom).sum()
    reach = stats.t.ppf(0.975, degrees) * error
    p = 2 * stats.t.sf(abs(mean + margin) / error, degrees)
    return Estimate(float(mean), float(mean - reach), float(mean + reach), float(p), S, n)


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
        found = estimate(part - s * whole)
        return max(found.low, -found.high)

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
    estimates = {}
    for method in dict.fromkeys(record.method for record in records):
        values = Side(study, of.get(method, (method,)), figure and on_test(figure)).values(records)
        if len(values) > 1:
            estimates[method] = estimate(np.stack([values[seed] for seed in sorted(values)]))
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
    """What the records say of every claim, at each of its scales; all of one chapter are judged together.

    A claim holds, or does not, where its adjusted p is below `LEVEL`, by the sign; else the experiment is too
    small to tell. results: the folder of the records, by default the book's.
    """
    asked = [(claim, scale) for claim in claims for scale in claim.scales]
    studies = {(side.study, scale) for claim, scale in asked for side in (claim.higher, claim.lower)}
    records = {which: read_records(*which, results=results) for which in studies}
    measured = [_measured(claim, scale, records) for claim, scale in asked]
    verdicts = [NOT_RECORDED] * len(asked)
    for chapter in {claim.chapter for claim in claims}:
        of_it = [i for i, (claim, _) in enumerate(asked) if claim.chapter == chapter and measured[i]]
        for index, p in zip(of_it, holm([measured[i].p for i in of_it])):
            above = measured[index].mean + asked[index][0].margin > 0
            verdicts[index] = TOO_SMALL if p >= LEVEL else HOLDS if above else DOES_NOT_HOLD
    return [Judged(*which, *answer) for which, *answer in zip(asked, measured, verdicts)]


def _measured(claim: Claim, scale: str, records: Mapping) -> Estimate | None:
    higher, lower = (side.values(records[side.study, scale]) for side in (claim.higher, claim.lower))
    shared = sorted(higher.keys() & lower.keys())
    if len(shared) < FEWEST_SEEDS:
        return None
    return estimate(np.stack([higher[seed] - lower[seed] for seed in shared]), claim.margin)
