"""Exercises of page D2, When are features needed?."""

from collections.abc import Callable
from math import sqrt
from statistics import mean, pvariance, variance

import torch
from scipy.stats import t as student
from scipy.stats import ttest_ind
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, told

# --- D2.1 ---


def corner_effects(accuracy: Tensor) -> dict[str, Tensor]:
    """Two main effects and the interaction of a 2 x 2, mean over seeds."""
    corner = accuracy.mean(0)
    features, routing = corner[1] - corner[0], corner[:, 1] - corner[:, 0]
    return {"features": features.mean(), "routing": routing.mean(), "interaction": features[1] - features[0]}


def by_regression(accuracy: Tensor) -> dict[str, Tensor]:
    """The same: coefficients of a regression on -1/2 and +1/2, and twice that of their product."""
    return regressed(accuracy, (-0.5, 0.5))


def regressed(accuracy: Tensor, codes: tuple[float, float]) -> dict[str, Tensor]:
    """Coefficients of features, routing and their product, where `codes` stand for useless and useful."""
    seeds = len(accuracy)
    code = accuracy.new_tensor(codes)
    features, routing = code[:, None].expand(2, 2), code.expand(2, 2)
    columns = [torch.ones_like(features), features, routing, features * routing]
    design = torch.stack([column.reshape(-1) for column in columns], 1).repeat(seeds, 1)
    _, *effects = torch.linalg.lstsq(design, accuracy.reshape(-1, 1)).solution[:, 0]
    return dict(zip(("features", "routing", "interaction"), effects))


def under_the_useful(accuracy):
    """You took what features add under *useful* routing, and routing with useful features: one side of the
    square each. A main effect is the mean of two opposite sides."""
    corner = accuracy.mean(0)
    features, routing = corner[1, 1] - corner[0, 1], corner[1, 1] - corner[1, 0]
    return corner_effects(accuracy) | {"features": features, "routing": routing}


# --- D2.2 ---

Seeds = dict[int, float]
World = dict[str, Seeds]


def what_a_message_adds(world: World) -> list[float]:
    """Copy's accuracy minus copy-routing-twin's, for the seeds that both have."""
    copy, twin = world["copy"], world["copy-routing-twin"]
    return [copy[seed] - twin[seed] for seed in sorted(copy.keys() & twin.keys())]


def interval(difference: float, parts: list[tuple[float, int]]) -> dict[str, float]:
    """A difference with its 95 % interval, by Welch, from the squared errors and numbers of what is in it."""
    error = sum(square for square, _ in parts)
    freedom = error**2 / sum(square**2 / (n - 1) for square, n in parts)
    reach = student.ppf(0.975, freedom) * sqrt(error)
    return {"mean": difference, "low": difference - reach, "high": difference + reach}


def compared_means(find: World, match: World, squared_error: Callable) -> dict[str, float]:
    """How much more a message adds in Find than in Match, with this squared error of a mean."""
    a, b = what_a_message_adds(find), what_a_message_adds(match)
    return interval(mean(a) - mean(b), [(squared_error(sample), len(sample)) for sample in (a, b)])


def more_of_a_message(find: World, match: World) -> dict[str, float]:
    """How much more a message adds in Find than in Match."""
    return compared_means(find, match, lambda sample: variance(sample) / len(sample))


def by_scipy(find: World, match: World) -> dict[str, float]:
    """The same, by scipy's test of two independent samples."""
    a, b = what_a_message_adds(find), what_a_message_adds(match)
    low, high = ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return {"mean": (low + high) / 2, "low": low, "high": high}


def nothing_paired(find, match):
    """You treated four lists as independent. Inside a world a seed's two students share labels and chance:
    subtract them seed by seed (where both are there), and what they share is gone."""
    lists = [list(world[name].values()) for world in (find, match) for name in ("copy", "copy-routing-twin")]
    a, b, c, d = map(mean, lists)
    return interval(a - b - (c - d), [(variance(sample) / len(sample), len(sample)) for sample in lists])


