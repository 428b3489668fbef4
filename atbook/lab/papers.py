"""What the papers report, as data: the content that the book quotes, each with its table."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from atbook.records import markdown_table, results_folder
from atlib._util import require_known


class Quoted(NamedTuple):
    """A paper's table. source: paper and section; setting: models and data; unit: of the content; columns,
    rows: as printed, the first column names the row, None is an empty cell."""

    source: str
    setting: str
    unit: str
    columns: list[str]
    rows: list[list]

    def value(self, row: str | tuple, column: str) -> float:
        """One figure. row: the first cell of its row, or as many of its first cells as tell it from others.
        Raises `ValueError` for an unknown row or column, and for cells that several rows begin with."""
        cells = row if isinstance(row, tuple) else (row,)
        name, names = _named(cells), [_named(line[: len(cells)]) for line in self.rows]
        require_known("row", name, names)
        require_known("column", column, self.columns)
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} rows begin with {name!r}: name more of their cells")
        return self.rows[names.index(name)][self.columns.index(column)]

    def __str__(self) -> str:
        cells = [["–" if value is None else value for value in row] for row in self.rows]
        return markdown_table([name.replace("_", " ") for name in self.columns], *cells)


def _named(cells: Sequence) -> str:
    """A row's first cells in one text, as "MAE, FLIP"; "–" for an empty one."""
    return ", ".join("–" if cell is None else str(cell) for cell in cells)


def quoted(table: str, paper: str = "attention-transfer") -> Quoted:
    """A table of `book/papers/PAPER.json`. Raises `ValueError` for an unknown one."""
    path = results_folder().parent / "book" / "papers" / f"{paper}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    require_known("table", table, content["tables"])
    printed = content["tables"][table]
    source = f"{content['paper']}, {printed['where']}"
    return Quoted(source, printed["setting"], printed["unit"], printed["columns"], printed["rows"])
