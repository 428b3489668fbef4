"""The method, and its variants: what a teacher hands over, and what a student learns.

Teacher and student stand side by side, each with the parts of an attention layer, one below the other. What
is handed over crosses from left to right. A part from the teacher has a solid line and is tinted; a part that
the student learns is dashed; one that it does not use is dotted: they can be told apart without colours.
"""

from dataclasses import dataclass

import numpy as np

from atbook.drawing import seen
from atbook.drawing.svg import GREY, arrow, box, drawing, heat, pixels, text
from atbook.plot import COLOURS

# The parts of a layer, from top to bottom.
PARTS = ("queries q", "keys k", "map p", "values v", "all the rest")
# Where things are: the towers' left edges and width, and the parts' first row, distance and height.
TEACHER, STUDENT, TOWER = 2, 236, 122
FIRST, STEP, CHIP = 172, 30, 24
PICTURE = 96
MAP = 64  # side of the map between the towers


@dataclass(frozen=True)
class Variant:
    """One way to hand attention over. The defaults are Copy."""

    #: What the drawing says, as its alternative text.
    alt: str
    #: The colour of what is handed over, that of its method in the book's figures.
    colour: str = COLOURS["copy"]
    #: Which of `PARTS` is handed over.
    part: str = "map p"
    #: Distilled: the student keeps its own, which a loss pulls to the teacher's.
    pulled: bool = False
    #: Rows of the map that are handed over: ("class", "patches"), or one of the two.
    rows: tuple[str, ...] = ("class", "patches")
    #: The teacher looks at the routing twin.
    twin: bool = False
    #: The student looks at an empty image.
    blank: bool = False


VARIANTS = {
    "copy": Variant(
        "Copy. Teacher and student see one image. The teacher is frozen; its map replaces the student's. "
        "The student learns its values and all the rest, and does not use its queries and keys."
    ),
    "distill": Variant(
        "Distill. The student learns all its parts, also the queries and keys that make its own map. A "
        "cross-entropy pulls this map to the frozen teacher's.",
        colour=COLOURS["distill"],
        pulled=True,
    ),
    "queries": Variant(
        "Q-transfer. The frozen teacher hands over its queries alone. The student learns keys and values, "
        "and its map is made of the teacher's queries and its own keys.",
        colour=COLOURS["copy-q"],
        part="queries q",
    ),
    "twin": Variant(
        "Copy with a twin. The teacher looks at the twin, the student at the image; the student uses the "
        "teacher's map of the twin, and learns everything else.",
        colour=COLOURS["copy-routing-twin"],
        twin=True,
    ),
    "blank": Variant(
        "Copy with a blank image. The teacher looks at the image, the student at an empty one. All that the "
        "student learns about the image is in the teacher's map.",
        colour=COLOURS["copy-message-twin"],
        blank=True,
    ),
    "class-row": Variant(
        "Copy of the class token's row. One row of the map is the teacher's; the rows of the patches are the "
        "student's own, made of its queries and keys.",
        rows=("class",),
    ),
    "patch-rows": Variant(
        "Copy of the patches' rows. The class token's row is the student's own, made of its queries and "
        "keys; all other rows are the teacher's.",
        rows=("patches",),
    ),
}


def method(variant: Variant) -> str:
    """The drawing of a variant, an SVG file."""
    teachers = seen.scene("routing" if variant.twin else None)
    parts = [
        text(TEACHER + TOWER / 2, 13, "sees the twin" if variant.twin else "sees the image"),
        pixels(TEACHER + (TOWER - PICTURE) / 2, 20, PICTURE, teachers.image),
        text(STUDENT + TOWER / 2, 13, "sees a blank image" if variant.blank else "sees the image"),
        *(_blank() if variant.blank else [pixels(_picture(STUDENT), 20, PICTURE, seen.scene().image)]),
    ]
    for left in (TEACHER, STUDENT):
        parts.append(arrow(left + TOWER / 2, 20 + PICTURE + 3, left + TOWER / 2, 138))
        parts.append(box(left, 140, TOWER, 38 + len(PARTS) * STEP, tint=0.06, corner=8))
    parts += [
        text(TEACHER + TOWER / 2, 159, "teacher, frozen", bold=True),
        text(STUDENT + TOWER / 2, 159, "student", bold=True),
    ]
    for row, name in enumerate(PARTS):
        parts += _teachers_part(variant, row, name)
        parts += _students_part(variant, row, name)
    looks = teachers.maps[1]  # the head in which the class token looks at the key
    parts += _handed_over(variant, looks[int(looks[:, 0, 1 + teachers.key].argmax())])
    end = 140 + 38 + len(PARTS) * STEP
    parts += [
        arrow(STUDENT + TOWER / 2, end, STUDENT + TOWER / 2, end + 18),
        text(STUDENT + TOWER / 2, end + 33, "its answer"),
        text(TEACHER + TOWER / 2, end + 17, "needed for training" if variant.pulled else "needed for every"),
        text(TEACHER + TOWER / 2, end + 33, "only" if variant.pulled else "image"),
    ]
    return drawing(end + 66, variant.alt, parts + _legend(variant, end + 58))