def worlds_paired(find, match):
    """Seeds of Find were paired with seeds of Match. Their images are different: nothing shared could cancel,
    and seeds are thrown away. The squared errors of the two means add."""
    four = [world[name] for world in (find, match) for name in ("copy", "copy-routing-twin")]
    seeds = set.intersection(*(set(accuracies) for accuracies in four))
    differences = [four[0][s] - four[1][s] - (four[2][s] - four[3][s]) for s in sorted(seeds)]
    return interval(mean(differences), [(variance(differences) / len(seeds), len(seeds))])


def normals_interval(find, match):
    """1.96 errors are right when the spread is known. From few seeds it is estimated itself: take Student's t
    with Welch's degrees of freedom."""
    a, b = what_a_message_adds(find), what_a_message_adds(match)
    reach = student.ppf(0.975, 1e9) * sqrt(variance(a) / len(a) + variance(b) / len(b))
    difference = mean(a) - mean(b)
    return {"mean": difference, "low": difference - reach, "high": difference + reach}


def numbered(*accuracies: float, first: int = 0) -> Seeds:
    """Accuracies by seed."""
    return dict(enumerate(accuracies, first))


# --- D2.3 ---

Search = dict[float, list[tuple[float, float]]]


def advantage(one: Search, other: Search) -> float | str:
    """How much better one corner is than the other, in test accuracy, or why the two cannot be compared."""
    return compared(one, other, best_rate)


def compared(one: Search, other: Search, rate_of: Callable[[Search], float]) -> float | str:
    """The guards, and the difference at the rates that `rate_of` chooses."""
    if set(one) != set(other):
        return "searched unequally"
    rates = [rate_of(runs) for runs in (one, other)]
    if any(rate in (min(one), max(one)) for rate in rates):
        return "search on"
    return at(one, rates[0]) - at(other, rates[1])


def best_rate(runs: Search) -> float:
    """By the mean over seeds on validation images."""
    return max(runs, key=lambda rate: mean(validation for validation, _ in runs[rate]))


def at(runs: Search, rate: float) -> float:
    """The mean test accuracy at a rate."""
    return mean(test for _, test in runs[rate])


def without_a_look_at_the_ends(one, other):
    """A best rate at the end of the search was taken. Beyond it may be better: "search on". With one rate for
    all, both ends are there."""
    if set(one) != set(other):
        return "searched unequally"
    return at(one, best_rate(one)) - at(other, best_rate(other))


def unequal_searches(one, other):
    """One corner has tried rates that the other has not, and a longer search finds more. Refuse first:
    "searched unequally"."""
    if any(best_rate(runs) in (min(runs), max(runs)) for runs in (one, other)):
        return "search on"
    return at(one, best_rate(one)) - at(other, best_rate(other))


def ends_by_place(one, other):
    """The first and last entry were taken for the ends. A dict has the order in which rates were tried: the
    ends are min and max."""
    if set(one) != set(other):
        return "searched unequally"
    for runs in (one, other):
        tried = list(runs)
        if best_rate(runs) in (tried[0], tried[-1]):
            return "search on"
    return at(one, best_rate(one)) - at(other, best_rate(other))


RATES = (1e-3, 5e-4, 2e-3, 4e-3, 2.5e-4)  # in the order in which they were tried


def searched() -> tuple[Search, Search]:
    """Two corners, with (validation, test) of two seeds at each rate."""
    one = (
        [(70.0, 69.1), (71.0, 70.3)],
        [(61.0, 60.2), (72.5, 70.6)],
        [(69.2, 72.0), (70.2, 71.5)],
        [(40.0, 39.0), (42.5, 41.0)],
        [(33.0, 32.1), (35.5, 34.8)],
    )
    other = (
        [(50.0, 50.8), (52.0, 51.7)],
        [(30.0, 29.5), (31.0, 30.4)],
        [(55.0, 54.2), (56.0, 55.3)],
        [(53.0, 52.1), (54.0, 53.4)],
        [(20.0, 21.1), (22.0, 20.9)],
    )
    return dict(zip(RATES, one)), dict(zip(RATES, other))


def all_but(runs: Search, *rates: float) -> Search:
    """A search without some rates."""
    return {rate: accuracies for rate, accuracies in runs.items() if rate not in rates}


