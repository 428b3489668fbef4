"""Pictures whose numbers are recorded or computed: the rulers and the twins of book/assets/drawings, made
anew by `make drawings`, and the panels of the front page. All other drawings there are edited as SVG."""

from collections.abc import Iterator

from atbook.drawing.ruler import RULERS, ruler
from atbook.drawing.twin import jigsaw, looks, twin


def drawings() -> Iterator[tuple[str, str]]:
    """The drawings that code makes: (name of the file, its text)."""
    for name, lines in RULERS.items():
        yield f"ruler-{name}.svg", ruler(lines)
    yield "twin.svg", twin()
    yield "twin-message.svg", twin("message")
    yield "looks.svg", looks()
    yield "jigsaw.svg", jigsaw()
