"""Attention for one token, with computed numbers: its query meets all keys, a softmax makes shares of the
scores, and the shares weigh the values."""

import numpy as np

from atbook.drawing.svg import GREY, arrow, box, drawing, heat, number, text
from atbook.plot import COLOURS

# Five tokens of width d = 4, and the query of token 1.
TOKENS = ("class", "1", "2", "…", "N−1")
ASKING = 1
QUERIES = np.array([[1, 2, 0, 1], [3, 0, 2, 1], [0, 3, 1, 0], [1, 1, 1, 3], [2, 0, 0, 2]]) / 1.5
KEYS = np.array([[1, 1, 0, 1], [2, 1, 1, 0], [0, 3, 0, 1], [3, 0, 2, 1], [1, 0, 1, 2]]) / 1.5
VALUES = np.array([[1, 0, 2, 1], [0, 2, 1, 0], [2, 1, 0, 3], [3, 0, 1, 2], [0, 1, 3, 0]])
LEFT, STEP = 128, 48  # of the tokens' columns
ALT = (
    "Attention in one head, for one token i. Its query is compared with the keys of all N tokens, which "
    "gives N scores. A softmax turns them into shares that sum to 1: row i of the N by N map. The mean "
    "of all values, weighted with these shares, is the token's output of width d."
)


def attention() -> str:
    """The drawing, an SVG file."""
    scores = QUERIES @ KEYS.T / np.sqrt(KEYS.shape[1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    p = weights / weights.sum(-1, keepdims=True)
    row, output = p[ASKING], p[ASKING] @ VALUES
    parts = [text(52, 14, "token i asks", bold=True), text(LEFT + 2 * STEP, 14, "all N tokens", bold=True)]
    parts += [text(_x(j), 32, name) for j, name in enumerate(TOKENS)]
    parts += [*_vector(52, 40, QUERIES[ASKING] * 1.5, COLOURS["copy-q"]), text(52, 96, "query q_i")]
    parts += [arrow(66, 62, LEFT - 20, 62)]
    for j in range(len(TOKENS)):
        parts += _vector(_x(j), 40, KEYS[j] * 1.5, COLOURS["copy-k"])
    parts.append(text(LEFT + 2 * STEP, 96, "keys k_j, d numbers each"))
    parts.append(text(52, 122, "scores"))
    parts += [text(_x(j), 122, f"{score:.1f}") for j, score in enumerate(scores[ASKING])]
    parts.append(text(LEFT + 2 * STEP, 140, "q_i·k_j / √d"))
    parts += [arrow(36, 130, 36, 162), text(43, 150, "softmax", "start")]
    parts.append(text(52, 182, "shares,"))
    for j, share in enumerate(row):
        parts += [heat(_x(j) - 20, 150, 40, np.array([[share]])), text(_x(j), 206, f"{share:.2f}")]
    parts.append(text(52, 197, "sum to 1"))
    for j in range(len(TOKENS)):
        parts.append(arrow(_x(j), 212, _x(j), 228))
        parts += _vector(_x(j), 232, VALUES[j], COLOURS["copy-v"])
    parts.append(text(52, 250, "weighted"))
    parts.append(text(52, 265, "mean of"))
    parts.append(text(LEFT + 2 * STEP, 288, "values v_j, d numbers each"))
    parts += _map_and_output(p, output)
    return drawing(438, ALT, parts)


def _map_and_output(p: np.ndarray, output: np.ndarray) -> list[str]:
    """Below: the row in its map at the left, the output at the right."""
    top, side = 322, 17
    left = 30
    frame = box(
        left - 2, top + ASKING * side - 2, 5 * side + 4, side + 4, COLOURS["copy-q"], thick=2.5, corner=2
    )
    parts = [text(left + 2.5 * side, top - 8, "the map p: N × N"), heat(left, top, side, p), frame]
    parts += [
        text(left - 8, top + 29, "i", "end"),
        text(left + 2.5 * side, top + 102, "row i: where i listens"),
    ]
    centre = _x(2)
    parts += [arrow(centre, 296, centre, 316, COLOURS["copy-v"])]
    parts += [
        *_vector(centre, 322, output, COLOURS["copy-v"]),
        text(centre + 22, 346, "output of token i,", "start"),
    ]
    parts += [text(centre + 22, 361, "d numbers", "start")]
    parts += [text(centre - 60, 400, "H heads do this side by side.", "start")]
    parts += [text(centre - 60, 416, "H maps; H · d = D numbers", "start")]
    parts += [text(centre - 60, 431, "for each token.", "start")]
    return parts


def _vector(x: float, y: float, values: np.ndarray, colour: str) -> list[str]:
    """A token's vector, one square a number: the fuller, the larger."""
    squares = []
    for place, value in enumerate(values):
        where = f'x="{number(x - 6)}" y="{number(y + 11 * place)}" width="12" height="11"'
        squares.append(f'<rect {where} fill="{colour}" fill-opacity="{number(value / 3)}" stroke="{GREY}"/>')
    return squares


def _x(token: int) -> float:
    return LEFT + STEP * token
