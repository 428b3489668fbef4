"""A chapter's figure in a slide, drawn by the chapter's own cell: `figure("04-routing-or-message",
"fig-two-worlds", worlds=both_worlds())`."""

import ast
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import jupytext
import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown
from matplotlib.figure import Figure

from atbook import plot
from atbook.exercises import headings
from atbook.records import markdown_table

ROOT = Path(__file__).parents[2]
USUAL = {"np": np, "plot": plot, "plt": plt, "torch": torch}  # what chapters import at their beginning


def figure(
    chapter: str, name: str, size: tuple[float, float] | None = None, from_start: bool = False, **variables
) -> Figure:
    """The figure that the cell of that name draws, in a chapter or another page. variables: what its code
    takes from earlier cells; from_start: whether to run these cells in place of that; size: in inches; a size
    below the chapter's makes the letters larger. Raises `ValueError` for an unknown name."""
    page = next(path for room in ("notebooks", "book") if (path := ROOT / room / f"{chapter}.md").exists())
    cells = [cell for cell in jupytext.read(page).cells if cell.cell_type == "code"]
    named = {cell.metadata.get("mystnb", {}).get("figure", {}).get("name"): cell for cell in cells}
    if name not in named:
        raise ValueError(f"{chapter} has no figure {name!r}; it has {', '.join(filter(None, named))}")
    *first, last = ast.parse(named[name].source).body
    space = USUAL | variables
    if from_start:
        with redirect_stdout(StringIO()):
            for cell in cells[: cells.index(named[name])]:
                if "skip-execution" not in cell.metadata.get("tags", []):
                    exec(compile(cell.source, chapter, "exec"), space)
    exec(compile(ast.Module(first, []), chapter, "exec"), space)
    drawn = eval(compile(ast.Expression(last.value), chapter, "eval"), space)
    return sized(drawn, size) if size else drawn


def sized(drawn: Figure, size: tuple[float, float]) -> Figure:
    drawn.set_size_inches(*size)
    return drawn


def exercises(*numbers: str) -> Markdown:
    """A table of exercises."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.md")]
    heads = {number: head for text in texts for number, head in headings(text).items()}
    rows = [[number, heads[number].title, heads[number].minutes] for number in numbers]
    return Markdown(markdown_table(["exercise", "asks", "minutes"], *rows))
