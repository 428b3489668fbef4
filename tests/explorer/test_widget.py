"""The explorer in a notebook: a reader's own models in the page's JavaScript, the state in Python."""

import json

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from atbook.explorer.widget import Explorer
from atlib import AttentionTransfer, Plan, create_vit
from tests.explorer.conftest import chosen, says
from tests.explorer.test_model import decoded
from tests.helpers import randomise


@pytest.fixture
def teacher():
    return randomise(create_vit("glyphs"), 0).eval()


@pytest.fixture
def student():
    return randomise(create_vit("glyphs"), 1).eval()


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>notebook</title><div id="cell"></div>
<script type="module">
{esm}
</script></html>"""
# What a notebook does: the module's default export, with a model that keeps values and tells of changes.
SHOWN = """
const values = {values}, calls = [];
globalThis.model = {{
    get: name => values[name],
    set: (name, value) => {{
        if (values[name] === value) return;
        values[name] = value;
        calls.forEach(call => call());
    }},
    save_changes: () => {{}},
    on: (name, call) => calls.push(call),
}};
widget.render({{ model, el: document.getElementById("cell") }});"""


@pytest.fixture
def notebook(visit, tmp_path):
    """A function that shows a widget as a notebook would."""

    def show(widget):
        values = json.dumps({"content": widget.content, "address": widget.address})
        esm = widget._esm.replace("export default", "const widget =") + SHOWN.format(values=values)
        file = tmp_path / "notebook.html"
        file.write_text(PAGE.format(esm=esm), encoding="utf-8")
        return visit(file.as_uri())

    return show


def kept(page):
    return dict(part.split("=") for part in page.evaluate("model.get('address').slice(1)").split("&"))


def test_own_models_are_shown_and_the_state_goes_both_ways(notebook, teacher, student):
    page = notebook(Explorer({"mine": student, "teacher": teacher}, "match", "#model=mine&seed=3"))
    assert says(page).startswith("Mine with its own maps answers")
    assert chosen(page, "World") == "match" and chosen(page, "Model") == "mine"
    page.get_by_label("Maps of all layers").select_option("twin")
    assert kept(page) == {"world": "match", "model": "mine", "maps": "twin", "seed": "3"}
    assert page.evaluate("location.hash") == "", "the notebook's own address is left alone"
    page.evaluate("model.set('address', '#model=teacher&maps=uniform')")  # as Python would
    assert chosen(page, "Model") == "teacher" and chosen(page, "Maps of all layers") == "uniform"


@pytest.mark.parametrize("what", ["copy", "distill", "alone"])
def test_a_pair_is_its_student_with_the_maps_it_is_made_for(notebook, teacher, student, what):
    model = student if what == "alone" else AttentionTransfer(teacher, student, Plan(how=what))
    page = notebook(shown := Explorer({"mine": model, "teacher": teacher}))
    page.get_by_label("Model", exact=True).select_option("mine")
    assert chosen(page, "Maps of all layers") == ("teacher" if what == "copy" else "own")
    tensors = shown.content["worlds"]["find"]["mine"]["tensors"]
    for name, value in student.state_dict().items():  # rounded to 12 bits
        step = value.abs().max().item() / 2000
        torch.testing.assert_close(decoded(tensors[name]), value, atol=step, rtol=0)


CELL = """
from atlib import create_vit
from atbook.explorer.widget import Explorer
explorer = Explorer({"mine": create_vit("glyphs"), "teacher": create_vit("glyphs")}, world="match")
explorer
"""


def test_a_kernel_shows_it_and_a_static_page_gets_a_sentence():
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(book, timeout=300, kernel_name="python3").execute()
    (output,) = book.cells[0].outputs
    assert "mine, teacher in Match" in output.data["text/html"] and "play.html" in output.data["text/html"]
    assert output.data["text/plain"] == "Explorer of mine, teacher in match"
    shown = output.data["application/vnd.jupyter.widget-view+json"]["model_id"]
    state = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"][shown]["state"]
    assert list(state["content"]["worlds"]["match"]) == ["mine", "teacher"]
    assert "export default" in state["_esm"] and ".explorer" in state["_css"]
