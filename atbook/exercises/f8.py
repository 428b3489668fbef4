"""Exercises of card F8, ResMLP."""

import torch
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, told

# --- F8.1 ---


def finer(A: Tensor, grid: tuple[int, int], s: int) -> Tensor:
    """The map of patches that are cut into s x s: the parts have its row, and they share what others took
    from it."""
    h, w = grid
    table = A.reshape(h, w, h, w)
    for axis in range(4):
        table = table.repeat_interleave(s, axis)
    return table.reshape(s * s * h * w, -1) / s**2


def by_parents(A: Tensor, grid: tuple[int, int], s: int) -> Tensor:
    """The same: the patch that each small one is cut from."""
    h, w = grid
    row, column = torch.arange(s * h) // s, torch.arange(s * w) // s
    parent = (w * row[:, None] + column).flatten()
    return A[parent][:, parent] / s**2


def tiled(A, grid, s):
    """The whole grid was repeated (tensor.repeat). Each patch has to become a block of s x s:
    repeat_interleave."""
    h, w = grid
    return A.reshape(h, w, h, w).repeat(s, s, s, s).reshape(s * s * h * w, -1) / s**2


EXERCISES = (
    Exercise(
        "F8.1",
        subject="static maps",
        right=finer,
        cases={
            "2 x 3 patches, each cut into 2 x 2": lambda: (normal(6, 6), (2, 3), 2),
            "3 x 2 patches, each cut into 3 x 3": lambda: (normal(6, 6, seed=4), (3, 2), 3),
        },
        also_right=(by_parents,),
        wrong={
            "Every sum grew s² times: what was taken from one patch is now taken"
            " from each of its s² parts. Share it among them.": lambda A, grid, s: finer(A, grid, s) * s**2,
            "You divided by s. A patch is cut in both directions, into s² parts.": lambda A, grid, s: (
                finer(A, grid, s) * s
            ),
            "You divided by s² twice. Only *keys* share: a small patch"
            " that listens gets all that its large one got.": lambda A, grid, s: finer(A, grid, s) / s**2,
            "You repeated the flat index, as if a patch's parts followed"
            " each other. Patches are in reading order: bring A to (h, w, h,"
            " w) first.": lambda A, grid, s: A.repeat_interleave(s * s, 0).repeat_interleave(s * s, 1) / s**2,
            "The grid is (patches down, patches across),"
            " and you took it the other way round.": lambda A, grid, s: finer(A, grid[::-1], s),
            **told(tiled),
        },
    ),
)
