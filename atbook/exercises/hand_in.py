"""`python -m atbook hand-in NOTEBOOK` says of an assignment what the grader would say of its form, with the
grader's own functions, tries the public checks on the answers as the grader will run them, and makes the one
file that is handed in."""

import argparse
import json
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

from atbook.cage.outside import Cage, CageDamaged, missing
from atbook.exercises import answers
from atbook.exercises.reading import cells_read

SECONDS = 60.0  # of a processor for the checks of an answer
# Runs in the cage, where the answer is. Nothing in there is secret: it is the student's own machine.
JUDGE = """
import sys
sys.path.insert(0, {folder!r})
from checks import EXERCISES
from atbook.exercises.judging import judge

def verdict(number, name):
    (exercise,) = [known for known in EXERCISES if known.number == number]
    said = judge(exercise, globals()[name])
    return said.passed, said.says
"""


class Examined(NamedTuple):
    """What is said of a notebook before it is handed in."""

    # The name that the student filled in; "" where there is none.
    student: str
    # {what is asked for: ("right", "there", which is judged when it is graded, or "not yet", and why)}.
    verdicts: dict[str, tuple[str, str]]
    # Why the whole notebook would be refused; "" where it would not.
    refused: str


def examine(path: Path) -> tuple[Examined, dict]:
    """What the grader would say of a notebook, and what its assignment asks for. Raises `ValueError` for a
    file that is no notebook of an assignment."""
    handout_path = path.parent / "handout.json"
    for file in (path, handout_path):
        if not file.is_file():
            raise ValueError(f"there is no {file}: leave the files that came with the notebook beside it")
    handout = json.loads(handout_path.read_text(encoding="utf-8"))
    for name in (handout["assignment"], *handout["uploads"]):  # they are read, zipped and given away
        if not re.fullmatch(r"[\w-][\w.-]*", str(name)):
            raise ValueError(f"{handout_path} names {name!r}: it must be a file beside it")
    tasks = {task["name"]: task for task in handout["tasks"]}
    says = cells_read(*answers.cells_of(path.read_bytes()), handout["code"], tasks)
    student, problem = says["name"]
    if says["labels"] and handout["edition"] not in says["labels"]:
        problem = f"the notebook is of {', '.join(says['labels'])}, its files of {handout['edition']}"
        return Examined("", {}, problem), handout
    if student is None:
        return Examined("", {}, problem), handout
    verdicts = {"STUDENT": ("there", problem)} if problem else {}
    folder = path.parent.resolve()
    with Cage([*handout["imports"], "atbook.exercises.judging"], [folder]) as cage:
        for task, (code, problem) in says["answers"].items():
            name = tasks[task]["answer"]
            problem = problem.removeprefix(f"{name}: ")
            verdicts[name] = ("not yet", problem) if problem else _judged(name, code, handout, folder, cage)
    for task, (_, problem) in says["typed"].items():
        there = ("there", "typed in; hidden tests say whether it is right")
        verdicts[tasks[task]["typed"]] = ("not yet", problem) if problem else there
    for upload in handout["uploads"]:
        absent = ("not yet", "not there: it belongs beside the notebook")
        verdicts[upload] = ("there", "it is graded") if _is_beside(path, upload) else absent
    return Examined(student, verdicts, ""), handout


def _judged(name: str, code: str, handout: dict, folder: Path, cage: Cage) -> tuple[str, str]:
    """What the public check says of an answer."""
    number = next((number for number, checked in handout["checks"].items() if checked == name), None)
    if number is None:
        return "there", "it has no public check"
    try:
        whole = code + JUDGE.format(folder=str(folder))
        reply = cage.call(whole, "verdict", [number, name], seconds=SECONDS)
        passed, says = reply.value if not reply.error else (False, f"not yet: {reply.error}")
    except CageDamaged as error:
        passed, says = False, f"not yet: {error}"
    return "right" if passed else "not yet", str(says)


def _is_beside(path: Path, name: str) -> bool:
    return (path.parent / name).is_file() and not (path.parent / name).is_symlink()


def write_file(path: Path, student: str, handout: dict) -> Path:
    """Make the one file that is handed in, beside the notebook: it and what is asked for with it."""
    name = re.sub(r"\W+", "-", student).strip("-")[:60] or "nameless"
    out = path.parent / f"{handout['assignment']}-{name}.zip"
    files = [path, *(path.parent / name for name in handout["uploads"] if _is_beside(path, name))]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.name)
    return out


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of `hand-in`, and what it calls, `run`."""
    parser.add_argument("notebook", type=Path)
    parser.set_defaults(run=hand_in_command)


def hand_in_command(arguments: argparse.Namespace) -> int:
    """Say what the grader would, and make the file; 0 where all is well, 1 where something is missing or
    wrong, which can be handed in nevertheless."""
    examined, handout = examine(arguments.notebook)
    if examined.refused:
        print(f"not ready: {examined.refused}. No file was made.")
        return 1
    for name, (word, says) in examined.verdicts.items():
        print(f"{word:7}  {name}: {says}")
    if lacks := missing():
        print(f"(Tried here with fewer limits than the grader has. {lacks})")
    print(f"Hand in {write_file(arguments.notebook, examined.student, handout)}")
    return int(any(word == "not yet" for word, _ in examined.verdicts.values()))
