"""What the papers report, as data: the figures that the book quotes, each with its table."""

import json
from typing import NamedTuple

from atlib._util import require_known
from atlib.record import markdown_table, results_folder


class Quoted(NamedTuple):
    """A paper's table. source: paper and section; setting: models and data; unit: of the figures; columns,
    rows: as printed, the first column names the row, None is an empty cell."""

    source: str
    setting: str
    unit: str
    columns: list[str]
    rows: list[list]

    def value(self, row: str, column: str) -> float:
        """One figure. Raises `ValueError` for an unknown row or column."""
        rows = {str(each[0]): each for each in self.rows}
        require_known("row", row, rows)
        require_known("column", column, self.columns)
        return rows[row][self.columns.index(column)]

    def __str__(self) -> str:
        cells = [["–" if value is None else value for value in row] for row in self.rows]
        return markdown_table([name.replace("_", " ") for name in self.columns], *cells)


def quoted(table: str, paper: str = "attention-transfer") -> Quoted:
    """A table of `book/papers/PAPER.json`. Raises `ValueError` for an unknown one."""
    path = results_folder().parent / "book" / "papers" / f"{paper}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    require_known("table", table, found["tables"])
    each = found["tables"][table]
    source = f"{found['paper']}, {each['where']}"
    return Quoted(source, each["setting"], each["unit"], each["columns"], each["rows"])
