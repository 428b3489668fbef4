"""How a page reads: no cell that the page cuts off, a question first, few findings at the end; how long the
ten chapters may be, and how soon each has a result; and how a card reads, in the five parts of all."""

import re

import jupytext
import pytest

from atbook.lab.findings import CLAIMS
from tests.helpers import ROOT
from tools.claims_in_sentences import Passage, problems_of, recorded_verdicts

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.md"))
CARDS = [path for path in NOTEBOOKS if path.stem.startswith("card-")]
PAGES = [path for path in NOTEBOOKS if path not in CARDS]
CHAPTERS = [path for path in PAGES if path.stem[:2].isdecimal()]
FINDINGS, CELLS, LINES, COLUMNS = 5, 20, 25, 80
# Of the ten chapters: findings of each, words of its text before the first number that is held to a record,
# and words (without code) and cells (without those of exercises) of all together.
FEW_FINDINGS, FIRST_RESULT, MAIN_WORDS, MAIN_CELLS = 4, 400, 30_000, 160
# Of a card: its parts, its words and cells before the exercises, and the lines of the cell that runs it,
# without imports.
PARTS = ["What it changes", "What can be handed over", "Run it", "What we measured", "Source"]
CARD_WORDS, CARD_CELLS, CARD_LINES = (300, 700), 6, 10
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


@pytest.mark.parametrize("chapter", NOTEBOOKS, ids=lambda chapter: chapter.stem)
def test_no_cell_is_cut_off(chapter):
    code = []
    for cell in jupytext.read(chapter, fmt="md:myst").cells:
        if cell.cell_type == "code":
            lines = cell.source.splitlines()
            assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, cell.source
            code.append({*cell.metadata.get("tags", [])})
    # an exercise's three cells, starter, solution and check, come on top
    assert sum(not tags & {"exercise", "solution", "check"} for tags in code) <= CELLS


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_a_card_has_the_five_parts_of_all_and_is_short(card):
    text, _, _ = prose(card).partition("\n## Exercises\n")
    title, opening, *_ = text.split("\n\n")
    assert re.fullmatch(r"# F\d+ .+", title) and re.match(r"\*\*.*\?\*\*", opening, re.S)
    assert re.search(r"\*\*You need\*\*", text) and re.search(r"\*\*Time:\*\* \d minutes to read", text)
    assert re.findall(r"^## (.+)", text, re.M) == PARTS
    without_code = re.sub(r"!\[.*?\]\(.*?\)|\$\$.*?\$\$", "", text, flags=re.S)
    assert CARD_WORDS[0] <= len(without_code.split()) <= CARD_WORDS[1]
    assert len(re.findall(r"!\[.*?\]\(\.\./book/assets/drawings/card-", section(card, PARTS[0]))) == 1
    tags = {"exercise", "solution", "check"}
    code = [cell for cell in jupytext.read(card, fmt="md:myst").cells if cell.cell_type == "code"]
    assert sum(not tags & {*cell.metadata.get("tags", [])} for cell in code) <= CARD_CELLS
    (runs, *_), measured = (
        re.findall(r"```{code-cell}.*?```", section(card, part), re.S) for part in PARTS[2:4]
    )
    lines = re.sub(r"^(from|import) .*?(\(.*?\))?$", "", runs.split("\n", 1)[1][:-3], flags=re.M | re.S)
    assert len([line for line in lines.splitlines() if line.strip()]) <= CARD_LINES
    number = re.match(r"# (F\d+)", title)[1]
    if number in {claim.chapter for claim in CLAIMS}:
        assert any(f'verdicts_table("{number}")' in cell for cell in measured)


def test_the_family_page_lists_all_cards_and_says_no_more_than_their_verdicts():
    page = ROOT / "book" / "family.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    listed = [re.match(r"\| \[\]\(\.\./notebooks/([\w-]+)\.md\)", row)[1] for row in rows]
    titles = {card.stem: re.search(r"^# F(\d+)", prose(card), re.M)[1] for card in CARDS}
    assert listed[:-1] == sorted(titles, key=lambda name: int(titles[name]))
    judged = recorded_verdicts()
    for row in rows:  # a table's cells are no sentences for tools.claims_in_sentences
        said = Passage(page, 0, "text", row.split(" | ")[3])
        assert problems_of(said, judged) == []


def words(text: str) -> int:
    return len(re.sub(r"<!--.*?-->", "", text, flags=re.S).split())


def test_the_ten_chapters_are_short():
    assert [chapter.stem[:2] for chapter in CHAPTERS] == [f"{number:02}" for number in range(1, 11)]
    assert sum(words(prose(chapter)) for chapter in CHAPTERS) <= MAIN_WORDS
    cells = [cell for chapter in CHAPTERS for cell in jupytext.read(chapter, fmt="md:myst").cells]
    code = [{*cell.metadata.get("tags", [])} for cell in cells if cell.cell_type == "code"]
    assert sum(not tags & {"exercise", "solution", "check"} for tags in code) <= MAIN_CELLS


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_a_chapter_has_a_result_early(chapter):
    text = chapter.read_text(encoding="utf-8").split("\n---\n", 1)[1]
    before = re.sub(r"^```.*?^```$", "", text.partition("<!-- = ")[0], flags=re.S | re.M)
    assert words(before) <= FIRST_RESULT


@pytest.mark.parametrize("chapter", PAGES, ids=lambda chapter: chapter.stem)
def test_it_asks_first_and_answers_at_the_end_in_few_findings(chapter):
    _, opening, *_ = prose(chapter).split("\n\n")
    assert re.match(r"\*\*.*\?\*\*", opening, re.S), "it begins with its question, in bold"
    text = prose(chapter)
    assert re.search(r"\*\*You need\*\*", text) and re.search(r"\*\*Time:\*\* \d+ minutes to read", text)
    learned = section(chapter, "What we learned")
    assert "<!-- = " in learned, "what was found, with its number"
    assert 3 <= len(re.findall(r"^- ", learned, re.M)) <= (FEW_FINDINGS if chapter in CHAPTERS else FINDINGS)
    assert not POINTING.search(learned), "a bullet makes sense without the table above it"
