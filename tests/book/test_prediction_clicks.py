"""Predictions: choices to click, one right answer, a closed explanation, and an outcome that is open."""

import re

import jupytext
import pytest

from tests.helpers import ROOT
from tools.predictions import predictions

# Pages in which a reader only reads: cards ask for no prediction.
READ_ONLY = {"card"}
CHAPTERS = [
    path for path in sorted((ROOT / "notebooks").glob("*.md")) if re.split("-", path.stem)[0] not in READ_ONLY
]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
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
