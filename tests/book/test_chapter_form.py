"""How long pages and cards may be, what the family's page may say, and the form of predictions."""

import json
import re

import jupytext
import pytest

from tests.helpers import ROOT
from tools import notebooks
from tools.claims_in_sentences import Passage, problems_of, recorded_verdicts
from tools.predictions import predictions

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.md"))
CARDS = [path for path in NOTEBOOKS if path.stem.startswith("card-")]
CHAPTERS = [path for path in NOTEBOOKS if path.stem[:2].isdecimal()]
CELLS, LINES, COLUMNS = 20, 25, 80
MAIN_WORDS, MAIN_CELLS = 30_000, 160  # of the ten chapters together
CARD_WORDS, CARD_CELLS = 700, 6  # before the exercises


def prose(chapter) -> str:
    """All text of a chapter, without the comments that hold its numbers."""
    cells = jupytext.read(chapter, fmt="md:myst").cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def section(chapter, title: str) -> str:
    """One section of a chapter, with its comments."""
    text = chapter.read_text(encoding="utf-8")
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def code_cells(chapter) -> list[str]:
    """Code without that of exercises, whose starter, solution and check come on top."""
    cells = [cell for cell in jupytext.read(chapter, fmt="md:myst").cells if cell.cell_type == "code"]
    exercise = {"exercise", "solution", "check"}
    return [cell.source for cell in cells if not exercise & {*cell.metadata.get("tags", [])}]


@pytest.mark.parametrize("chapter", NOTEBOOKS, ids=lambda chapter: chapter.stem)
def test_no_cell_is_cut_off(chapter):
    for cell in jupytext.read(chapter, fmt="md:myst").cells:
        lines = cell.source.splitlines() if cell.cell_type == "code" else []
        assert len(lines) <= LINES and max(map(len, lines), default=0) <= COLUMNS, cell.source
    assert len(code_cells(chapter)) <= (CARD_CELLS if chapter in CARDS else CELLS)


def test_chapters_and_cards_are_short():
    assert [chapter.stem[:2] for chapter in CHAPTERS] == [f"{number:02}" for number in range(1, 11)]
    assert sum(len(prose(chapter).split()) for chapter in CHAPTERS) <= MAIN_WORDS
    assert sum(len(code_cells(chapter)) for chapter in CHAPTERS) <= MAIN_CELLS
    for card in CARDS:
        text, _, _ = prose(card).partition("\n## Exercises\n")
        without_code = re.sub(r"!\[.*?\]\(.*?\)|\$\$.*?\$\$", "", text, flags=re.S)
        assert len(without_code.split()) <= CARD_WORDS, card.stem


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


# Cards ask for no prediction.
@pytest.mark.parametrize("chapter", sorted({*NOTEBOOKS} - {*CARDS}), ids=lambda chapter: chapter.stem)
def test_every_prediction_has_choices_one_right_answer_and_an_outcome(chapter):
    cells = jupytext.read(chapter, fmt="md:myst").cells
    predicted = 0
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        if cell.cell_type != "markdown":
            continue
        asked = len(re.findall(r"^\*\*Predict\b", cell.source, re.M))
        of_the_form = predictions(cell.source)
        assert len(of_the_form) == asked, "see the form in tools/predictions.py"
        for one in of_the_form:
            assert 2 <= len(one.choices) <= 4 and "".join(one.choices) == "ABCD"[: len(one.choices)]
            assert len(set(one.choices.values())) == len(one.choices)
            assert one.right in one.choices and one.answer.strip()
        if asked:
            assert asked == 1, "the outcome of the first of two would follow the second"
            assert following is not None and "answer" in following.metadata.get("tags", [])
            assert cell.source.rstrip().endswith("</details>"), "the outcome follows its answer"
        predicted += asked
    assert predicted


# --- Each notebook's MyST source and its .ipynb are in step


SOURCES = sorted((ROOT / "notebooks").glob("*.md"))

SAMPLE = """\
---
kernelspec:
  display_name: Python 3
  name: python3
---

# A title

The same. See [the next](02-b.md), [notation](../book/notation.md#letters), [a site](https://example.org/a.md).
![A drawing.](../book/assets/drawings/twin.svg)

```{code-cell} ipython3
x
```

```{code-cell} ipython3
x
```
"""


def test_pairs_are_in_step():
    assert SOURCES and notebooks.out_of_step(ROOT / "notebooks") == [], "run `make notebooks`"


@pytest.fixture
def sample(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/o/n"\n')
    (folder / "01-a.md").write_text(SAMPLE)
    return folder


def test_links_lead_somewhere_on_colab(sample):
    badge, set_up, title, *same = json.loads(notebooks.converted(sample / "01-a.md"))["cells"]
    addresses = {
        "https://colab.research.google.com/github/o/n/blob/main/notebooks/01-a.ipynb": badge,
        "git clone --quiet --depth 1 https://github.com/o/n": set_up,
        "(https://colab.research.google.com/github/o/n/blob/main/notebooks/02-b.ipynb)": title,
        "(https://github.com/o/n/blob/main/book/notation.md#letters)": title,
        "(https://example.org/a.md)": title,
        "![A drawing.](https://raw.githubusercontent.com/o/n/main/book/assets/drawings/twin.svg)": title,
    }
    for address, cell in addresses.items():
        assert address in "".join(cell["source"])
    assert [cell["source"] for cell in same] == [["x"], ["x"]] and same[0]["id"] != same[1]["id"]


def test_pairs_out_of_step_are_named(sample):
    assert notebooks.out_of_step(sample) == ["01-a.ipynb is missing"]
    (sample / "01-a.ipynb").write_text("{}")
    (sample / "07-b.ipynb").write_text("{}")
    differs, alone = "01-a.ipynb differs from what 01-a.md makes", "07-b.ipynb has no 07-b.md"
    assert notebooks.out_of_step(sample) == [differs, alone]
