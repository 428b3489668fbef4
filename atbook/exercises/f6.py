"""Exercises of card F6, LayerScale and depth."""

import torch
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise

# --- F6.1 ---


def fold_in(weight: Tensor, bias: Tensor, gamma: Tensor) -> dict[str, Tensor]:
    """Weight and bias with the factors in them: a row of the weight makes one channel, and so does an entry
    of the bias."""
    return {"weight": gamma[:, None] * weight, "bias": gamma * bias}


def by_diagonal(weight: Tensor, bias: Tensor, gamma: Tensor) -> dict[str, Tensor]:
    """The same, with the factors as a diagonal matrix."""
    scale = torch.diag(gamma)
    return {"weight": scale @ weight, "bias": scale @ bias}


def linear(D: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weight (D, width), bias (D,) and factors (D,) of both signs, none of them near 0."""
    factors = normal(D, seed=seed + 2)
    return normal(D, width, seed=seed), normal(D, seed=seed + 1), factors + 0.5 * factors.sign()


EXERCISES = (
    Exercise(
        "F6.1",
        subject="deep ViTs",
        right=fold_in,
        cases={"square": lambda: linear(4, 4), "wide": lambda: linear(3, 12, seed=5)},
        also_right=(by_diagonal,),
        wrong={
            "The factors were multiplied into the *columns* of the weight:"
            " those meet what comes into the layer. A channel that comes out is"
            " made by a row.": lambda weight, bias, gamma: {"weight": weight * gamma, "bias": gamma * bias},
            "The weight is folded and the bias is not. The factor multiplies all that the layer gives,"
            " its bias too.": lambda weight, bias, gamma: {"weight": gamma[:, None] * weight, "bias": bias},
            "All channels got one factor, the mean."
            " Each channel has a factor of its own.": lambda weight, bias, gamma: (
                {"weight": gamma.mean() * weight, "bias": gamma.mean() * bias}
            ),
            "You divided by the factors: that takes out what is to be put in.": lambda weight, bias, gamma: {
                "weight": weight / gamma[:, None],
                "bias": bias / gamma,
            },
            "1 was added to the factors. The stream is added outside of the branch,"
            " where no factor is; the last linear layer knows only the branch.": lambda weight, bias, gamma: (
                {"weight": (1 + gamma[:, None]) * weight, "bias": (1 + gamma) * bias}
            ),
        },
    ),
)
