"""A grader without a cage: the same driver, but answers run in its own process, with nothing taken from them.
On it the tests show that an attack would succeed, so that its failure in the cage says something."""

import json
import os
import pickle
import signal
import sys
import tempfile
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atbook.cage.inside import answered, explained
from atbook.cage.outside import Reply
from atbook.exercises import answers
from tools import grades
from tools.grades import Edition, graded
from tools.handed import Handed, Reading

SECONDS = 60


class Outcome(NamedTuple):
    """What came of grading."""

    # Points of the task.
    points: float
    # All that a student or a teacher reads.
    says: str
    # Whether the grader was ended before it had said anything.
    ended: bool


class Open:
    """What stands in the place of a cage."""

    def call(self, code: str, name: str, arguments, gradients=(), weights=None, **_) -> Reply:
        """Run some code in this process, as `Cage.call` does in another."""
        request = dict(code=code, name=name, arguments=list(arguments), gradients=list(gradients))
        try:
            value = answered(request | dict(weights=weights, no_grad=False, by_hand=False))
        except Exception as error:
            return Reply(None, self.whole(error), 0.0, 0)
        if not any(isinstance(part, Tensor) for part in value["returned"]):
            value = pickle.loads(pickle.dumps(value))  # as graders do that hand results over
        return Reply(value if gradients else value["returned"], "", 0.0, 0)

    @staticmethod
    def whole(error: Exception) -> str:
        """An error with all of its text."""
        return f"{explained(error)} {error}"


def unruly(edition: Edition) -> Edition:
    """The edition without its tasks' rules about names."""
    same = Edition(edition.folder)
    same.tasks = {name: {**task, "refused": {}} for name, task in deepcopy(edition.tasks).items()}
    return same


def executed(name: str, cells: list[str]) -> answers.Typed:
    """What was typed in, by running its cell instead of reading it."""
    space: dict = {}
    cell = next(code for code in cells if f"{name} = " in code)
    exec(cell, space)
    return answers.Typed(space[name])


def outcome(edition: Edition, handed: Handed) -> Outcome:
    """What the grader without a cage says. It runs in a child of a child, whose parents an attack may end."""
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        os.setsid()
        pid = os.fork()
        if not pid:
            try:
                _graded_here(edition, handed, write)
            finally:
                os._exit(1)  # whatever the attack raised
        os.close(write)
        os.waitpid(pid, 0)
        os._exit(0)
    os.close(write)
    _, state = os.waitpid(parent, 0)
    with os.fdopen(read, "rb") as file:
        text = file.read().decode(errors="replace")
    if os.WIFSIGNALED(state) or not text:
        return Outcome(0.0, text, True)
    return Outcome(*json.loads(text), False)


def _graded_here(edition: Edition, handed: Handed, write: int) -> None:
    """Grade in this process, and write what came of it."""
    signal.alarm(SECONDS)
    torch.set_num_threads(1)  # the threads of the parent are not here, and would be waited for
    os.chdir(tempfile.mkdtemp())
    told, plainly = StringIO(), grades.read

    def read(handed: Handed, *given) -> Reading:
        reading = plainly(handed, *given)
        names = {task: says["typed"] for task, says in edition.tasks.items() if "typed" in says}
        reading.typed = {task: executed(name, handed.code) for task, name in names.items()}
        return reading

    grades.read = read
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    import course.a1.cases as cases

    cases.numbers = lambda value, shape: value
    with redirect_stdout(told):
        result = graded(handed, unruly(edition), Open())
    says = [test.says for tests in result.tests.values() for test in tests]
    shown = " ".join([told.getvalue(), *result.remarks, *says])
    os.write(write, json.dumps([result.total, shown]).encode())


def gained(outcome: Outcome, file: Path, secrets: tuple[str, ...]) -> str:
    """What an attack has gained; "" where nothing. file: it held "mine" before."""
    if outcome.ended:
        return "the grader was ended"
    if outcome.points:
        return f"{outcome.points:g} points"
    if not file.is_file() or file.read_bytes() != b"mine":
        return "a file was written"
    leaked = [secret for secret in secrets if secret in outcome.says]
    return f"{leaked[0]!r} was told" if leaked else ""
