"""What the hidden tests of A3 ask; `course/a3/master.md` gives each its points."""

from functools import lru_cache
from math import sqrt
from pathlib import Path

import numpy as np
import torch
from scipy.special import expit, logit
from torch import Tensor

from atbook.exercises.answers import numbers
from atbook.exercises.own import own_seed
from atbook.records import read_file
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import World, generate
from atlib import AttentionTransfer, Plan, create_vit
from atlib.analysis import walks
from atlib.checkpoint import load_vit
from atlib.loading import seed_for
from course import hidden
from course.a3.checks import ORDINARY, best_run, flattered, report_of
from course.hidden import Asked


def number(value, what: str) -> float:
    """A number that an answer returned, as Python's own."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise AssertionError(f"{what}: expected a number, got {type(value).__name__}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise AssertionError(f"{what}: expected a number, got {type(value).__name__}") from None


def same_number(got, want: float, what: str, tolerance: float = 1e-6) -> None:
    """A number is as it must be."""
    hidden.same(torch.tensor(number(got, what), dtype=torch.float64), torch.tensor(want), what, tolerance)


# --- Task 1: unbiased CKA within classes ---


def features(seed: int, sizes: list[dict[int, int]]) -> tuple[list, list, list]:
    """Features of two models and labels, batch by batch; sizes: {class: images} of every batch. The part that
    the models share differs from class to class."""
    shared, wide = hidden.normal(seed, 3, 6), hidden.normal(seed + 1, 3, 5)
    batches = []
    for at, counts in enumerate(sizes):
        labels = torch.tensor([c for c, many in counts.items() for _ in range(many)])
        labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed + at))]
        spread = 1.5 * torch.stack([(hidden.normal(seed + 7 + c, 3) * 0.6).exp() for c in labels.tolist()])
        centre = torch.stack([2 * hidden.normal(seed + 40 + c, 11) for c in labels.tolist()])
        latent = spread * hidden.normal(seed + 100 + at, len(labels), 3)
        rest = centre + 0.5 * hidden.normal(seed + 200 + at, len(labels), 11)
        batches.append((latent @ shared + rest[:, :6], latent @ wide + rest[:, 6:], labels))
    return tuple(list(parts) for parts in zip(*batches))


def groups(xs: list, ys: list, labels: list) -> list[tuple[int, Tensor, Tensor]]:
    """(class, features of one model, of the other) of the images of one class in one batch."""
    return [
        (c, x[kinds == c].double(), y[kinds == c].double())
        for x, y, kinds in zip(xs, ys, labels)
        for c in set(kinds.tolist())
    ]


def by_covariances(x: Tensor, y: Tensor) -> float:
    """HSIC of a group without bias, from its definition: centred tables, and the part that chance adds to
    them."""
    n = len(x)
    K, L = (z @ z.T for z in (x - x.mean(0), y - y.mean(0)))
    K, L = (gram - gram.diag().diag() for gram in (K, L))
    k, l = K.sum(0), L.sum(0)
    inner = (K * L).sum() - 2 * (k * l).sum() / (n - 2) + k.sum() * l.sum() / ((n - 1) * (n - 2))
    return (inner / (n * (n - 3))).item()


def expected_cka(letter: str, xs: list, ys: list, labels: list) -> float:
    """CKA as this edition's variant defines it."""
    of_class = groups(xs, ys, labels)

    def hsic(s: int, t: int) -> float:
        if letter == "c":
            use = [g for g in of_class if len(g[1]) >= 2]
            p = use[0][s].shape[1]
            flat = torch.stack([torch.cov(torch.cat([g[s], g[t]], 1).T)[:p, p:].flatten() for g in use])
            n = torch.tensor([float(len(g[1])) for g in use], dtype=torch.float64)
            pairs = torch.outer(n, n).fill_diagonal_(0)
            return ((flat @ flat.T * pairs).sum() / pairs.sum()).item()
        use = [g for g in of_class if len(g[1]) >= 4]
        sums = {}
        for c, *sides in use:
            x, y = sides[s - 1], sides[t - 1]
            total, many = sums.get(c, (0.0, 0))
            sums[c] = total + len(x) * by_covariances(x, y), many + len(x)
        if letter == "a":
            return sum(total for total, _ in sums.values()) / sum(many for _, many in sums.values())
        return sum(total / many for total, many in sums.values()) / len(sums)

    return hsic(1, 2) / sqrt(hsic(1, 1) * hsic(2, 2))


