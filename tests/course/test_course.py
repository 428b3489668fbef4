"""`tools/course.py` and `tools/grades.py` before anything is graded: masters, editions, what is shared."""

import json
import zipfile

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from atbook.exercises.own import own_seed
from tests.helpers import ROOT
from tools import course, grades

OTTER = "otter is not installed (the extra `course`)"
SECRET = b"a secret for tests only"


@pytest.mark.parametrize("name", course.assignments())
def test_a_master_has_three_variants_of_every_coding_task_each_with_its_check(name):
    cells = course.read_master(name).cells
    letters = course.variants(cells)
    known = {exercise.number for exercise in course.checks_of(name)}
    assert letters and all(variants == ["a", "b", "c"] for variants in letters.values())
    for letter in "abc":
        code = "\n".join(cell.source for cell in course.chosen(cells, {task: letter for task in letters}))
        for task in letters:
            number = f"{name.upper()}.{task[1:]}{letter}"
            assert f'check("{number}", ' in code and number in known
    assert (ROOT / "course" / name / "cases.py").is_file() and (
        ROOT / "course" / name / "mutants.py"
    ).is_file()


def test_points_are_those_of_the_design():
    points = {
        name: sum(q["points"] for q in course.questions(course.read_master(name).cells).values())
        for name in course.assignments()
    }
    assert points.items() <= {"a1": 20, "a2": 25, "a3": 25, "a4": 30}.items()


def test_a_secret_is_made_where_there_is_none(tmp_path):
    with pytest.raises(ValueError, match="token_hex"):
        course.read_secret(tmp_path / "absent")
    (tmp_path / "short").write_text("abc")
    with pytest.raises(ValueError, match="16 characters"):
        course.read_secret(tmp_path / "short")
    (tmp_path / "good").write_text("0123456789abcdef\n")
    assert course.read_secret(tmp_path / "good") == b"0123456789abcdef"


def test_a_student_has_own_numbers_which_do_not_hang_on_how_the_name_is_typed():
    assert own_seed("Ada ", "a1/3") == own_seed("ada", "a1/3") != own_seed("Bob", "a1/3")
    for absent in (..., "", None):
        with pytest.raises(ValueError, match="STUDENT"):
            own_seed(absent, "a1/3")


@pytest.mark.slow
def test_a_secret_stays_out_of_what_students_get_and_draws_the_variants(tmp_path, capsys):
    pytest.importorskip("otter", reason=OTTER)
    (tmp_path / "secret").write_bytes(SECRET)
    for out in ("one", "two"):
        assert (
            course.main(["edition", "--secret", str(tmp_path / "secret"), "--out", str(tmp_path / out)]) == 0
        )
    for name in course.assignments():
        one, two = (
            json.loads((tmp_path / out / name / "edition.json").read_text()) for out in ("one", "two")
        )
        assert one == two, "the same secret makes the same edition"
        with zipfile.ZipFile(tmp_path / "one" / name / f"{name}-student.zip") as archive:
            files = {member: archive.read(member) for member in archive.namelist()}
        handed_out = course.settings_of(course.read_master(name).cells).get("files", {})
        assert set(files) == {f"{name}.ipynb", "checks.py", *handed_out}
        text = files[f"{name}.ipynb"].decode()
        for secret in (one["key"], SECRET.decode(), "BEGIN SOLUTION", "Rubric", "def test_", "import cases"):
            assert secret not in text
        released = nbformat.reads(text, as_version=4)
        assert one["edition"] in text and "{{" not in text
        assert sum("otter_answer_cell" in cell.metadata.get("tags", []) for cell in released.cells) >= 3
        with zipfile.ZipFile(tmp_path / "one" / name / f"{name}-gradescope.zip") as archive:
            assert SECRET not in b"".join(archive.read(member) for member in archive.namelist())
        assert "**Rubric" in (tmp_path / "one" / name / "rubric.md").read_text(encoding="utf-8")
    assert course.main(["edition", "--secret", str(tmp_path / "absent"), "--out", str(tmp_path)]) == 2
    assert course.main(["edition", "--secret", str(tmp_path / "secret"), "--out", str(tmp_path), "a9"]) == 2
    assert course.main(["grade", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "x.csv")]) == 2
    said = capsys.readouterr().err
    assert "token_hex" in said and "'a9'; there are a1" in said and "no edition.json" in said


def test_what_two_students_share_is_remarked():
    pytest.importorskip("otter", reason=OTTER)

    def handed(file, student, numbers):
        code = f"STUDENT = {student!r}", f"SHARES = {numbers}"
        return grades.Handed(file, new_notebook(cells=[new_code_cell(source) for source in code]))

    everybody = [
        handed("1", "ada", [[0.1, 0.2]]),
        handed("2", "Bob", [[0.1005, 0.2]]),
        handed("3", "bob", [[0.5, 0.6]]),
        handed("4", "", [[0.7, 0.8]]),
        grades.Handed("5", problem="broken"),
    ]
    grades.compare(everybody, {"SHARES"})
    assert [handed_in.remarks for handed_in in everybody] == [
        ["the same SHARES as 2, whose own are others"],
        ["the same SHARES as 1, whose own are others", "the same STUDENT as 3"],
        ["the same STUDENT as 2"],
        ["STUDENT is not filled in"],
        [],
    ]
