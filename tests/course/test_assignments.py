"""The assignments graded: model solutions, planted mistakes, and what a teacher is told of a report of A3."""

import importlib
import shutil

import pytest

from atbook.records import records_file
from course.a3.cases import without_each_fault
from tests.course.helpers import Work, edition_of, only, solution
from tools import course
from tools.grades import graded

TASKS = {name: course.tasks_of(course.read_master(name).cells) for name in course.assignments()}
LETTERS = "abc"


def planted(edition, right: str, wrong, uploads: dict[str, bytes]) -> Work:
    """The model solution with a mistake, in an answer or in a file that comes with it."""
    handed = solution(edition)
    handed.uploads = dict(uploads)
    if right in uploads:
        handed.uploads[right] = wrong(uploads[right])
        return handed
    at = next(number for number, cell in enumerate(handed.code) if right in cell and "check(" not in cell)
    handed.code[at] = handed.code[at].replace(right, wrong)
    return handed


@pytest.mark.slow
@pytest.mark.parametrize("letter", LETTERS)
@pytest.mark.parametrize("name", course.assignments())
def test_the_solution_gets_all_points_and_every_mistake_what_it_is_worth(name, letter, tmp_path):
    edition = edition_of(tmp_path, name, letter)
    mutants = importlib.import_module(f"course.{name}.mutants")
    uploads = getattr(mutants, "UPLOADS", {})
    automatic = {task: says["points"] for task, says in TASKS[name].items() if says["tests"]}
    handed = solution(edition)
    handed.uploads = dict(uploads)
    with edition.cage() as cage:
        result = graded(handed, edition, cage)
        assert {task: result.points(task) for task in automatic} == automatic, result
        got, want = {}, {}
        for task in automatic:
            for number, (right, wrong, points) in enumerate(mutants.MUTANTS[task, letter]):
                handed = planted(edition, right, wrong, uploads)
                result = graded(handed, only(edition, task), cage)
                got[task, number], want[task, number] = result.points(task), points
        assert got == want


def test_a_report_without_each_of_its_faults(tmp_path):
    """The numbers that the model answer has typed."""
    for study in ("shifts", "shifts-pool"):
        shutil.copy(records_file(study, "find"), tmp_path / f"{study}.jsonl")
    found = without_each_fault("cue@3", ("copy", "fine-tune"), tmp_path)
    typed = {"mean of the runs": 7.1, "logit axes": 7.1}
    typed |= {"without the judged runs": 12.4, "without guessing runs": 10.4}
    assert found == pytest.approx(typed, abs=0.06)
