"""Exercises of card F11, Grafit and SNCA+."""

import torch
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, Wrong

# --- F11.1 ---


def precision(right: Tensor) -> Tensor:
    """The share of right ones up to each rank, (n,)."""
    return right.cumsum(0) / torch.arange(1, len(right) + 1)


def average_precision(right: Tensor) -> Tensor:
    """The mean of the precision at the ranks of the right ones."""
    return (precision(right) * right).sum() / right.sum()


def by_loop(right: Tensor) -> float:
    """The same, one rank after the other."""
    seen, shares = 0.0, []
    for rank, hit in enumerate(right.tolist(), start=1):
        seen += hit
        if hit:
            shares.append(seen / rank)
    return sum(shares) / len(shares)


def at_every_rank(right: Tensor) -> Tensor:
    """You took the mean over all ranks. Only those of the right images count: multiply by `right` first."""
    return precision(right).mean()


def over_all(right: Tensor) -> Tensor:
    """You divided by the number of ranked images. The mean is over the right ones: divide by right.sum()."""
    return (precision(right) * right).sum() / len(right)


def at_the_number_of_right_ones(right: Tensor) -> Tensor:
    """That is the precision at one rank, that of the number of right images. Average precision has one share
    for each right image."""
    return precision(right)[int(right.sum()) - 1]


def first_alone(right: Tensor) -> Tensor:
    """That is one over the rank of the first right image (the reciprocal rank). All right images count."""
    return 1 / (right.argmax() + 1.0)


def recall(right: Tensor) -> Tensor:
    """You divided the count by all right images, not by the rank: that is recall, the share of right images
    that were found."""
    return (right.cumsum(0) / right.sum() * right).sum() / right.sum()


def ranked(text: str) -> tuple[Tensor]:
    """Right and wrong by rank, from "1011"."""
    return (torch.tensor([float(letter) for letter in text], dtype=torch.float64),)


# --- F11.2 ---


def same_class(asked: Tensor, known: Tensor) -> Tensor:
    """(q, n): whether both have one coarse class."""
    return asked[:, None] == known


def nearest_first(scores: Tensor) -> Tensor:
    """The order of scores (q, n), the largest first."""
    return scores.argsort(1, descending=True)


def class_first(cosines: Tensor, asked: Tensor, known: Tensor) -> Tensor:
    """By class, then by cosine."""
    return nearest_first(cosines + 3 * same_class(asked, known))


def two_sorts(cosines: Tensor, asked: Tensor, known: Tensor) -> Tensor:
    """The same by two stable sorts: the last one decides first."""
    order = nearest_first(cosines)
    same = same_class(asked, known).gather(1, order).int()
    return order.gather(1, same.argsort(dim=1, descending=True, stable=True))


def too_little(cosines: Tensor, asked: Tensor, known: Tensor) -> Tensor:
    """You added 1 to those of the same class. Cosines can be 2 apart, and an image of another class can still
    be in front: add more than 2."""
    return nearest_first(cosines + same_class(asked, known))


def multiplied(cosines: Tensor, asked: Tensor, known: Tensor) -> Tensor:
    """You multiplied by 0 and 1: images of other classes all have a score of 0, ahead of those of the same
    class with a negative cosine."""
    return nearest_first(cosines * same_class(asked, known))


def farthest_first(cosines: Tensor, asked: Tensor, known: Tensor) -> Tensor:
    """The order begins with the least similar image: argsort is ascending, unless you say descending=True."""
    return (cosines + 3 * same_class(asked, known)).argsort(1)


def class_alone(cosines: Tensor, asked: Tensor, known: Tensor) -> Tensor:
    """The class comes first, and within it the cosines are forgotten."""
    return same_class(asked, known).int().argsort(dim=1, descending=True, stable=True)


def cosine_alone(cosines: Tensor, asked: Tensor, known: Tensor) -> Tensor:
    """That is the ranking without the coarse class."""
    return nearest_first(cosines)


def ranks_not_numbers(cosines: Tensor, asked: Tensor, known: Tensor) -> Tensor:
    """You returned each image's rank. Asked for is the other table: at each rank, the number of the image."""
    return class_first(cosines, asked, known).argsort(1)


def asked_and_known(queries: int, images: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines and coarse classes of three kinds."""
    cosines = normal(queries, images, seed=seed).tanh()
    return cosines, torch.arange(queries) % 3, torch.arange(images) % 3


EXERCISES = (
    Exercise(
        "F11.1",
        "How far in front?",
        stars=1,
        minutes=10,
        subject="retrieval",
        right=average_precision,
        cases={
            "three of six": lambda: ranked("010110"),
            "the best first": lambda: ranked("11000"),
            "two late ones": lambda: ranked("0010001"),
        },
        also_right=(by_loop,),
        wrong={
            "at every rank": Wrong(at_every_rank),
            "over all": Wrong(over_all),
            "at the number of right ones": Wrong(at_the_number_of_right_ones),
            "first alone": Wrong(first_alone),
            "recall": Wrong(recall),
        },
    ),
    Exercise(
        "F11.2",
        "The class first",
        stars=2,
        minutes=15,
        subject="retrieval",
        right=class_first,
        cases={
            "5 asked, 12 known": lambda: asked_and_known(5, 12),
            "2 asked, 30 known": lambda: asked_and_known(2, 30, seed=3),
        },
        also_right=(two_sorts,),
        wrong={
            "too little": Wrong(too_little),
            "multiplied": Wrong(multiplied),
            "farthest first": Wrong(farthest_first),
            "class alone": Wrong(class_alone),
            "cosine alone": Wrong(cosine_alone),
            "ranks, not numbers": Wrong(ranks_not_numbers),
        },
    ),
)
