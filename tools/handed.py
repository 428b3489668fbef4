"""What students handed in: notebooks and the files that come with them, in folders and zips, with the names
that Canvas and Moodle give them. Nothing is run or read here but names and sizes: a cage reads the rest."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from atbook.cage import outside
from atbook.cage.outside import Cage, cleaned
from atbook.exercises.answers import Found, Typed
from atbook.exercises.reading import AGAIN, MOST_BYTES, is_hidden

CANVAS = re.compile(r"^(?P<name>[^_]+)(?P<late>_LATE)?_(?P<id>\d+)_\d+_(?P<file>.+)$")
MOODLE = re.compile(r"^(?P<name>.+)_(?P<id>\d+)_assignsubmission_file_?(?P<file>.*)$")
READ = "from atbook.exercises.reading import read"


class Owner(NamedTuple):
    """What the outermost name, of a folder or a file, says of who handed it in."""

    # As the learning platform or the teacher writes it; "" where the work stands alone.
    name: str
    # The platform's number of the student, or of the submission (Moodle); "" where no platform named it.
    identifier: str
    # The name that the student gave the file.
    file: str
    # Whether the platform calls it late.
    late: bool = False


@dataclass
class Reading:
    """What is in a submission."""

    # Why it cannot be graded; "" where it can.
    problem: str = ""
    # The name that the student filled in.
    name: Typed = Typed(None)
    # The editions that it says it belongs to.
    labels: list[str] = field(default_factory=list)
    # {task: the code of its answer, or why there is none}.
    answers: dict[str, Found] = field(default_factory=dict)
    # {task: what was typed in}.
    typed: dict[str, Typed] = field(default_factory=dict)
    # {task: pieces of its code, to be compared}.
    pieces: dict[str, set[int]] = field(default_factory=dict)
    # The sources of the text cells.
    texts: list[str] = field(default_factory=list)
    # {name: content} of the files that the assignment asks for beside the notebook.
    uploads: dict[str, bytes] = field(default_factory=dict)
    # What the teacher and the student should know.
    remarks: list[str] = field(default_factory=list)


@dataclass
class Handed:
    """What a student handed in."""

    # The path of the submission, from the folder of submissions.
    file: str
    path: Path
    # {name: path} of the files that came beside it.
    beside: dict[str, Path] = field(default_factory=dict)
    # What its name says of the student.
    owner: Owner = Owner("", "", "")
    # When it was handed in, as far as the files say.
    time: datetime | None = None
    # What is in it, as soon as it was read.
    reading: Reading = field(default_factory=Reading)

    def contents(self) -> tuple[bytes, dict[str, bytes]]:
        """Of the file, and of those beside it. Raises `ValueError` where they cannot be a submission."""
        if self.path.suffix.lower() not in (".ipynb", ".zip"):
            raise ValueError("it holds 0 notebooks (.ipynb), not one")
        if is_hidden(PurePosixPath(self.path.name)):
            raise ValueError("its name begins with a dot: rename it")
        if any(file.stat().st_size > MOST_BYTES for file in (self.path, *self.beside.values())):
            raise ValueError(f"a file has more than {MOST_BYTES // 10**6} MB")
        return self.path.read_bytes(), {name: file.read_bytes() for name, file in self.beside.items()}


def read(
    handed: Handed, cage: Cage, edition: str, uploads: list[str], code: list[str], tasks: dict
) -> Reading:
    """What is in a submission. edition: the label that tells the assignment's notebook from others in a zip;
    uploads: the names of files that belong to a notebook; code: the cells that students got; tasks: {name:
    what is asked for}. Raises `CageDamaged`."""
    try:
        content, beside = handed.contents()
        as_bytes = torch.frombuffer(bytearray(content) or bytearray(1), dtype=torch.uint8)
        given = (as_bytes, handed.path.suffix.lower() == ".zip", edition, uploads, code, tasks)
        reply = cage.call(READ, "read", given, seconds=outside.SECONDS)
        if reply.error:
            raise ValueError(reply.error.replace("the answer", "it"))
        says, *files = (part.numpy().tobytes() for part in reply.value)
        says = json.loads(says)
    except (ValueError, OSError) as error:
        return Reading(f"cannot be read: {cleaned(str(error))}")
    if "problem" in says:
        return Reading(cleaned(says["problem"]))
    return Reading(
        name=Typed(*says["name"]),
        labels=says["labels"],
        answers={task: Found(*answer) for task, answer in says["answers"].items()},
        typed={task: Typed(*typed) for task, typed in says["typed"].items()},
        pieces={task: set(numbers) for task, numbers in says["pieces"].items()},
        texts=says["texts"],
        uploads=beside | dict(zip(says["uploads"], files)),
        remarks=says["remarks"],
    )


def owner_of(path: PurePosixPath) -> Owner:
    """What the outermost name says of who handed in a file: it is the platform's, or the teacher's. One
    inside it is the student's, and says nothing."""
    outer, alone = path.parts[0], len(path.parts) == 1
    match = MOODLE.match(outer) or CANVAS.match(outer)
    if not match:
        return Owner("" if alone else outer, "", AGAIN.sub("", path.name))
    file = AGAIN.sub("", match["file"] if alone else path.name)
    return Owner(match["name"], match["id"], file, bool(match.groupdict().get("late")))


def handed_in(folder: Path, uploads: Sequence[str]) -> list[Handed]:
    """All submissions in a folder and below it, in the order of their paths.

    uploads: the names of files that belong to a notebook: those of the same owner, or beside it.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    inner = {path: PurePosixPath(path.relative_to(folder).as_posix()) for path in paths}
    paths = [path for path in paths if not is_hidden(inner[path].parent) and not _is_shadow(path)]
    owners = {path: owner_of(inner[path]) for path in paths}
    together = {path: owner[:2] if owner.identifier else path.parent for path, owner in owners.items()}
    groups: dict[object, list[Path]] = {}
    for path in paths:
        groups.setdefault(together[path], []).append(path)
    everybody = []
    for path in paths:
        owner, group = owners[path], groups[together[path]]
        if owner.file in uploads or path.name in ("received.csv", "whose.csv"):
            continue
        is_work = path.suffix.lower() in (".ipynb", ".zip")
        if not is_work and owner.name and any(other.suffix.lower() in (".ipynb", ".zip") for other in group):
            continue  # a picture beside a notebook
        beside = {owners[other].file: other for other in group if owners[other].file in uploads}
        time = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        everybody.append(Handed(cleaned(str(inner[path])), path, beside, owner, time))
    return everybody


def _is_shadow(path: Path) -> bool:
    """Whether a system made a file beside another (`._a1.ipynb`), or for itself (`.DS_Store`)."""
    is_work = path.suffix.lower() in (".ipynb", ".zip")
    return path.name.startswith(".") and (path.name.startswith("._") or not is_work)
