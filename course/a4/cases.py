"""What the hidden tests of A4 ask; `course/a4/master.md` gives each its points."""

import math

import torch

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


LONGEST = 120.0  # seconds of a processor for a run's first steps, or for its accuracies
DRAWN = 3  # runs whose accuracies are measured anew
READ = """
import random, sys
sys.path.insert(0, {folder!r})
import checks

def examined(records, weights, student, drawn, folder):
    records, wrong = checks.readable(records.numpy().tobytes(), student)
    question = checks.question_of(student)
    runs = sorted((record for record in records if record.kind == "run"), key=lambda run: run.key)
    runs = random.Random(drawn).sample(runs, len(runs))  # in an order of this student's own
    return {expression}
"""


def of_records(asked: Asked, expression: str, weights: bytes = b"", seconds: float = LONGEST) -> list:
    """What an expression says of the records that came with the notebook: they are read in the cage, and may
    ask for a billion images. It knows `records`, what is `wrong` with other lines, and the drawn `runs`."""
    code = READ.format(folder=str(asked.files), expression=expression)
    records = asked.uploads.get("records.jsonl", b"")[: checks.LARGEST]
    content = [torch.frombuffer(bytearray(part or b"\n"), dtype=torch.uint8) for part in (records, weights)]
    given = [*content, asked.named(), asked.seed("A4.3"), str(asked.files)]
    reply = asked.cage.call(code, "examined", given, seconds=seconds)
    if reply.error:
        raise AssertionError(f"the records cannot be examined here: {reply.error}")
    return reply.value


def nothing_wrong(asked: Asked, expression: str, **more) -> None:
    """Raise `AssertionError` with what an expression says is wrong, where something is."""
    if wrong := of_records(asked, f"({expression})[:5]", **more):
        raise AssertionError("; ".join(wrong))


def records_readable(asked: Asked) -> None:
    """Every line is a whole record of this student's."""
    nothing_wrong(asked, "wrong")


def records_complete(asked: Asked) -> None:
    """The records hold the question's conditions and a control, with three seeds each and the question's
    settings."""
    nothing_wrong(asked, "checks.incomplete(records, question)")


def records_tuned(asked: Asked) -> None:
    """All conditions have the same trials, and their recipes are chosen on validation images."""
    nothing_wrong(asked, "checks.unequal(records) if records else wrong")


def records_repeated(asked: Asked) -> None:
    """The first steps of one run, made here from its settings, have the losses that are recorded."""
    losses = "checks.losses_of(runs[0].config['settings'], runs[0].seed, folder)"
    nothing_wrong(asked, f"checks.not_repeated(runs[0], {losses}) if runs else {NO_RUN}")


def records_measured(asked: Asked) -> None:
    """The accuracies of three runs are those of the weights that were handed in."""
    weights = asked.uploads.get(checks.WEIGHTS, b"")
    if not 0 < len(weights) <= checks.MOST_BYTES:
        size = f"it has to have 1 to {checks.MOST_BYTES} bytes, and has {len(weights)}"
        raise AssertionError(f"{checks.WEIGHTS}, which `checks.run` writes beside the records: {size}")
    drawn = f"checks.not_measured(runs[:{DRAWN}], weights.numpy().tobytes(), folder) if runs else {NO_RUN}"
    nothing_wrong(asked, drawn, weights=weights, seconds=DRAWN * LONGEST)


NO_RUN = ["there is no run to look at"]


def finding(answer, asked: Asked) -> None:
    """The numbers of the statement are those of the records, to 0.05 points."""
    contrasts = of_records(asked, "list(checks.answers(records, question).values())")
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
