"""Measured numbers in sentences: `82.0<!-- = acc("match", "copy") -->` is held to the records by its
comment.

The comment, invisible in the book and on Colab, is an expression over the functions below; the number in
front of it must be what the expression gives, rounded to as many digits as are printed. A word between the
two is allowed: `82.0 %<!-- = ... -->`. `python -m tools.sentences` lists the numbers that no longer are; with
`--mend` it writes them again, and you read the sentences around each.
"""

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from atbook.lab.few_seeds import gaps, stories_of
from atbook.lab.findings import SCRATCH
from atbook.lab.overlaps import overlap, right_by_partner
from atbook.lab.papers import quoted
from atbook.lab.shown import kept_share
from atbook.lab.verdicts import Side, estimate, on_test, proportion
from atbook.records import read_records

ROOT = Path(__file__).resolve().parent.parent
GUARDED = re.compile(
    r"(?P<number>[+−-]?\d[\d,]*(?:\.\d+)?)(?P<unit>(?:\s?%|\s\w+){0,2})\s?<!-- = (?P<expression>.+?) -->",
    re.S,
)


class Guarded(NamedTuple):
    """A number in a sentence, and the expression that it is held to."""

    path: Path
    line: int
    # As it is printed.
    number: str
    # What the comment behind it says.
    expression: str


def guarded(path: Path) -> list[Guarded]:
    """The numbers of a page that are held to records. Raises `ValueError` for a comment without a number in
    front of it."""
    text = path.read_text(encoding="utf-8")
    numbers = [
        Guarded(path, text[: m.start()].count("\n") + 1, m["number"], " ".join(m["expression"].split()))
        for m in GUARDED.finditer(text)
    ]
    comments = text.count("<!-- =")
    if len(numbers) != comments:
        raise ValueError(f"{path}: {comments} comments start with '<!-- =', {len(numbers)} follow a number")
    return numbers


def functions(results: Path | None = None) -> dict[str, Callable[..., float]]:
    """The functions that expressions can call. Accuracies and their differences are in points; in the central
    experiment, "scratch" is the mean of its three first weights. end: "mean", "low" or "high" of the 95 %
    interval. figure: a figure of the test images such as "ap" or "iou", in place of accuracy."""

    def values(
        scale: str, method: str | tuple[str, ...], study: str, figure: str | None
    ) -> dict[int, np.ndarray]:
        methods = (method,) if isinstance(method, str) else method
        if study == "transfer":
            methods = tuple(m for name in methods for m in (SCRATCH if name == "scratch" else (name,)))
        side = Side(study, methods, figure and on_test(figure))
        return side.values(read_records(study, scale, results=results))

    def acc(
        scale: str, method, study: str = "transfer", end: str = "mean", figure: str | None = None
    ) -> float:
        by_seed = values(scale, method, study, figure)
        return 100 * getattr(proportion(np.stack(list(by_seed.values()))), end)

    def one(scale: str, method: str, seed: int, study: str = "transfer", figure: str | None = None) -> float:
        return 100 * values(scale, method, study, figure)[seed].mean()

    def diff(
        scale: str,
        a,
        b,
        study: str = "transfer",
        other: str | None = None,
        end: str = "mean",
        figure: str | None = None,
    ) -> float:
        """a minus b, within seeds; `other` is b's study where it differs from a's."""
        of_a, of_b = values(scale, a, study, figure), values(scale, b, other or study, figure)
        shared = sorted(of_a.keys() & of_b.keys())
        return 100 * getattr(estimate(np.stack([of_a[seed] - of_b[seed] for seed in shared])), end)

    def field(study: str, scale: str, method: str, path: str, kind: str = "run") -> float:
        """The mean over seeds of a figure of the records' results; "shape.itself" is results["shape"]
        ["itself"]."""
        figures = []
        for record in read_records(study, scale, kind, results):
            if record.method == method:
                value = record.results
                for key in path.split("."):
                    value = value[int(key) if isinstance(value, list) else key]
                figures.append(value)
        return mean(figures)

    def searched(scale: str, method: str, study: str) -> float:
        """The best accuracy of a method's search, on validation images and with one seed."""
        trials = [r for r in read_records(study, scale, "trial", results) if r.method == method]
        return 100 * max(trial.results["validation_accuracy"] for trial in trials)

    def chosen(scale: str, method: str, study: str, setting: str) -> float:
        """A setting of the recipe that all runs of a method have."""
        runs = [r for r in read_records(study, scale, results=results) if r.method == method]
        (one,) = {run.config["recipe"][setting] for run in runs}
        return one

    def share(
        scale: str,
        part: str,
        whole: str = "copy",
        study: str = "real",
        other: str | None = None,
        end: str = "value",
    ) -> float:
        """The share, in per cent, of the gain of `whole` over scratch that `part` keeps; `other` is the study
        of `whole` and of scratch where it differs. end: "value", "low" or "high" of its interval."""
        base = SCRATCH if (other or study) == "transfer" else ("scratch",)
        sides = Side(study, (part,)), Side(other or study, (whole,)), Side(other or study, base)
        return 100 * getattr(kept_share(scale, *sides, results=results), end)

    def three(scale: str, higher: str, lower: str, figure: str) -> float:
        """Of the choices of three seeds, the per cent that say something else than all do: `figure` is one of
        "other_sign", "missed" and "invented"."""
        return 100 * getattr(stories_of(scale, higher, lower, results=results), figure)

    def gap(scale: str, share: float) -> float:
        """What so large a share of the distances between two groups of three scratch runs is below, in
        points."""
        runs = [r for r in read_records("transfer", scale, results=results) if r.method in SCRATCH]
        return 100 * float(np.quantile(gaps([run.results["test_accuracy"] for run in runs]), share))

    def right_where(scale: str, of: str, only: str, but: str, *studies: str) -> float:
        """How often `of` is right where, in other seeds, `only` is right and `but` is wrong."""
        return 100 * overlap(scale, of, only, but, *studies).mean

    def by_partner(scale: str, read: bool, of: str, blind: str, study: str = "real") -> float:
        """How often `of` is right where `blind` reads the partner's maps rightly, or not."""
        return 100 * right_by_partner(scale, read, of, blind, study).mean

    def position(a: str, b: str, classes: int = 8) -> float:
        """The place of the disagreement of two methods of Find between nested (0) and independent (1)
        mistakes, by the formula of page D3 from the means over seeds."""
        share = field("comparison", "find", a, f"disagreement.{b}")
        of_a, of_b = (field("comparison", "find", name, "test_accuracy") for name in (a, b))
        least, agree = abs(of_a - of_b), of_a * of_b + (1 - of_a) * (1 - of_b) / (classes - 1)
        return (share - least) / (1 - agree - least)

    def paper(table: str, row: str, column: str = "top1", of: str = "attention-transfer") -> float:
        """A figure of a table of `book/papers/OF.json`."""
        return quoted(table, of).value(row, column)

    def seconds(notebook: str) -> float:
        """How long a notebook was measured to run."""
        return next(
            r.seconds for r in read_records("notebooks", None, results=results) if r.method == notebook
        )

    names = {
        "seconds": seconds,
        "acc": acc,
        "one": one,
        "diff": diff,
        "field": field,
        "searched": searched,
        "chosen": chosen,
        "position": position,
        "paper": paper,
    }
    names |= {"share": share, "three": three, "gap": gap, "overlap": right_where, "by_partner": by_partner}
    return names | {"min": min, "max": max, "sum": sum}


