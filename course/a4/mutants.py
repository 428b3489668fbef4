"""Wrong answers to A4, and the points that each is worth: {(task, variant): [(in the solution, in its place,
points), ...]}. Where the first is the name of an upload, the second makes another file of it."""

import json
from collections.abc import Callable
from pathlib import Path

RECORDS, WEIGHTS = "records.jsonl", "weights.safetensors"
UPLOADS = {name: (Path(__file__).parent / name).read_bytes() for name in (RECORDS, WEIGHTS)}


def lines(change: Callable[[dict], dict | None]) -> Callable[[bytes], bytes]:
    """A file whose records are changed one by one; where `change` returns None, the record is left out."""

    def changed(content: bytes) -> bytes:
        kept = [change(json.loads(line)) for line in content.splitlines()]
        return b"".join(json.dumps(record).encode() + b"\n" for record in kept if record is not None)

    return changed


def two_seeds(record: dict) -> dict | None:
    """Seed 2 was never run."""
    return None if record["kind"] == "run" and record["seed"] == 2 else record


def one_condition(record: dict) -> dict | None:
    """A condition of the question is missing."""
    return None if record["method"] == "all layers" else record


def other_losses(record: dict) -> dict:
    """Losses that this run never had."""
    losses = [1.001 * loss for loss in record["results"]["first_losses"]]
    return record | {"results": record["results"] | {"first_losses": losses}}


def invented(record: dict) -> dict:
    """Twenty real steps, and accuracies that nobody measured."""
    if record["kind"] == "trial":
        return record
    better = {"plain": 0.99, "faint": 0.97}
    return record | {"results": record["results"] | better}


def on_test(record: dict) -> dict:
    """Trials that were measured on test images."""
    return record | {"config": record["config"] | {"split": "test"}}


def not_the_best(record: dict) -> dict:
    """The trials' order is turned round: the runs have the recipe of the worst."""
    if record["kind"] == "run":
        return record
    return record | {"results": record["results"] | {"plain": 1 - record["results"]["plain"]}}


def somebody_else(record: dict) -> dict:
    """The file belongs to another student."""
    return record | {"config": record["config"] | {"student": "Ada"}}


def other_question(record: dict) -> dict:
    """The mark was less faint than the question asks."""
    settings = record["config"]["settings"]
    settings = settings | {"tests": {"plain": {}, "faint": {"cue": 0.8}}}
    return record | {"config": record["config"] | {"settings": settings}}


def cut(content: bytes) -> bytes:
    """A line, of a control's last run, was cut off."""
    by_line = content.splitlines()
    last = max(at for at, line in enumerate(by_line) if json.loads(line)["method"] == "alone")
    by_line[last] = by_line[last][:300]
    return b"\n".join(by_line) + b"\n"


MUTANTS = {
    ("q1", "a"): [
        ("d = [a[s] - b[s] for s in a if s in b]", "d = [x - y for x, y in zip(a.values(), b.values())]", 1),
        ("abs(sum(x * y for x, y in zip(d, signs)))", "sum(x * y for x, y in zip(d, signs))", 0),
        (">= abs(sum(d)) - 1e-9", "> abs(sum(d)) + 1e-9", 0),
    ],
    ("q1", "b"): [
        ("d = [a[s] - b[s] for s in a if s in b]", "d = [x - y for x, y in zip(a.values(), b.values())]", 1),
        ("-margin < low and high < margin", "low <= 0 <= high", 0),
        ("statistics.stdev", "statistics.pstdev", 0),
    ],
    ("q1", "c"): [
        ("[(1 - a[s]) / (1 - b[s]) for s in a if s in b]", "[a[s] / b[s] for s in a if s in b]", 0),
        ("for s in a if s in b]", "for s in a]", 1),
        ("logs = [math.log(r) for r in ratios]", "logs = ratios", 0),
    ],
    ("q3", "a"): [
        (RECORDS, lines(two_seeds), 4),  # neither complete, nor enough for the interval
        (RECORDS, lines(one_condition), 4),
        (RECORDS, cut, 4),  # not readable, and what was cut is missing
    ],
    ("q3", "b"): [
        (RECORDS, lines(other_losses), 5),
        (RECORDS, lines(invented), 4),  # nor are the typed numbers those of the records
        (RECORDS, lines(on_test), 5),
        ("FINDING = [", "FINDING = [1 + ", 5),
    ],
    ("q3", "c"): [
        (RECORDS, lines(not_the_best), 5),
        (RECORDS, lines(somebody_else), 0),
        (RECORDS, lines(other_question), 4),  # nor are the accuracies those of its test images
    ],
}
