"""What all drawings are made of: texts, boxes, arrows, pictures and heat maps, each a string of SVG.

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
DASHES = {"solid": "", "dashed": "5 3", "dotted": "1.5 3"}


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
    """A rectangle. line: "solid", "dashed" or "dotted". tint: how much of the colour fills it, 0 to 1."""
    dashes = f' stroke-dasharray="{DASHES[line]}"' if DASHES[line] else ""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    look = f'stroke="{colour}" stroke-width="{number(thick)}" fill="{colour}" fill-opacity="{number(tint)}"'
    return f'<rect {place} rx="{number(corner)}" {look}{dashes}/>'


def arrow(x: float, y: float, to_x: float, to_y: float, colour: str = GREY) -> str:
    """A straight arrow."""
    length = np.hypot(to_x - x, to_y - y)
    along_x, along_y = (to_x - x) / length, (to_y - y) / length
    back_x, back_y = to_x - 7 * along_x, to_y - 7 * along_y
    corners = [(to_x, to_y), (back_x - 4 * along_y, back_y + 4 * along_x)]
    corners.append((back_x + 4 * along_y, back_y - 4 * along_x))
    head = "L".join(f"{number(a)} {number(b)}" for a, b in corners)
    shaft = f"M{number(x)} {number(y)}L{number(back_x)} {number(back_y)}"
    return (
        f'<path d="{shaft}" stroke="{colour}" stroke-width="2" fill="none"/>'
        f'<path d="M{head}z" fill="{colour}"/>'
    )


def pixels(x: float, y: float, size: float, image: np.ndarray) -> str:
    """A picture, uint8 (3, height, width), each pixel a square, drawn `size` wide: one path a colour."""
    _, height, width = image.shape
    side = size / width
    runs: dict[str, str] = {}
    for row in range(height):
        start = 0
        for column in range(1, width + 1):
            if column == width or (image[:, row, column] != image[:, row, start]).any():
                colour = "#" + "".join(f"{value:02x}" for value in image[:, row, start])
                runs[colour] = runs.get(colour, "") + f"M{start} {row}h{column - start}v1H{start}z"
                start = column
    paths = "".join(f'<path fill="{colour}" d="{path}"/>' for colour, path in runs.items())
    # the ground is the commonest colour: as one square it leaves no seams between the runs
    commonest = max(runs, key=lambda colour: len(runs[colour]))
    ground = f'<path fill="{commonest}" d="M0 0h{width}v{height}H0z"/>'
    place = f"translate({number(x)} {number(y)}) scale({side:.4f})"
    frame = box(x, y, size, size, thick=1, corner=0)
    return f'<g transform="{place}" shape-rendering="crispEdges">{ground}{paths}</g>{frame}'


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


def spotlight(x: float, y: float, size: float, shares: np.ndarray) -> str:
    """A veil for a picture of `size`: a cell with a smaller share (rows, columns) of attention is darker."""
    side = size / len(shares)
    veil = ""
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            dark = 0.8 * (1 - round(float(share), 1))
            corner = f"M{number(x + column * side)} {number(y + row * side)}"
            if dark > 0:
                square = f"{corner}h{number(side)}v{number(side)}h-{number(side)}z"
                veil += f'<path d="{square}" fill-opacity="{number(dark)}"/>'
    return f'<g shape-rendering="crispEdges">{veil}</g>'


def drawing(height: float, alt: str, parts: Iterable[str]) -> str:
    """The file: `alt` says in words what the drawing shows."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" viewBox="0 0 {WIDTH} {number(height)}" '
        f'width="{WIDTH}" height="{number(height)}" font-family="system-ui, sans-serif" role="img">'
    )
    return "\n".join([head, f"<title>{escape(alt)}</title>", STYLE, *parts, "</svg>", ""])
