"""`python -m atbook exercises NOTEBOOK` on notebooks as students hand them in."""

import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from atbook.__main__ import main
from atbook.exercises import commands

RIGHT = """
def map_loss(s0, s1, t0, t1):
    return sum(-(t.detach() * s.log()).sum(-1).mean() for s, t in ((s0, t0), (s1, t1)))
"""
CHECK = 'from atbook.exercises import check\n\ncheck("6.{}", {})'


@pytest.mark.slow
def test_verdicts_of_what_is_right_unfinished_and_broken(tmp_path, capsys, monkeypatch):
    above = new_markdown_cell("### Exercise 6.1. Written by hand\n\n★ 10 minutes. Write it.")
    cells = [
        RIGHT,
        CHECK.format(1, "map_loss"),
        "def excess(students, teachers):\n    ...",
        CHECK.format(2, "excess"),
        CHECK.format(3, "never_defined"),
    ]
    path = tmp_path / "mine.ipynb"
    nbformat.write(new_notebook(cells=[above, *map(new_code_cell, cells)]), path)
    assert main(["exercises", str(path), "--json"]) == 1
    verdicts = {verdict["number"]: verdict for verdict in json.loads(capsys.readouterr().out)}
    assert [verdicts[f"6.{i}"]["right"] for i in (1, 2, 3)] == [True, False, False]
    assert "not done" in verdicts["6.2"]["says"] and "NameError" in verdicts["6.3"]["says"]
    assert verdicts["6.1"]["title"] == "Written by hand"
    monkeypatch.setattr(commands, "verdicts", lambda path: {"6.1": verdicts["6.1"]["says"]})
    assert main(["exercises", str(path)]) == 0
    assert "1 of 1 right" in capsys.readouterr().out


def test_what_is_no_notebook_is_named(tmp_path, capsys):
    (tmp_path / "mine.ipynb").write_text("no")
    assert main(["exercises", str(tmp_path / "mine.ipynb")]) == 2
    assert main(["exercises", str(tmp_path / "absent.ipynb")]) == 2
    said = capsys.readouterr().err
    assert "mine.ipynb is not a notebook" in said and "absent.ipynb" in said
