"""Exercises in chapters: starter, solution, check, in this order, as the judge knows them."""

import inspect
import json
import re

import jupytext
import pytest

from atbook.exercises import every, headings, judge
from tests.helpers import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.md"))


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def page_of(exercise):
    """The notebook in which the exercise stands."""
    head = f"\n### Exercise {exercise.number}."
    (page,) = [path for path in NOTEBOOKS if head in path.read_text(encoding="utf-8")]
    return page


def cells_of(exercise) -> tuple:
    """Text, starter, solution and check of an exercise."""
    cells = jupytext.read(page_of(exercise), fmt="md:myst").cells
    text = f"### Exercise {exercise.number}."
    (start,) = [number for number, cell in enumerate(cells) if text in cell.source]
    return tuple(cells[start : start + 4])


def defined(code: str) -> dict:
    names = {}
    exec(code, names)
    return names


@pytest.mark.parametrize("exercise", every(), ids=lambda exercise: exercise.number)
def test_an_exercise_has_a_starter_a_solution_and_a_check(exercise):
    text, starter, solution, check = cells_of(exercise)
    ((number, head),) = headings(text.source).items()  # each has cells of its own
    assert number == exercise.number and head.stars in (1, 2, 3) and 5 <= head.minutes <= 60
    assert text.source.count("### Exercise") == 1
    assert tags(starter) == ["exercise", "skip-execution"]
    assert tags(solution) == ["solution", "hide-cell"] and tags(check) == ["check"]
    name = re.fullmatch(
        rf'from atbook.exercises import check\n\ncheck\("{exercise.number}", (\w+)\)', check.source
    )[1]
    parameters = list(inspect.signature(exercise.right).parameters)
    begun, solved = (defined(cell.source)[name] for cell in (starter, solution))
    for answer in (begun, solved):
        assert list(inspect.signature(answer).parameters) == parameters
    assert judge(exercise, begun).mistake == "not done"
    verdict = judge(exercise, solved)
    assert verdict.passed, verdict
    if exercise.see:
        assert f"\n## {exercise.see}\n" in page_of(exercise).read_text(encoding="utf-8")


@pytest.mark.parametrize("chapter", NOTEBOOKS, ids=lambda chapter: chapter.stem)
def test_a_chapter_has_the_exercises_that_the_judge_knows_and_nothing_leans_on_a_solution(chapter):
    cells = jupytext.read(chapter, fmt="md:myst").cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    asked = re.findall(r"^### Exercise ([A-Z]?\d+\.\d+)\.", text, re.MULTILINE)
    pages = {number.split(".")[0] for number in asked}
    known = [exercise.number for exercise in every() if exercise.number.split(".")[0] in pages]
    assert asked == known and len(pages) <= 1
    solutions = [set(re.findall(r"^def (\w+)", c.source, re.M)) for c in cells if "solution" in tags(c)]
    names = set().union(*solutions)
    assert sum(map(len, solutions)) == len(names), "a name is one exercise's"
    for cell in cells:
        if cell.cell_type == "code" and not {"exercise", "solution", "check"} & {*tags(cell)}:
            assert not names & set(re.findall(r"\w+", cell.source)), "a reader has no solution"


@pytest.mark.parametrize("chapter", NOTEBOOKS, ids=lambda chapter: chapter.stem)
def test_a_students_notebook_has_solutions_only_as_folded_text_after_the_check(chapter):
    source = jupytext.read(chapter, fmt="md:myst").cells
    solutions = [cell.source for cell in source if "solution" in tags(cell)]
    cells = json.loads(chapter.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    for solution in solutions:
        (at,) = [number for number, text in enumerate(texts) if solution in text]
        assert cells[at]["cell_type"] == "markdown" and texts[at].startswith("<details>\n<summary>Solution")
        assert cells[at - 1]["metadata"]["tags"] == ["check"]
    every_tag = [tag for cell in cells for tag in cell["metadata"].get("tags", [])]
    assert "solution" not in every_tag and "skip-execution" not in every_tag
    assert every_tag.count("exercise") == every_tag.count("check") == len(solutions)
