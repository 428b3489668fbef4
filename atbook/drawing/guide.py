"""The decision guide of chapter 10: four questions, one below the other, and what to try for each answer."""

from typing import NamedTuple

from atbook.drawing.svg import GREY, arrow, box, drawing, text
from atbook.plot import COLOURS

QUESTION, ANSWER = (4, 204), (244, 112)  # left edges and widths of the two columns
HEIGHT, STEP = 52, 84


class Question(NamedTuple):
    """A question of the guide. One answer leads to something to try, the other to the next question."""

    #: Its first line, and the second.
    asks: str
    more: str
    #: "yes" or "no": the answer that leads to the right.
    leaves: str
    #: What to try then, and a line below it.
    tries: str
    then: str
    #: The colour of what is tried, that of its method in the book's figures.
    colour: str


QUESTIONS = (
    Question("Is it a model that you want,", "not an explanation?", "no", "copy", "with controls", "copy"),
    Question(
        "Is a ViT of your size pre-", "trained on such images?", "yes", "probe", "then fine-tune", "fine-tune"
    ),
    Question("Can a larger one run while", "you train yours?", "no", "scratch", "more labels", "scratch"),
    Question("Have you many images", "without labels?", "yes", "answers", "then features", "distill, tokens"),
)
LAST = "features, then maps"


def guide() -> str:
    """The drawing, an SVG file."""
    ways = "; ".join(
        f"{number}. {question.asks} {question.more} If {question.leaves}: {question.tries}"
        for number, question in enumerate(QUESTIONS, start=1)
    )
    alt = f"Four questions, one below the other. {ways}; if no, {LAST}, beside scratch."
    (left, width), parts = QUESTION, []
    for row, question in enumerate(QUESTIONS):
        y, goes_on = 4 + row * STEP, "yes" if question.leaves == "no" else "no"
        parts.append(box(left, y, width, HEIGHT, GREY, tint=0.1, corner=8))
        parts.append(text(left + 10, y + 21, question.asks, "start"))
        parts.append(text(left + 10, y + 38, question.more, "start"))
        parts += _leads_to(y, question)
        middle = left + width / 2
        parts.append(arrow(middle, y + HEIGHT + 2, middle, y + STEP - 2))
        parts.append(text(middle + 10, y + HEIGHT + 21, goes_on, "start", bold=True))
    end = 4 + len(QUESTIONS) * STEP
    parts.append(box(left, end, width, 30, COLOURS["distill"], tint=0.25, thick=2, corner=8))
    parts.append(text(left + width / 2, end + 19.5, LAST, bold=True))
    return drawing(end + 36, alt, parts)


def _leads_to(y: float, question: Question) -> list[str]:
    (left, width), start, colour = ANSWER, sum(QUESTION), COLOURS[question.colour]
    return [
        arrow(start + 2, y + HEIGHT / 2, left - 2, y + HEIGHT / 2),
        text((start + left) / 2 - 2, y + HEIGHT / 2 - 6, question.leaves, bold=True),
        box(left, y, width, HEIGHT, colour, tint=0.25, thick=2, corner=8),
        text(left + width / 2, y + 21, question.tries, bold=True),
        text(left + width / 2, y + 38, question.then),
    ]
