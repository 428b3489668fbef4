"""Markdown tables for the book's pages, and how a page writes a mean over seeds."""

from collections.abc import Sequence
from statistics import mean, stdev


def markdown_table(*rows: Sequence) -> str:
    """A Markdown table; the first row is its head. Raises `ValueError` when a row has another number of cells than the head."""
    head, *body = [[str(cell) for cell in row] for row in rows]
    for row in body:
        if len(row) != len(head):
            raise ValueError(f"the head has {len(head)} cells, this row {len(row)}: {row}")
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation over seeds with one decimal, the mean alone for one value; `sign="+"` writes the plus too."""
    return f"{mean(values):{sign}.1f}".replace("-", "−") + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")
