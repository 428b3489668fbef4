"""What a ViT has to hand over: maps, features, predictions and weights, each where it arises."""

from typing import NamedTuple

from atbook.drawing import seen
from atbook.drawing.svg import GREY, arrow, box, drawing, pixels, text
from atbook.plot import COLOURS

TEACHER, STUDENT, TOWER = 4, 236, 120  # left edges of the two networks, and their width


class Signal(NamedTuple):
    """Something that crosses from the teacher to the student."""

    name: str
    #: What it tells the student.
    tells: str
    colour: str
    #: "dashed" where a loss pulls the student's to it, "solid" where it takes the student's place.
    line: str


SIGNALS = (
    Signal("weights", "a start", COLOURS["fine-tune"], "solid"),
    Signal("maps", "where to listen", COLOURS["copy"], "solid"),
    Signal("features", "the numbers", COLOURS["distill, tokens"], "dashed"),
    Signal("prediction", "the answer", COLOURS["distill"], "dashed"),
)


def signals() -> str:
    """The drawing, an SVG file."""
    image, parts, top = seen.scene().image, [], 108
    for left, name in ((TEACHER, "teacher"), (STUDENT, "student")):
        middle = left + TOWER / 2
        parts += [text(middle, 13, name, bold=True), pixels(middle - 32, 20, 64, image)]
        parts.append(arrow(middle, 87, middle, top - 4))
        parts.append(box(left, top, TOWER, len(SIGNALS) * 50 + 4, tint=0.06, corner=8))
    for row, signal in enumerate(SIGNALS):
        y = top + 29 + row * 50
        for left, line in ((TEACHER, "solid"), (STUDENT, signal.line)):
            parts.append(box(left + 10, y - 16, TOWER - 20, 32, signal.colour, line, tint=0.2, thick=1.75))
            parts.append(text(left + TOWER / 2, y + 4, signal.name))
        parts.append(arrow(TEACHER + TOWER - 7, y, STUDENT + 7, y, signal.colour, signal.line))
        parts.append(text((TEACHER + TOWER + STUDENT) / 2, y + 18, signal.tells))
    y = top + len(SIGNALS) * 50 + 22
    parts.append(box(4, y - 10, 24, 12, GREY, tint=0.3, thick=1.75, corner=3))
    parts.append(text(34, y, "handed over as it is", "start"))
    parts.append(box(190, y - 10, 24, 12, GREY, "dashed", thick=1.75, corner=3))
    parts.append(text(220, y, "target of a loss", "start"))
    told = "; ".join(f"its {signal.name}: {signal.tells}" for signal in SIGNALS)
    return drawing(y + 8, f"Teacher and student see one image. The teacher can hand over {told}.", parts)
