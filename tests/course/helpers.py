"""Editions for tests, and submissions that are made of the model solution."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from atbook.exercises.answers import cells_of
from tests.course.unguarded import Open
from tools import course
from tools.grades import Edition
from tools.handed import Handed, read

SECRET = b"a secret for tests only"


@dataclass
class Work(Handed):
    """A submission whose notebook is made of cells, which a test changes."""

    code: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)

    def contents(self) -> tuple[bytes, dict[str, bytes]]:
        return as_notebook(self), self.uploads


def edition_of(folder: Path, name: str, letter: str) -> Edition:
    """An edition in which every task has the same variant."""
    tasks = course.variants(course.read_master(name).cells)
    return Edition(course.make_edition(name, SECRET, folder / letter, {task: letter for task in tasks}))


def only(edition: Edition, *tasks: str) -> Edition:
    """The same edition with some of its tasks."""
    some = Edition(edition.folder)
    some.tasks = {name: edition.tasks[name] for name in tasks}
    return some


def solution(edition: Edition, student: str = "model solution") -> Work:
    """The model solution, handed in by somebody."""
    path = edition.folder / f"{edition.name}-solution.ipynb"
    code, texts = cells_of(path.read_bytes())
    handed = Work(f"{student}.ipynb", path, code=code, texts=texts)
    replace(handed, "STUDENT", f'STUDENT = "{student}"')
    return handed


def replace(handed: Work, name: str, code: str) -> Work:
    """Put another answer in the place of the one that defines a name."""
    pattern = re.compile(rf"^(?:def|class) {name}\b|^{name} = ", re.M)
    (at,) = [i for i, cell in enumerate(handed.code) if pattern.search(cell) and "check(" not in cell]
    handed.code[at] = code
    return handed


def as_notebook(handed: Work) -> bytes:
    """A submission as a notebook's file."""
    cells = [("markdown", text) for text in handed.texts] + [("code", code) for code in handed.code]
    made = [{"cell_type": kind, "metadata": {}, "source": source} for kind, source in cells]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def read_here(handed: Handed, edition: Edition) -> None:
    """Read a submission in this process."""
    handed.reading = read(handed, Open(), edition.label, edition.uploads, edition.code, edition.tasks)
