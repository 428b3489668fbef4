"""What all drawings are made of: texts, boxes and heat maps, each a string of SVG.

A drawing is at most 360 units wide, so that its letters of 12 units are 12 pixels large on a phone. Its
ground is transparent. What is said is `currentColor`, the colour of the text around it; lines are a grey that
can be seen on white and on black. Nothing in a drawing has an id, so that a page may hold several of them.
"""

from collections.abc import Iterable
from html import escape

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex

WIDTH = 360
GREY = "#808080"
# A file that is shown as an image does not know the colours of its page, only whether the page is dark. The
# halo keeps letters legible where it is told wrong. The book puts the drawing itself into the page instead,
# without this (tools/book_pages.py).
STYLE = (
    "<style>svg{color:#1f2328}text{paint-order:stroke;stroke:#fff;stroke-width:2px}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3}text{stroke:#14181e}}</style>"
)
DASHES = {"solid": "", "dashed": "5 3"}


def number(value: float) -> str:
    """A coordinate, without digits that nobody sees: 12, 3.5."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, words: str, anchor: str = "middle", size: float = 12, bold: bool = False) -> str:
    """A line of text at its base line. anchor: what of it is at x, "start", "middle" or "end"."""
    weight = ' font-weight="700"' if bold else ""
    place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" font-size="{number(size)}"'
    return f'<text {place} fill="currentColor"{weight}>{escape(words)}</text>'


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str = GREY,
    line: str = "solid",
    tint: float = 0.0,
    thick: float = 1.5,
    corner: float = 4,
) -> str:
    """A rectangle. line: "solid" or "dashed". tint: how much of the colour fills it, 0 to 1."""
    dashes = f' stroke-dasharray="{DASHES[line]}"' if DASHES[line] else ""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    look = f'stroke="{colour}" stroke-width="{number(thick)}" fill="{colour}" fill-opacity="{number(tint)}"'
    return f'<rect {place} rx="{number(corner)}" {look}{dashes}/>'


def heat(x: float, y: float, side: float, shares: np.ndarray) -> str:
    """A table of shares (rows, columns), each a square of `side`; the scale is 0 (black) to 1 (white), that
    of all maps of the book."""
    squares = ""
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            colour = to_hex(colormaps["magma"](round(float(share), 2)))
            squares += f'<path fill="{colour}" d="M{column} {row}h1v1h-1z"/>'
    place = f"translate({number(x)} {number(y)}) scale({number(side)})"
    rows, columns = shares.shape
    frame = box(x, y, side * columns, side * rows, thick=1, corner=0)
    return f'{frame}<g transform="{place}" shape-rendering="crispEdges">{squares}</g>'


def drawing(height: float, alt: str, parts: Iterable[str]) -> str:
    """The file: `alt` says in words what the drawing shows."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" viewBox="0 0 {WIDTH} {number(height)}" '
        f'width="{WIDTH}" height="{number(height)}" font-family="system-ui, sans-serif" role="img">'
    )
    return "\n".join([head, f"<title>{escape(alt)}</title>", STYLE, *parts, "</svg>", ""])
