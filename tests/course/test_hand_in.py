"""`python -m atbook hand-in`: what the grader would say, before anything is handed in."""

import json
import zipfile

import pytest

from atbook.exercises import hand_in
from tests.course.helpers import as_notebook, replace, solution
from tools.grades import graded
from tools.handed import handed_in


@pytest.fixture
def work(edition, tmp_path):
    """A student's folder, as the zip for students makes it."""
    with zipfile.ZipFile(edition.folder / "a1-student.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path / "a1" / "a1.ipynb"


def test_a_green_check_is_what_the_grader_says_and_one_file_is_made(edition, cage, work, capsys, tmp_path):
    from atbook.__main__ import main

    handed = replace(solution(edition), "gradient", "def gradient(q, k, v, grad):\n    return q.backward()")
    work.write_bytes(as_notebook(handed))
    assert main(["hand-in", str(work)]) == 1
    said = capsys.readouterr().out
    assert "right    talking: right, in" in said
    assert "not yet  gradient: backward is not for this task" in said and "there    SHARES" in said
    (tmp_path / "class").mkdir()
    (work.parent / "a1-model-solution.zip").rename(tmp_path / "class" / "a1.zip")
    (back,) = handed_in(tmp_path / "class", [])
    result = graded(back, edition, cage)
    assert (result.points("q1"), result.points("q2"), result.points("q3")) == (5, 0, 4)


def test_what_would_be_refused_as_a_whole_makes_no_file(edition, work):
    for old, new, says in (
        ('STUDENT = "model solution"', "STUDENT = ...", "STUDENT is not filled in"),
        (edition.label, "a1-0000", "its files of"),
    ):
        handed = solution(edition)
        handed.code = [code.replace(old, new) for code in handed.code]
        work.write_bytes(as_notebook(handed))
        examined, _ = hand_in.examine(work)
        assert says in examined.refused and not list(work.parent.glob("*.zip"))


@pytest.mark.parametrize(
    "field, name", [("uploads", ["../secret"]), ("uploads", ["/etc/passwd"]), ("assignment", "../a1")]
)
def test_a_hand_out_names_no_path_outside_its_folder(tmp_path, field, name):
    (tmp_path / "a1.ipynb").write_text('{"cells": []}')
    handout = {"assignment": "a1", "uploads": [], "edition": "x", field: name}
    (tmp_path / "handout.json").write_text(json.dumps(handout))
    with pytest.raises(ValueError, match="beside it"):
        hand_in.examine(tmp_path / "a1.ipynb")
