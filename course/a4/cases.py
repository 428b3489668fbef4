"""What the hidden tests of A4 ask; `course/a4/master.md` gives each its points."""

import math
import random
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from atbook.exercises.answers import numbers
from course import hidden
from course.a4 import checks
from course.hidden import Asked

# --- Task 1: what a few seeds can say ---


def accuracies(seed: int, seeds: list[int], centre: float, spread: float) -> dict[int, float]:
    """{seed: accuracy}, in the order of `seeds`."""
    drawn = hidden.normal(seed, len(seeds)).tolist()
    return {key: centre + spread * x for key, x in zip(seeds, drawn)}


def flipped(differences: list[float], total: float = 0.0) -> list[float]:
    """The sums with every pattern of signs."""
    if not differences:
        return [total]
    first, *rest = differences
    return flipped(rest, total + first) + flipped(rest, total - first)


def expected(letter: str, a: dict, b: dict, *more: float) -> list:
    """The right answer of this edition's variant."""
    both = [seed for seed in a if seed in b]
    n = len(both)

    def around(differences: list[float], t: float) -> tuple[float, float]:
        centre = sum(differences) / n
        return centre, t * math.sqrt(sum((x - centre) ** 2 for x in differences) / (n - 1) / n)

    differences = [a[seed] - b[seed] for seed in both]
    match letter:
        case "a":
            as_large = [total for total in flipped(differences) if abs(total) > abs(sum(differences)) - 1e-9]
            return [sum(differences) / n, len(as_large) / 2**n]
        case "b":
            margin, t = more
            centre, half = around(differences, t)
            return [centre - half, centre + half, abs(centre) + half < margin, abs(centre) > half]
        case "c":
            centre, half = around([math.log1p(-a[seed]) - math.log1p(-b[seed]) for seed in both], *more)
            return [math.exp(centre + side) for side in (0, -half, half)]


def compared(compare, asked: Asked, task: str, seeds_a: list[int], seeds_b: list[int]) -> None:
    """An answer is right on six draws, of which some show a difference and some show none."""
    for draw, (gap, spread) in enumerate([(0.1, 0.01), (0.002, 0.004), (-0.05, 0.02), (0.01, 0.05)] * 2):
        seed = asked.seed(f"{task} {draw}")
        a, b = accuracies(seed, seeds_a, 0.7 + gap, spread), accuracies(seed + 1, seeds_b, 0.7, spread)
        more = {"a": (), "b": (0.03, 2.92), "c": (2.353,)}[asked.variants["q1"]]
        want = expected(asked.variants["q1"], a, b, *more)
        got = compare(a, b, *more)
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            raise AssertionError(f"compare has to return {len(want)} values")
        for at, (g, w) in enumerate(zip(got, want)):
            if type(g) not in (float, int, bool):
                raise AssertionError(f"value {at} is no number of Python's own, but {type(g).__name__}")
            if not math.isclose(g, w, rel_tol=1e-6, abs_tol=1e-9):
                raise AssertionError(f"value {at} is {g:.6g}, not {w:.6g}")


def compare_values(compare, asked: Asked) -> None:
    """Both conditions have the same seeds, in the same order."""
    compared(compare, asked, "A4.1", [0, 1, 2, 3], [0, 1, 2, 3])


def compare_seeds(compare, asked: Asked) -> None:
    """The seeds are in different orders, and some seeds only one of the two has."""
    compared(compare, asked, "A4.1 seeds", [0, 1, 2, 5, 6], [6, 4, 2, 1, 0])


# --- Task 3: the records ---


def nothing(wrong: list[str]) -> None:
    """Raise `AssertionError` with what is wrong, where something is."""
    if wrong:
        raise AssertionError("; ".join(wrong[:5]))


