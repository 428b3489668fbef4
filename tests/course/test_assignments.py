"""The assignments, graded as a teacher grades them: solutions, planted mistakes, attacks, bad submissions."""

import csv
import importlib.util
import json
import zipfile

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from tests.course.attacks import GRADED
from tests.helpers import ROOT, made_once
from tools import course, grades

pytest.importorskip("otter", reason="otter is not installed (the extra `course`)")
pytestmark = pytest.mark.slow

SECRET = b"a secret for tests only"
TASKS = {name: course.questions(course.read_master(name).cells) for name in course.assignments()}
LETTERS = "abc"


def mutants_of(name: str):
    """The planted mistakes of an assignment, and the files that come with its solution."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "course" / name / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MUTANTS, getattr(module, "UPLOADS", {})


def edition_of(folder, name, letter):
    """An edition in which every task has the same variant."""
    tasks = course.variants(course.read_master(name).cells)
    return course.make_edition(name, SECRET, folder / letter, {task: letter for task in tasks})


def solution(edition):
    return nbformat.read(edition / f"{edition.name}-solution.ipynb", as_version=4)


def cell_of(notebook, code: str):
    """The answer that holds a piece of code."""
    cells = [
        c for c in notebook.cells if c.cell_type == "code" and code in c.source and "check(" not in c.source
    ]
    return cells[0]


def replace(notebook, name: str, code: str):
    """Another answer in place of the one that defines a name."""
    (cell,) = [c for c in notebook.cells if c.source.startswith((f"def {name}(", f"{name} = "))]
    cell.source = code


def put(notebook, folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / name)
    return notebook


def hand_in_with(files: dict[str, bytes], notebook, folder, name: str):
    """A notebook, and in a folder of its own with it the files that a student hands in."""
    own = folder / name.removesuffix(".ipynb") if files else folder
    put(notebook, own, name)
    for file, content in files.items():
        (own / file).write_bytes(content)


def graded(edition, submissions, folder) -> dict[str, dict]:
    """{file: line} of all submissions."""
    rows = grades.grade(edition, submissions, folder / "grades.csv")
    with open(folder / "grades.csv", encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    return {row["file"]: row for row in rows}


# --- Solutions and planted mistakes ---


@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.parametrize("name", course.assignments())
def test_the_solution_gets_all_points_and_every_mistake_what_it_is_worth(name, letter, tmp_path):
    edition = edition_of(tmp_path, name, letter)
    mutants, uploads = mutants_of(name)
    hand_in_with(uploads, solution(edition), tmp_path / "handed", "solution.ipynb")
    automatic = {task: question["points"] for task, question in TASKS[name].items() if not question["manual"]}
    expected = {"solution.ipynb": dict(automatic)}
    planted = {task: mutants[task, letter] for task in automatic}
    for number in range(max(map(len, planted.values()))):
        notebook, points, files = solution(edition), dict(automatic), dict(uploads)
        for task, mistakes in planted.items():
            if number < len(mistakes):
                right, wrong, points[task] = mistakes[number]
                if right in files:
                    files[right] = wrong(files[right])
                    continue
                cell = cell_of(notebook, right)
                cell.source = cell.source.replace(right, wrong)
        hand_in_with(files, notebook, tmp_path / "handed", f"{number}.ipynb")
        expected[f"{number}.ipynb"] = points
    rows = graded(edition, tmp_path / "handed", tmp_path)
    rows = {file.partition("/")[2] or file: row for file, row in rows.items()}
    points_by_file = {file: {task: row.get(task) for task in automatic} for file, row in rows.items()}
    assert points_by_file == expected
    assert rows["solution.ipynb"]["points"] == sum(automatic.values())
    assert rows["solution.ipynb"]["remarks"].startswith("the same STUDENT as")


# --- A1 as it comes in ---


def hand_in(folder) -> tuple[dict[str, dict], str, str]:
    """Submissions of many kinds to variant a of A1: {file: line}, the report, and the key that must not be in
    it."""
    edition, handed = edition_of(folder, "a1", "a"), folder / "handed"
    attacks = {slot: [code for at, code in GRADED.values() if at == slot] for slot, _ in GRADED.values()}
    for number, codes in enumerate(zip(*attacks.values())):
        notebook = solution(edition)
        replace(notebook, "STUDENT", f'STUDENT = "attack {number}"')
        for slot, code in zip(attacks, codes):
            replace(notebook, slot, code)
        put(notebook, handed, f"attack-{number}.ipynb")

    rearranged = solution(edition)
    replace(rearranged, "STUDENT", '# me\nSTUDENT = "Ada"')
    talking, gradient = (cell_of(rearranged, f"def {name}(").source for name in ("talking", "gradient"))
    replace(rearranged, "talking", "def talking(q, k, v, mix):\n    ...")
    cell_of(rearranged, "def gradient(").source = f"%%time\nimport math\n{gradient}".replace(
        "q.shape[-1] ** -0.5", "1 / math.sqrt(width(q))"
    )
    for cell in rearranged.cells:
        cell.metadata.pop("tags", None)
    rearranged.cells[2:2] = [
        new_code_cell("def width(x):\n    return x.shape[-1]\n\nraise ValueError('an experiment')"),
        new_code_cell("this is no Python"),
        new_code_cell(talking.replace("einsum", "no_such_name")),
        new_code_cell(talking),
        new_markdown_cell("My answer: 17 rows."),
    ]
    put(rearranged, handed / "ada", "a1 (1).ipynb")

    nameless = solution(edition)
    replace(nameless, "STUDENT", "STUDENT = ...")
    put(nameless, handed, "nameless.ipynb")

    cut = solution(edition)
    replace(cut, "STUDENT", 'STUDENT = "cut"')
    cut.metadata.pop("course")
    cut.cells = [c for c in cut.cells if "def gradient(" not in c.source]
    for cell in cut.cells:
        cell.source = cell.source.replace('EDITION = "', 'EDITION_WAS = "')
    put(cut, handed, "cut.ipynb")

    other = solution(edition)
    for cell in other.cells:
        cell.source = cell.source.replace('EDITION = "a1-', 'EDITION = "a1-0')
    other.metadata["course"] = "a1-0000"
    put(other, handed, "other-edition.ipynb")

    (handed / "broken.ipynb").write_text('{"cells": [')
    (handed / "essay.txt").write_text("here is my answer")
    (handed / "empty.zip").write_bytes(b"")
    with zipfile.ZipFile(handed / "two.zip", "w") as archive:
        for name in ("a.ipynb", "b.ipynb"):
            archive.writestr(name, "{}")
    rows = graded(edition, handed, folder)
    report = (folder / "grades-report.md").read_text(encoding="utf-8")
    return rows, report, json.loads((edition / "edition.json").read_text(encoding="utf-8"))["key"]


@pytest.fixture(scope="module")
def came_in(tmp_path_factory):
    return made_once(tmp_path_factory, "came-in", hand_in)[1]


def test_twelve_attacks_get_nothing_and_learn_nothing(came_in):
    rows, report, key = came_in
    assert len(GRADED) == 12
    for number in range(4):
        row = rows[f"attack-{number}.ipynb"]
        assert row["status"] == "graded" and row["points"] == 0, row
        for slot in ("talking", "gradient", "SHARES"):
            assert f"{slot}: not run, because" in row["remarks"]
    assert key not in report and "def talk_inputs" not in report and "run by the grader" not in report


def test_a_notebook_whose_cells_were_moved_doubled_and_untagged_gets_all_points(came_in):
    rows, report, _ = came_in
    row = rows["ada/a1 (1).ipynb"]
    assert (row["status"], row["points"], row["student"], row["remarks"]) == ("graded", 15, "Ada", "")
    assert "My answer: 17 rows." in report


def test_without_a_name_all_but_the_own_numbers_is_graded(came_in):
    row = came_in[0]["nameless.ipynb"]
    assert (row["q1"], row["q2"], row["q3"]) == (5, 6, 0)
    assert "STUDENT is not filled in" in row["remarks"]


def test_a_cell_that_was_deleted_costs_its_points_and_no_others(came_in):
    row = came_in[0]["cut.ipynb"]
    assert (row["q1"], row["q2"]) == (5, 0)
    assert "gradient: no cell defines it" in row["remarks"] and "of which edition" in row["remarks"]


def test_another_edition_and_what_is_no_notebook_are_refused_with_the_reason(came_in):
    rows = came_in[0]
    for file, says in {
        "other-edition.ipynb": "refused: this is edition a1-",
        "broken.ipynb": "no notebook that can be read",
        "essay.txt": "holds 0 notebooks",
        "empty.zip": "not a zip file",
        "two.zip": "holds 2 notebooks",
    }.items():
        assert rows[file]["status"] == "refused" and says in rows[file]["remarks"]
        assert "points" not in rows[file]
    assert len(rows) == 4 + 4 + 4


def test_files_that_come_with_a_notebook_are_not_imported_and_what_never_ends_is_ended(tmp_path, monkeypatch):
    edition = edition_of(tmp_path, "a1", "c")
    with zipfile.ZipFile(edition / "a1-gradescope.zip") as archive:
        archive.extract("course_guard.py", tmp_path)
        archive.extract("files/edition.json", tmp_path)
    handed = grades.Handed(
        "x", solution(edition), {"torch.py": b"raise SystemExit('mine')", "json.py": b"1/0"}
    )
    result, problem = grades.otter_run(handed, (edition / "a1-gradescope.zip").resolve(), str(tmp_path))
    assert not problem and sum(test["score"] for test in result["tests"]) == 15

    endless = solution(edition)
    replace(endless, "talking", "def talking(q, k, v, mix):\n    while True:\n        pass")
    put(endless, tmp_path / "handed", "endless.ipynb")
    monkeypatch.setattr(grades, "LIMIT", 20)
    (row,) = graded(edition, tmp_path / "handed", tmp_path).values()
    assert row["status"] == "failed" and "did not end within 20 s" in row["remarks"]
