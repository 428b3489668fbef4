"""From records to a verdict: differences within seeds, and one rule for all claims.

A record is only compared with records of the same seed: they share the teacher, the labels and the order of
training.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from atlib.analysis.robustness import fit_line
from atlib.data.catalogue import DOMAINS
from atlib.data.glyphs import SHAPES
from atlib.record import Record, read_records

VERDICTS = ("holds", "does not hold", "undecided", "not tested")
HOLDS, DOES_NOT_HOLD, UNDECIDED, NOT_TESTED = VERDICTS
FEWEST_SEEDS = 3
ONE_POINT = 0.01  # the margin of "no worse" and "no better", in accuracy
HALF_AN_IMAGE = 0.5 / 1000  # of a shifted set: keeps the logit of an accuracy of 1 finite

Metric = Callable[[Record], float]
BySeed = Mapping[int, float]


class Evidence(NamedTuple):
    """figures: what the records say, as text; verdict: one of `VERDICTS`."""

    figures: str
    verdict: str


class Unit(NamedTuple):
    """How differences are printed: times `factor`, with `digits` behind the point."""

    word: str
    factor: float = 1
    digits: int = 3


POINTS, NATS, CKA = Unit("points", 100, 1), Unit("nats"), Unit("CKA")


# --- The rule ---


def verdict(differences: Sequence[float], sign: int, margin: float = 0.0) -> str:
    """What differences within seeds, one a seed, say about the claim that they are positive (`sign` 1) or
    negative (-1).

    The claim holds when every seed has its sign, does not hold when every seed has the opposite, and is
    undecided otherwise. With a `margin` it is the weaker claim that a difference is wrong by less than that:
    "no worse". Fewer than `FEWEST_SEEDS` differences test nothing.
    """
    if len(differences) < FEWEST_SEEDS:
        return NOT_TESTED
    right = [sign * difference + margin for difference in differences]
    return HOLDS if min(right) > 0 else DOES_NOT_HOLD if max(right) < 0 else UNDECIDED


def together(parts: Sequence[Evidence]) -> Evidence:
    """Evidence about a claim with several parts: it holds when all of them hold, and does not as soon as one
    of them does not."""
    found = {part.verdict for part in parts}
    order = (DOES_NOT_HOLD, NOT_TESTED, UNDECIDED, HOLDS)
    return Evidence("; ".join(part.figures for part in parts), next(name for name in order if name in found))


# --- What is compared ---


class Side(NamedTuple):
    """One side of a comparison. numbers: (the results folder, scale) -> {seed: number}, empty where nothing
    is recorded."""

    name: str
    numbers: Callable[[Path, str], BySeed]


class Comparison(NamedTuple):
    """The claim that `a` is above `b` (`sign` 1) or below it (-1), but for a `margin`. name: printed in place
    of "a − b"."""

    a: Side
    b: Side
    sign: int
    unit: Unit = POINTS
    name: str | None = None
    margin: float = 0.0

    def differences(self, results: Path, scale: str = "built-in") -> list[float]:
        """a less b of every seed that both have, in the order of the seeds."""
        a, b = self.a.numbers(results, scale), self.b.numbers(results, scale)
        return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]

    def evidence(self, results: Path, scale: str = "built-in") -> Evidence:
        """Mean ± standard deviation of the differences, the number of seeds in which the claim is true, and
        the verdict."""
        found, name = self.differences(results, scale), self.name or f"{self.a.name} − {self.b.name}"
        if len(found) < FEWEST_SEEDS:
            return Evidence(
                f"{name}: {len(found) or 'no'} seed{'s' if len(found) != 1 else ''} recorded", NOT_TESTED
            )
        word, factor, digits = self.unit
        true = sum(self.sign * difference + self.margin > 0 for difference in found)
        figures = (
            f"{factor * mean(found):+.{digits}f} ± {factor * stdev(found):.{digits}f} {word}, {true} of"
            f" {len(found)} seeds".replace("-", "−")
        )
        return Evidence(f"{name} {figures}", verdict(found, self.sign, self.margin))


def higher(a: Side, b: Side, unit: Unit = POINTS, name: str | None = None) -> Comparison:
    """The claim that `a` is above `b`."""
    return Comparison(a, b, 1, unit, name)


def lower(a: Side, b: Side, unit: Unit = POINTS, name: str | None = None) -> Comparison:
    """The claim that `a` is below `b`."""
    return Comparison(a, b, -1, unit, name)


def no_worse(a: Side, b: Side, name: str | None = None) -> Comparison:
    """The claim that accuracy `a` is less than one point below `b`, or above it."""
    return Comparison(a, b, 1, POINTS, name, ONE_POINT)


def no_better(a: Side, b: Side, name: str | None = None) -> Comparison:
    """The claim that accuracy `a` is less than one point above `b`, or below it."""
    return Comparison(a, b, -1, POINTS, name, ONE_POINT)


# --- Where the numbers come from ---


def accuracy(record: Record) -> float:
    """Test accuracy, from 0 to 1."""
    return record.results["test_accuracy"]


def mean_shifted_accuracy(record: Record) -> float:
    """Mean accuracy over all shifted or corrupted sets, those named like "noise@3"."""
    return mean(value for name, value in record.results.items() if "@" in name)


def other_domains(record: Record) -> float:
    """Mean accuracy over the three domains of PACS that are not photographs."""
    return mean(record.results[f"test_{domain}_accuracy"] for domain in DOMAINS[1:])


def cka_to_fine_tuned(record: Record) -> float:
    """CKA with the same layer of the fine-tuned model, mean over layers."""
    table = record.results["cka to fine-tune"]
    return mean(table[layer][layer] for layer in range(len(table)))


def divergence_from_teacher(record: Record) -> float:
    """Jensen-Shannon divergence of the maps from the teacher's, heads paired one to one, mean over layers;
    nats."""
    return mean(record.results["divergence from teacher"]["bipartite"])


def ensemble_with(other: str) -> Metric:
    """Test accuracy of the mean of this model's and another's probabilities."""
    return lambda record: record.results["ensemble"][other]


def disagreement_with(other: str) -> Metric:
    """Share of test images for which another model's answer differs."""
    return lambda record: record.results["disagreement"][other]