@lru_cache
def handed_in(content: bytes | None, student: str) -> tuple[list, list[str]]:
    """The records that came with the notebook, and what is wrong with the other lines."""
    if content is None:
        return [], ["there is no file records.jsonl"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        path.write_bytes(content)
        return checks.readable(path, student)


def records(asked: Asked) -> list:
    """The records that can be read."""
    return handed_in(asked.uploads.get("records.jsonl"), asked.named())[0]


def runs(asked: Asked) -> list:
    """The runs among the records, in an order of this student's own."""
    made = sorted((record for record in records(asked) if record.kind == "run"), key=lambda run: run.key)
    if not made:
        raise AssertionError("there is no run to look at")
    drawn = random.Random(asked.seed("A4.3"))
    return drawn.sample(made, len(made))


def records_readable(asked: Asked) -> None:
    """Every line is a whole record of this student's."""
    nothing(handed_in(asked.uploads.get("records.jsonl"), asked.named())[1])


def records_complete(asked: Asked) -> None:
    """The records hold the question's conditions and a control, with three seeds each and the question's
    settings."""
    nothing(checks.incomplete(records(asked), checks.question_of(asked.named())))


def records_tuned(asked: Asked) -> None:
    """All conditions have the same trials, and their recipes are chosen on validation images."""
    nothing(checks.unequal(records(asked)) if records(asked) else ["there are no records"])


LONGEST = 120.0  # seconds of a processor for a run's first steps, or for its accuracies


def in_cage(asked: Asked, name: str, *arguments):
    """What a function of the assignment's checks returns. It runs in the cage: a record may ask for a billion
    images."""
    code = f"import sys\nsys.path.insert(0, {str(asked.files)!r})\nfrom checks import {name}\n"
    reply = asked.cage.call(code, name, [*arguments, str(asked.files)], seconds=LONGEST)
    if reply.error:
        raise AssertionError(f"the run cannot be made here: {reply.error}")
    return reply.value


def records_repeated(asked: Asked) -> None:
    """The first steps of one run, made here from its settings, have the losses that are recorded."""
    drawn = runs(asked)[0]
    losses = in_cage(asked, "losses_of", drawn.config["settings"], drawn.seed)
    nothing(checks.not_repeated(drawn, losses))


DRAWN = 3  # runs whose accuracies are measured anew


def records_measured(asked: Asked) -> None:
    """The accuracies of three runs are those of the weights that were handed in."""
    content = asked.uploads.get(checks.WEIGHTS)
    if content is None:
        raise AssertionError(f"{checks.WEIGHTS} was not handed in: `checks.run` writes it beside the records")
    wrong = []
    for run in runs(asked)[:DRAWN]:
        own = checks.weights_of(content, run)
        if own is None:
            wrong.append(f"{checks.WEIGHTS} does not hold {run.method!r}, seed {run.seed}")
            continue
        for test, accuracy in in_cage(asked, "measured", run.config["settings"], run.seed, own).items():
            said = run.results[test]
            if not abs(said - accuracy) <= checks.ROUNDED:
                text = f"{run.method!r}, seed {run.seed}, {test}: {100 * said:.1f} % is recorded"
                wrong.append(f"{text}, its weights are right on {100 * accuracy:.1f} %")
    nothing(wrong)


def finding(answer, asked: Asked) -> None:
    """The numbers of the statement are those of the records, to 0.05 points."""
    contrasts = list(checks.answers(records(asked), checks.question_of(asked.named())).values())
    if len(contrasts) < len(checks.SEEDS):
        raise AssertionError(f"only {len(contrasts)} seeds have all runs that answer the question")
    n, centre = len(contrasts), sum(contrasts) / len(contrasts)
    half = checks.T90[n - 1] * math.sqrt(sum((x - centre) ** 2 for x in contrasts) / (n - 1) / n)
    typed = numbers(answer, (3,))
    if typed is None:
        raise AssertionError("FINDING has to be three numbers: mean, low, high")
    for name, g, w in zip(("mean", "low", "high"), typed, (centre, centre - half, centre + half)):
        if not abs(g - w) <= 0.05:
            raise AssertionError(f"FINDING: {name} is {g:.2f}, by the records it is {w:.2f}")
