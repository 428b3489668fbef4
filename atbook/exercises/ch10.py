"""Exercises of chapter 10, When it fails, when to use it."""

from collections.abc import Callable
from math import exp, inf, log, sqrt
from statistics import pstdev, stdev

import numpy as np
from scipy import stats

from atbook.exercises.judging import Exercise, told
from atfamily.measures import accounting

# --- 10.1 ---

Costs = dict[str, int]


def product(rows: int, inner: int, columns: int) -> int:
    """Multiplications and additions of a matrix product."""
    return 2 * rows * inner * columns


def _block(N: int, D: int) -> int:
    """A block: four projections, two products of attention, and an MLP."""
    return 4 * product(N, D, D) + 2 * product(N, D, N) + 2 * product(N, D, 4 * D)


def _scores(N: int, D: int) -> int:
    """q, k, and their product."""
    return 2 * product(N, D, D) + product(N, D, N)


def _teacher(N: int, L: int, D: int) -> int:
    """A teacher up to the scores of its last layer."""
    return (L - 1) * _block(N, D) + _scores(N, D)


def at_inference(N: int, L: int, D: int, teacher_D: int) -> Costs:
    """What the blocks of a distilled and of a copying student take an image."""
    student = L * (_block(N, D) - _scores(N, D))
    return {"distill": L * _block(N, D), "copy": _teacher(N, L, teacher_D) + student}


def by_accounting(N: int, L: int, D: int, teacher_D: int) -> Costs:
    """The same with atlib's count."""
    student, teacher = (accounting.Shape(N, 0, L, width, 4 * width, 0, 0) for width in (D, teacher_D))
    return {"distill": accounting.plain(student), "copy": accounting.copy_inference(student, L, teacher)}


# --- 10.2 ---

Critical = dict[int, float]


def _fewest(reach: Callable[[int], float], difference: float, most: int) -> int:
    return next((S for S in range(2, most + 1) if reach(S) < difference), most)


def seeds_needed(pilot: list[float], difference: float, t: Critical) -> int:
    """The fewest seeds whose interval is narrower than the difference."""
    return _fewest(lambda S: t[S - 1] * stdev(pilot) / sqrt(S), difference, max(t))


def in_a_loop(pilot: list[float], difference: float, t: Critical) -> int:
    """The same with numpy."""
    S, spread = 2, np.std(pilot, ddof=1)
    while t[S - 1] * spread * S**-0.5 >= difference:
        S += 1
    return S


def critical(most: int) -> Critical:
    """{degrees of freedom: critical value of a two-sided t test at 5 %}."""
    return {degrees: float(stats.t.ppf(0.975, degrees)) for degrees in range(1, most + 1)}


# --- 10.3 ---


def labels_worth(labels: list[int], scratch: list[float], accuracy: float) -> float:
    """How many labels the curve of scratch needs for that accuracy."""
    if accuracy > scratch[-1]:
        return inf
    return float(np.exp(np.interp(accuracy, scratch, np.log(labels))))


def by_segments(labels: list[int], scratch: list[float], accuracy: float) -> float:
    """The same, segment by segment."""
    if accuracy <= scratch[0]:
        return float(labels[0])
    for i in range(1, len(labels)):
        if accuracy <= scratch[i]:
            share = (accuracy - scratch[i - 1]) / (scratch[i] - scratch[i - 1])
            return exp((1 - share) * log(labels[i - 1]) + share * log(labels[i]))
    return inf


def extrapolated(labels, scratch, accuracy):
    """You went on beyond the last point, along the last segment. A curve that bends may never get there:
    return infinity."""
    if accuracy <= scratch[-1]:
        return labels_worth(labels, scratch, accuracy)
    slope = (log(labels[-1]) - log(labels[-2])) / (scratch[-1] - scratch[-2])
    return exp(log(labels[-1]) + slope * (accuracy - scratch[-1]))


