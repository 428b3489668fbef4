"""Exercises of card F5, Class attention."""

import torch
from torch import Tensor

from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, told

# --- F5.1 ---


def one_wide_head(q: Tensor, k: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of wide heads: each new query holds all the old ones side by side, weighted, and each
    key all the old keys."""
    weighted = L[:, :, None, None] * q[:, None]  # (B, new head, old head, N, d)
    wide = weighted.transpose(2, 3).flatten(3)
    keys = k.transpose(1, 2).flatten(2)[:, None]
    return wide, keys.expand(-1, len(L), -1, -1)


def weights_on_the_keys(q: Tensor, k: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
    """The same products: a weight may stand on either side."""
    wide, queries = one_wide_head(k, q, L)
    return queries, wide


def scaled_anew(q, k, L):
    """The logits are too small by a factor of √H: you scaled for the new width H·d. The mixed logits were
    scaled by √d before, and that stays."""
    wide, keys = one_wide_head(q, k, L)
    return wide / q.shape[1] ** 0.5, keys


def heads(B: int, H: int, N: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (B, H, N, d) and a mixing (H, H) that is not symmetric."""
    shape = B, H, N, d
    return normal(*shape, seed=seed), normal(*shape, seed=seed + 1), normal(H, H, seed=seed + 2)


# --- F5.2 ---


def mixed(row: Tensor, v: Tensor) -> dict[str, Tensor]:
    """A row, and what it makes of the values."""
    return {"row": row, "output": row @ v}


def without_itself(p: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Row and output as if the class token had never been a key."""
    return mixed(p[..., 1:] / p[..., 1:].sum(-1, keepdim=True), v[:, :, 1:])


def by_subtraction(p: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The same: take the class token's part out of the output, and scale what is left."""
    share = p[..., :1]
    return {"row": p[..., 1:] / (1 - share), "output": (p @ v - share * v[:, :, :1]) / (1 - share)}


def class_row(B: int, H: int, N: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Class rows (B, H, 1, N + 1) and values (B, H, N + 1, d)."""
    return maps(B, H, 1, N + 1, seed=seed), normal(B, H, N + 1, d, seed=seed + 1)


EXERCISES = (
    Exercise(
        "F5.1",
        subject="attention",
        right=one_wide_head,
        cases={"three heads": lambda: heads(2, 3, 5, 4), "two heads": lambda: heads(1, 2, 3, 2, seed=5)},
        also_right=(weights_on_the_keys,),
        # many queries and keys make the same logits
        view=lambda pair: pair[0] @ pair[1].mT,
        wrong={
            "L was read by columns. Row h of L makes head"
            " h: the old head g counts for it with L[h, g].": lambda q, k, L: one_wide_head(q, k, L.mT),
            "All heads came out the same: the old ones stand side by side without their weights. Head h"
            " weights the old head g with L[h, g].": lambda q, k, L: one_wide_head(q, k, torch.ones_like(L)),
            "Queries *and* keys were weighted, so that each product has L[h, g] squared."
            " Weight one of the two.": lambda q, k, L: (one_wide_head(q, k, L)[0], one_wide_head(k, q, L)[0]),
            "You mixed the queries into one of width d. Then every old query meets"
            " the keys of head h alone; it has to meet its own keys. Put them side"
            " by side, not on top of each other.": lambda q, k, L: (torch.einsum("hg,bgnd->bhnd", L, q), k),
            **told(scaled_anew),
        },
    ),
    Exercise(
        "F5.2",
        subject="attention",
        right=without_itself,
        cases={
            "two heads": lambda: class_row(2, 2, 4, 3),
            "three heads": lambda: class_row(1, 3, 6, 2, seed=5),
        },
        also_right=(by_subtraction,),
        wrong={
            "The row no longer sums to 1: the class token's share is missing. A softmax"
            " over the patches alone divides by their sum.": lambda p, v: mixed(p[..., 1:], v[:, :, 1:]),
            "Each patch got an equal part of the class token's"
            " share. The ratios between patches have to stay:"
            " scale the row.": lambda p, v: mixed(p[..., 1:] + p[..., :1] / (p.shape[-1] - 1), v[:, :, 1:]),
            "You took a softmax of shares. They are past the softmax; what is left of them"
            " only has to be scaled to sum to 1.": lambda p, v: mixed(p[..., 1:].softmax(-1), v[:, :, 1:]),
            "The last patch was left out. The class token is the *first* key.": lambda p, v: mixed(
                p[..., :-1] / p[..., :-1].sum(-1, keepdim=True), v[:, :, :-1]
            ),
            "The row is right and the output is not: row and values are off by one. The class"
            " token's value has to go, too.": lambda p, v: mixed(without_itself(p, v)["row"], v[:, :, :-1]),
            "All heads were scaled alike. Each head has a share of its own on the class"
            " token.": lambda p, v: mixed(p[..., 1:] / (1 - p[..., :1].mean(1, keepdim=True)), v[:, :, 1:]),
        },
    ),
)
