"""Grades of a folder of submissions to an assignment: `python -m tools.course grade`.

`otter run` with the edition's guard runs every submission by itself. Every submission has a line in the
table: graded, or refused or failed with the reason. Nothing in a submission stops the others.
"""

import csv
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import psutil

LIMIT = 600  # seconds for one submission


@dataclass
class Handed:
    """What a student handed in."""

    # The path of the submission, from the folder of submissions.
    file: str
    notebook: nbformat.NotebookNode | None = None
    # {name: content} of the files that the assignment asks for beside the notebook.
    uploads: dict[str, bytes] = field(default_factory=dict)
    # Why it cannot be graded.
    problem: str = ""
    # The name that the student filled in.
    student: str = ""
    # What the instructor should see.
    remarks: list[str] = field(default_factory=list)


@dataclass
class Edition:
    """An assignment of an edition, as `tools/course.py` wrote it."""

    folder: Path

    def __post_init__(self):
        path = self.folder / "edition.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} is no assignment of an edition: it has no edition.json")
        says = json.loads(path.read_text(encoding="utf-8"))
        self.uploads: list[str] = says["uploads"]
        self.automatic = {name: q["points"] for name, q in says["questions"].items() if not q["manual"]}
        by_hand = {name: q["points"] for name, q in says["questions"].items() if q["manual"]}
        self.by_hand = {name: points for name, points in by_hand.items() if points}
        self.archive = (self.folder / f"{self.folder.resolve().name}-gradescope.zip").resolve()
        with zipfile.ZipFile(self.archive) as archive:
            text = archive.read("files/released.json").decode("utf-8")
        self.released = nbformat.reads(text, as_version=4)

    @property
    def columns(self) -> list[str]:
        """The columns of the table; an instructor fills in those of the written part."""
        written = [f"{name} (of {points})" for name, points in self.by_hand.items()]
        return ["file", "student", "status", *self.automatic, "points", "of", *written, "remarks", "seconds"]


# --- What was handed in ---


def handed_in(folder: Path, uploads: list[str]) -> list[Handed]:
    """All submissions in a folder and below it: notebooks, zips, and files that are neither."""
    all_handed = []
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        hidden = any(part.startswith((".", "__MACOSX")) for part in inner.parts)
        if hidden or path.is_dir() or path.name in uploads:
            continue
        handed = Handed(inner.as_posix())
        try:
            files = _files(path, uploads)
            notebooks = [name for name in files if name.endswith(".ipynb")]
            if len(notebooks) != 1:
                raise ValueError(f"it holds {len(notebooks)} notebooks (.ipynb), not one")
            handed.notebook = nbformat.reads(files[notebooks[0]].decode("utf-8"), as_version=4)
            handed.uploads = {Path(name).name: files[name] for name in files if Path(name).name in uploads}
        except Exception as error:  # whatever a file holds, the others are still to be graded
            handed.problem = f"no notebook that can be read: {error}".splitlines()[0][:300]
        all_handed.append(handed)
    return all_handed


def _files(path: Path, uploads: list[str]) -> dict[str, bytes]:
    """The files of a submission: those of a zip, or a file and the uploads that lie beside it."""
    if path.suffix != ".zip":
        beside = [path.parent / name for name in uploads]
        return {file.name: file.read_bytes() for file in (path, *beside) if file.is_file()}
    with zipfile.ZipFile(path) as archive:
        return {member: archive.read(member) for member in archive.namelist() if "__MACOSX" not in member}


def compare(all_handed: list[Handed], names: set[str]) -> None:
    """Read the students' names, and remark where two of them share the name, or numbers that should be
    different for each. names: the variables that the notebook asks students to fill in."""
    from course.course_guard import literal

    readable = [handed for handed in all_handed if handed.notebook is not None]
    numbers = {}
    for handed in readable:
        student = literal(handed.notebook, "STUDENT")
        handed.student = student.strip() if isinstance(student, str) else ""
        if not handed.student:
            handed.remarks.append("STUDENT is not filled in")
        values = {name: literal(handed.notebook, name) for name in names}
        numbers[handed.file] = {name: value for name, value in values.items() if isinstance(value, list)}
    for handed in readable:
        for other in (candidate for candidate in readable if candidate is not handed):
            if handed.student and handed.student.lower() == other.student.lower():
                handed.remarks.append(f"the same STUDENT as {other.file}")
                continue
            other_values = numbers[other.file]
            shared = [
                name for name, value in numbers[handed.file].items() if _alike(value, other_values.get(name))
            ]
            if shared:
                handed.remarks.append(f"the same {', '.join(shared)} as {other.file}, whose own are others")


