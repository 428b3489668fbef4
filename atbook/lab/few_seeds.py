"""How often a few seeds tell another story than all that are recorded: every choice of them, counted."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from atbook.lab.verdicts import DOES_NOT_HOLD, HOLDS, LEVEL, Estimate, Side, estimate
from atbook.records import read_records

NOT_SEEN = "no difference seen"


class Stories(NamedTuple):
    """What all seeds say of a difference, and the shares of the choices of a few that say something else."""

    #: Of all seeds.
    whole: Estimate
    #: What all seeds say, judged alone: "holds", "does not hold" or `NOT_SEEN`.
    verdict: str
    #: How many choices there are.
    choices: int
    #: The mean has the other sign.
    other_sign: float
    #: No difference seen, where all seeds see one.
    missed: float
    #: A difference seen that all seeds do not see.
    invented: float


def stories(differences: np.ndarray, few: int = 3) -> Stories:
    """Every choice of `few` seeds of the differences (seeds, images) between two methods, judged as if no
    others had been run: by its sign, and by the t test of `estimate` at 5 %.

    Raises `ValueError` for fewer than two seeds, which have no spread, and for as many as there are or more.
    """
    seeds = len(differences)
    if not 2 <= few < seeds:
        raise ValueError(f"few={few} of {seeds} seeds: choose at least 2 and fewer than there are")
    whole = estimate(differences)
    verdict = _alone(whole)
    parts = [estimate(differences[list(chosen)]) for chosen in combinations(range(seeds), few)]
    verdicts = [_alone(part) for part in parts]
    return Stories(
        whole,
        verdict,
        len(parts),
        float(np.mean([part.mean * whole.mean < 0 for part in parts])),
        float(np.mean([verdict != NOT_SEEN == of_part for of_part in verdicts])),
        float(np.mean([of_part not in (NOT_SEEN, verdict) for of_part in verdicts])),
    )


def stories_of(
    scale: str, higher: str, lower: str, few: int = 3, study: str = "transfer", results: Path | None = None
) -> Stories:
    """The same of two methods of a study, from the seeds that both have. results: the folder of the records,
    by default the book's. Raises as `stories` does."""
    return stories(within_seeds(scale, higher, lower, study, results), few)


def within_seeds(
    scale: str, higher: str, lower: str, study: str = "transfer", results: Path | None = None
) -> np.ndarray:
    """Which method was right and the other not, in each seed that both have: (seeds, images), 1, 0 or -1."""
    records = read_records(study, scale, results=results)
    of_higher, of_lower = (Side(study, (method,)).values(records) for method in (higher, lower))
    shared = sorted(of_higher.keys() & of_lower.keys())
    return np.array([of_higher[seed] - of_lower[seed] for seed in shared])


def gaps(values: Sequence[float], few: int = 3) -> np.ndarray:
    """How far apart two groups of `few` runs of one method lie: the distances between the means of every two
    groups that share no run, in order. Raises `ValueError` for fewer runs than two groups have."""
    runs = np.asarray(values, dtype=float)
    if len(runs) < 2 * few:
        raise ValueError(f"two groups of {few} need {2 * few} runs, got {len(runs)}")
    chosen = list(combinations(range(len(runs)), few))
    member = np.zeros((len(chosen), len(runs)), dtype=np.float32)
    for row, group in enumerate(chosen):
        member[row, list(group)] = 1
    means = member @ runs / few
    first, second = np.nonzero(np.triu(member @ member.T == 0))
    return np.sort(np.abs(means[first] - means[second]))


def _alone(difference: Estimate) -> str:
    """The verdict on one difference that is asked alone."""
    if difference.p >= LEVEL:
        return NOT_SEEN
    return HOLDS if difference.mean > 0 else DOES_NOT_HOLD
