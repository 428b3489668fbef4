"""Editions of the graded assignments, and their grades.

    python -m tools.course edition --secret FILE --out DIR [a1 ...]
    python -m tools.course grade DIR/a1 SUBMISSIONS --out FOLDER [--roster FILE] [--deadline TIME]
    python -m tools.course totals FOLDER FOLDER ... --out FOLDER [--roster FILE]

An edition belongs to one course: the instructor's secret draws a variant of every task, and the hidden tests'
numbers. `course/README.md` says how a master is written, `tools/grades.py` how submissions are graded, and
`tools/gradebook.py` what is made of the results.
"""

import argparse
import hashlib
import hmac
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType

import jupytext
import nbformat
import yaml
from nbformat.v4 import new_markdown_cell, new_notebook

from atbook.cage.outside import missing
from atbook.exercises.judging import Exercise
from tools import gradebook
from tools.grades import Edition
from tools.notebooks import repository

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "course"
VARIANT = re.compile(r"# VARIANT (\w+) (\w+)")
HERE = "_Type your answer here, replacing this text._"


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


def module_of(name: str, part: str) -> ModuleType:
    """A module of an assignment (cases, checks, mutants); they are in no installed package."""
    return import_module(f"course.{name}.{part}")


def checks_of(name: str) -> list[Exercise]:
    """The checks of all variants of an assignment's tasks."""
    return module_of(name, "checks").EXERCISES


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


def tasks_of(cells: list) -> dict[str, dict]:
    """{name: {title, points, tests, rubric, ...}} of a master's questions; `tests` is empty where a question
    is graded by hand."""
    tasks, title, current = {}, "", None
    for cell in cells:
        if cell.cell_type == "markdown":
            title = gradebook.title_in(cell.source) or title
        if cell.source.startswith("# BEGIN QUESTION"):
            says = yaml.safe_load(cell.source)
            current = says | {"title": title, "tests": says.get("tests", {}), "rubric": []}
            current["points"] = sum(current["tests"].values()) or says.get("points", 0)
            tasks[says["name"]] = current
        elif current is not None and cell.cell_type == "markdown" and "**Rubric" in cell.source:
            lines = re.findall(r"^\| (\d+) \| (.+) \|$", cell.source, re.MULTILINE)
            current["rubric"] = [{"points": int(points), "for": text} for points, text in lines]
    return tasks


# --- What students get, and what the solution is ---


def without_solution(code: str) -> str:
    """An answer's code as students get it: `...` in place of the solution."""
    code = re.sub(r"^.*# BEGIN SOLUTION NO PROMPT\n(?:.*\n)*?.*# END SOLUTION\n*", "", code, flags=re.M)
    code = re.sub(r"^( *)# BEGIN SOLUTION\n(?:.*\n)*?.*# END SOLUTION", r"\1...", code, flags=re.M)
    return re.sub(r"^(\w+ = ).* # SOLUTION$", r"\1...", code, flags=re.M)


def with_solution(code: str, typed: dict[str, str]) -> str:
    """An answer's code without the marks; typed: {name: the value} of what the solution types in."""
    code = re.sub(r"^ *# (?:BEGIN|END) SOLUTION.*\n?", "", code, flags=re.M)
    for name, value in typed.items():
        code = re.sub(rf"^{name} = .* # SOLUTION$", f"{name} = {value}", code, flags=re.M)
    return code.replace(" # SOLUTION", "").strip()


def released(cells: list) -> list:
    """The cells that students get."""
    given, inside, by_hand = [], False, False
    for cell in cells:
        if cell.source.startswith("# BEGIN QUESTION"):
            says = yaml.safe_load(cell.source)
            by_hand = says.get("manual", False) and says["points"] > 0
        elif cell.source.startswith("# BEGIN SOLUTION"):
            inside = True
            given += [new_markdown_cell(HERE)] if by_hand else []
        elif cell.source.startswith("# END SOLUTION"):
            inside = False
        elif cell.cell_type == "code":
            given.append(nbformat.from_dict(cell | {"source": without_solution(cell.source)}))
        elif cell.cell_type == "markdown" and not inside:
            given.append(cell)
    return given


def solved(cells: list, typed: dict[str, str]) -> list:
    """The cells of the model solution."""
    kept = [cell for cell in cells if cell.cell_type != "raw"]
    return [nbformat.from_dict(cell | {"source": with_solution(cell.source, typed)}) for cell in kept]


# --- Editions ---