def _alike(a, b) -> bool:
    """Whether two nested lists of numbers are the same, to 0.002."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) > 0 and all(map(_alike, a, b))
    return isinstance(a, (int, float)) and isinstance(b, (int, float)) and abs(a - b) <= 0.002


# --- Running it ---


def otter_environment() -> dict[str, str]:
    """The environment of otter's processes: one thread, this Python's kernel, and none of the instructor's
    own packages."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return kept | one_thread | {"JUPYTER_PREFER_ENV_PATH": "1", "MPLBACKEND": "agg"}


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    """A zip of some files."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def otter_run(handed: Handed, archive: Path, guard: str) -> tuple[dict, str]:
    """Otter's results of a submission, and the reason where there are none. guard: a folder with the
    edition's plugin."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        notebook = nbformat.writes(handed.notebook).encode()
        write_zip(folder / "submission.zip", {"submission.ipynb": notebook, **handed.uploads})
        command = [sys.executable, "-m", "otter", "run", "--no-logo", "-a", str(archive), "-o", temporary]
        environment = otter_environment() | {"PYTHONPATH": guard, "IPYTHONDIR": temporary}
        with open(folder / "said", "w+", encoding="utf-8") as said:
            process = subprocess.Popen(
                [*command, "submission.zip"], cwd=folder, env=environment, stdout=said, stderr=said
            )
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                for running in [*psutil.Process(process.pid).children(recursive=True), process]:
                    running.kill()  # otter itself has no limit, and without it its kernel would go on
                process.wait()
                return {}, f"did not end within {LIMIT} s"
            said.seek(0)
            last = (said.read().strip().splitlines() or ["nothing"])[-1]
        if not (folder / "results.json").is_file():
            return {}, f"otter ended with {process.returncode} and said: {last[:300]}"
        return json.loads((folder / "results.json").read_text(encoding="utf-8")), ""


def grade_one(handed: Handed, edition: Edition, guard: str) -> tuple[dict, str]:
    """The line of a submission in the table, and the output of its hidden tests."""
    row = {"file": handed.file, "student": handed.student, "of": sum(edition.automatic.values())}
    if handed.notebook is None:
        return row | {"status": "refused", "remarks": handed.problem, "seconds": 0}, ""
    start = time.monotonic()
    try:
        result, problem = otter_run(handed, edition.archive, guard)
    except Exception as error:  # a notebook that cannot be written, a full disk: a line, and on to the next
        result, problem = {}, f"{type(error).__name__}: {error}"
    tests = {test["name"]: test for test in result.get("tests", [])}
    remarks = handed.remarks + [line for line in result.get("output", "").splitlines() if line]
    row |= {"seconds": round(time.monotonic() - start, 1)}
    if not problem and edition.automatic.keys() - tests.keys():
        problem = "otter has no results: the process that ran the answers was ended"
    if problem:
        return row | {"status": "failed", "remarks": " | ".join([*remarks, problem])}, ""
    row["remarks"] = " | ".join(remarks)
    if any(remark.startswith("refused") for remark in remarks):
        return row | {"status": "refused"}, ""
    scores = {name: tests[name]["score"] for name in edition.automatic}
    says = "\n\n".join(tests[name]["output"] for name in scores)
    return row | {"status": "graded", **scores, "points": sum(scores.values())}, says


def text_of(handed: Handed, edition: Edition) -> str:
    """The text of a student: the cells of text that are not in the released notebook."""
    known = {cell.source.strip() for cell in edition.released.cells}
    cells = handed.notebook.cells if handed.notebook is not None else []
    written = [
        cell.source for cell in cells if cell.cell_type == "markdown" and cell.source.strip() not in known
    ]
    return "\n\n".join(written)


def grade(folder: Path, submissions: Path, out: Path, jobs: int = 1) -> list[dict]:
    """Grade all submissions of a folder. Writes a line of `out` for each, and beside it, in a file that ends
    in -report.md, the output of the hidden tests and the student's text, to be read with the rubric.

    Raises `ValueError` for a folder that is no edition's, or holds no submissions.
    """
    edition = Edition(folder)
    all_handed = handed_in(submissions, edition.uploads)
    if not all_handed:
        raise ValueError(f"{submissions} holds no submissions")
    code = "\n".join(cell.source for cell in edition.released.cells)
    compare(all_handed, set(re.findall(r"^(\w+) = \.\.\.$", code, re.MULTILINE)) - {"STUDENT"})
    rows = []
    with (
        TemporaryDirectory() as guard,
        open(out, "w", newline="", encoding="utf-8") as file,
        open(out.with_name(f"{out.stem}-report.md"), "w", encoding="utf-8") as report,
        ThreadPoolExecutor(jobs) as pool,
    ):
        with zipfile.ZipFile(edition.archive) as archive:
            archive.extract("course_guard.py", guard)
        table = csv.DictWriter(file, edition.columns)
        table.writeheader()
        for handed, (row, says) in zip(
            all_handed, pool.map(lambda handed: grade_one(handed, edition, guard), all_handed)
        ):
            rows.append(row)
            table.writerow(row)
            tests = f"```\n{says.strip()}\n```\n\n" if says else ""
            head = f"{handed.file}: {row['status']}, {row.get('points', 'no points')}"
            report.write(f"# {head}\n\n{row['remarks']}\n\n{tests}{text_of(handed, edition)}\n\n")
            for stream in (file, report):
                stream.flush()  # whatever stops this, what is graded stays
            print(head, flush=True)
    return rows
