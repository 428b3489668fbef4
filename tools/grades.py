"""Grades of submissions to an assignment of an edition, by its hidden tests.

Tests run here, answers run in a cage (`atbook.cage`): numbers go in and come out. Every submission has a
result: graded, or refused with the reason. Nothing in a submission stops the others, nor another task of its
own.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from atbook.cage.outside import Answer, Cage, CageDamaged, cleaned
from course.hidden import Asked
from tools.handed import Handed, read


class Marked(NamedTuple):
    """What a hidden test said."""

    # What it tests, in a sentence.
    title: str
    # The points that were reached, and those that can be.
    points: float
    of: float
    # Why points are missing; "" where none is.
    says: str
    # Whether it could be tested; where not, the teacher grades it by hand.
    judged: bool = True


@dataclass
class Result:
    """What came of a submission."""

    # The path of the submission, from the folder of submissions.
    file: str
    # The name that the student filled in; "" where there is none.
    student: str
    # "graded" or "refused".
    status: str
    # {task: its tests}.
    tests: dict[str, list[Marked]]
    # What the teacher and the student should know.
    remarks: list[str]
    # Seconds on a clock.
    seconds: float

    def points(self, task: str) -> float:
        """The points of a task."""
        return sum(test.points for test in self.tests.get(task, ()))

    @property
    def total(self) -> float:
        """The points of all tasks."""
        return sum(self.points(task) for task in self.tests)


class Edition:
    """An assignment of an edition, as `tools/course.py` wrote it. Raises `ValueError` for another folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / "edition.json"
        if not path.is_file():
            raise ValueError(f"{folder} is no assignment of an edition: it has no edition.json")
        says = json.loads(path.read_text(encoding="utf-8"))
        self.name: str = says["assignment"]
        self.title: str = says["title"]
        self.label: str = says["edition"]
        self.variants: dict[str, str] = says["variants"]
        self.key: str = says["key"]
        self.uploads: list[str] = says["uploads"]
        self.imports: list[str] = says["imports"]
        self.tasks: dict[str, dict] = says["tasks"]
        self.files = (folder / "files").resolve()
        handout = json.loads((self.files / "handout.json").read_text(encoding="utf-8"))
        self.code: list[str] = handout["code"]
        self.texts: set[str] = {text.strip() for text in handout["texts"]}

    @property
    def automatic(self) -> dict[str, dict]:
        """The tasks that hidden tests grade."""
        return {name: task for name, task in self.tasks.items() if task["tests"]}

    @property
    def by_hand(self) -> dict[str, dict]:
        """The tasks that are graded by hand."""
        return {name: task for name, task in self.tasks.items() if not task["tests"] and task["points"]}

    def cases(self) -> ModuleType:
        """The hidden tests."""
        return import_module(f"course.{self.name}.cases")

    def cage(self, use_namespaces: bool = True) -> Cage:
        """A cage for this assignment's answers."""
        return Cage(self.imports, [self.files], use_namespaces)


# --- One submission ---