def of(study: str, method: str, metric: Metric = accuracy, name: str | None = None) -> Side:
    """A number from each reported run of a method. A record without that number counts as none."""

    def numbers(results: Path, scale: str) -> BySeed:
        found = {}
        for record in read_records(study, scale, results=results):
            if record.method == method:
                with suppress(KeyError):
                    found[record.seed] = metric(record)
        return found

    return Side(name or method, numbers)


def made_of(name: str, function: Callable[..., float], *sides: Side) -> Side:
    """A number made of those of several sides, in the seeds that all of them have."""

    def numbers(results: Path, scale: str) -> BySeed:
        all_of_them = [side.numbers(results, scale) for side in sides]
        return {
            seed: function(*(each[seed] for each in all_of_them))
            for seed in all_of_them[0]
            if all(seed in each for each in all_of_them)
        }

    return Side(name, numbers)


_CHANCE, _TEST_IMAGES = 1 / len(SHAPES), 4000  # of the built-in world, which alone has a pool
_GUESSING = _CHANCE + 3 * (_CHANCE * (1 - _CHANCE) / _TEST_IMAGES) ** 0.5  # chance and three standard errors


def beyond_expectation(method: str) -> Side:
    """Effective robustness: accuracy under a shift less what the line through the ordinary models of
    "shifts-pool" expects, mean over all shifted sets.

    Each set has a line of its own (Taori et al. 2020, arXiv 2007.00644): a line on logit axes does not
    survive averaging over sets. Members of the pool that are no better than guessing are left out: they lie
    at chance under every shift and would tilt the line.
    """

    def numbers(results: Path, scale: str) -> BySeed:
        pool = [
            record.results
            for record in read_records("shifts-pool", scale, results=results)
            if record.results["test_accuracy"] > _GUESSING
        ]
        ordinary = [each["test_accuracy"] for each in pool]
        if len(set(ordinary)) < FEWEST_SEEDS:  # no line yet
            return {}
        lines = {
            name: fit_line(ordinary, [each[name] for each in pool], HALF_AN_IMAGE)
            for name in pool[0]
            if "@" in name
        }

        def beyond(record: Record) -> float:
            expected = {
                name: line.expected(record.results["test_accuracy"], HALF_AN_IMAGE)
                for name, line in lines.items()
            }
            return mean(record.results[name] - expected[name] for name in lines)

        return of("shifts", method, beyond).numbers(results, scale)

    return Side(method, numbers)
