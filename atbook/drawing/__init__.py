"""The drawings of the book: small SVG files in book/assets/drawings, made by this code (`make drawings`)."""

from collections.abc import Iterator

from atbook.drawing.attention import attention
from atbook.drawing.family import CARDS, card
from atbook.drawing.guide import guide
from atbook.drawing.method import VARIANTS, method
from atbook.drawing.ruler import RULERS, ruler
from atbook.drawing.signals import signals
from atbook.drawing.translation import translation
from atbook.drawing.twin import jigsaw, looks, twin


def drawings() -> Iterator[tuple[str, str]]:
    """All drawings of the book: (name of the file, its text)."""
    yield "attention.svg", attention()
    for name, variant in VARIANTS.items():
        yield f"method-{name}.svg", method(variant)
    for name, of in CARDS.items():
        yield f"card-{name}.svg", card(of)
    yield "card-encoder-and-decoder.svg", translation()
    for name, lines in RULERS.items():
        yield f"ruler-{name}.svg", ruler(lines)
    yield "twin.svg", twin()
    yield "twin-message.svg", twin("message")
    yield "looks.svg", looks()
    yield "jigsaw.svg", jigsaw()
    yield "signals.svg", signals()
    yield "guide.svg", guide()
