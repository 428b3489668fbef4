"""How a chapter reads: short, no cell that the page cuts off, a question that is answered at both ends.

Chapters from before this form are named; the list gets shorter, never longer.
"""

import re

import jupytext
import pytest

from tests.helpers import ROOT

CHAPTERS = sorted((ROOT / "notebooks").glob("*.md"))
BEFORE = {
    *("17-which-layers-which-heads", "18-what-in-a-map-matters", "19-different-teacher-different-student")
}
NEW = [chapter for chapter in CHAPTERS if chapter.stem not in BEFORE]
WORDS, CELLS, LINES, COLUMNS = 2500, 20, 25, 80
POINTING = re.compile(r"(table|curve|figure|column|row|line)s? (above|below)?,? ?(say|show|tell)s?\b")


def prose(chapter) -> str:
    """All text of a chapter, without the comments that hold its numbers."""
    cells = jupytext.read(chapter, fmt="md:myst").cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def section(chapter, title: str) -> str:
    """One section of a chapter, with its comments."""
    text = chapter.read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_list_names_what_is_there():
    assert BEFORE <= {chapter.stem for chapter in CHAPTERS}


@pytest.mark.parametrize("chapter", NEW, ids=lambda chapter: chapter.stem)
def test_it_is_short_and_no_cell_is_cut_off(chapter):
    assert len(prose(chapter).split()) <= WORDS
    cells = [c.source for c in jupytext.read(chapter, fmt="md:myst").cells if c.cell_type == "code"]
    assert len(cells) <= CELLS
    for cell in cells:
        lines = cell.splitlines()
        assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, cell


@pytest.mark.parametrize("chapter", NEW, ids=lambda chapter: chapter.stem)
def test_it_asks_first_and_answers_at_the_end_with_numbers(chapter):
    _, opening, *_ = prose(chapter).split("\n\n")
    assert re.match(r"\*\*.*\?\*\*", opening, re.S), "it begins with its question, in bold"
    assert re.search(r"\d", opening), "and with a number in the answer"
    text = prose(chapter)
    assert re.search(r"\*\*You need\*\*", text) and re.search(r"\*\*Time:\*\* \d+ minutes to read", text)
    learned = section(chapter, "What we learned")
    assert "<!-- = " in learned, "what was found, with its number"
    assert not POINTING.search(learned), "a bullet makes sense without the table above it"
