"""Predictions: choices to click, one right answer, a closed explanation, and an outcome that is open."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

from tests.helpers import ROOT
from tools.predictions import predictions

# Pages in which a reader only reads: cards ask for no prediction.
READ_ONLY = {"card"}
CHAPTERS = [
    path for path in sorted((ROOT / "notebooks").glob("*.md")) if re.split("-", path.stem)[0] not in READ_ONLY
]

PAGE = """\
# A page

**Predict.** How many?

- **A.** one, $x$
- **B.** two

<details>
<summary>What comes out, and why</summary>

**B.** There are two.

</details>

```{code-cell} ipython3
:tags: [answer]
print("first outcome")
```

Between the outcomes.

```{code-cell} ipython3
:tags: [answer]
print("second outcome")
```

After them.

**Predict.** And now?

- **A.** more
- **B.** fewer
- **C.** as many

<details>
<summary>What comes out, and why</summary>

**C.** As many.

</details>

```{code-cell} ipython3
:tags: [answer]
print("third outcome")
```

```{code-cell} ipython3
print("open")
```
"""
CONFIG = """\
extensions = ["myst_nb", "predictions"]
nb_execution_mode = "off"
suppress_warnings = ["myst-nb.lexer"]  # without a kernel nothing says in which language the cells are
myst_enable_extensions = ["dollarmath"]
html_static_path = ["assets"]
html_css_files = ["book.css"]
"""
HEAD = "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n"


MALFORMED = "# Another\n\n**Predict.** How many?\n\n- **A.** one\n- **B.** two\n\nText.\n"


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> tuple[Path, str]:
    """A book of two pages, and what its build complained about; made in a process of its own, because Sphinx
    keeps state for the whole process."""
    folder = tmp_path_factory.mktemp("predictions")
    (folder / "index.md").write_text(HEAD + PAGE, encoding="utf-8")
    (folder / "malformed.md").write_text("---\norphan: true\n---\n\n" + MALFORMED, encoding="utf-8")
    (folder / "assets").mkdir()
    for name in ("predict.js", "book.css"):
        shutil.copy(ROOT / "book" / "assets" / name, folder / "assets")
    config = f"import sys\nsys.path[:0] = [{str(ROOT / 'tools')!r}]\n{CONFIG}"
    (folder / "conf.py").write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-qE", "-b", "html", str(folder), str(folder / "html")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return folder / "html", done.stderr


@pytest.fixture
def page(book) -> Path:
    return book[0] / "index.html"


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


def test_the_explanations_are_closed_and_nothing_else_is(page):
    text = page.read_text()
    closed = re.findall(r'<div class="predict" data-right="(..)">(.*?)</details>\s*</div>', text, re.S)
    (first, one), (second, other) = closed
    assert (first, second) == ("B.", "C.")
    assert "There are two" in one.split("<details>")[1] and "As many." in other.split("<details>")[1]
    assert not any("outcome" in part or "Between" in part for part in (one, other))
    assert text.count("<details>") == text.count("</details>") == 2


def test_a_click_tells_what_comes_out_and_opens_the_explanation(page, browser):
    tab = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    tab.goto(page.as_uri())
    first, second = tab.query_selector_all(".predict")
    explained = tab.get_by_text("There are two")
    assert not explained.is_visible() and tab.get_by_text("second outcome").is_visible()
    tab.get_by_role("button", name="A. one").focus()
    tab.keyboard.press("Enter")
    assert explained.is_visible() and "A. It is B" in first.query_selector("[role=status]").inner_text()
    tab.get_by_role("button", name="B. two").click(force=True)  # what was predicted stays
    assert "A. It is B" in first.query_selector("[role=status]").inner_text()
    pressed = [button.get_attribute("aria-pressed") for button in first.query_selector_all("button")]
    assert pressed == ["true", "false"]
    assert not second.query_selector("details p").is_visible()
    tab.get_by_role("button", name="C. as many").click()
    assert second.query_selector("details p").is_visible()
    assert "C, and so it is" in second.query_selector("[role=status]").inner_text()
    wide = [button.bounding_box() for button in tab.query_selector_all(".predict button")]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] >= 44 for box in wide)
    tab.close()