EXERCISES = (
    Exercise(
        "10.1",
        subject="costs",
        right=at_inference,
        cases={
            "a student as wide as its teacher": lambda: (17, 4, 64, 64),
            "a student of a quarter of the width": lambda: (17, 12, 96, 384),
        },
        also_right=(by_accounting,),
        wrong={
            "Copy's teacher is missing. The maps of a new image are the teacher's"
            " maps of that image: it runs for every one, at inference too.": lambda N, L, D, teacher_D: (
                at_inference(N, L, D, teacher_D) | {"copy": L * (_block(N, D) - _scores(N, D))}
            ),
            "Your numbers are half of the right ones. Multiplications and additions"
            " are counted apart: a product of (n, m) by (m, k) has 2 n m k.": lambda N, L, D, teacher_D: (
                {name: cost // 2 for name, cost in at_inference(N, L, D, teacher_D).items()}
            ),
            "The teacher is counted with the student's width. Its own is `teacher_D`, and the cost of its"
            " projections grows with the square of it.": lambda N, L, D, teacher_D: at_inference(N, L, D, D),
            "The teacher ran to its end. Nobody reads what comes"
            " after the map of its last layer: stop it there.": lambda N, L, D, teacher_D: (
                at_inference(N, L, D, teacher_D)
                | {"copy": L * (_block(N, teacher_D) + _block(N, D) - _scores(N, D))}
            ),
            "The copying student still makes its own queries, keys and scores,"
            " which its map, the teacher's, does not need. Take them away.": lambda N, L, D, teacher_D: (
                at_inference(N, L, D, teacher_D) | {"copy": _teacher(N, L, teacher_D) + L * _block(N, D)}
            ),
            "Distill has a teacher in your count. It has one in training"
            " only: at inference the student makes its own maps.": lambda N, L, D, teacher_D: (
                at_inference(N, L, D, teacher_D) | {"distill": L * _block(N, D) + _teacher(N, L, teacher_D)}
            ),
        },
        see="What does it cost?",
    ),
    Exercise(
        "10.2",
        subject="seeds",
        right=seeds_needed,
        cases={
            "three seeds that differ by a point or two": lambda: ([1.0, 2.5, 4.0], 1.25, critical(60)),
            "four seeds, a difference of two points": lambda: ([3.0, -1.0, 2.0, 6.0], 2.0, critical(60)),
            "two seeds, far apart": lambda: ([0.0, 10.0], 4.0, critical(60)),
            "two seeds are enough": lambda: ([1.0, 1.2, 1.4], 5.0, critical(60)),
        },
        also_right=(in_a_loop,),
        wrong={
            "You took 1.96, the normal distribution's value. The spread is estimated"
            " from these few seeds too, so take `t[S - 1]`, which is larger.": lambda pilot, difference, t: (
                _fewest(lambda S: 1.96 * stdev(pilot) / sqrt(S), difference, max(t))
            ),
            "You took the critical value of the pilot's number of seeds. It is that of"
            " the study you plan, with S - 1 degrees of freedom for S seeds.": lambda pilot, difference, t: (
                _fewest(lambda S: t[len(pilot) - 1] * stdev(pilot) / sqrt(S), difference, max(t))
            ),
            "You divided by S. The standard error of a"
            " mean is the spread divided by the root of S.": lambda pilot, difference, t: _fewest(
                lambda S: t[S - 1] * stdev(pilot) / S, difference, max(t)
            ),
            "The spread was divided by the number of seeds. It is a"
            " sample's: divide the squares by that number less one.": lambda pilot, difference, t: _fewest(
                lambda S: t[S - 1] * pstdev(pilot) / sqrt(S), difference, max(t)
            ),
            "You asked for an interval whose whole width is below the difference. It is enough that it"
            " does not reach from the difference to zero: half of the width.": lambda pilot, difference, t: (
                _fewest(lambda S: 2 * t[S - 1] * stdev(pilot) / sqrt(S), difference, max(t))
            ),
            "You compared the spread of single seeds with the difference. What"
            " is compared is the mean of S seeds: divide by the root of S.": lambda pilot, difference, t: (
                _fewest(lambda S: t[S - 1] * stdev(pilot), difference, max(t))
            ),
        },
        see="What is not known?",
    ),
    Exercise(
        "10.3",
        subject="labels",
        right=labels_worth,
        cases={
            "between two points": lambda: ([250, 1000, 4000], [30.0, 75.0, 90.0], 82.0),
            "above the curve": lambda: ([250, 1000, 4000, 32_000], [28.0, 76.0, 89.0, 94.0], 94.5),
            "below the curve": lambda: ([100, 1000], [20.0, 60.0], 15.0),
        },
        also_right=(by_segments,),
        wrong={
            "You interpolated on a plain axis of labels. Accuracy grows with the"
            " logarithm of their number: draw the straight line there.": lambda labels, scratch, accuracy: (
                inf if accuracy > scratch[-1] else float(np.interp(accuracy, scratch, labels))
            ),
            "An accuracy above the whole curve gets the last number of"
            " labels. Nothing was measured beyond it: return infinity.": lambda labels, scratch, accuracy: (
                float(np.exp(np.interp(accuracy, scratch, np.log(labels))))
            ),
            "You took the first measured point that reaches"
            " the accuracy. Between two points, interpolate.": lambda labels, scratch, accuracy: next(
                (float(n) for n, other in zip(labels, scratch) if other >= accuracy), inf
            ),
            "You divided by the first number of labels. The number itself is asked"
            " for.": lambda labels, scratch, accuracy: labels_worth(labels, scratch, accuracy) / labels[0],
            **told(extrapolated),
        },
        see="How many labels?",
    ),
)
