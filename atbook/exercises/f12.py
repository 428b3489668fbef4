"""Exercises of card F12, encoder and decoder."""

from collections.abc import Sequence

import torch
from torch import Tensor

from atbook.exercises.judging import Exercise, told

Pairs = Sequence[tuple[int, int]]

# --- F12.1 ---


def marked(pairs: Pairs, M: int, N: int) -> Tensor:
    """1 where a pair is, (M, N)."""
    p = torch.zeros(M, N)
    for source, target in pairs:
        p[target, source] = 1
    return p


def aligned_map(pairs: Pairs, M: int, N: int) -> Tensor:
    """Each row shared among its source words."""
    p = marked(pairs, M, N)
    return p / p.sum(1, keepdim=True).clamp(min=1)


def target_first(pairs, M, N):
    """You took the first number of a pair for the target word. The source comes first in a pair, and last in
    a map."""
    p = torch.zeros(max(M, N), max(M, N))
    for target, source in pairs:
        p[target, source] = 1
    p = p[:M, :N]
    return p / p.sum(1, keepdim=True).clamp(min=1)


def even_where_nothing_is_known(pairs, M, N):
    """A target word without a source word got an even row, and a student would be pulled to it. Asked for is
    a row of zeros, which a loss can leave out."""
    p = marked(pairs, M, N)
    p[p.sum(1) == 0] = 1
    return p / p.sum(1, keepdim=True)


def counted_twice(pairs, M, N):
    """A pair that is there twice got twice the weight. It counts once: set its entry to 1, do not add 1."""
    p = torch.zeros(M, N)
    for source, target in pairs:
        p[target, source] += 1
    return p / p.sum(1, keepdim=True).clamp(min=1)


def last_alone(pairs, M, N):
    """A target word with several source words kept only the last of them. All of them share its row."""
    p = torch.zeros(M, N)
    for source, target in pairs:
        p[target] = 0
        p[target, source] = 1
    return p


EXERCISES = (
    Exercise(
        "F12.1",
        subject="cross-attention",
        right=aligned_map,
        cases={
            "every word once": lambda: ([(0, 1), (1, 2), (2, 0)], 3, 3),
            "one pair twice and one word alone": lambda: (
                [(0, 2), (3, 0), (1, 0), (3, 0), (2, 1), (0, 1)],
                5,
                4,
            ),
            "more source words than target words": lambda: ([(4, 0), (5, 0), (0, 2), (1, 2), (2, 2)], 3, 6),
        },
        wrong={
            "A row with two source words sums to 2. They share the"
            " target word's attention: divide each row by its sum.": lambda pairs, M, N: marked(pairs, M, N),
            "A softmax leaves weight on words that no"
            " pair names. Divide each row by its sum.": lambda pairs, M, N: marked(pairs, M, N).softmax(1),
            "A target word without a source word got a row of NaN:"
            " 0 divided by 0. Divide it by 1 (`clamp(min=1)`).": lambda pairs, M, N: (
                marked(pairs, M, N) / marked(pairs, M, N).sum(1, keepdim=True)
            ),
            "You divided each column by its sum. A map's rows"
            " sum to 1: one row is what one target word reads.": lambda pairs, M, N: (
                marked(pairs, M, N) / marked(pairs, M, N).sum(0, keepdim=True).clamp(min=1)
            ),
            **told(target_first, even_where_nothing_is_known, counted_twice, last_alone),
        },
    ),
)
