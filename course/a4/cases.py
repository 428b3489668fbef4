"""What the hidden tests of A4 ask; `course/a4/master.md` gives each its points."""

import math
from functools import lru_cache

import checks
import hidden

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


def expected(a: dict, b: dict, *more: float) -> list:
    """The right answer of this edition's variant."""
    both = [seed for seed in a if seed in b]
    n = len(both)

    def around(differences: list[float], t: float) -> tuple[float, float]:
        centre = sum(differences) / n
        return centre, t * math.sqrt(sum((x - centre) ** 2 for x in differences) / (n - 1) / n)

    differences = [a[seed] - b[seed] for seed in both]
    match hidden.variant("q1"):
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


def compared(compare, env: dict, task: str, seeds_a: list[int], seeds_b: list[int]) -> None:
    """An answer is right on six draws, of which some show a difference and some show none."""
    for draw, (gap, spread) in enumerate([(0.1, 0.01), (0.002, 0.004), (-0.05, 0.02), (0.01, 0.05)] * 2):
        seed = hidden.seed(env, f"{task} {draw}")
        a, b = accuracies(seed, seeds_a, 0.7 + gap, spread), accuracies(seed + 1, seeds_b, 0.7, spread)
        more = {"a": (), "b": (0.03, 2.92), "c": (2.353,)}[hidden.variant("q1")]
        want = expected(a, b, *more)
        got = compare(dict(a), dict(b), *more)
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            raise AssertionError(f"compare has to return {len(want)} values")
        for at, (g, w) in enumerate(zip(got, want)):
            if type(g) not in (float, int, bool):
                raise AssertionError(f"value {at} is no number of Python's own, but {type(g).__name__}")
            if not math.isclose(g, w, rel_tol=1e-6, abs_tol=1e-9):
                raise AssertionError(f"value {at} is {g:.6g}, not {w:.6g}")


def compare_values(compare, env: dict) -> None:
    """Both conditions have the same seeds, in the same order."""
    compared(compare, env, "A4.1", [0, 1, 2, 3], [0, 1, 2, 3])


def compare_seeds(compare, env: dict) -> None:
    """The seeds are in different orders, and some seeds only one of the two has."""
    compared(compare, env, "A4.1 seeds", [0, 1, 2, 5, 6], [6, 4, 2, 1, 0])


# --- Task 3: the records ---


def nothing(wrong: list[str]) -> None:
    """Raise `AssertionError` with what is wrong, where something is."""
    if wrong:
        raise AssertionError("; ".join(wrong[:5]))


@lru_cache
def handed_in(student: str) -> tuple[list, list[str]]:
    """The records that came with the notebook, and what is wrong with the other lines."""
    return checks.readable("records.jsonl", student)


def name_of(env: dict) -> str:
    """The student's name, which has to be filled in because it decides the question."""
    student = env.get("STUDENT")
    if not isinstance(student, str) or not student.strip():
        raise AssertionError("STUDENT is not filled in")
    return student


def records_readable(env: dict) -> None:
    """Every line is a whole record of this student's."""
    nothing(handed_in(name_of(env))[1])


def records_complete(env: dict) -> None:
    """The records hold the question's conditions and a control, with three seeds each and the question's
    settings."""
    student = name_of(env)
    nothing(checks.incomplete(handed_in(student)[0], checks.question_of(student)))


def records_tuned(env: dict) -> None:
    """All conditions have the same trials, and their recipes are chosen on validation images."""
    records = handed_in(name_of(env))[0]
    nothing(checks.unequal(records) if records else ["there are no records"])


def records_repeated(env: dict) -> None:
    """The first steps of one run, made here from its settings, have the losses that are recorded."""
    records = [record for record in handed_in(name_of(env))[0] if record.kind == "run"]
    if not records:
        raise AssertionError("there is no run to repeat")
    drawn = sorted(records, key=lambda record: record.key)[hidden.seed(env, "A4.3") % len(records)]
    nothing(checks.not_repeated(drawn))


def finding(answer, env: dict) -> None:
    """The numbers of the statement are those of the records, to 0.05 points."""
    student = name_of(env)
    question = checks.question_of(student)
    contrasts = list(checks.answers(handed_in(student)[0], question).values())
    if len(contrasts) < len(checks.SEEDS):
        raise AssertionError(f"only {len(contrasts)} seeds have all runs that answer the question")
    n, centre = len(contrasts), sum(contrasts) / len(contrasts)
    half = checks.T90[n - 1] * math.sqrt(sum((x - centre) ** 2 for x in contrasts) / (n - 1) / n)
    try:
        numbers = [float(value) for value in answer]
    except (TypeError, ValueError):
        raise AssertionError("FINDING has to be three numbers: mean, low, high") from None
    if len(numbers) != 3:
        raise AssertionError(f"FINDING has {len(numbers)} numbers, not three: mean, low, high")
    for name, g, w in zip(("mean", "low", "high"), numbers, (centre, centre - half, centre + half)):
        if not abs(g - w) <= 0.05:
            raise AssertionError(f"FINDING: {name} is {g:.2f}, by the records it is {w:.2f}")
