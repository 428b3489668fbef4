"""`tools/course.py` before anything is graded: masters, editions, what students get, a class's repository."""

import json
import zipfile

import nbformat
import pytest
import yaml

from atbook.exercises.answers import name_of
from atbook.exercises.own import own_seed
from tests.course.helpers import SECRET
from tests.helpers import ROOT
from tools import course


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
    assert (ROOT / "course" / name / "mutants.py").is_file()


@pytest.mark.parametrize("name", course.assignments())
def test_every_test_that_a_master_names_exists_and_says_what_it_tests(name):
    cases = course.module_of(name, "cases")
    for task in course.tasks_of(course.read_master(name).cells).values():
        assert all((getattr(cases, test).__doc__ or "").strip() for test in task["tests"])
        if not task["tests"] and task["points"]:
            assert sum(item["points"] for item in task["rubric"]) == task["points"]


def test_a_solution_is_taken_out_of_what_students_get():
    code = (
        "# BEGIN SOLUTION NO PROMPT\nclass A:\n    pass\n\n# END SOLUTION\ndef f(x):\n    # BEGIN SOLUTION\n"
    )
    code += "    y = x\n\n    return y\n    # END SOLUTION"
    assert course.without_solution(code) == "def f(x):\n    ..."
    assert course.without_solution("X = g(1) # SOLUTION") == "X = ..."
    assert course.with_solution(code, {}) == "class A:\n    pass\n\ndef f(x):\n    y = x\n\n    return y"
    assert course.with_solution("X = g(1) # SOLUTION", {"X": "[1]"}) == "X = [1]"


def test_a_short_secret_is_refused(tmp_path):
    (tmp_path / "short").write_text("abc")
    with pytest.raises(ValueError):
        course.read_secret(tmp_path / "short")


def test_a_student_has_own_numbers_which_do_not_hang_on_how_the_name_is_typed():
    assert own_seed("Ada ", "a1/3") == own_seed("ada", "a1/3") != own_seed("Bob", "a1/3")
    asked, (graded, _) = "Ada\u00a0 \tLovelace\u200b", name_of(['STUDENT = "Ada\u00a0 \\tLovelace\u200b"'])
    assert graded == "Ada Lovelace" and own_seed(asked, "a1/3") == own_seed(graded, "a1/3")
    for absent in (..., "", None):
        with pytest.raises(ValueError, match="STUDENT"):
            own_seed(absent, "a1/3")


def test_a_secret_stays_out_of_what_students_get_and_draws_the_variants(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    for out, some in (("one", []), ("two", ["a1"])):
        arguments = ["edition", "--secret", str(tmp_path / "secret"), "--out", str(tmp_path / out), *some]
        assert course.main(arguments) == 0
    first, second = ((tmp_path / out / "a1" / "edition.json").read_text() for out in ("one", "two"))
    assert first == second, "the same secret makes the same edition"
    for name in course.assignments():
        one = json.loads((tmp_path / "one" / name / "edition.json").read_text())
        with zipfile.ZipFile(tmp_path / "one" / name / f"{name}-student.zip") as archive:
            assert all(member.startswith(f"{name}/") for member in archive.namelist())
            files = {member.removeprefix(f"{name}/"): archive.read(member) for member in archive.namelist()}
        handed_out = course.settings_of(course.read_master(name).cells).get("files", {})
        assert set(files) == {f"{name}.ipynb", "checks.py", "handout.json", *handed_out}
        for file in (f"{name}.ipynb", "handout.json"):
            text = files[file].decode()
            for secret in (one["key"], SECRET.decode(), "BEGIN SOLUTION", "Rubric", "model solution"):
                assert secret not in text
        released = nbformat.reads(files[f"{name}.ipynb"].decode(), as_version=4)
        nbformat.validate(released)
        assert one["edition"] in files[f"{name}.ipynb"].decode()
        assert not any("{{" in cell.source for cell in released.cells)
        assert "**Rubric" in (tmp_path / "one" / name / "rubric.md").read_text(encoding="utf-8")


WORKFLOW = (ROOT / "course/template/.github/workflows/check.yml").read_text(encoding="utf-8")


def test_the_workflow_may_read_and_nothing_else():
    workflow = yaml.safe_load(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in workflow["jobs"].values())
    assert "secrets." not in WORKFLOW and "pull_request_target" not in WORKFLOW
