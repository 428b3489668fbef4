"""Every figure of the papers' tables with the commands that would repeat it: `paper_commands.toml` for arXiv
2411.09702, `other_papers.toml` for the other founding documents. Both say how they are read."""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Repeat(NamedTuple):
    """A figure of a table and how to repeat it. row: the first cells of its row; column: of the figure;
    commands: in their order, what a later one needs before it; empty where none can be said; note: what is
    not as printed, or is missing."""

    table: str
    row: tuple[str | float | None, ...]
    column: str
    commands: tuple[str, ...]
    note: str = ""


def _read(name: str) -> dict:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


_PAPER = _read("paper_commands.toml")
# What each table is about, in its order on the page.
TITLES: dict[str, str] = {name: table["title"] for name, table in _PAPER["tables"].items()}
# The figures whose points are runs of their own, with an example of a point.
FIGURES: dict[str, str] = _PAPER["points"]


def repeats() -> list[Repeat]:
    """Every figure of the paper's tables that an experiment gives, in the order of `TITLES`."""
    runs = {name: f"{command} --out runs/{name}" for name, command in _PAPER["runs"].items()}
    return [
        Repeat(
            name,
            tuple(cell or None for cell in figure["row"]),
            figure.get("column", "top1"),
            tuple(runs.get(command, command) for command in figure["commands"]),
            figure.get("note", ""),
        )
        for name, table in _PAPER["tables"].items()
        for figure in table["figures"]
    ]


class Elsewhere(NamedTuple):
    """What another founding document reports in one place. paper: its data's file; table: its name there;
    about: in our words; command: that repeats it, or a row of it, empty for none; note: what else is to be
    said, such as "not here"."""

    paper: str
    table: str
    about: str
    command: str
    note: str


def elsewhere() -> dict[str, list[Elsewhere]]:
    """The tables and figures of the other founding documents, by the document's title."""
    return {
        content["title"]: [Elsewhere(paper, table, *row) for table, row in content["tables"].items()]
        for paper, content in _read("other_papers.toml").items()
    }
