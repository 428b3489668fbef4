"""Exercises of card F10, BinaryViT."""

import torch
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, Wrong

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


def agreeing(q: Tensor, k: Tensor) -> Tensor:
    """You counted the places that agree. Those that differ are products of -1, and must be taken off."""
    return q.shape[-1] - differing(q, k)


def other_sign(q: Tensor, k: Tensor) -> Tensor:
    """The sign is the wrong way round: two signs that differ have the product -1."""
    return 2 * differing(q, k) - q.shape[-1]


def both_set(q: Tensor, k: Tensor) -> Tensor:
    """You counted places where both bits are set. Two signs of -1 have the product 1 as well."""
    return (q[:, None] & k[None]).sum(-1)


def bits_multiplied(q: Tensor, k: Tensor) -> Tensor:
    """You multiplied bits of 0 and 1, of which some stand for -1. Ask where two bits agree."""
    return q.float() @ k.float().T - differing(q, k)


def averaged(q: Tensor, k: Tensor) -> Tensor:
    """You divided by d. Asked for is the product of the signs itself, a whole number from -d to d."""
    return score_by_count(q, k) / q.shape[-1]


def keys_first(q: Tensor, k: Tensor) -> Tensor:
    """Rows are keys. A row of scores belongs to one query: (queries, keys)."""
    return score_by_count(q, k).T


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


def row_by_row(weight: Tensor) -> Tensor:
    """The same, one row after the other."""
    rows = []
    for row in weight:
        size = sum(abs(w) for w in row.tolist()) / len(row)
        rows.append([size if w - row.mean() >= 0 else -size for w in row])
    return torch.tensor(rows, dtype=weight.dtype)


def not_centred(weight: Tensor) -> Tensor:
    """You took the signs of the weights as they are. The mean of each row is taken off first."""
    return signs(weight) * factor(weight)


def factor_of_the_centred(weight: Tensor) -> Tensor:
    """You centred the weights before you took their mean absolute value. The factor is that of the weights as
    they are."""
    return signs(centred(weight)) * factor(centred(weight))


def three_values(weight: Tensor) -> Tensor:
    """A weight at its row's mean became 0: torch.sign(0) is 0. A bit has two values; here 0 counts as
    positive."""
    return centred(weight).sign() * factor(weight)


def one_factor(weight: Tensor) -> Tensor:
    """You took one factor for all weights. Each row, which makes one output, has its own."""
    return signs(centred(weight)) * weight.abs().mean()


def of_columns(weight: Tensor) -> Tensor:
    """You took means over the outputs. A row (out, in) belongs to one output, and its mean is over the
    inputs: dim=1."""
    return signs(weight - weight.mean(0)) * weight.abs().mean(0)


def no_factor(weight: Tensor) -> Tensor:
    """The signs alone are all of size 1. Multiply each row by its mean absolute value."""
    return signs(centred(weight))


def length_of_the_row(weight: Tensor) -> Tensor:
    """You took the root of the mean square. The factor is the mean absolute value: with it the signs are
    nearest to the weights."""
    return signs(centred(weight)) * weight.square().mean(1, keepdim=True).sqrt()


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
        "Attention by counting",
        stars=1,
        minutes=10,
        subject="bits",
        right=score_by_count,
        cases={
            "three queries, five keys": lambda: (bits(3, 8, seed=0), bits(5, 8, seed=1)),
            "one equal pair": lambda: (bits(2, 16, seed=2), bits(2, 16, seed=2)),
            "opposites": lambda: (bits(4, 6, seed=3), ~bits(4, 6, seed=3)),
        },
        also_right=(by_product,),
        wrong={
            "agreeing places": Wrong(agreeing),
            "the other sign": Wrong(other_sign),
            "both set": Wrong(both_set),
            "bits multiplied": Wrong(bits_multiplied),
            "averaged": Wrong(averaged),
            "keys first": Wrong(keys_first),
        },
    ),
    Exercise(
        "F10.2",
        "Weights of one bit",
        stars=2,
        minutes=15,
        subject="bits",
        right=one_bit_weights,
        cases={
            "random weights": lambda: (normal(5, 7, seed=4),),
            "shifted rows": lambda: (normal(4, 6, seed=5) + torch.arange(4.0)[:, None] - 1,),
            "a weight at its row's mean": at_their_mean,
        },
        also_right=(row_by_row,),
        wrong={
            "not centred": Wrong(not_centred),
            "the factor of the centred": Wrong(factor_of_the_centred),
            "three values": Wrong(three_values),
            "one factor": Wrong(one_factor),
            "columns": Wrong(of_columns),
            "no factor": Wrong(no_factor),
            "the root of the mean square": Wrong(length_of_the_row),
        },
    ),
)
