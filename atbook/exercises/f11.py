"""Exercises of card F11, Grafit and SNCA+."""

import torch
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise

# --- F11.1 ---


def precision(right: Tensor) -> Tensor:
    """The share of right ones up to each rank, (n,)."""
    return right.cumsum(0) / torch.arange(1, len(right) + 1)


def average_precision(right: Tensor) -> Tensor:
    """The mean of the precision at the ranks of the right ones."""
    return (precision(right) * right).sum() / right.sum()


def ranked(text: str) -> tuple[Tensor]:
    """Right and wrong by rank, from "1011"."""
    return (torch.tensor([float(letter) for letter in text], dtype=torch.float64),)


# --- F11.2 ---


def same_class(asked_classes: Tensor, known_classes: Tensor) -> Tensor:
    """(q, n): whether both have one coarse class."""
    return asked_classes[:, None] == known_classes


def nearest_first(scores: Tensor) -> Tensor:
    """The order of scores (q, n), the largest first."""
    return scores.argsort(1, descending=True)


def class_first(cosines: Tensor, asked_classes: Tensor, known_classes: Tensor) -> Tensor:
    """By class, then by cosine."""
    return nearest_first(cosines + 3 * same_class(asked_classes, known_classes))


def two_sorts(cosines: Tensor, asked_classes: Tensor, known_classes: Tensor) -> Tensor:
    """The same by two stable sorts: the last one decides first."""
    order = nearest_first(cosines)
    same = same_class(asked_classes, known_classes).gather(1, order).int()
    return order.gather(1, same.argsort(dim=1, descending=True, stable=True))


def asked_and_known(queries: int, images: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines and coarse classes of three kinds."""
    cosines = normal(queries, images, seed=seed).tanh()
    return cosines, torch.arange(queries) % 3, torch.arange(images) % 3


EXERCISES = (
    Exercise(
        "F11.1",
        subject="retrieval",
        right=average_precision,
        cases={
            "three of six": lambda: ranked("010110"),
            "the best first": lambda: ranked("11000"),
            "two late ones": lambda: ranked("0010001"),
        },
        wrong={
            "You took the mean over all ranks. Only those of"
            " the right images count: multiply by `right` first.": lambda right: precision(right).mean(),
            "You divided by the number of ranked images. The mean is over the right"
            " ones: divide by right.sum().": lambda right: (precision(right) * right).sum() / len(right),
            "That is the precision at one rank, that of the number of right images. Average precision"
            " has one share for each right image.": lambda right: precision(right)[int(right.sum()) - 1],
            "That is one over the rank of the first right image"
            " (the reciprocal rank). All right images count.": lambda right: 1 / (right.argmax() + 1.0),
            "You divided the count by all right images, not by"
            " the rank: that is recall, the share of right images"
            " that were found.": lambda right: (right.cumsum(0) / right.sum() * right).sum() / right.sum(),
        },
    ),
    Exercise(
        "F11.2",
        subject="retrieval",
        right=class_first,
        cases={
            "5 asked, 12 known": lambda: asked_and_known(5, 12),
            "2 asked, 30 known": lambda: asked_and_known(2, 30, seed=3),
        },
        also_right=(two_sorts,),
        wrong={
            "You added 1 to those of the same class. Cosines can be 2 apart,"
            " and an image of another class can still be in front: add"
            " more than 2.": lambda cosines, *classes: nearest_first(cosines + same_class(*classes)),
            "You multiplied by 0 and 1: images of other classes all have a"
            " score of 0, ahead of those of the same class with a negative"
            " cosine.": lambda cosines, *classes: nearest_first(cosines * same_class(*classes)),
            "The order begins with the least similar image:"
            " argsort is ascending, unless you say descending=True.": lambda cosines, *classes: (
                cosines + 3 * same_class(*classes)
            ).argsort(1),
            "The class comes first, and within it the cosines are forgotten.": lambda cosines, *classes: (
                same_class(*classes).int().argsort(dim=1, descending=True, stable=True)
            ),
            "That is the ranking without the coarse class.": lambda cosines, *classes: nearest_first(cosines),
            "You returned each image's rank. Asked for is the other table: at each rank, the number"
            " of the image.": lambda cosines, *classes: class_first(cosines, *classes).argsort(1),
        },
    ),
)