def _teachers_part(variant: Variant, row: int, name: str) -> list[str]:
    handed = name == variant.part
    colour = variant.colour if handed else GREY
    return [
        box(TEACHER + 7, _top(row), TOWER - 14, CHIP, colour, tint=0.3 if handed else 0.12),
        text(TEACHER + TOWER / 2, _top(row) + 16.5, name, bold=handed),
    ]


def _students_part(variant: Variant, row: int, name: str) -> list[str]:
    left, width, top = STUDENT + 7, TOWER - 14, _top(row)
    middle = text(STUDENT + TOWER / 2, top + 16.5, name)
    if name == variant.part and not variant.pulled:
        if len(variant.rows) == 2:
            given = box(left, top, width, CHIP, variant.colour, tint=0.3, thick=2.5)
            return [given, text(STUDENT + TOWER / 2, top + 16.5, name, bold=True)]
        return _half_given(variant, left, top, width)
    if _unused(variant, name):
        return [box(left, top, width, CHIP, line="dotted"), f'<g opacity="0.6">{middle}</g>']
    own = f"own {name}" if name == "map p" else name
    colour = variant.colour if name == variant.part else GREY
    return [
        box(left, top, width, CHIP, colour, "dashed", thick=1.75),
        text(STUDENT + TOWER / 2, top + 16.5, own),
    ]


def _half_given(variant: Variant, left: float, top: float, width: float) -> list[str]:
    """The student's map where only some rows are the teacher's."""
    parts = []
    for place, rows in enumerate(("class", "patches")):
        x, wide = left + place * width * 0.44, width * (0.44, 0.56)[place] - 2
        given = rows in variant.rows
        look = {"colour": variant.colour, "tint": 0.3, "thick": 2.5} if given else {"line": "dashed"}
        parts.append(box(x, top, wide, CHIP, **look))
        parts.append(text(x + wide / 2, top + 16.5, rows, bold=given))
    return parts


def _unused(variant: Variant, name: str) -> bool:
    """Whether the student makes this part and nothing depends on it."""
    whole_map = variant.part == "map p" and not variant.pulled and len(variant.rows) == 2
    return whole_map and name in ("queries q", "keys k")


def _handed_over(variant: Variant, p: np.ndarray) -> list[str]:
    """What crosses from the teacher to the student, and how."""
    y, middle = _top(PARTS.index(variant.part)) + CHIP / 2, (TEACHER + TOWER + STUDENT) / 2
    left, right = TEACHER + TOWER - 7, STUDENT + 7
    if variant.part != "map p":
        arrows = [arrow(left + 2, y, right - 3, y, variant.colour)]
        return [*arrows, text(middle, y - 8, "only these"), text(middle, y + 18, "H × N × d")]
    patches = np.arange(len(p)) > 0
    shown, what = {("class",): (~patches, "H × 1 × N"), ("patches",): (patches, "H × (N−1) × N")}.get(
        variant.rows, (None, "H × N × N")
    )
    line = "dashed" if variant.pulled else "solid"
    return [
        heat(middle - MAP / 2, y - 14 - MAP, MAP / len(p), p, shown),
        arrow(left + 2, y, right - 3, y, variant.colour, line),
        text(middle, y + 18, "target of a" if variant.pulled else what),
        *([text(middle, y + 33, "cross-entropy")] if variant.pulled else []),
    ]


def _legend(variant: Variant, y: float) -> list[str]:
    """What the lines of the boxes mean."""
    shown = [("solid", "from the teacher", 9), ("dashed", "learned", 152), ("dotted", "not used", 243)]
    parts = []
    for line, words, x in shown[: 2 + any(_unused(variant, name) for name in PARTS)]:
        solid = line == "solid"
        colour = variant.colour if solid else GREY
        parts.append(box(x, y - 10, 24, 12, colour, line, tint=0.3 if solid else 0, thick=1.75, corner=3))
        parts.append(text(x + 30, y, words, "start"))
    return parts


def _blank() -> list[str]:
    return [box(_picture(STUDENT), 20, PICTURE, PICTURE, tint=0.25, corner=0)]


def _picture(tower: float) -> float:
    return tower + (TOWER - PICTURE) / 2


def _top(row: int) -> float:
    return FIRST + row * STEP
