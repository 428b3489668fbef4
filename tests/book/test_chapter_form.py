"""How a chapter reads: no cell that the page cuts off, a question first, at most five findings at the end."""

import re
from collections import Counter

import jupytext
import pytest

from tests.helpers import ROOT

CHAPTERS = sorted((ROOT / "notebooks").glob("*.md"))
FINDINGS, CELLS, LINES, COLUMNS = 5, 20, 25, 80
WORDS = dict.fromkeys(("17", "18", "19", "20"), 1800)  # of the family, before exercises
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


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_no_cell_is_cut_off_and_the_familys_chapters_are_short(chapter):
    text, code = prose(chapter), []
    for cell in jupytext.read(chapter, fmt="md:myst").cells:
        if cell.cell_type == "code":
            lines = cell.source.splitlines()
            assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, cell.source
            code.append({*cell.metadata.get("tags", [])})
    if chapter.stem[:2] in WORDS:
        assert len(text.split("\n## Exercises\n")[0].split()) <= WORDS[chapter.stem[:2]]
    # an exercise's three cells, starter, solution and check, come on top
    assert sum(not tags & {"exercise", "solution", "check"} for tags in code) <= CELLS


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_it_asks_first_and_answers_at_the_end_in_five_findings(chapter):
    _, opening, *_ = prose(chapter).split("\n\n")
    assert re.match(r"\*\*.*\?\*\*", opening, re.S), "it begins with its question, in bold"
    text = prose(chapter)
    assert re.search(r"\*\*You need\*\*", text) and re.search(r"\*\*Time:\*\* \d+ minutes to read", text)
    learned = section(chapter, "What we learned")
    assert "<!-- = " in learned, "what was found, with its number"
    assert 3 <= len(re.findall(r"^- ", learned, re.M)) <= FINDINGS
    assert not POINTING.search(learned), "a bullet makes sense without the table above it"


def test_no_two_figures_of_the_book_have_one_name():
    """Sphinx finds it too, after all notebooks have run."""
    pages = [*(ROOT / "notebooks").glob("*.md"), *(ROOT / "book").glob("*.md")]
    names = [
        name for page in pages for name in re.findall(r"name: (fig-\S+)$", page.read_text("utf-8"), re.M)
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []
