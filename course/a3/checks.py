"""Tasks of assignment A3, The same, or just as good?: three variants of the one that is coded, and the report
that each student referees."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atbook.exercises.d3 import biased, hsic_1
from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, checker
from atbook.exercises.own import own_seed
from atbook.records import read_file
from atfamily.measures.cka import MinibatchCKA
from atrun.record import Record

# --- A3.1: (xs, ys, labels), lists of batches, to CKA ---

Batches = Sequence[Tensor]
Group = tuple[Tensor, Tensor, int]  # features of the same images in two models, and their class


def apart(xs: Batches, ys: Batches, labels: Batches) -> list[Group]:
    """The images of one class in one batch."""
    return [
        (x[kinds == c].double(), y[kinds == c].double(), c)
        for x, y, kinds in zip(xs, ys, labels)
        for c in kinds.unique().tolist()
    ]


def whole_batches(xs: Batches, ys: Batches, labels: Batches) -> list[Group]:
    """Wrong: classes are ignored."""
    return [(x, y, 0) for x, y in zip(xs, ys)]


def means_taken_out(xs: Batches, ys: Batches, labels: Batches) -> list[Group]:
    """Wrong: whole batches, minus the means of their classes."""
    less_means = []
    for x, y, kinds in zip(xs, ys, labels):
        same = (kinds[:, None] == kinds).double()
        same /= same.sum(1, keepdim=True)
        less_means.append((x - same @ x, y - same @ y, 0))
    return less_means


def put_together(xs: Batches, ys: Batches, labels: Batches) -> list[Group]:
    """Wrong: the images of one class in all batches."""
    return apart(*([torch.cat(list(batches))] for batches in (xs, ys, labels)))


def ratio(hsic: Callable[[int, int], Tensor]) -> Tensor:
    """CKA from HSICs of the models 0 and 1."""
    return hsic(0, 1) / (hsic(0, 0) * hsic(1, 1)).sqrt()


def by_images(of_group: int, of_class: int) -> float:
    """A group counts by its images."""
    return of_group


def by_classes(of_group: int, of_class: int) -> float:
    """A class counts 1, a group by its share in it."""
    return of_group / of_class


def all_alike(of_group: int, of_class: int) -> float:
    """A group counts 1."""
    return 1.0


def within(weigh: Callable = by_images, groups: Callable = apart, hsic: Callable = hsic_1) -> Callable:
    """CKA from a weighted mean of the groups' HSIC."""

    def cka_within(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
        used = [group for group in groups(xs, ys, labels) if len(group[0]) >= 4]
        images = Counter()
        for x, _, c in used:
            images[c] += len(x)

        def mean(s: int, t: int) -> Tensor:
            tables = [(group[s] @ group[s].T, group[t] @ group[t].T) for group in used]
            weights = [weigh(len(group[0]), images[group[2]]) for group in used]
            return sum(w * hsic(K, L) for w, (K, L) in zip(weights, tables)) / sum(weights)

        return ratio(mean)

    return cka_within


def by_atlib(xs: Batches, ys: Batches, labels: Batches) -> float:
    """Groups as atlib's batches."""
    cka = MinibatchCKA()
    for x, y, _ in apart(xs, ys, labels):
        if len(x) >= 4:
            cka.update(x, y)
    return cka.value()


def class_by_class(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
    """Classes alike, with a loop over them."""
    used = [group for group in apart(xs, ys, labels) if len(group[0]) >= 4]
    totals = torch.zeros(3, dtype=torch.float64)
    for c in {c for _, _, c in used}:
        of_class = [(x, y) for x, y, kind in used if kind == c]
        for at, (s, t) in enumerate(((0, 1), (0, 0), (1, 1))):
            parts = [len(g[0]) * hsic_1(g[s] @ g[s].T, g[t] @ g[t].T) for g in of_class]
            totals[at] += sum(parts) / sum(len(g[0]) for g in of_class)
    return totals[0] / (totals[1] * totals[2]).sqrt()


def mean_of_ratios(weigh: Callable) -> Callable:
    """Wrong: a CKA for every group, and the mean of them."""

    def cka_within(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
        by_group = apart(xs, ys, labels)
        images = Counter()
        for x, _, c in by_group:
            images[c] += len(x)
        weights = [weigh(len(x), images[c]) for x, _, c in by_group]
        ratios = [within()([x], [y], [torch.zeros(len(x))]) for x, y, _ in by_group]
        return sum(w * r for w, r in zip(weights, ratios)) / sum(weights)

    return cka_within


def covariance(group: Group, s: int, t: int, less: int = 1) -> Tensor:
    """The covariance of the features of two models in a group, divided by the number of its images minus
    `less`."""
    x, y = (group[k] - group[k].mean(0) for k in (s, t))
    return x.T @ y / (len(x) - less)


def across(
    weigh: Callable = by_images,
    groups: Callable = apart,
    less: int = 1,
    counted: Callable[[int, Group, int, Group], bool] = lambda i, g, j, h: i != j,
) -> Callable:
    """CKA from products of the covariances of two groups, for all pairs of groups that are counted."""

    def cka_within(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
        numbered = list(enumerate(g for g in groups(xs, ys, labels) if len(g[0]) >= 2))

        def mean(s: int, t: int) -> Tensor:
            covariances = [covariance(g, s, t, less) for _, g in numbered]
            weight = [weigh(len(g[0]), 1) for _, g in numbered]
            chosen = [(i, j) for i, g in numbered for j, h in numbered if counted(i, g, j, h)]
            total = sum(weight[i] * weight[j] * (covariances[i] * covariances[j]).sum() for i, j in chosen)
            return total / sum(weight[i] * weight[j] for i, j in chosen)

        return ratio(mean)

    return cka_within


def all_less_own(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
    """The same as the square of a sum minus the squares."""
    used = [g for g in apart(xs, ys, labels) if len(g[0]) >= 2]
    n = torch.tensor([len(g[0]) for g in used], dtype=torch.float64)

    def mean(s: int, t: int) -> Tensor:
        parts = torch.stack([covariance(g, s, t) for g in used]) * n[:, None, None]
        return (parts.sum(0).square().sum() - parts.square().sum()) / (n.sum() ** 2 - n.square().sum())

    return ratio(mean)


def batches(*counts: tuple[int, ...], seed: int = 0) -> Callable[[], tuple]:
    """Features (n, 5) and (n, 4) that share something, and labels; `counts`: images of each class, a tuple a
    batch. Every class has means and a spread of its own."""

    def make() -> tuple:
        shared, width = normal(3, 5, seed=seed + 90), normal(3, 4, seed=seed + 91)
        centre = 3 * normal(len(counts[0]), 9, seed=seed + 92)
        spread = 2 * normal(len(counts[0]), 3, seed=seed + 93).exp()
        xs, ys, labels = [], [], []
        for at, of_classes in enumerate(counts):
            kinds = torch.arange(len(of_classes)).repeat_interleave(torch.tensor(of_classes))
            kinds = kinds[torch.randperm(len(kinds), generator=torch.Generator().manual_seed(seed + at))]
            latent = normal(len(kinds), 3, seed=seed + 10 + at) * spread[kinds]
            noise = 0.8 * normal(len(kinds), 9, seed=seed + 20 + at) + centre[kinds]
            xs.append(latent @ shared + noise[:, :5])
            ys.append(latent @ width + noise[:, 5:])
            labels.append(3 * kinds + 2)
        return xs, ys, labels

    return make


MILD = {
    "equal groups": batches((6, 6), (6, 6)),
    "unequal groups": batches((12, 4, 5), (4, 5, 14), (4, 9, 0), seed=5),
}
CLASSES = (
    "The classes are ignored, and most of this likeness is that of their means. A group is the images of one"
    " class in one batch."
)
TOGETHER = (
    "The batches were put together. Batches come one by one, and the sum of their estimates is all that may"
    " be kept."
)
RATIOS = (
    "You took a CKA in every group, and then a mean. A ratio of unbiased estimates is biased: each HSIC is"
    " averaged first, and the ratio comes last, once."
)
GROUPS_ALIKE = "Every group counts alike here, one of 4 images as much as one of 12."

# --- A3.3 and A3.4: a report on robustness, with five faults ---

METHODS = ("copy", "distill", "fine-tune", "copy-fine-tuned")
FACTORS = ("background", "blur", "conflicting cue", "contrast", "cue", "noise", "position", "rendering")
FACTORS += ("scale", "texture")
ORDINARY = "test_accuracy"  # a record's accuracy without a shift


class Report(NamedTuple):
    """A report to be refereed: what it compares, and what it says."""

    # The shift, as records call it: "cue@3".
    shift: str
    # The two methods that are compared.
    methods: tuple[str, str]
    # The report.
    text: str


def best_run(method: str, shift: str, folder: Path) -> Record:
    """The run of a method with the highest accuracy under a shift: what no fair comparison takes."""
    runs = [run for run in read_file(folder / "shifts.jsonl") if run.method == method]
    return max(runs, key=lambda run: run.results[shift])


def flattered(shift: str, methods: tuple[str, str], folder: Path) -> float:
    """By how many points the first method's best run lies above a straight line through all runs, its own and
    those that only guess among them, on axes of per cent."""
    runs = [run for run in read_file(folder / "shifts.jsonl") if run.method in methods]
    runs += read_file(folder / "shifts-pool.jsonl")
    x, y = ([run.results[key] for run in runs] for key in (ORDINARY, shift))
    slope, intercept = np.polyfit(x, y, 1)
    best = best_run(methods[0], shift, folder).results
    return 100 * float(best[shift] - intercept - slope * best[ORDINARY])


def report_of(student: str, edition: str, folder: str | Path = ".") -> Report:
    """The report that a student referees. folder: where the records are. Raises `ValueError` for a name that
    is not filled in."""
    folder, seed = Path(folder), own_seed(student, f"{edition}/3")
    shift = f"{FACTORS[seed % len(FACTORS)]}@{(3, 5)[seed // 16 % 2]}"
    pairs = list(permutations(METHODS, 2))
    methods = pairs[seed // 32 % len(pairs)]
    if not read_file(folder / "shifts.jsonl"):
        raise ValueError(
            f"there are no records in {folder / 'shifts.jsonl'}: leave the files beside the notebook"
        )
    lines, losses = [], []
    for method in methods:
        best = best_run(method, shift, folder).results
        before, after = 100 * best[ORDINARY], 100 * best[shift]
        losses.append(before - after)
        lines.append(
            f"  The best of our runs of {method} is right on {before:.1f} % of ordinary images and on"
            f" {after:.1f} % under the shift. It loses {losses[-1]:.1f} points."
        )
    tougher = methods[losses.index(min(losses))]
    points = flattered(shift, methods, folder)
    place = "above" if points > 0 else "below"
    compared = [run for run in read_file(folder / "shifts.jsonl") if run.method in methods]
    many = len(read_file(folder / "shifts-pool.jsonl")) + len(compared)
    text = "\n".join(
        [
            f"We tested {methods[0]} and {methods[1]} under the shift {shift}.",
            *lines,
            f"  So {tougher} is the more robust of the two.",
            f"  We fitted a straight line to all {many} runs that we have, of both methods and of the pool:",
            "  accuracy under the shift against accuracy without it, both in per cent.",
            f"  The best run of {methods[0]} lies {abs(points):.1f} points {place} this line.",
            f"  Its robustness is therefore {'more' if points > 0 else 'less'} than its accuracy promises.",
        ]
    )
    return Report(shift, methods, text)


# --- The exercises ---


EXERCISES = (
    Exercise(
        "A3.1a",
        right=within(),
        also_right=(by_atlib,),
        cases=MILD,
        wrong={
            CLASSES: within(groups=whole_batches),
            "The classes' means were taken out of a batch, and the formula"
            " used on the batch. It is unbiased for images of which none had"
            " a part in another's features: use it on each class by itself.": within(groups=means_taken_out),
            TOGETHER: within(groups=put_together),
            GROUPS_ALIKE + " Weigh by images.": within(all_alike),
            "Every class counts alike here. It is images that do.": within(by_classes),
            RATIOS: mean_of_ratios(by_images),
            "That is from the chapter's biased HSIC. Take HSIC₁ of exercise D3.1.": within(hsic=biased),
        },
    ),
    Exercise(
        "A3.1b",
        right=within(by_classes),
        also_right=(class_by_class,),
        cases=MILD,
        wrong={
            CLASSES: within(by_classes, whole_batches),
            TOGETHER: within(by_classes, put_together),
            GROUPS_ALIKE + " Weigh by images within a class.": within(all_alike),
            "Every image counts alike here, so that large classes rule. It is classes that do.": within(),
            RATIOS: mean_of_ratios(by_classes),
            "That is from the chapter's biased HSIC. Take HSIC₁ of exercise D3.1.": within(
                by_classes, hsic=biased
            ),
        },
    ),
    Exercise(
        "A3.1c",
        right=across(),
        also_right=(all_less_own,),
        cases=MILD,
        wrong={
            CLASSES: across(groups=whole_batches),
            TOGETHER: across(groups=put_together),
            GROUPS_ALIKE + " Weigh both groups by their images.": across(all_alike),
            "A group was multiplied with itself, too. Then chance does not"
            " cancel: only pairs of *different* groups are free of bias.": across(counted=lambda *pair: True),
            "The covariances were divided by n. They are taken about the group's own mean: n − 1.": across(
                less=0
            ),
            "Only pairs of the same class were counted. All pairs of different groups are.": across(
                counted=lambda i, g, j, h: i != j and g[2] == h[2]
            ),
        },
    ),
)

check = checker(EXERCISES)
