"""The book's experiment in pictograms, a panel for each world: what the teacher sees, a map, what the student
sees, and how often students are right; and a photograph, its map, and what a blind student sees."""

import base64
import io
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from PIL import Image

from atbook.drawing import seen
from atbook.drawing.svg import GREY, box, drawing, heat, number, text
from atbook.plot import COLOURS, two_groups

SIZE, STEP, TOP = 52, 82, 54  # of a picture; of a row; where the first row begins
TEACHER, MAP, STUDENT, BAR, WIDE = 4, 70, 136, 206, 146  # left edges, and the width of 100 %


class Row(NamedTuple):
    """What a student gets."""

    #: Said above the row.
    name: str
    #: What the teacher sees, None for the student's scene, or where there is no picture, words for it.
    sees: str | None
    #: Whose own map is drawn, where it is not the teacher's.
    whose: str | None = None


ROWS = {
    "scratch": Row("Nothing", "no|teacher", "scratch"),
    "oracle": Row("Perfect routing: the cell is told", "no|teacher", "oracle"),
    "copy-routing-twin": Row("Maps of a routing twin: same places", "routing"),
    "copy-message-twin": Row("Maps of a message twin: same answer", "message"),
    "copy": Row("The maps of the same scene", None),
    "fine-tune": Row("The teacher's weights", "its|weights", "fine-tune"),
}


def pictograms(task: str, accuracies: Mapping[str, Any]) -> str:
    """The panel of a world, "find" or "match", as SVG for a page: a row for each of `ROWS`, whose accuracies
    (shares) are those of its name."""
    title, image = task.capitalize(), seen.scene(task=task)
    heads = ((TEACHER, "teacher", "sees"), (MAP, "map", ""), (STUDENT, "student", "sees"))
    parts = [text(4, 14, f"{title}: name the {image.shape}", "start", 14, bold=True)]
    for x, *lines in heads:
        parts += [text(x + SIZE / 2, 32 + 13 * i, line) for i, line in enumerate(lines) if line]
    parts.append(text(BAR, 45, "right, of 100 new scenes", "start"))
    phrases = []
    for i, (method, row) in enumerate(ROWS.items()):
        y = TOP + i * STEP
        parts += [text(4, y + 13, row.name, "start", bold=True), *_pictures(y + 19, row, image, task)]
        results, words = _accuracy(y + 19, method, accuracies[method])
        parts += results
        phrases.append(f"{row.name}: {words}")
    guess = number(BAR + WIDE / 8)
    lines = (
        f'<path d="M{guess} {TOP}V{TOP + len(ROWS) * STEP - 6}" stroke="{GREY}" stroke-dasharray="1.5 3"/>'
    )
    parts += [lines, text(BAR + WIDE / 8, TOP + len(ROWS) * STEP + 7, "guessing")]
    alt = f"{title}, a row for each thing that a student gets, and how many of 100 scenes it has right. "
    file = drawing(TOP + len(ROWS) * STEP + 14, "", parts)
    return _in_a_page(file, alt + "; ".join(phrases) + ".")


def photograph(image: np.ndarray, shares: np.ndarray) -> str:
    """A photograph (3, height, width), 8 bits, a class token's row on its patch grid (from 0 to 1), and a
    grey square, three pictures for a page."""
    large = Image.fromarray(image.transpose(1, 2, 0)).resize((448, 448), Image.Resampling.BICUBIC)
    map = Image.fromarray((255 * colormaps["magma"](np.clip(shares / 0.5, 0, 1))[..., :3]).astype(np.uint8))
    blank = Image.new("RGB", (8, 8), (124, 124, 124))
    pictures = (
        (large, "The teacher sees the photograph.", "A white horse on a meadow."),
        (
            map,
            "Its maps are handed over (here, one row of one layer).",
            "Sixteen cells, a few of them bright.",
        ),
        (blank, "The student sees a grey square.", "A grey square."),
    )
    return _panels(
        "panels three",
        (
            f'<img src="{_address(picture)}" alt="{escape(alt)}">{escape(words)}'
            for picture, words, alt in pictures
        ),
    )


def both(accuracies: Mapping[str, Mapping[str, Any]]) -> str:
    """The panels of both worlds, {task: {method: accuracy}}."""
    return _panels("panels", (pictograms(task, of_world) for task, of_world in accuracies.items()))


def _panels(kind: str, parts: Iterable[str]) -> str:
    return f'<div class="{kind}">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def _pictures(y: float, row: Row, image: seen.Seen, task: str) -> list[str]:
    parts = [_picture(STUDENT, y, image.image)]
    if row.whose is None:
        sees = seen.scene(row.sees, task)
        return [*parts, _picture(TEACHER, y, sees.image), heat(MAP, y, SIZE / 4, sees.looks(3))]
    parts.append(box(TEACHER, y, SIZE, SIZE, GREY, "dashed"))
    words = row.sees.split("|")
    parts += [text(TEACHER + SIZE / 2, y + 24 + 14 * i, word) for i, word in enumerate(words)]
    if row.whose == "oracle":
        shares = np.eye(16)[image.cell].reshape(4, 4)
    else:
        shares = seen.looks_of(row.whose, image, task)
    return [*parts, heat(MAP, y, SIZE / 4, shares)]


def _accuracy(y: float, method: str, accuracy: Any) -> tuple[list[str], str]:
    """A bar up to the mean, or, where the seeds are two groups, the seeds alone; and the result in words."""
    seeds, colour = sorted(accuracy.of_seeds), COLOURS.get(method, GREY)
    groups = two_groups(seeds)
    lines = [_group(group) for group in groups[::-1]] or [f"{100 * accuracy.mean:.1f} %"]
    parts = [
        text(BAR, y + 24 - 14 * (len(lines) - 1 - i), line, "start", bold=True)
        for i, line in enumerate(lines)
    ]
    if not groups:
        parts.append(box(BAR, y + 31, WIDE * accuracy.mean, 12, colour, tint=0.45, thick=1, corner=0))
    dots = "".join(
        f'<circle cx="{number(BAR + WIDE * seed)}" cy="{number(y + 37)}" r="2.5"/>' for seed in seeds
    )
    ends = f"M{BAR} {number(y + 29)}v16M{BAR + WIDE} {number(y + 29)}v16"
    parts.append(f'<path d="{ends}" stroke="{GREY}"/><g fill="{colour}" stroke="{GREY}">{dots}</g>')
    return parts, ", ".join(lines)


def _group(seeds: list[float]) -> str:
    low, high = (f"{100 * end:.0f}" for end in (seeds[0], seeds[-1]))
    return f"{len(seeds)} seeds: {low} to {high} %" if len(seeds) > 1 else f"1 seed: {low} %"


def _picture(x: float, y: float, image: np.ndarray) -> str:
    address = _address(Image.fromarray(image.transpose(1, 2, 0)))
    place = f'x="{number(x)}" y="{number(y)}" width="{SIZE}" height="{SIZE}"'
    return f'<image {place} style="image-rendering:pixelated" href="{address}"/>'


def _address(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _in_a_page(file: str, alt: str) -> str:
    """A drawing that takes the colour of the page around it."""
    svg = re.sub(r"<(style|title)>.*?</\1>\n?", "", file, flags=re.S)
    return svg.replace("<svg ", f'<svg aria-label="{escape(alt)}" ', 1)
