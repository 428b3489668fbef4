"""A scene of Match drawn large: where the teacher looks in it, or in a twin, and what the student sees."""

from atbook.drawing import seen
from atbook.drawing.svg import arrow, box, drawing, pixels, spotlight, text
from atbook.plot import COLOURS

LARGE, SMALL = 168, 78
LEFT, RIGHT = 4, 188  # of the two columns
# Frames of the key and of the glyph that is asked for, as in the figures of page D4.
FRAME, KEY, GLYPH = "#00ffff", "dotted", "solid"


def twin() -> str:
    """What the teacher sees beside the image: the teacher's eye on the one, the student's on the other."""
    image, theirs = seen.scene(), seen.scene("routing")
    named = seen.answer("copy", image, theirs)
    alt = (
        f"Two scenes of Match. The student sees the image, which asks for a {image.shape}. The teacher sees "
        f"the twin, which asks for a {theirs.shape}, in the same cell. The teacher's class "
        f"token looks at the key of what it sees in layer 1, and at the {theirs.shape} in layer 3. The "
        f"student uses these maps on the image, and names a {named}."
    )
    sign = "✓" if named == image.shape else "✗"
    parts = [
        text(LEFT + LARGE / 2, 14, "The twin", bold=True),
        text(LEFT + LARGE / 2, 30, "the teacher sees it"),
        text(RIGHT + LARGE / 2, 14, "The image", bold=True),
        text(RIGHT + LARGE / 2, 30, "the student sees it"),
        text(LEFT, 250, "Where its class token looks,", "start"),
        text(LEFT, 265, "layers 1 and 3:", "start"),
        text(RIGHT, 250, "The same places, so it", "start"),
        text(RIGHT, 265, "meets its own glyphs:", "start"),
        arrow(LEFT + LARGE + 1, 312, RIGHT - 1, 312, COLOURS["copy-routing-twin"]),
        text(LEFT + LARGE / 2, 390, f"(a {theirs.shape} in the twin)"),
        text(RIGHT + LARGE / 2, 390, f"It answers: {named} {sign}", bold=True),
    ]
    for left, sees in ((LEFT, theirs), (RIGHT, image)):
        parts += _framed(left, 38, LARGE, sees)
        parts.append(text(left + LARGE / 2, 222, f"the glyph asked for: {sees.shape}"))
        for place, (layer, what) in enumerate(seen.LOOKS.items()):
            x = left + place * (LARGE - SMALL)
            parts += _looked_at(x, 273, SMALL, sees, theirs, layer)
            parts.append(text(x + SMALL / 2, 366, what))
    return drawing(398, alt, parts)


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
