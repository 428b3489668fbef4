"""Exercises of card F10, BinaryViT."""

import torch
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise

# --- F10.1 ---


def differing(q: Tensor, k: Tensor) -> Tensor:
    """In how many places each query differs from each key, (N, M)."""
    return (q[:, None] != k[None]).sum(-1)


def score_by_count(q: Tensor, k: Tensor) -> Tensor:
    """Places that agree count 1 each, places that differ -1."""
    return q.shape[-1] - 2 * differing(q, k)


def by_product(q: Tensor, k: Tensor) -> Tensor:
    """The same, by multiplying signs."""
    return (2 * q.float() - 1) @ (2 * k.float() - 1).T


def bits(*shape: int, seed: int) -> Tensor:
    """Random bits."""
    return normal(*shape, seed=seed) >= 0


# --- F10.2 ---


def factor(weight: Tensor) -> Tensor:
    """Of each row, the mean absolute value, (out, 1)."""
    return weight.abs().mean(1, keepdim=True)


def centred(weight: Tensor) -> Tensor:
    """Each row less its mean."""
    return weight - weight.mean(1, keepdim=True)


def signs(x: Tensor) -> Tensor:
    """1 where x >= 0, else -1."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def one_bit_weights(weight: Tensor) -> Tensor:
    """Signs of the centred weights, times the factor of the uncentred."""
    return signs(centred(weight)) * factor(weight)


def at_their_mean() -> tuple[Tensor]:
    """Rows in which one weight is the mean, and rows all of whose weights have one sign."""
    return (
        torch.tensor(
            [[1.0, 2.0, 3.0], [-4.0, 0.0, 4.0], [-1.0, -2.0, -6.0], [0.5, 0.5, 0.5]], dtype=torch.float64
        ),
    )


EXERCISES = (
    Exercise(
        "F10.1",
        subject="bits",
        right=score_by_count,
        cases={
            "three queries, five keys": lambda: (bits(3, 8, seed=0), bits(5, 8, seed=1)),
            "one equal pair": lambda: (bits(2, 16, seed=2), bits(2, 16, seed=2)),
            "opposites": lambda: (bits(4, 6, seed=3), ~bits(4, 6, seed=3)),
        },
        also_right=(by_product,),
        wrong={
            "You counted the places that agree. Those that"
            " differ are products of -1, and must be taken off.": lambda q, k: q.shape[-1] - differing(q, k),
            "The sign is the wrong way round: two signs that differ have the product -1.": lambda q, k: (
                2 * differing(q, k) - q.shape[-1]
            ),
            "You counted places where both bits are set."
            " Two signs of -1 have the product 1 as well.": lambda q, k: (q[:, None] & k[None]).sum(-1),
            "You multiplied bits of 0 and 1, of which some stand"
            " for -1. Ask where two bits agree.": lambda q, k: q.float() @ k.float().T - differing(q, k),
            "You divided by d. Asked for is the product of the"
            " signs itself, a whole number from -d to d.": lambda q, k: score_by_count(q, k) / q.shape[-1],
            "Rows are keys. A row of scores belongs to one query: (queries, keys).": lambda q, k: (
                score_by_count(q, k).T
            ),
        },
    ),
    Exercise(
        "F10.2",
        subject="bits",
        right=one_bit_weights,
        cases={
            "random weights": lambda: (normal(5, 7, seed=4),),
            "shifted rows": lambda: (normal(4, 6, seed=5) + torch.arange(4.0)[:, None] - 1,),
            "a weight at its row's mean": at_their_mean,
        },
        wrong={
            "You took the signs of the weights as they"
            " are. The mean of each row is taken off first.": lambda weight: signs(weight) * factor(weight),
            "You centred the weights before you took their mean absolute value. The factor is that"
            " of the weights as they are.": lambda weight: signs(centred(weight)) * factor(centred(weight)),
            "A weight at its row's mean became 0: torch.sign(0) is 0. A bit has"
            " two values; here 0 counts as positive.": lambda weight: centred(weight).sign() * factor(weight),
            "You took one factor for all weights. Each row, which"
            " makes one output, has its own.": lambda weight: signs(centred(weight)) * weight.abs().mean(),
            "You took means over the outputs. A row (out, in) belongs to one output, and its mean is"
            " over the inputs: dim=1.": lambda weight: signs(weight - weight.mean(0)) * weight.abs().mean(0),
            "The signs alone are all of size 1. Multiply"
            " each row by its mean absolute value.": lambda weight: signs(centred(weight)),
            "You took the root of the mean square. The factor is the mean absolute value.": lambda weight: (
                signs(centred(weight)) * weight.square().mean(1, keepdim=True).sqrt()
            ),
        },
    ),
)