def make_edition(name: str, secret: bytes, out: Path, drawn: dict[str, str] | None = None) -> Path:
    """Write an edition of an assignment into the folder `out/name`, and return that. drawn: {task: letter},
    in place of the letters that the secret draws. Raises `ValueError` for an unknown assignment."""
    book = read_master(name)
    settings = settings_of(book.cells)
    if drawn is None:
        drawn = {
            task: letters[int(digest(secret, name, task), 16) % len(letters)]
            for task, letters in variants(book.cells).items()
        }
    label = f"{name}-{digest(secret, name, 'label', json.dumps(drawn, sort_keys=True))[:8]}"
    cells = list(chosen(book.cells, drawn))
    for cell in cells:
        cell.source = cell.source.replace("{{ edition }}", label).replace("{{ repository }}", repository())
    edition = {
        "assignment": name,
        "title": settings["title"],
        "edition": label,
        "tasks": tasks_of(cells),
        "uploads": settings.get("uploads", []),
        "imports": settings["imports"],
        "variants": drawn,
        "key": digest(secret, name, "key"),  # not the secret: whoever reads this learns of one assignment
    }
    folder = out / name
    (folder / "files").mkdir(parents=True, exist_ok=True)
    handed_out = {to: (ROOT / path).read_bytes() for to, path in settings.get("files", {}).items()}
    handed_out["checks.py"] = (COURSE / name / "checks.py").read_bytes()
    handed_out["handout.json"] = json.dumps(_handout(cells, edition), indent=1).encode()
    for file, content in handed_out.items():
        (folder / "files" / file).write_bytes(content)
    of_students = _notebook(released(cells), book.metadata, label)
    # a folder in it: the assignments' checks have the same names, and stand side by side when unpacked
    in_zip = {f"{name}/{file}": content for file, content in handed_out.items()}
    write_zip(folder / f"{name}-student.zip", {f"{name}/{name}.ipynb": of_students, **in_zip})
    make_typed = getattr(module_of(name, "cases"), "solution", lambda *_: {})
    typed = make_typed("model solution", label, drawn, folder / "files")
    solution = _notebook(solved(cells, typed), book.metadata, label)
    (folder / f"{name}-solution.ipynb").write_bytes(solution)
    rubrics = [c.source for c in cells if c.cell_type == "markdown" and "**Rubric" in c.source]
    (folder / "rubric.md").write_text("\n\n---\n\n".join(rubrics) + "\n", encoding="utf-8")
    (folder / "edition.json").write_text(json.dumps(edition, indent=1) + "\n", encoding="utf-8")
    return folder


def _notebook(cells: list, metadata: dict, label: str) -> bytes:
    """A notebook as a file."""
    made = new_notebook(cells=cells, metadata={**metadata, "course": label})
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # the same edition is the same file
    return nbformat.writes(made).encode()


def _handout(cells: list, edition: dict) -> dict:
    """What `hand-in` and the grader know of a notebook as it was handed out; nothing of it is secret."""
    given = released(cells)
    code = [c for c in given if c.cell_type == "code" and "otter_ignore" not in c.metadata.get("tags", [])]
    checks = re.findall(r"^check\(\"([\w.]+)\", (\w+)\)", "\n".join(c.source for c in given), re.M)
    tasks = [
        {key: task[key] for key in ("name", "title", "answer", "typed", "refused") if key in task}
        for task in edition["tasks"].values()
    ]
    return {
        **{key: edition[key] for key in ("edition", "assignment", "uploads", "imports")},
        "tasks": tasks,
        "checks": dict(checks),
        "code": [cell.source for cell in code],
        "texts": [cell.source for cell in given if cell.cell_type == "markdown"],
    }


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    """A zip of some files."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0 when every edition was made or every submission has its line, and else
    2."""
    parser = argparse.ArgumentParser(prog="python -m tools.course", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("edition", help="what students and the teacher get")
    making.add_argument("--secret", type=Path, required=True, help="a file that stays with the teacher")
    making.add_argument("assignments", nargs="*", help="all where none is named")
    grading = commands.add_parser("grade", help="a folder of submissions to a folder of grades")
    grading.add_argument("edition", type=Path, help="an assignment of an edition, as in DIR/a1")
    grading.add_argument("submissions", type=Path)
    grading.add_argument("--jobs", type=int, default=1, help="submissions that are graded side by side")
    without = "grade though answers can then read and write your files, the edition's key and other works"
    grading.add_argument("--without-sandbox", action="store_true", help=without)
    grading.add_argument("--deadline", type=datetime.fromisoformat, help="as in 2027-01-31T23:59+01:00")
    summing = commands.add_parser("totals", help="the folders of grades of a course to one table")
    summing.add_argument("grades", type=Path, nargs="+", help="folders that `grade` wrote")
    summing.add_argument(
        "--late-days", type=int, default=0, help="free for each student, in the whole course"
    )
    summing.add_argument("--penalty", type=float, default=10.0, help="per cent of points for each day more")
    for command in (making, grading, summing):
        command.add_argument("--out", type=Path, required=True, help="a folder; points by hand stay in it")
    for command in (grading, summing):
        command.add_argument("--roster", type=Path, help="CSV with the columns id, name, and more")
    options = parser.parse_args(arguments)
    try:
        if options.command == "edition":
            secret = read_secret(options.secret)
            for name in options.assignments or assignments():
                print(f"{make_edition(name, secret, options.out)} is ready")
            return 0
        roster = gradebook.read_roster(options.roster) if options.roster else None
        if options.command == "totals":
            budget = gradebook.Late(options.late_days, options.penalty / 100)
            print(gradebook.totals(options.grades, options.out, roster, budget))
            return 0
        if lacks := missing():
            if not options.without_sandbox:
                raise ValueError(f"{lacks} --without-sandbox grades nevertheless")
            print(f"note: {lacks}", file=sys.stderr)
        given = Edition(options.edition), options.submissions, options.out, roster, options.deadline
        print(gradebook.grade_folder(*given, options.jobs))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"python -m tools.course: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
