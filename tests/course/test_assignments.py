"""The assignments, graded as a teacher grades them: model solutions, and planted mistakes."""

import importlib

import pytest

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