def evaluated(expression: str, names: dict[str, Callable[..., float]]) -> float:
    return eval(expression, {"__builtins__": {}} | names)  # written by us, in our own pages


def wrong(guard: Guarded, names: dict[str, Callable[..., float]]) -> str | None:
    """What is wrong with a number, in words; None where its expression gives it."""
    where = f"{guard.path.relative_to(ROOT) if guard.path.is_relative_to(ROOT) else guard.path}:{guard.line}"
    try:
        value = evaluated(guard.expression, names)
    except Exception as error:  # whatever it is, it is told with its place
        return f"{where}: {guard.expression} cannot be computed: {type(error).__name__}: {error}"
    digits = len(guard.number.partition(".")[2])
    printed = float(guard.number.replace(",", "").replace("−", "-"))
    if not abs(value - printed) <= 0.5 * 10**-digits + 1e-9:  # nan is no number, either
        return f"{where}: {guard.number} is printed, {guard.expression} is {value:.{digits + 1}f}"
    return None


def mend(path: Path, names: dict[str, Callable[..., float]]) -> None:
    """Correct the numbers of a page that are no longer what their expressions give; digits and sign keep the
    form in which they were printed."""

    def anew(match: re.Match) -> str:
        if wrong(Guarded(path, 0, match["number"], " ".join(match["expression"].split())), names) is None:
            return match[0]
        digits = len(match["number"].partition(".")[2])
        form = "+" * match["number"].startswith("+") + "," * ("," in match["number"]) + f".{digits}f"
        number = format(evaluated(" ".join(match["expression"].split()), names), form)
        return number.replace("-", "−") + match[0][len(match["number"]) :]

    text = path.read_text(encoding="utf-8")
    path.write_text(GUARDED.sub(anew, text), encoding="utf-8")


def pages() -> list[Path]:
    """All pages that may have numbers in sentences."""
    return [
        *sorted((ROOT / "notebooks").glob("*.md")),
        *sorted((ROOT / "book").glob("*.md")),
        *sorted((ROOT / "course" / "slides").glob("*.md")),
        ROOT / "README.md",
    ]


def main() -> int:
    """Print what is wrong; returns 1 where anything is wrong and was not mended."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--mend", action="store_true", help="write the wrong numbers anew")
    mending, names = parser.parse_args().mend, functions()
    numbers = [number for page in pages() for number in guarded(page)]
    problems = list(filter(None, map(partial(wrong, names=names), numbers)))
    for page in {number.path for number in numbers} if mending and problems else ():
        mend(page, names)
    print(*problems, f"{len(numbers)} numbers in sentences, {len(problems)} wrong", sep="\n")
    return 1 if problems and not mending else 0


if __name__ == "__main__":
    sys.exit(main())
