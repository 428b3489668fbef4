"""A scene of Match drawn large: where the teacher looks in it, or in a twin, and what the student sees."""

from typing import NamedTuple

from atbook.drawing import seen
from atbook.drawing.svg import arrow, box, drawing, pixels, spotlight, text
from atbook.plot import COLOURS

LARGE, SMALL = 168, 78
LEFT, RIGHT = 4, 188  # of the two columns
# Frames of the key and of the glyph that is asked for, as in the figures of chapter 11.
FRAME, KEY, GLYPH = "#00ffff", "dotted", "solid"


class Control(NamedTuple):
    """A picture that the teacher sees while the student sees the image."""

    #: What it shares with the image (`atbook.worlds.glyphs.TWINS`); None is the image itself.
    twin: str | None
    #: Its name, which stands above it.
    name: str
    #: Two lines: which places its maps name in the image, and what the student finds there.
    leads_to: tuple[str, str]


CONTROLS = {
    "twin-none": Control(None, "the image", ("The same places, so it", "meets the same glyphs:")),
    "twin": Control("routing", "the twin", ("The same places, so it", "meets its own glyphs:")),
    "twin-message": Control("message", "the twin", ("Other places, so it", "meets other glyphs:")),
}


def twin(control: Control) -> str:
    """What the teacher sees beside the image: the teacher's eye on the one, the student's on the other."""
    image, theirs = seen.scene(), seen.scene(control.twin)
    named = seen.answer("copy", image, theirs)
    there = "the same cell" if theirs.cell == image.cell else "another cell"
    alt = (
        f"Two scenes of Match. The student sees the image, which asks for a {image.shape}. The teacher sees "
        f"{control.name}, which asks for a {theirs.shape}, in {there}. The teacher's class "
        f"token looks at the key of what it sees in layer 1, and at the {theirs.shape} in layer 3. The "
        f"student uses these maps on the image, and names a {named}."
    )
    parts = [
        text(LEFT + LARGE / 2, 14, control.name.capitalize(), bold=True),
        text(LEFT + LARGE / 2, 30, "the teacher sees it"),
        text(RIGHT + LARGE / 2, 14, "The image", bold=True),
        text(RIGHT + LARGE / 2, 30, "the student sees it"),
        text(LEFT, 250, "Where its class token looks,", "start"),
        text(LEFT, 265, "layers 1 and 3:", "start"),
        text(RIGHT, 250, control.leads_to[0], "start"),
        text(RIGHT, 265, control.leads_to[1], "start"),
        arrow(LEFT + LARGE + 1, 312, RIGHT - 1, 312, COLOURS["copy-routing-twin"]),
        text(LEFT + LARGE / 2, 390, f"(a {theirs.shape} in {control.name})"),
        text(RIGHT + LARGE / 2, 390, f"It answers: {named} {_mark(named, image)}", bold=True),
    ]
    for left, sees in ((LEFT, theirs), (RIGHT, image)):
        parts += _framed(left, 38, LARGE, sees)
        parts.append(text(left + LARGE / 2, 222, f"the glyph asked for: {sees.shape}"))
        otherwise = "" if sees.cell == theirs.cell else "not "
        for place, (layer, what) in enumerate(seen.LOOKS.items()):
            x = left + place * (LARGE - SMALL)
            parts += _looked_at(x, 273, SMALL, sees, theirs, layer)
            parts.append(text(x + SMALL / 2, 366, otherwise + what))
    return drawing(398, alt, parts)


def front() -> str:
    """The book in one picture: a scene, the teacher's map, and a student with and without it."""
    image = seen.scene()
    given, alone = seen.answer("copy", image, image), seen.answer("scratch", image)
    alt = (
        f"A scene of sixteen cells: a square in a bright frame, the key, and fifteen coloured glyphs. The "
        f"task is to name the glyph that has the key's hue, a {image.shape}. The teacher's class token looks "
        f"at the key in layer 1 and at the {image.shape} in layer 3. A student that is given these maps "
        f"answers {given}; one without a teacher answers {alone}."
    )
    big, small, x = 196, 72, 266
    parts = [text(LEFT, 16, "Which glyph has the colour of the key?", "start", 13, bold=True)]
    parts += [*_framed(LEFT, 28, big, image), text(x + small / 2, 39, "teacher looks at")]
    for place, (layer, what) in enumerate(seen.LOOKS.items()):
        y = 47 + place * 100
        parts += [*_looked_at(x, y, small, image, image, layer), text(x + small / 2, y + small + 14, what)]
        parts.append(arrow(LEFT + big + 6, y + small / 2, x - 6, y + small / 2))
    for y, line, colour, words, said in (
        (246, "solid", COLOURS["copy"], "A student given these maps says", given),
        (278, "dashed", COLOURS["scratch"], "A student without a teacher says", alone),
    ):
        parts.append(box(LEFT, y, 352, 26, colour, line, tint=0.2 if line == "solid" else 0))
        parts += [
            text(LEFT + 12, y + 17.5, words, "start"),
            text(346, y + 17.5, f"{said} {_mark(said, image)}", "end", 13, bold=True),
        ]
    return drawing(308, alt, parts)


def _mark(said: str, image: seen.Seen) -> str:
    """Whether an answer is right, as a sign."""
    return "✓" if said == image.shape else "✗"


def _framed(x: float, y: float, size: float, sees: seen.Seen) -> list[str]:
    """A scene, with a dotted frame round the key and a solid one round the glyph that is asked for."""
    return [pixels(x, y, size, sees.image), *_frames(x, y, size, sees, thick=3)]


def _looked_at(
    x: float, y: float, size: float, shown: seen.Seen, maps_of: seen.Seen, layer: int
) -> list[str]:
    """A scene under the veil of the class token's row of the teacher's map of `maps_of`."""
    veil = spotlight(x, y, size, maps_of.looks(layer))
    return [pixels(x, y, size, shown.image), veil, *_frames(x, y, size, shown, thick=1.5)]


def _frames(x: float, y: float, size: float, sees: seen.Seen, thick: float) -> list[str]:
    side = size / 4
    return [
        box(x + cell % 4 * side, y + cell // 4 * side, side, side, FRAME, line, thick=thick, corner=0)
        for cell, line in ((sees.key, KEY), (sees.cell, GLYPH))
    ]
