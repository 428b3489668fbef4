"""Pictures whose numbers are recorded: the rulers of book/assets/drawings, made anew by `make drawings`, and
the panels of the front page. All other drawings there are edited as SVG."""

from collections.abc import Iterator

from atbook.drawing.ruler import RULERS, ruler


def drawings() -> Iterator[tuple[str, str]]:
    """The drawings that code makes: (name of the file, its text)."""
    for name, lines in RULERS.items():
        yield f"ruler-{name}.svg", ruler(lines)