EXERCISES = (
    Exercise(
        "D2.1",
        subject="statistics",
        right=corner_effects,
        cases={
            "five seeds": lambda: (
                torch.tensor([[17.0, 92.0], [62.0, 97.0]], dtype=torch.float64) + normal(5, 2, 2),
            ),
            "one seed, routing that harms": lambda: (
                torch.tensor([[[30.0, 20.0], [80.0, 77.0]]], dtype=torch.float64),
            ),
        },
        also_right=(by_regression,),
        wrong={
            "These are the coefficients of a regression on 0 and 1. They"
            " say what features add under *useless* routing, not on average;"
            " code the two levels as -1/2 and +1/2.": lambda accuracy: regressed(accuracy, (0.0, 1.0)),
            "Features and routing are exchanged. accuracy[s,"
            " f, r]: features are axis 1, routing is axis 2.": lambda accuracy: corner_effects(accuracy.mT),
            "The interaction is halved. The task asks for the whole difference: how"
            " many points more features add under useful routing than under useless.": lambda accuracy: (
                corner_effects(accuracy) | {"interaction": corner_effects(accuracy)["interaction"] / 2}
            ),
            "You added what features do in the two columns. An interaction is how much"
            " the two *differ*; it is 0 where features are worth the same everywhere.": lambda accuracy: (
                corner_effects(accuracy) | {"interaction": 2 * corner_effects(accuracy)["features"]}
            ),
            **told(under_the_useful),
        },
    ),
    Exercise(
        "D2.2",
        subject="statistics",
        right=more_of_a_message,
        cases={
            "7 seeds and 5": lambda: (
                {
                    "copy": numbered(93.1, 95.0, 94.2, 96.3, 92.0, 95.5, 94.8),
                    "copy-routing-twin": numbered(80.2, 83.1, 81.5, 84.0, 78.9, 82.2, 81.9),
                },
                {
                    "copy": numbered(80.1, 84.2, 78.7, 81.5, 82.9),
                    "copy-routing-twin": numbered(78.0, 82.9, 77.5, 79.2, 81.8),
                },
            ),
            "a seed that is not there": lambda: (
                {
                    "copy": numbered(71.0, 60.5, 66.2, 69.9),
                    "copy-routing-twin": numbered(59.8, 58.1, 57.0, first=1),
                },
                {"copy": numbered(50.2, 57.3, 52.4), "copy-routing-twin": numbered(49.9, 50.1, 51.1)},
            ),
        },
        also_right=(by_scipy,),
        wrong={
            "The sign is turned: the task asks how much *more*"
            " a message adds in Find than in Match.": lambda find, match: more_of_a_message(match, find),
            "You took the variance of single seeds. A mean of n seeds"
            " has that variance divided by n.": lambda find, match: compared_means(find, match, variance),
            "The squared deviations were divided by n. They are taken from the seeds' own mean,"
            " which lies too near to them: divide by n - 1 (statistics.variance).": lambda find, match: (
                compared_means(find, match, lambda sample: pvariance(sample) / len(sample))
            ),
            **told(nothing_paired, worlds_paired, normals_interval),
        },
        see="What do features add to maps?",
        rtol=1e-6,
    ),
    Exercise(
        "D2.3",
        subject="tuning",
        right=advantage,
        cases={
            "equal searches": searched,
            "one searched less": lambda: (searched()[0], all_but(searched()[1], 5e-4)),
            "best at the end": lambda: tuple(all_but(runs, 4e-3) for runs in searched()),
            "best at the other end": lambda: tuple(all_but(runs, 5e-4, 2.5e-4) for runs in searched()),
            "one recipe for all": lambda: tuple(all_but(runs, *RATES[1:]) for runs in searched()),
        },
        wrong={
            "The rate was chosen on test images, so its number is too good: the luck"
            " of the choice is in it. Choose on validation, then read the test once.": lambda one, other: (
                compared(one, other, lambda runs: max(runs, key=lambda rate: at(runs, rate)))
            ),
            "The best single run chose the rate. That is the"
            " luckiest seed: choose by the mean over seeds.": lambda one, other: compared(
                one, other, lambda runs: max(runs, key=lambda rate: max(runs[rate])[0])
            ),
            "Both corners were read at the first one's rate. The same"
            " recipe is not equal tuning: each corner has the rate"
            " that is best for itself.": lambda one, other: compared(one, other, lambda runs: best_rate(one)),
            **told(without_a_look_at_the_ends, unequal_searches, ends_by_place),
        },
    ),
)