def graded(
    handed: Handed, edition: Edition, cage: Cage, grader: Cage | None = None, again: bool = False
) -> Result:
    """The result of a submission. cage: for its answers; grader: for what the grader evaluates (None: the
    same). Raises `CageDamaged` where a cage did not reply, which says nothing of the submission; again: what
    was asked then is left to the teacher, and the rest graded."""
    start = time.monotonic()
    handed.reading = reading = read(handed, cage, edition.label, edition.uploads, edition.code, edition.tasks)
    problem, labels = reading.problem, cleaned(", ".join(reading.labels))
    if labels and edition.label not in reading.labels:
        problem = f"this is edition {edition.label}, the notebook is of {labels}"
    if problem:
        return Result(handed.file, "", "refused", {}, [problem], 0.0)
    remarks = [*reading.remarks, *[reading.name.problem] * bool(reading.name.problem)]
    if not labels:
        remarks.append("the notebook does not say of which edition it is")
    student = reading.name.value or ""
    asked = Asked(
        student, edition.label, edition.variants, edition.key, edition.files, grader or cage, reading.uploads
    )
    cases, tests = edition.cases(), {}
    for task, says in edition.automatic.items():
        given, failed = (), ""
        if task in reading.answers:
            code, failed = reading.answers[task]
            given = (Answer(cage, code, says["answer"], by_hand=bool(says.get("refused"))),)
        elif task in reading.typed:
            given = (reading.typed[task].value,)
            remarks += [reading.typed[task].problem] * bool(reading.typed[task].problem)
        remarks += [failed] * bool(failed)
        tests[task] = [
            _tested(cases, test, of, given, asked, again, failed) for test, of in says["tests"].items()
        ]
    seconds = round(time.monotonic() - start, 1)
    return Result(handed.file, student, "graded", tests, [cleaned(remark) for remark in remarks], seconds)


def title_of(cases: ModuleType, test: str) -> str:
    """What a hidden test tests, in a sentence."""
    return " ".join((getattr(cases, test).__doc__ or test).split())


def _tested(
    cases: ModuleType, name: str, points: float, given: Sequence, asked: Asked, again: bool, failed: str
) -> Marked:
    """A test's result. failed: why there is nothing to test; "" where there is."""
    if failed:
        return Marked(title_of(cases, name), 0, points, failed)
    test: Callable = getattr(cases, name)
    try:
        test(*given, asked) if takes_answer(test) else test(asked)
    except AssertionError as error:
        return Marked(title_of(cases, name), 0, points, cleaned(str(error)) or "not right")
    except CageDamaged as error:
        if not again:
            raise
        return Marked(title_of(cases, name), 0, points, f"not graded, look at it: {error}", judged=False)
    except RecursionError:
        return Marked(title_of(cases, name), 0, points, "what was handed in is nested too deeply")
    except Exception as error:  # a value that no test expected is no reason to stop
        kind = cleaned(f"{type(error).__name__}: {error}")
        return Marked(title_of(cases, name), 0, points, f"the test could not read the answer ({kind})")
    return Marked(title_of(cases, name), points, points, "")


def takes_answer(test: Callable) -> bool:
    """Whether a test takes an answer beside what was asked."""
    return len(signature(test).parameters) == 2


# --- All of them ---


def grade(
    edition: Edition,
    everybody: Sequence[Handed],
    jobs: int = 1,
    use_namespaces: bool = True,
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """The results of all submissions, in their order. jobs: how many are graded side by side. Each has a cage
    of its own, and the grader another; one whose cage did not reply is graded again, alone, and what is not
    answered then is left to the teacher. done: is called with each result as soon as it is there."""
    # jobs run side by side, and threads of one wait for each other on a busy machine
    torch.set_num_threads(1)

    def one(handed: Handed, again: bool = False) -> Result | CageDamaged:
        try:
            with edition.cage(use_namespaces) as cage, edition.cage(use_namespaces) as grader:
                return graded(handed, edition, cage, grader, again)
        except CageDamaged as error:
            return error
        except Exception as error:  # the cage does not start, the disk is full: a line, and on to the next
            return _not_graded(handed, error)

    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(one, everybody):
            results.append(result)
            if isinstance(result, Result):
                done(result)
    for at, (handed, first) in enumerate(zip(everybody, results)):
        if isinstance(first, Result):
            continue
        again = one(handed, again=True)
        if isinstance(again, CageDamaged):
            again = _not_graded(handed, again)
        again.remarks.append(cleaned(f"graded again, alone: {first}"))
        results[at] = again
        done(again)
    return results


def _not_graded(handed: Handed, error: Exception) -> Result:
    """The line of a submission that the teacher has to look at."""
    says = cleaned(f"not graded, look at it: {type(error).__name__}: {error}")
    return Result(handed.file, "", "refused", {}, [says], 0.0)
