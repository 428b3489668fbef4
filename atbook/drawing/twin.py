"""A scene of Match: where the teacher looks in it, layer by layer, or in a twin; what the student sees."""

from atbook.drawing import seen
from atbook.drawing.svg import arrow, box, drawing, pixels, spotlight, text
from atbook.plot import COLOURS
from atfamily.measures.controls import patch_order

LARGE, SMALL = 168, 78
LEFT, RIGHT = 4, 188  # of the two columns
# Frames of the key and of the glyph that is asked for, as in the figures of page D4.
FRAME, KEY, GLYPH = "#00ffff", "dotted", "solid"


# Of a twin: where its glyph is, and what the student meets there.
MEETS = {
    "routing": ("in the same cell", "The same places, so it", "meets its own glyphs:"),
    "message": ("in another cell", "Other places in this", "image, wrong glyphs:"),
}


def twin(kind: str = "routing") -> str:
    """What the teacher sees beside the image: the teacher's eye on the one, the student's on the other. kind:
    of twin, "routing" or "message"."""
    image, twin_scene = seen.scene(), seen.scene(kind)
    named = seen.answer("copy", image, twin_scene)
    where, *meets = MEETS[kind]
    alt = (
        f"Two scenes of Match. The student sees the image, which asks for a {image.shape}. The teacher sees "
        f"the twin, which asks for a {twin_scene.shape}, {where}. The teacher's class "
        f"token looks at the key of what it sees in layer 1, and at the {twin_scene.shape} in layer 3. The "
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
        text(RIGHT, 250, meets[0], "start"),
        text(RIGHT, 265, meets[1], "start"),
        arrow(LEFT + LARGE + 1, 312, RIGHT - 1, 312, COLOURS[f"copy-{kind}-twin"]),
        text(LEFT + LARGE / 2, 390, f"(a {twin_scene.shape} in the twin)"),
        text(RIGHT + LARGE / 2, 390, f"It answers: {named} {sign}", bold=True),
    ]
    for left, sees in ((LEFT, twin_scene), (RIGHT, image)):
        parts += _framed(left, 38, LARGE, sees)
        parts.append(text(left + LARGE / 2, 222, f"the glyph asked for: {sees.shape}"))
        for place, (layer, what) in enumerate(seen.LOOKS.items()):
            x = left + place * (LARGE - SMALL)
            parts += _looked_at(x, 273, SMALL, sees, twin_scene, layer)
            meant = sees is twin_scene or kind == "routing"
            parts.append(text(x + SMALL / 2, 366, what if meant else f"not {what}"))
    return drawing(398, alt, parts)


def looks() -> str:
    """Where the teacher's class token looks in the scene, a frame for each layer."""
    image, size, step = seen.scene(), 82, 90
    parts, phrases = [], []
    for layer in range(len(image.maps)):
        x = 4 + layer * step
        shares = image.looks(layer).flatten()
        words = f"key {shares[image.key]:.2f}", f"glyph {shares[image.cell]:.2f}"
        phrases.append(f"layer {layer}, {words[0]}, {words[1]}")
        parts.append(text(x + size / 2, 14, f"layer {layer}", bold=True))
        parts += _looked_at(x, 22, size, image, image, layer)
        parts += [text(x + size / 2, 120 + 15 * line, what) for line, what in enumerate(words)]
    alt = "A scene of Match four times, darker where the teacher's class token does not look. Shares of its "
    return drawing(140, f"{alt}attention, of the head that looks there most: {'; '.join(phrases)}.", parts)


def jigsaw() -> str:
    """The scene under the class token's row of layer 3, and under the same row over shuffled patches."""
    image, layer, size, y = seen.scene(), 3, 148, 54
    row = image.looks(layer)
    order = patch_order(row.size, 0, seed=0).numpy()
    shuffled = row.flatten()[order].reshape(row.shape)
    parts = [arrow(LEFT + size + 8, y + size / 2, 360 - LEFT - size - 8, y + size / 2, COLOURS["copy"])]
    columns = (
        (LEFT, row, "The teacher's map", "points to its glyph"),
        (360 - LEFT - size, shuffled, "Over shuffled patches", "it points to another cell"),
    )
    for x, shares, *words in columns:
        parts += [text(x + size / 2, 16 + 16 * line, what, bold=line == 0) for line, what in enumerate(words)]
        parts += [pixels(x, y, size, image.image), spotlight(x, y, size, shares)]
        parts += _frames(x, y, size, image, thick=2)
    alt = (
        f"A scene of Match twice. On the left, all but its {image.shape} is dark: there the teacher's class "
        "token looks. On the right, the same weights lie over the patches in a shuffled order, and a "
        "different cell is bright."
    )
    return drawing(y + size + 6, alt, parts)


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
