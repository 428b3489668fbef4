"""Editions of the graded assignments, and their grades; the extra `course` of the project has what it needs.

    python -m tools.course edition --secret FILE --out DIR [a1 ...]
    python -m tools.course grade DIR/a1 SUBMISSIONS --out grades.csv

An edition belongs to one course: the instructor's secret draws a variant of every task, and the hidden tests'
numbers. For each assignment it holds the files for students, the files for Gradescope, the model solution,
and the rubric of the written part. `course/README.md` says how a master is written, `tools/grades.py` how
submissions are graded.
"""

import argparse
import hashlib
import hmac
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
import yaml
from nbformat.v4 import new_raw_cell

from atbook.exercises.judging import Exercise
from tools.grades import grade, otter_environment, write_zip
from tools.notebooks import repository

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "course"
VARIANT = re.compile(r"# VARIANT (\w+) (\w+)")
# All assignments share this. Students do not need otter to work on one (there are no cells of its), and otter
# runs no solution here: the guard needs the released notebook first. Results are shown when grades are
# published, in place of "all public tests passed", which otter says where all tests are hidden.
CONFIG = """\
# ASSIGNMENT CONFIG
init_cell: false
export_cell: false
check_all_cell: false
run_tests: false
tests: {{ok_format: false, files: true}}
generate: {{show_hidden: true, force_public_test_summary: false}}
python_version: "3.11"
requirements: ["attention-transfer @ git+{url}"]
"""


def digest(secret: bytes, *parts: str) -> str:
    """A number in hexadecimal that depends on the secret."""
    return hmac.new(secret, "/".join(parts).encode(), hashlib.sha256).hexdigest()


def read_secret(path: Path) -> bytes:
    """The teacher's secret. Raises `ValueError` for a missing or a short one."""
    secret = path.read_bytes().strip() if path.is_file() else b""
    if len(secret) < 16:
        make = f"python -c 'import secrets; print(secrets.token_hex())' > {path}"
        raise ValueError(f"{path} holds no secret of at least 16 characters. Make one, once: {make}")
    return secret


# --- What a master says ---


def assignments() -> list[str]:
    """The names of all assignments."""
    return sorted(path.parent.name for path in COURSE.glob("*/master.md"))


def read_master(name: str):
    """The notebook of an assignment's master. Raises `ValueError` for an unknown one."""
    if name not in assignments():
        raise ValueError(f"there is no assignment {name!r}; there are {', '.join(assignments())}")
    return jupytext.read(COURSE / name / "master.md", fmt="md:myst")


