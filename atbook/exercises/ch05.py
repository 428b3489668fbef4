"""Exercises of chapter 5, Photographs."""

import math

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, told

# --- 5.1 ---


def blank_pairs(images: Tensor, grey: float) -> Tensor:
    """What the student sees, and what its teacher sees: (B, 2, 3, height, width)."""
    return torch.stack([torch.full_like(images, grey), images], 1)


def by_filling(images: Tensor, grey: float) -> Tensor:
    """The same, written into an empty tensor."""
    pairs = images.new_empty(len(images), 2, *images.shape[1:])
    pairs[:, 0], pairs[:, 1] = grey, images
    return pairs


# --- 5.2 ---

Seeds = list[float]  # accuracies of one method, one for each seed
Interval = tuple[float, float, float]


def _gains(scratch: Seeds, blank: Seeds, copy: Seeds) -> tuple[np.ndarray, np.ndarray]:
    start = np.array(scratch)
    return np.array(blank) - start, np.array(copy) - start


def share_with_interval(scratch: Seeds, blank: Seeds, copy: Seeds, t: float) -> Interval:
    """The share, and where its interval begins and ends."""
    part, whole = _gains(scratch, blank, copy)
    return _fieller(part.mean(), whole.mean(), np.cov(part, whole, ddof=1) / len(part), t)


def _fieller(part: float, whole: float, of_means: np.ndarray, t: float) -> Interval:
    """From two means and the covariance (2, 2) of these means."""
    a = whole**2 - t**2 * of_means[1, 1]
    b = part * whole - t**2 * of_means[0, 1]
    c = part**2 - t**2 * of_means[0, 0]
    root = math.sqrt(b * b - a * c)
    return float(part / whole), float((b - root) / a), float((b + root) / a)


def by_search(scratch: Seeds, blank: Seeds, copy: Seeds, t: float) -> Interval:
    """The same by looking for the shares at which the t test just fails."""
    part, whole = _gains(scratch, blank, copy)
    share = part.mean() / whole.mean()

    def told_from(s: float) -> float:
        rest = part - s * whole
        return abs(rest.mean()) - t * rest.std(ddof=1) / len(rest) ** 0.5

    low, high = (optimize.brentq(told_from, share, share + by) for by in (-100, 100))
    return float(share), float(low), float(high)


def gain_taken_as_known(scratch, blank, copy, t):
    """You divided the interval of the blind student's gain by Copy's mean gain, as if that were known
    exactly. It was measured in the same few seeds: ask for each share s whether part - s · whole could be
    nothing."""
    part, whole = _gains(scratch, blank, copy)
    reach = t * part.std(ddof=1) / len(part) ** 0.5
    return tuple(float(x / whole.mean()) for x in (part.mean(), part.mean() - reach, part.mean() + reach))


def shares_averaged(scratch, blank, copy, t):
    """You took the share of each seed and the mean of these. A seed in which Copy gains little then decides:
    divide mean gains."""
    part, whole = _gains(scratch, blank, copy)
    shares = part / whole
    reach = t * shares.std(ddof=1) / len(shares) ** 0.5
    return float(shares.mean()), float(shares.mean() - reach), float(shares.mean() + reach)


def spread_of_seeds(scratch, blank, copy, t):
    """Your interval is one for a single seed. The mean over S seeds is more certain: divide variances and
    covariance by S."""
    part, whole = _gains(scratch, blank, copy)
    return _fieller(part.mean(), whole.mean(), np.cov(part, whole, ddof=1), t)


def divided_by_seeds(scratch, blank, copy, t):
    """Variances were divided by S, not by S - 1, so the interval is too short: with few seeds it matters
    (ddof=1)."""
    part, whole = _gains(scratch, blank, copy)
    return _fieller(part.mean(), whole.mean(), np.cov(part, whole, ddof=0) / len(part), t)


def as_if_unrelated(scratch, blank, copy, t):
    """You left out the covariance. Both gains are measured from the same scratch students, so they move
    together."""
    part, whole = _gains(scratch, blank, copy)
    of_means = np.diag(np.diag(np.cov(part, whole, ddof=1))) / len(part)
    return _fieller(part.mean(), whole.mean(), of_means, t)


# --- 5.3 ---


def _flat(p: Tensor) -> Tensor:
    return p.flatten(1)


