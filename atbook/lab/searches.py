"""How each recorded method's recipe was searched: how many trials, between which learning rates, and whether
any trial left guessing. A mean of runs whose search never did says nothing about the method."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from atbook.lab.tuning import ABOVE_GUESSING
from atbook.records import markdown_table, read_records, results_folder
from atrun.record import Record

NEAR_GUESSING = 0.075  # what is listed: 20 % of eight classes
# How many classes students tell apart, where accuracy is what is searched for.
CLASSES = {
    "find": 8,
    "match": 8,
    "cifar10-cpu": 10,
    "pacs": 7,
    "real-cifar10": 10,
    "real-pacs": 7,
    "real-cifar10-98px": 10,
    "real-cifar10-full": 10,
    "real-cifar10-long": 10,
    "mosaics": 10,
}


class Search(NamedTuple):
    """The trials of one method."""

    study: str
    scale: str
    method: str
    trials: int
    #: Of the best trial: its accuracy on validation images, and its learning rate.
    best: float
    rate: float
    #: The smallest and the largest learning rate that was tried.
    low: float
    high: float
    #: Whether the best is above guessing by more than `ABOVE_GUESSING`.
    learned: bool


def searches(study: str, scale: str, results: Path | None = None) -> list[Search]:
    """Those of all methods of a study that are reported at a scale of `CLASSES` and were searched; none at
    another scale. results: the folder of the records, by default the book's."""
    if scale not in CLASSES:
        return []
    trials: dict[str, list[Record]] = {}
    for record in read_records(study, scale, "trial", results):
        if "validation_accuracy" in record.results:
            trials.setdefault(record.method, []).append(record)
    reported = {record.method for record in read_records(study, scale, results=results)}
    return [_search(study, scale, method, trials[method]) for method in trials if method in reported]


def all_searches(results: Path | None = None) -> list[Search]:
    """Those of every study and scale that have records."""
    folder = results_folder() if results is None else results
    files = sorted(folder.glob("*/*.jsonl"))
    return [search for file in files for search in searches(file.parent.name, file.stem, results)]


def did_not_learn(study: str, scale: str, results: Path | None = None) -> dict[str, int]:
    """{method: trials} of a study's methods of which no trial left guessing."""
    return {one.method: one.trials for one in searches(study, scale, results) if not one.learned}


def near_guessing_table(results: Path | None = None) -> str:
    """All searches whose best trial is at most `NEAR_GUESSING` above guessing, as a Markdown table."""
    rows = [
        [
            one.study,
            one.scale,
            f"`{one.method}`",
            one.trials,
            f"{one.low:g} to {one.high:g}",
            f"{100 * one.best:.1f}",
            "a little" if one.learned else "no",
        ]
        for one in all_searches(results)
        if one.best <= 1 / CLASSES[one.scale] + NEAR_GUESSING
    ]
    head = ["study", "scale", "method", "trials", "learning rates", "best (%)", "left guessing"]
    return markdown_table(head, *rows)


def _search(study: str, scale: str, method: str, trials: Sequence[Record]) -> Search:
    best = max(trials, key=lambda trial: trial.results["validation_accuracy"])
    accuracy = best.results["validation_accuracy"]
    rates = [trial.config["recipe"]["lr"] for trial in trials]
    learned = accuracy > 1 / CLASSES[scale] + ABOVE_GUESSING
    rate = best.config["recipe"]["lr"]
    return Search(study, scale, method, len(trials), accuracy, rate, min(rates), max(rates), learned)
