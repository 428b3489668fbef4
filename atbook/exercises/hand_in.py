"""`python -m atbook hand-in NOTEBOOK` says of an assignment what the grader would say of its form, with the
grader's own functions, tries the public checks on the answers as the grader will run them, and makes the one
file that is handed in."""

import argparse
import json
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from atbook.cage.outside import Cage, CageDamaged, missing
from atbook.exercises import answers

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


@dataclass
class Examined:
    """What is said of a notebook before it is handed in."""

    # The name that the student filled in; "" where there is none.
    student: str = ""
    # {what is asked for: what is said of it}, of answers, numbers and files.
    said: dict[str, str] = field(default_factory=dict)
    # What is right, of these, and what is there and is not judged before it is graded.
    right: set[str] = field(default_factory=set)
    there: set[str] = field(default_factory=set)
    # Why the whole notebook would be refused; "" where it would not.
    refused: str = ""


def examine(path: Path) -> tuple[Examined, dict]:
    """What the grader would say of a notebook, and what its assignment asks for. Raises `ValueError` for a
    file that is no notebook of an assignment."""
    handout_path = path.parent / "handout.json"
    if not path.is_file() or not handout_path.is_file():
        absent = path if not path.is_file() else handout_path
        raise ValueError(f"there is no {absent}: leave the files that came with the notebook beside it")
    handout = json.loads(handout_path.read_text(encoding="utf-8"))
    for name in (handout["assignment"], *handout["uploads"]):  # they are read, zipped and given away
        if not re.fullmatch(r"[\w-][\w.-]*", str(name)):
            raise ValueError(f"{handout_path} names {name!r}: it must be a file beside it")
    code, _ = answers.cells_of(path.read_bytes())
    examined = Examined()
    labels = answers.edition_of(code)
    if labels and handout["edition"] not in labels:
        examined.refused = (
            f"the notebook is of {', '.join(sorted(labels))}, its files of {handout['edition']}"
        )
        return examined, handout
    name = answers.name_of(code)
    if name.value is None:
        examined.refused = name.problem
        return examined, handout
    examined.student = name.value
    if name.problem:
        examined.said["STUDENT"] = name.problem
    with Cage([*handout["imports"], "atbook.exercises.judging"], [path.parent.resolve()]) as cage:
        for task in handout["tasks"]:
            if "answer" in task:
                _examine_answer(task, code, handout, path.parent.resolve(), cage, examined)
            if "typed" in task:
                typed = answers.typed(task["typed"], code)
                examined.said[task["typed"]] = (
                    typed.problem or "typed in; hidden tests say whether it is right"
                )
                examined.there |= set() if typed.problem else {task["typed"]}
    for upload in handout["uploads"]:
        there = _is_beside(path, upload)
        examined.said[upload] = "it is graded" if there else "not there: it belongs beside the notebook"
        examined.there |= {upload} if there else set()
    return examined, handout


def _examine_answer(
    task: dict, code: list[str], handout: dict, folder: Path, cage: Cage, examined: Examined
) -> None:
    """Say of one answer what the grader, and then what the public check says."""
    name = task["answer"]
    found = answers.answer(name, code, handout["code"])
    problem = found.problem or "; ".join(answers.broken_rules(found.code, task.get("refused", {})))
    if problem:
        examined.said[name] = problem
        return
    number = next((number for number, checked in handout["checks"].items() if checked == name), None)
    if number is None:
        examined.said[name] = "there; it has no public check"
        return
    whole = found.code + JUDGE.format(folder=str(folder))
    try:
        reply = cage.call(whole, "verdict", [number, name], seconds=SECONDS)
        passed, says = reply.value if not reply.error else (False, f"not yet: {reply.error}")
    except CageDamaged as error:
        passed, says = False, f"not yet: {error}"
    examined.said[name] = str(says)
    examined.right |= {name} if passed else set()


def _is_beside(path: Path, name: str) -> bool:
    return (path.parent / name).is_file() and not (path.parent / name).is_symlink()


def write_file(path: Path, examined: Examined, handout: dict) -> Path:
    """Make the one file that is handed in, beside the notebook: it and what is asked for with it."""
    student = re.sub(r"\W+", "-", examined.student).strip("-")[:60] or "nameless"
    out = path.parent / f"{handout['assignment']}-{student}.zip"
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
    for name, says in examined.said.items():
        word = "right" if name in examined.right else "there" if name in examined.there else "not yet"
        print(f"{word:7}  {name}: {says}")
    if lacks := missing():
        print(f"(Tried here with fewer limits than the grader has. {lacks})")
    print(f"Hand in {write_file(arguments.notebook, examined, handout)}")
    return 0 if examined.right | examined.there >= examined.said.keys() - {"STUDENT"} else 1