def cka(cka_within, asked: Asked, inputs: tuple, what: str, tolerance: float = 1e-6) -> None:
    """An answer's CKA is the variant's."""
    want = expected_cka(asked.variants["q1"], *inputs)
    same_number(cka_within(*inputs), want, what, tolerance)


def cka_equal(cka_within, asked: Asked) -> None:
    """Every class has 6 images in every batch."""
    cka(cka_within, asked, features(asked.seed("A3.1"), [{1: 6, 4: 6, 5: 6}] * 3), "CKA of equal groups")


def cka_few(cka_within, asked: Asked) -> None:
    """Classes of 1, 2 and 3 images in a batch, one that is missing from a batch, one from the first."""
    sizes = [{1: 6, 4: 1, 5: 6}, {1: 3, 4: 6, 5: 6, 8: 6}, {1: 6, 4: 2, 5: 6}, {1: 6, 4: 6, 5: 1}]
    cka(cka_within, asked, features(asked.seed("A3.1 few"), sizes), "CKA where classes have few images")


def cka_unequal(cka_within, asked: Asked) -> None:
    """Batches and classes of very unequal sizes."""
    sizes = [{1: 25, 4: 4, 5: 7}, {1: 4, 4: 5}, {1: 5, 4: 18, 5: 4}]
    cka(cka_within, asked, features(asked.seed("A3.1 unequal"), sizes), "CKA of unequal batches")


def cka_single(cka_within, asked: Asked) -> None:
    """Features in single precision, ten thousand times as far from 0 as from each other."""
    xs, ys, labels = features(asked.seed("A3.1 single"), [{1: 6, 4: 6, 5: 6}] * 3)
    inputs = [(x + 1e5).float() for x in xs], [(y - 1e5).float() for y in ys], labels
    cka(cka_within, asked, inputs, "CKA of features in single precision, far from 0", 2e-4)


# --- Task 2: likeness on your images ---

MODELS = ("untrained copy", "copy", "distill", "fine-tune")
BATCHES = [300, 250, 200, 150, 100]


@lru_cache
def likeness(student: str, edition: str, letter: str, files: Path) -> list[list[float]]:
    """CKA within classes of each model's class token with the teacher's, (models, layers), on a student's
    images of Find."""
    drawn = generate("test", sum(BATCHES), seed=own_seed(student, f"{edition}/2"), world=World("find"))
    images, labels = glyph_images(drawn), torch.from_numpy(drawn.shape).split(BATCHES)
    models = {name: load_vit(files / f"find-{name}.safetensors") for name in ("teacher", *MODELS[1:])}
    torch.manual_seed(seed_for(0, "student"))
    for name, student_of in (("untrained copy", create_vit("glyphs")), ("copy", models["copy"])):
        models[name] = AttentionTransfer(models["teacher"], student_of, Plan())

    def tokens(name: str) -> list[list[Tensor]]:
        batches = [seen.stream for (seen,) in walks([models[name]], images, 250)]
        return [list(torch.cat(layer)[:, 0].split(BATCHES)) for layer in zip(*batches)]

    teacher = tokens("teacher")
    return [[expected_cka(letter, x, y, labels) for x, y in zip(tokens(name), teacher)] for name in MODELS]


def table_row(answer, wanted: list[list[float]], row: int, name: str, shape: str, tolerance: float) -> None:
    """A row of a typed table is right within a tolerance."""
    rows = answer if isinstance(answer, (list, tuple)) else ()
    typed = numbers(rows[row], (len(wanted[row]),)) if len(rows) == len(wanted) else None
    if typed is None:
        raise AssertionError(f"{name} has to be {shape}")
    for column, (g, w) in enumerate(zip(typed, wanted[row])):
        if not abs(g - w) <= tolerance:
            raise AssertionError(f"{name}: row {row}, number {column} is off by more than {tolerance}")


def likeness_row(answer, asked: Asked, row: int) -> None:
    wanted = likeness(asked.named(), asked.edition, asked.variants["q1"], asked.files)
    table_row(answer, wanted, row, "LIKENESS", "4 rows, one a model, of 4 numbers, one a layer", 0.01)


