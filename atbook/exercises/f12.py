"""Exercises of card F12, encoder and decoder."""

from collections.abc import Sequence

import torch
from torch import Tensor

from atbook.exercises.judging import Exercise, Wrong

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


def row_by_row(pairs: Pairs, M: int, N: int) -> list[list[float]]:
    """The same, without torch."""
    rows = []
    for target in range(M):
        sources = {source for source, of in pairs if of == target}
        rows.append([1 / len(sources) if place in sources else 0.0 for place in range(N)])
    return rows


def target_first(pairs: Pairs, M: int, N: int) -> Tensor:
    """You took the first number of a pair for the target word. The source comes first in a pair, and last in
    a map."""
    p = torch.zeros(max(M, N), max(M, N))
    for target, source in pairs:
        p[target, source] = 1
    p = p[:M, :N]
    return p / p.sum(1, keepdim=True).clamp(min=1)


def not_shared(pairs: Pairs, M: int, N: int) -> Tensor:
    """A row with two source words sums to 2. They share the target word's attention: divide each row by its
    sum."""
    return marked(pairs, M, N)


def nothing_divided_by_nothing(pairs: Pairs, M: int, N: int) -> Tensor:
    """A target word without a source word got a row of NaN: 0 divided by 0. Divide it by 1
    (`clamp(min=1)`)."""
    p = marked(pairs, M, N)
    return p / p.sum(1, keepdim=True)


def even_where_nothing_is_known(pairs: Pairs, M: int, N: int) -> Tensor:
    """A target word without a source word got an even row, and a student would be pulled to it. Asked for is
    a row of zeros, which a loss can leave out."""
    p = marked(pairs, M, N)
    p[p.sum(1) == 0] = 1
    return p / p.sum(1, keepdim=True)


def by_softmax(pairs: Pairs, M: int, N: int) -> Tensor:
    """A softmax leaves weight on words that no pair names. Divide each row by its sum."""
    return marked(pairs, M, N).softmax(1)


def columns_shared(pairs: Pairs, M: int, N: int) -> Tensor:
    """You divided each column by its sum. A map's rows sum to 1: one row is what one target word reads."""
    p = marked(pairs, M, N)
    return p / p.sum(0, keepdim=True).clamp(min=1)


def counted_twice(pairs: Pairs, M: int, N: int) -> Tensor:
    """A pair that is there twice got twice the weight. It counts once: set its entry to 1, do not add 1."""
    p = torch.zeros(M, N)
    for source, target in pairs:
        p[target, source] += 1
    return p / p.sum(1, keepdim=True).clamp(min=1)


def last_alone(pairs: Pairs, M: int, N: int) -> Tensor:
    """A target word with several source words kept only the last of them. All of them share its row."""
    p = torch.zeros(M, N)
    for source, target in pairs:
        p[target] = 0
        p[target, source] = 1
    return p


EXERCISES = (
    Exercise(
        "F12.1",
        "From an alignment to a map",
        stars=2,
        minutes=15,
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
        also_right=(row_by_row,),
        wrong={
            "target first": Wrong(target_first),
            "not shared": Wrong(not_shared),
            "nothing divided by nothing": Wrong(nothing_divided_by_nothing),
            "even where nothing is known": Wrong(even_where_nothing_is_known),
            "softmax": Wrong(by_softmax),
            "columns shared": Wrong(columns_shared),
            "counted twice": Wrong(counted_twice),
            "the last alone": Wrong(last_alone),
        },
    ),
)