def _one_hot(labels: Tensor, like: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(labels).to(like)


def _scores(p: Tensor, targets: Tensor, asked: Tensor, ridge: float) -> Tensor:
    """Ridge regression, by as many equations as there are numbers in a map."""
    eye = torch.eye(p.shape[1]).to(p)
    return asked @ torch.linalg.solve(p.T @ p + ridge * eye, p.T @ targets)


def read_labels(p: Tensor, labels: Tensor, asked: Tensor, ridge: float) -> Tensor:
    """What a linear reader says of the classes of other maps: (n, classes)."""
    middle, mean_target = _flat(p).mean(0), _one_hot(labels, p).mean(0)
    return mean_target + _scores(
        _flat(p) - middle, _one_hot(labels, p) - mean_target, _flat(asked) - middle, ridge
    )


def by_images(p: Tensor, labels: Tensor, asked: Tensor, ridge: float) -> Tensor:
    """The same by as many equations as there are images."""
    middle, targets = _flat(p).mean(0), _one_hot(labels, p)
    centred, new = _flat(p) - middle, _flat(asked) - middle
    gram = centred @ centred.T + ridge * torch.eye(len(p)).to(p)
    return targets.mean(0) + new @ centred.T @ torch.linalg.solve(gram, targets - targets.mean(0))


def classes_as_amounts(p, labels, asked, ridge):
    """You fitted the class's number, as if class 2 were twice class 1. Give each class a column of its own:
    1 for its images, 0 for others."""
    middle, start = _flat(p).mean(0), labels.to(p).mean()
    scores = _scores(_flat(p) - middle, labels.to(p)[:, None] - start, _flat(asked) - middle, ridge) + start
    return scores.expand(-1, int(labels.max()) + 1)


def all_maps_centred(p, labels, asked, ridge):
    """The mean was taken over known and asked maps together. What is asked about must not change what was
    learned: take it over the known ones."""
    middle = torch.cat([p, asked]).mean(0)
    targets = _one_hot(labels, p)
    scores = _scores(_flat(p - middle), targets - targets.mean(0), _flat(asked - middle), ridge)
    return targets.mean(0) + scores


def no_ridge(p, labels, asked, ridge):
    """The ridge is missing. With more numbers in a map than there are images, infinitely many readers are
    right on all known maps; the ridge takes the smallest ones."""
    middle, targets = _flat(p).mean(0), _one_hot(labels, p)
    weights = torch.linalg.pinv(_flat(p) - middle) @ (targets - targets.mean(0))
    return targets.mean(0) + (_flat(asked) - middle) @ weights


EXERCISES = (
    Exercise(
        "5.1",
        subject="controls",
        right=blank_pairs,
        cases={
            "3 photographs": lambda: (normal(3, 3, 4, 6), 0.5),
            "one": lambda: (normal(1, 3, 5, 5, seed=1), 0.0),
            "2, darker": lambda: (normal(2, 3, 2, 2, seed=2), -1.2),
        },
        also_right=(by_filling,),
        wrong={
            "The student sees the photograph and the teacher the blank image. Turn"
            " them round: the maps have to be of the photograph, and the student"
            " has to have nothing but these maps.": lambda images, grey: blank_pairs(images, grey).flip(1),
            "The teacher sees the blank image, too, so all its maps"
            " are the same and nothing can be told. It has to see the"
            " photograph.": lambda images, grey: torch.full_like(images, grey)[:, None].repeat(1, 2, 1, 1, 1),
            "Your student sees the photographs of others in the batch. They say nothing about"
            " its own photograph, but they are a noise that blank images do not have: fill"
            " with the grey that is given.": lambda images, grey: torch.stack([images.roll(1, 0), images], 1),
            "You put blank images behind photographs, (2B, 3, height, width). An entry is a pair: stack"
            " along a new axis 1.": lambda images, grey: torch.cat([torch.full_like(images, grey), images]),
            "Your blank image has the photograph's own mean colour, which says something about the"
            " photograph (the sea is blue). It has to be the same image each time.": lambda images, grey: (
                torch.stack([images.mean((2, 3), keepdim=True).expand_as(images), images], 1)
            ),
        },
        see="A student that never sees the photograph",
    ),
    Exercise(
        "5.2",
        subject="intervals",
        right=share_with_interval,
        cases={
            "five seeds": lambda: (
                [32.4, 32.1, 32.9, 32.6, 33.4],
                [49.0, 49.9, 48.2, 50.4, 49.3],
                [53.4, 51.8, 51.1, 52.5, 51.4],
                2.776,
            ),
            "it is not all kept, or more": lambda: (
                [30.0, 33.0, 31.0],
                [44.0, 50.0, 47.0],
                [46.0, 48.0, 47.0],
                4.303,
            ),
            "below scratch": lambda: (
                [14.1, 14.9, 13.8, 15.0],
                [13.0, 13.9, 12.6, 12.9],
                [80, 82, 79, 83],
                3.182,
            ),
        },
        also_right=(by_search,),
        wrong={
            "You divided accuracies. What a student reaches without"
            " any map is no gain: take scratch away, seed by seed.": lambda scratch, blank, copy, t: (
                share_with_interval([0.0] * len(scratch), blank, copy, t)
            ),
            **told(gain_taken_as_known, shares_averaged, spread_of_seeds, divided_by_seeds, as_if_unrelated),
        },
        see="A student that never sees the photograph",
    ),
    Exercise(
        "5.3",
        subject="controls",
        right=read_labels,
        cases={
            "few images": lambda: (
                maps(9, 2, 3, 3),
                torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1]),
                maps(4, 2, 3, 3, seed=1),
                0.1,
            ),
            "many images": lambda: (
                maps(40, 1, 3, 3, seed=2),
                torch.arange(40) % 4,
                maps(5, 1, 3, 3, seed=3),
                1.0,
            ),
        },
        also_right=(by_images,),
        wrong={
            "Nothing was centred, so the penalty pulls on what all maps share,"
            " too. Take the mean of the known maps, and of their targets,"
            " away first, and add the targets' mean again at the end.": lambda p, labels, asked, ridge: (
                _scores(_flat(p), _one_hot(labels, p), _flat(asked), ridge)
            ),
            "You centred the asked maps by their own mean. A reader"
            " has to say the same of a map whatever others are"
            " asked about with it: take the mean of the known maps.": lambda p, labels, asked, ridge: (
                read_labels(p, labels, asked - asked.mean(0) + p.mean(0), ridge)
            ),
            "Your penalty grows with the number of images: the sum of squares is over images, and the ridge"
            " is added once.": lambda p, labels, asked, ridge: read_labels(p, labels, asked, ridge * len(p)),
            **told(classes_as_amounts, all_maps_centred, no_ridge),
        },
        see="What a linear classifier reads from maps",
    ),
)