def like_floor(answer, asked: Asked) -> None:
    """The floor: untrained Copy, on your images."""
    likeness_row(answer, asked, 0)


def like_copy(answer, asked: Asked) -> None:
    """Copy, on your images."""
    likeness_row(answer, asked, 1)


def like_distill(answer, asked: Asked) -> None:
    """Distill, on your images."""
    likeness_row(answer, asked, 2)


def like_tuned(answer, asked: Asked) -> None:
    """The fine-tuned teacher, on your images."""
    likeness_row(answer, asked, 3)


# --- Tasks 3 and 4: your report ---


def points_above(runs: list, pool: list, shift: str, logits: bool) -> np.ndarray:
    """By how many points each run lies above the line through a pool, on axes of per cent or on logit axes,
    kept away from 0 and 1 as in chapter 9."""

    def axis(of: list, key: str) -> np.ndarray:
        accuracy = np.array([run.results[key] for run in of])
        return logit(np.clip(accuracy, 0.0005, 1 - 0.0005)) if logits else accuracy

    slope, intercept = np.polyfit(axis(pool, ORDINARY), axis(pool, shift), 1)
    expected = intercept + slope * axis(runs, ORDINARY)
    return 100 * (np.array([run.results[shift] for run in runs]) - (expit(expected) if logits else expected))


def able(runs: list) -> list:
    """Those that do not only guess."""
    return [run for run in runs if run.results[ORDINARY] > 0.2]


def runs_of(method: str, files: Path) -> list:
    """A method's runs, by their seeds."""
    runs = [run for run in read_file(files / "shifts.jsonl") if run.method == method]
    return sorted(runs, key=lambda run: run.seed)


def corrected(student: str, edition: str, files: Path) -> list[list[float]]:
    """Points of effective robustness of both methods' runs, (methods, seeds), as chapter 9 has them."""
    shift, methods, _ = report_of(student, edition, files)
    pool = able(read_file(files / "shifts-pool.jsonl"))
    return [points_above(runs_of(method, files), pool, shift, logits=True).tolist() for method in methods]


def points_row(answer, asked: Asked, row: int) -> None:
    wanted = corrected(asked.named(), asked.edition, asked.files)
    table_row(answer, wanted, row, "POINTS", "2 rows, one a method, of 5 numbers, one a seed", 0.1)


def points_first(answer, asked: Asked) -> None:
    """The points of the first method's five runs."""
    points_row(answer, asked, 0)


def points_second(answer, asked: Asked) -> None:
    """The points of the second method's five runs."""
    points_row(answer, asked, 1)


def solution(student: str, edition: str, variants: dict[str, str], files: Path) -> dict[str, str]:
    """What the model solution types in."""
    like = likeness(student, edition, variants["q1"], files)
    points = corrected(student, edition, files)
    return {
        "LIKENESS": str([[round(number, 2) for number in row] for row in like]),
        "POINTS": str([[round(number, 1) for number in row] for row in points]),
    }


def without_each_fault(shift: str, methods: tuple[str, str], files: Path) -> dict[str, float]:
    """What the report's number for its first method becomes without one of its faults, in points."""
    first, second = (runs_of(method, files) for method in methods)
    unjudged, best = read_file(files / "shifts-pool.jsonl"), [best_run(methods[0], shift, files)]
    pool = [*first, *second, *unjudged]
    return {
        "mean of the runs": points_above(first, pool, shift, logits=False).mean().item(),
        "logit axes": points_above(best, pool, shift, logits=True).item(),
        "without the judged runs": points_above(best, unjudged, shift, logits=False).item(),
        "without guessing runs": points_above(best, able(pool), shift, logits=False).item(),
    }


def notes(student: str, edition: str, files: Path) -> str:
    """What a teacher has to know of a student's report before grading task 4."""
    shift, methods, _ = report_of(student, edition, files)
    rows = [
        f"{name} {', '.join(f'{point:+.1f}' for point in row)}"
        for name, row in zip(methods, corrected(student, edition, files))
    ]
    points = flattered(shift, methods, files)
    alone = [f"{what} {to:+.1f}" for what, to in without_each_fault(shift, methods, files).items()]
    right = f"right, seed by seed: {'; '.join(rows)}; one fault taken away alone: {', '.join(alone)}"
    return f"report on {shift}: {points:+.1f} for {methods[0]}; {right}"