def checks_of(name: str) -> list[Exercise]:
    """The checks of all variants of an assignment's tasks; they are in no installed package."""
    spec = spec_from_file_location(f"course_{name}_checks", COURSE / name / "checks.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EXERCISES


def settings_of(cells: list) -> dict:
    """The settings of a master, from its cell `# COURSE`."""
    return yaml.safe_load(next(cell.source for cell in cells if cell.source.startswith("# COURSE")))


def variants(cells: list) -> dict[str, list[str]]:
    """{task: the letters of its variants} of a master."""
    letters: dict[str, list[str]] = {}
    for cell in cells:
        if match := VARIANT.match(cell.source):
            letters.setdefault(match[1], []).append(match[2])
    return letters


def chosen(cells: list, drawn: dict[str, str]) -> Iterator:
    """The cells of a master with one variant of each task, without the cells that only this file reads."""
    variant = None
    for cell in cells:
        if match := VARIANT.match(cell.source):
            variant = match.groups()
        elif cell.source.startswith("# END VARIANT"):
            variant = None
        elif not cell.source.startswith("# COURSE") and (variant is None or drawn[variant[0]] == variant[1]):
            yield cell


def questions(cells: list) -> dict[str, dict]:
    """{name: {points, manual}} of a master."""
    named = {}
    for cell in cells:
        if cell.source.startswith("# BEGIN QUESTION"):
            says = yaml.safe_load(cell.source)
            points = sum(says["points"]) if isinstance(says["points"], list) else says["points"]
            named[says["name"]] = {"points": points, "manual": says.get("manual", False)}
    return named


# --- Editions ---


def make_edition(name: str, secret: bytes, out: Path, drawn: dict[str, str] | None = None) -> Path:
    """Write an edition of an assignment into the folder `out/name`, and return that. drawn: {task: letter},
    in place of the letters that the secret draws. Raises `ValueError` for an unknown assignment."""
    book = read_master(name)
    settings = settings_of(book.cells)
    if drawn is None:
        all_letters = variants(book.cells)
        drawn = {
            task: letters[int(digest(secret, name, task), 16) % len(letters)]
            for task, letters in all_letters.items()
        }
    label = f"{name}-{digest(secret, name, 'label', json.dumps(drawn, sort_keys=True))[:8]}"
    url = repository()
    book.cells = [new_raw_cell(CONFIG.format(url=url)), *chosen(book.cells, drawn)]
    for cell in book.cells:
        cell.source = cell.source.replace("{{ edition }}", label).replace("{{ repository }}", url)
    book.metadata["course"] = label
    edition = {
        "edition": label,
        "questions": questions(book.cells),
        "uploads": settings.get("uploads", []),
        "variants": drawn,
        "key": digest(secret, name, "key"),  # not the secret: whoever reads this learns of one assignment
    }
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as temporary:
        _assign(book, name, Path(temporary))
        _write(folder, Path(temporary) / "dist", settings, edition)
    return folder


def _assign(book, name: str, folder: Path) -> None:
    """Let otter make the student's notebook, the solution and the autograder of a master in `folder`/dist."""
    nbformat.write(book, folder / f"{name}.ipynb")
    command = [sys.executable, "-m", "otter", "assign", "--no-run-tests", f"{name}.ipynb", "dist"]
    done = subprocess.run(command, cwd=folder, env=otter_environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"otter made nothing of {name}: {(done.stdout + done.stderr).strip()[-2000:]}")


def _write(folder: Path, made: Path, settings: dict, edition: dict) -> None:
    """Write the files of an edition from the files that otter made."""
    name = folder.name
    handed_out = {to: (ROOT / path).read_bytes() for to, path in settings.get("files", {}).items()}
    handed_out["checks.py"] = (COURSE / name / "checks.py").read_bytes()
    released = (made / "student" / f"{name}.ipynb").read_bytes()
    write_zip(folder / f"{name}-student.zip", {f"{name}.ipynb": released, **handed_out})

    (otter_made,) = (made / "autograder").glob("*.zip")
    with zipfile.ZipFile(otter_made) as archive:
        autograder = {member: archive.read(member) for member in archive.namelist()}
    # The guard, and the files that it and the hidden tests read, are put in here: otter's own ways to add
    # files would put some of them into the student's folder, and need all of them beside the master.
    config = json.loads(autograder["otter_config.json"])
    guard = {key: settings[key] for key in ("modules", "refused", "stores") if key in settings}
    config["plugins"] = [
        {"course_guard.Guard": guard | {key: edition[key] for key in ("edition", "uploads")}}
    ]
    autograder["otter_config.json"] = json.dumps(config, indent=1).encode()
    autograder["course_guard.py"] = (COURSE / "course_guard.py").read_bytes()
    files = handed_out | {
        "hidden.py": (COURSE / "hidden.py").read_bytes(),
        "cases.py": (COURSE / name / "cases.py").read_bytes(),
        "released.json": released,
        "edition.json": json.dumps(edition, indent=1).encode(),
    }
    autograder |= {f"files/{to}": content for to, content in files.items()}
    write_zip(folder / f"{name}-gradescope.zip", autograder)

    solution = nbformat.read(made / "autograder" / f"{name}.ipynb", as_version=4)
    nbformat.write(solution, folder / f"{name}-solution.ipynb")
    rubrics = [c.source for c in solution.cells if c.cell_type == "markdown" and "**Rubric" in c.source]
    (folder / "rubric.md").write_text("\n\n---\n\n".join(rubrics) + "\n", encoding="utf-8")
    (folder / "edition.json").write_text(json.dumps(edition, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0 when every edition was made or every submission has its line, and else
    2."""
    parser = argparse.ArgumentParser(prog="python -m tools.course", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("edition", help="what students, Gradescope and the teacher get")
    making.add_argument("--secret", type=Path, required=True, help="a file that stays with the teacher")
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("assignments", nargs="*", help="all where none is named")
    grading = commands.add_parser("grade", help="a folder of submissions to a CSV")
    grading.add_argument("edition", type=Path, help="an assignment of an edition, as in DIR/a1")
    grading.add_argument("submissions", type=Path)
    grading.add_argument("--out", type=Path, required=True)
    grading.add_argument("--jobs", type=int, default=1, help="submissions that are graded side by side")
    options = parser.parse_args(arguments)
    if find_spec("otter") is None:
        print('python -m tools.course needs otter: pip install ".[course]"', file=sys.stderr)
        return 2
    try:
        if options.command == "grade":
            rows = grade(options.edition, options.submissions, options.out, options.jobs)
            left = sum(row["status"] != "graded" for row in rows)
            print(f"{options.out}: {len(rows)} submissions, {left} of them not graded")
            return 0
        secret = read_secret(options.secret)
        for name in options.assignments or assignments():
            print(f"{make_edition(name, secret, options.out)} is ready")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"python -m tools.course: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
