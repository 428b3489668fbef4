"""What students handed in: notebooks and the files that come with them, out of folders and zips, with the
names that Canvas and Moodle give them. Nothing is run, and nothing in a file stops the others."""

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from atbook.cage.outside import cleaned
from atbook.exercises.answers import cells_of

MOST_BYTES, MOST_MEMBERS = 60_000_000, 2_000  # of a file after unpacking, and of the files in a zip
CANVAS = re.compile(r"^(?P<name>[^_]+)(?P<late>_LATE)?_(?P<id>\d+)_\d+_(?P<file>.+)$")
MOODLE = re.compile(r"^(?P<name>.+)_(?P<id>\d+)_assignsubmission_file_?(?P<file>.*)$")
AGAIN = re.compile(r"(?:-\d+| ?\(\d+\))(?=\.\w+$)")  # what is added where a name was there before


class Owner(NamedTuple):
    """What a file's name says of who handed it in."""

    # As the learning platform writes it; "" where no platform named the file.
    name: str
    # The platform's number of the student, or of the submission (Moodle).
    identifier: str
    # The name that the student gave the file.
    file: str
    # Whether the platform calls it late.
    late: bool = False


@dataclass
class Handed:
    """What a student handed in."""

    # The path of the submission, from the folder of submissions.
    file: str
    # The sources of the code cells, in their order.
    code: list[str] = field(default_factory=list)
    # The sources of the text cells.
    texts: list[str] = field(default_factory=list)
    # {name: content} of the files that the assignment asks for beside the notebook.
    uploads: dict[str, bytes] = field(default_factory=dict)
    # Why it cannot be graded; "" where it can.
    problem: str = ""
    # What the file's name says of the student.
    owner: Owner = Owner("", "", "")
    # When it was handed in, as far as the files say.
    time: datetime | None = None


def owner_of(path: PurePosixPath) -> Owner:
    """What the names of a file and of its folders say of its owner: the outermost is the platform's, one
    inside it is the student's, and says nothing."""
    for folder in path.parts[:-1]:
        if match := MOODLE.match(folder):
            return Owner(match["name"], match["id"], AGAIN.sub("", path.name))
    if match := CANVAS.match(path.name):
        return Owner(match["name"], match["id"], AGAIN.sub("", match["file"]), bool(match["late"]))
    if match := MOODLE.match(path.name):
        return Owner(match["name"], match["id"], AGAIN.sub("", match["file"]))
    return Owner("", "", AGAIN.sub("", path.name))


def _hidden(path: PurePosixPath) -> bool:
    """Whether programs made a file for themselves (`.ipynb_checkpoints`, `__MACOSX`)."""
    return any(part.startswith((".", "__MACOSX")) for part in path.parts)


def _of_zip(path: Path, uploads: Sequence[str]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The notebooks and the uploads in a zip. Raises `ValueError` for one that is too large."""
    notebooks, files, left = {}, {}, MOST_BYTES
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > MOST_MEMBERS:
            raise ValueError(f"the zip holds {len(members)} files")
        for member in members:
            inner = PurePosixPath(member.filename.replace("\\", "/"))
            name = AGAIN.sub("", inner.name)
            if member.is_dir() or _hidden(inner) or not (name.endswith(".ipynb") or name in uploads):
                continue
            with archive.open(member) as file:  # what it holds, not what it says that it holds
                content = file.read(left + 1)
            left -= len(content)
            if left < 0:
                raise ValueError(f"the zip holds more than {MOST_BYTES // 10**6} MB")
            (notebooks if name.endswith(".ipynb") else files)[str(inner) if name not in uploads else name] = (
                content
            )
    return notebooks, files


def _chosen(notebooks: dict[str, bytes], edition: str) -> bytes:
    """The one notebook of an assignment. Raises `ValueError` where there is none, or more than one."""
    if len(notebooks) > 1:
        of_edition = {name: content for name, content in notebooks.items() if edition.encode() in content}
        notebooks = of_edition if len(of_edition) == 1 else notebooks
    if len(notebooks) != 1:
        raise ValueError(f"it holds {len(notebooks)} notebooks (.ipynb), not one")
    return next(iter(notebooks.values()))


def read_one(path: Path, beside: dict[str, Path], edition: str, uploads: Sequence[str]) -> Handed:
    """A submission: a notebook with the uploads beside it, or a zip. beside: {upload: its path}."""
    handed = Handed(path.name)
    try:
        if path.suffix.lower() == ".zip":
            notebooks, handed.uploads = _of_zip(path, uploads)
            content = _chosen(notebooks, edition)
        else:
            everything = [path, *beside.values()]
            if any(file.stat().st_size > MOST_BYTES for file in everything):
                raise ValueError(f"a file has more than {MOST_BYTES // 10**6} MB")
            if path.suffix.lower() != ".ipynb":
                raise ValueError("it holds 0 notebooks (.ipynb), not one")
            content = path.read_bytes()
            handed.uploads = {name: file.read_bytes() for name, file in beside.items()}
        handed.code, handed.texts = cells_of(content)
    except Exception as error:  # whatever a file holds, the others are still to be graded
        handed.problem = f"cannot be read: {cleaned(str(error)) or type(error).__name__}"
    return handed


def handed_in(folder: Path, edition: str, uploads: Sequence[str]) -> list[Handed]:
    """All submissions in a folder and below it, in the order of their paths.

    edition: the label that tells the assignment's notebook from others in a zip. uploads: the names of files
    that belong to a notebook: those of the same owner on a platform, or beside it.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    inner = {path: PurePosixPath(path.relative_to(folder).as_posix()) for path in paths}
    paths = [path for path in paths if not _hidden(inner[path])]
    owners = {path: owner_of(inner[path]) for path in paths}

    def together(path: Path) -> tuple:
        owner = owners[path]
        return owner[:2] if owner.name else (path.parent, "")

    groups: dict[tuple, list[Path]] = {}
    for path in paths:
        groups.setdefault(together(path), []).append(path)
    everybody = []
    for path in paths:
        group = groups[together(path)]
        ours = owners[path].name or path.parent != folder
        if owners[path].file in uploads or path.name in ("received.csv", "whose.csv"):
            continue
        is_work = path.suffix.lower() in (".ipynb", ".zip")
        if not is_work and ours and any(other.suffix.lower() in (".ipynb", ".zip") for other in group):
            continue  # a picture beside a notebook
        beside = {owners[other].file: other for other in group if owners[other].file in uploads}
        handed = read_one(path, beside, edition, uploads)
        handed.file, handed.owner = cleaned(str(inner[path])), owners[path]
        handed.time = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        everybody.append(handed)
    return everybody
