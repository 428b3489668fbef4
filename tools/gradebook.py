"""What is made of results: a folder of grades for each assignment, and the totals of a course.

A folder of grades holds `grades.csv`, a line for each submission; `hand.csv`, a line for each thing that is
graded by hand, in which a teacher types points, and to which lines are only ever added; `feedback/`, a page
for each student; `report.md`, the texts to be read; `similar.csv`, works that are alike; `canvas.csv` and
`moodle.csv`; and `results.json`, of which all of these are made again after points were typed in.
"""

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from atbook.cage.outside import cleaned
from atbook.exercises.reading import pieces
from atlib._util import write_atomically
from tools.grades import Edition, Marked, Result, grade
from tools.handed import Handed, handed_in

HOUR, DAY = 60 * 60, 24 * 60 * 60


class Student(NamedTuple):
    """A line of the roster."""

    # The course's own number or short name.
    id: str
    name: str
    email: str = ""
    # The number that Canvas gives the student.
    canvas: str = ""
    # The number that Moodle gives the student's submission, or the student.
    moodle: str = ""

    def answers_to(self, text: str) -> bool:
        """Whether a name or number means this student, however it is typed."""
        names = {_plain(part) for part in (self.id, self.name, self.email) if part}
        words = re.findall(r"\w+", self.name.lower())
        return bool(_plain(text)) and _plain(text) in names | {"".join(words[-1:] + words[:-1])}


class Late(NamedTuple):
    """What handing in late costs in a course."""

    # Days that cost nothing, for each student over all assignments.
    free_days: int = 0
    # The share of an assignment's points that each day more costs.
    penalty: float = 0.1


@dataclass
class Line:
    """A submission in a folder of grades."""

    result: Result
    # The student of the roster; "" where none was recognised.
    id: str = ""
    # The name that is shown.
    name: str = ""
    # The numbers of the platforms.
    canvas: str = ""
    moodle: str = ""
    email: str = ""
    # When it was handed in, and by how many days that is late.
    time: str = ""
    late_days: int = 0
    # Whether there is a roster that does not have the student: then no name in a file is a key.
    is_unlisted: bool = False
    # Whether a platform or whose.csv says whose it is, and not only the file itself.
    is_known: bool = False
    # Whether another work of the same student would count as well: the teacher says which does.
    is_disputed: bool = False
    # The later attempt that counts in its place; "" where this one counts.
    superseded_by: str = ""
    # What only the teacher reads.
    notes: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """What points by hand are kept under."""
        return self.id or (not self.is_unlisted and _plain(self.result.student)) or self.result.file


def _plain(text: str) -> str:
    return "".join(re.findall(r"\w+", text.lower()))


# --- Tables ---


def safe(value) -> str:
    """A value for a table; a text that a spreadsheet would take for a formula begins with a quote."""
    text = cleaned(str(value), 2000) if isinstance(value, str) else str(value)
    return f"'{text}" if isinstance(value, str) and text[:1] in ("=", "+", "-", "@") else text


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping]) -> None:
    """Write a CSV, all of it or nothing."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns)
    table.writeheader()
    for row in rows:
        table.writerow({name: safe(row.get(name, "")) for name in columns})
    write_atomically(path, text.getvalue().encode("utf-8-sig"))


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, however a spreadsheet has separated its columns; none where there is no file."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8-sig")
    separator = max(",;\t", key=text.partition("\n")[0].count)
    return list(csv.DictReader(io.StringIO(text), delimiter=separator))


def read_roster(path: Path) -> list[Student]:
    """The students of a course: a CSV with the columns id and name, and email, canvas and moodle where they
    are known. Raises `ValueError` for a table without them, or with a number twice."""
    if not path.is_file():
        raise ValueError(f"there is no roster {path}")
    rows = read_table(path)
    if not rows or not {"id", "name"} <= rows[0].keys():
        raise ValueError(f"{path} needs the columns id and name, and a student in each line")
    students = [Student(*((row.get(name) or "").strip() for name in Student._fields)) for row in rows]
    twice = {s.id for s in students if sum(other.id == s.id for other in students) > 1}
    if twice or not all(student.id for student in students):
        raise ValueError(f"{path}: each student needs an id of their own; {sorted(twice) or 'one is empty'}")
    return students


# --- Whose, when, alike ---


def lines_of(
    everybody: Sequence[Handed],
    results: Sequence[Result],
    roster: Sequence[Student] | None,
    deadline: datetime | None,
    received: Mapping[str, datetime],
    whose: Mapping[str, Sequence[Student]] = MappingProxyType({}),
) -> list[Line]:
    """The lines of all submissions, with what the platforms and the roster know of them.

    received: {file: when it was handed in}, in place of the files' own times. whose: {file: the students
    whose work it is}, in place of what is recognised; all but the first get lines of their own, at the end.
    """
    lines, of_partners = [], []
    for handed, result in zip(everybody, results):
        line = Line(result, name=result.student or handed.owner.name)
        when = received.get(handed.file, handed.time)
        line.time = when.isoformat(timespec="seconds") if when else ""
        if deadline and when:
            line.late_days = max(0, math.ceil((when - aware(deadline)).total_seconds() / DAY))
        if handed.owner.late and not line.late_days:
            line.notes.append("the platform calls it late")
        if line.result.student == "model solution":
            line.notes.append("STUDENT is the model solution's: its numbers and files are public")
        if handed.file in whose:
            partners = [replace(line, notes=[*line.notes]) for _ in whose[handed.file][1:]]
            for entry, student in zip([line, *partners], whose[handed.file]):
                entry.id, entry.name, entry.email = student.id, student.name, student.email
                entry.is_known = True
                entry.canvas, entry.moodle = student.canvas, student.moodle
            of_partners += partners
        elif roster is not None:
            _find(line, handed, roster)
        lines.append(line)
    lines += of_partners
    for line in lines:
        same = [other for other in lines if other.key == line.key and other.result.status == "graded"]
        newest = max(same, key=lambda attempt: (attempt.result.file in whose, _when(attempt)), default=line)
        if newest is line or roster is None or not line.id:
            continue
        (student,) = (student for student in roster if student.id == line.id)
        names, names_newest = (student.answers_to(attempt.result.student) for attempt in (line, newest))
        # a name in a file takes nobody's attempt away, nor does an attempt that names another student
        agree = line.is_known and newest.is_known and (names_newest or not names)
        if agree or newest.result.file in whose:
            line.superseded_by = newest.result.file
            continue
        for one, other in ((line, newest), (newest, line)):
            one.is_disputed = True
            one.notes.append(
                f"{other.result.file} would count for {student.name} too: say in whose.csv which"
            )
    return lines


def _when(line: Line) -> datetime:
    """When a submission came, in any zone; the earliest of all where it is not known."""
    return aware(datetime.fromisoformat(line.time)) if line.time else datetime.min.replace(tzinfo=UTC)


def aware(time: datetime) -> datetime:
    """A time with its zone; without one, that of this machine."""
    return time if time.tzinfo else time.astimezone()


def _find(line: Line, handed: Handed, roster: Sequence[Student]) -> None:
    """Fill in the student of a line, or note that there is none."""
    number, name = handed.owner.identifier, handed.owner.name
    by_platform = [s for s in roster if number and number in (s.canvas, s.moodle)]
    by_platform = by_platform or [s for s in roster if name and s.answers_to(name)]
    by_typed = [s for s in roster if s.answers_to(line.result.student)]
    # where a platform names somebody, a file does not
    students = by_platform if number or by_platform else by_typed
    if len(students) != 1:
        what = "not in the roster" if not students else "more than one student of the roster"
        line.notes.append(f"{what}: say in whose.csv whose work it is")
        line.is_unlisted = True
        return
    student, line.is_known = students[0], bool(by_platform)
    line.id, line.name, line.email = student.id, student.name, student.email
    line.canvas, line.moodle = student.canvas, student.moodle or (number if not student.canvas else "")
    if by_platform and student not in by_typed:
        typed = line.result.student or "nobody"
        line.notes.append(f"handed in by {student.name}, but STUDENT is {typed}: the numbers are theirs")


def remark_what_is_shared(lines: Sequence[Line], everybody: Sequence[Handed], edition: Edition) -> None:
    """Note where two submissions share the name, or typed numbers that should be different for each."""
    names = {name: task["typed"] for name, task in edition.tasks.items() if "typed" in task}
    readings = [handed.reading for handed in everybody]
    same_uploads = getattr(edition.cases(), "same_uploads", None)
    for (line, reading), (other, other_reading) in combinations(list(zip(lines, readings)), 2):
        student, second = line.result.student.lower(), other.result.student.lower()
        if student and student == second:
            if not (line.id and line.id == other.id):
                _both(line, other, "the same STUDENT as")
            continue
        for task in reading.typed.keys() & other_reading.typed.keys():
            if alike(reading.typed[task].value, other_reading.typed[task].value):
                _both(line, other, f"{names[task]} is the same, although the images are others, as in")
        if same_uploads and (shared := same_uploads(reading.uploads, other_reading.uploads)):
            _both(line, other, f"{shared}, as in")


def _both(line: Line, other: Line, says: str) -> None:
    line.notes.append(f"{says} {other.result.file}")
    other.notes.append(f"{says} {line.result.file}")


def alike(a, b) -> bool:
    """Whether two nested lists of numbers are the same, to 0.002."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) > 0 and all(map(alike, a, b))
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return numbers and (a == b or abs(a - b) <= 0.002)


def similar(everybody: Sequence[Handed], edition: Edition) -> list[dict]:
    """Pairs of submissions whose answers or texts are alike, the likest first: {first, second, task, per
    cent}. It says that they are alike, and not who copied: short right answers often are."""
    pairs = []
    for name, task in edition.tasks.items():
        if "answer" in task:
            code = [handed.reading.pieces.get(name, set()) for handed in everybody]
            pairs += _pairs(everybody, code, f"{name} (code)", 0.8)
    texts = [pieces(" ".join(own_texts(handed, edition)).lower().split(), 5) for handed in everybody]
    pairs += _pairs(everybody, texts, "text", 0.25)
    return sorted(pairs, key=lambda pair: -pair["per cent"])


def _pairs(everybody: Sequence[Handed], of_each: Sequence[set], what: str, least: float) -> list[dict]:
    pairs = []
    for (first, a), (second, b) in combinations(list(zip(everybody, of_each)), 2):
        share = len(a & b) / max(1, len(a | b))
        if min(len(a), len(b)) >= 10 and share >= least:
            files = {"first": first.file, "second": second.file}
            pairs.append(files | {"task": what, "per cent": round(100 * share)})
    return pairs


def own_texts(handed: Handed, edition: Edition) -> list[str]:
    """The texts that a student wrote: those that are not in the notebook as it was handed out."""
    return [text for text in handed.reading.texts if text.strip() and text.strip() not in edition.texts]


def title_in(markdown: str) -> str:
    """The title of the question that begins in a cell: "## 3. Where heads look (4 points)" is "Where heads
    look"; "" where none begins."""
    heading = re.search(r"^## (?:\d+\. )?(.+?)(?: \(.*\).*)?$", markdown, re.M)
    return heading[1] if heading else ""


def _quoted(text: str) -> str:
    """A text as a block of code, in which nothing is a heading."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def texts_by_question(handed: Handed, edition: Edition) -> list[str]:
    """The same below the headings that they stand under, and of a question that is graded by hand and has no
    text, that it has none."""
    title, of_title = "", {task["title"]: [] for task in edition.by_hand.values()}
    for text in map(str.strip, handed.reading.texts):
        if text in edition.texts:
            title = title_in(text) or title
        elif text:
            of_title.setdefault(title, []).append(text)
    return [
        f"## {title or 'Before the first question'}\n\n" + ("\n\n".join(map(_quoted, texts)) or "*no text*")
        for title, texts in of_title.items()
    ]


# --- Points by hand ---

HAND = ("key", "name", "task", "item", "for", "of", "points", "remark")


def add_hand_lines(path: Path, lines: Sequence[Line], edition: Edition) -> list[dict]:
    """The lines of `hand.csv`, with empty ones for students that are new, and for what could not be tested;
    those that are there stay as they are, but for what was tested since."""
    untested = {
        (line.key, task, f"test {number}"): test
        for line in lines
        if not line.superseded_by  # the attempt that counts has points of its own
        for task, tests in line.result.tests.items()
        for number, test in enumerate(tests, start=1)
        if not test.judged
    }
    rows = read_table(path)
    rows = [row for row in rows if not row["item"].startswith("test ") or _item(row) in untested]
    item_keys = {_item(row) for row in rows}
    for line in lines:
        if line.result.status != "graded" or line.superseded_by:
            continue
        for task, says in edition.by_hand.items():
            items = says["rubric"] or [{"points": says["points"], "for": says["title"]}]
            for number, item in enumerate(items, start=1):
                if (line.key, task, str(number)) not in item_keys:
                    item_keys.add((line.key, task, str(number)))
                    row = {"key": line.key, "name": line.name, "task": task, "item": str(number)}
                    rows.append(row | {"for": item["for"], "of": str(item["points"])})
        for (key, task, item), test in untested.items():
            if key == line.key and (key, task, item) not in item_keys:
                row = {"key": key, "name": line.name, "task": task, "item": item}
                rows.append(row | {"for": f"{test.title} (could not be tested)", "of": str(test.of)})
    write_table(path, HAND, rows)
    return rows


def _item(row: Mapping) -> tuple[str, str, str]:
    """What a line of `hand.csv` is about."""
    return row["key"].lstrip("'"), row["task"], row["item"]


def hand_points(rows: Iterable[Mapping], key: str) -> tuple[float, int]:
    """A student's points by hand, and how many lines are still to be filled in. Raises `ValueError` for
    points that are no number, or more than there are."""
    total, still = 0.0, 0
    for row in (row for row in rows if row["key"].lstrip("'") == key):
        text = (row.get("points") or "").strip().replace(",", ".")
        if not text:
            still += 1
            continue
        try:
            points = float(text)
        except ValueError:
            points = -1.0
        if not 0 <= points <= float(row["of"]):
            raise ValueError(f"hand.csv: {key}, {row['task']}, item {row['item']}: {text!r} of {row['of']}")
        total += points
    return total, still


# --- What is written ---


def write_grades(folder: Path, edition: Edition, lines: Sequence[Line]) -> None:
    """Write all of a folder of grades that is made of results and of points by hand."""
    hand = add_hand_lines(folder / "hand.csv", lines, edition)
    most = sum(task["points"] for task in edition.tasks.values())
    rows, canvas, moodle = [], [], []
    for line in lines:
        by_hand, still = hand_points(hand, line.key)
        row = {"file": line.result.file, "id": line.id, "name": line.name, "status": line.result.status}
        if line.superseded_by and line.result.status == "graded":
            row["status"] = "superseded"
        if line.result.status == "graded":
            row |= {task: _short(line.result.points(task)) for task in edition.automatic}
            row |= {"automatic": _short(line.result.total), "by hand": _short(by_hand)}
            row |= {"points": "" if still else _short(line.result.total + by_hand), "of": most}
            row |= {"still by hand": still}
        says = [*line.result.remarks, *line.notes]
        row |= {"time": line.time, "late days": line.late_days, "remarks": " | ".join(says)}
        rows.append(row | {"seconds": line.result.seconds})
        if line.result.status == "graded" and not line.superseded_by and not line.is_disputed:
            points = row["points"]
            of_canvas = {"Student": line.name, "ID": line.canvas, "SIS User ID": line.id}
            canvas.append(of_canvas | {_title(edition): points})
            participant = f"Participant {line.moodle}" if line.moodle else ""
            of_moodle = {"Identifier": participant, "Full name": line.name, "Email address": line.email}
            moodle.append(of_moodle | {"Grade": points})
    columns = ["file", "id", "name", "status", *edition.automatic, "automatic", "by hand", "still by hand"]
    columns += ["points", "of", "time", "late days", "remarks", "seconds"]
    write_table(folder / "grades.csv", columns, rows)
    write_table(folder / "canvas.csv", ["Student", "ID", "SIS User ID", "Section", _title(edition)], canvas)
    write_table(folder / "moodle.csv", ["Identifier", "Full name", "Email address", "Grade"], moodle)
    (folder / "feedback").mkdir(exist_ok=True)
    for line in lines:
        if not line.superseded_by:
            hand_rows = [row for row in hand if row["key"].lstrip("'") == line.key]
            page = folder / "feedback" / f"{page_name(line)}.html"
            write_atomically(page, feedback(line, edition, hand_rows).encode())


def _title(edition: Edition) -> str:
    return f"{edition.name.upper()} {edition.title}"


def _short(points: float) -> float | int:
    return int(points) if float(points).is_integer() else round(points, 2)


def page_name(line: Line) -> str:
    """The name of a student's page: the id of the roster, and else what no other page can be called."""
    name = "" if line.is_disputed else line.id
    says = re.sub(r"\W+", "-", name or f"{line.result.student}-{line.result.file}").strip("-")[-60:]
    number = hashlib.sha256(f"{name}/{line.result.file}".encode(errors="replace")).hexdigest()[:12]
    return says if says == name else f"{says}.{number}"


def feedback(line: Line, edition: Edition, hand: Sequence[Mapping]) -> str:
    """A student's page: tasks with their points, what was said of each test, rubric and remarks."""
    parts, in_all, still = [], 0.0, False
    for name, task in edition.tasks.items():
        if not task["points"]:
            continue
        rows, reached = [], 0.0
        for test in line.result.tests.get(name, ()):
            reached += test.points
            says = f"<br><em>{escape(test.says)}</em>" if test.says else ""
            rows.append((f"{_short(test.points)} of {_short(test.of)}", escape(test.title) + says))
        waits = False
        for row in (row for row in hand if row["task"] == name):
            points = (row.get("points") or "").strip()
            waits |= not points
            reached += float(points.replace(",", ".")) if points else 0
            remark = f"<br><em>{escape(row.get('remark') or '')}</em>" if row.get("remark") else ""
            rows.append((f"{points or 'open'} of {row['of']}", escape(row["for"].lstrip("'")) + remark))
        in_all, still = in_all + reached, still or waits
        total = _reached(reached, task["points"], waits)
        table = "".join(f"<tr><td>{points}</td><td>{text}</td></tr>" for points, text in rows)
        parts.append(f"<h2>{escape(name[1:])}. {escape(task['title'])}: {total}</h2><table>{table}</table>")
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in line.result.remarks)
    most = sum(task["points"] for task in edition.tasks.values())
    late = f"<p>Handed in {line.late_days} days late.</p>" if line.late_days else ""
    title = f"{_title(edition)}: {line.name or line.result.file}"
    status, graded = "This submission was not graded.", line.result.status == "graded"
    if graded:
        status = f"In all: {_reached(in_all, most, still)}, without a deduction for late days."
    return PAGE.format(
        title=escape(title),
        status=escape(status),
        late=late,
        remarks=f"<ul>{remarks}</ul>" if remarks else "",
        tasks="".join(parts) if graded else "",
    )


def _reached(points: float, of: float, waits: bool) -> str:
    return f"{_short(points)} of {_short(of)}" + (", not all of it graded yet" if waits else "")


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 17px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }} td {{ padding: .3rem .8rem .3rem 0; vertical-align: top; }}
td:first-child {{ white-space: nowrap; }} h2 {{ font-size: 1.15rem; }} em {{ color: #a3380b; }}
</style></head><body>
<h1>{title}</h1>
<p>{status}</p>{late}{remarks}
{tasks}
</body></html>
"""


def write_report(path: Path, edition: Edition, lines: Sequence[Line], everybody: Sequence[Handed]) -> None:
    """Write the texts of all students, to be read with the rubric."""
    parts, notes_of = [], getattr(edition.cases(), "notes", None)
    for line, handed in zip(lines, everybody):
        says = [*line.result.remarks, *line.notes]
        if notes_of and line.result.student:
            says.append(notes_of(line.result.student, edition.label, edition.files))
        remarks = "\n".join(f"- {remark}" for remark in says)
        texts = "\n\n".join(texts_by_question(handed, edition))
        head = f"# {line.result.file}: {line.name or 'nameless'}, {line.result.status}"
        parts.append(f"{head}\n\n{remarks}\n\n{texts}\n")
    write_atomically(path, "\n".join(parts).encode(errors="replace"))


# --- The commands ---


def grade_folder(
    edition: Edition,
    submissions: Path,
    out: Path,
    roster: Sequence[Student] | None = None,
    deadline: datetime | None = None,
    jobs: int = 1,
    use_namespaces: bool = True,
) -> str:
    """Grade a folder of submissions into a folder of grades; returns what was done. Raises `ValueError` for a
    folder without submissions, for a student of `whose.csv` who is not in the roster, and for a file of
    `whose.csv` or `received.csv` that is not there.

    `received.csv` among the submissions, with the columns file and time, says when each was handed in, and
    `whose.csv`, with the columns file and id, whose work it is: a line for each student of a pair.
    """
    everybody = handed_in(submissions, edition.uploads)
    if not everybody:
        raise ValueError(f"{submissions} holds no submissions")
    received = {
        row["file"]: aware(datetime.fromisoformat(row["time"]))
        for row in read_table(submissions / "received.csv")
    }
    by_id, whose = {student.id: student for student in roster or ()}, {}
    for row in read_table(submissions / "whose.csv"):
        if row["id"] not in by_id:
            raise ValueError(f"whose.csv: {row['file']} is of {row['id']!r}, who is not in the roster")
        whose.setdefault(row["file"], []).append(by_id[row["id"]])
    files = {handed.file for handed in everybody}
    if absent := sorted(whose.keys() - files):
        raise ValueError(f"whose.csv: there is no submission {absent[0]!r}")
    if absent := [file for file in received if file not in files and not (submissions / file).is_file()]:
        raise ValueError(f"received.csv: there is no file {absent[0]!r}")
    out.mkdir(parents=True, exist_ok=True)

    def say(result: Result) -> None:
        print(f"{result.file}: {result.status}, {_short(result.total)} ({result.seconds} s)", flush=True)

    results = grade(edition, everybody, jobs, use_namespaces, say)
    lines = lines_of(everybody, results, roster, deadline, received, whose)
    remark_what_is_shared(lines, everybody, edition)
    content = {"edition": str(edition.folder.resolve()), "lines": [asdict(line) for line in lines]}
    write_atomically(out / "results.json", json.dumps(content, indent=1).encode())
    write_grades(out, edition, lines)
    write_report(out / "report.md", edition, lines, everybody)
    write_table(out / "similar.csv", ["first", "second", "task", "per cent"], similar(everybody, edition))
    left = sum(result.status != "graded" for result in results)
    done = f"{out}: {len(everybody)} submissions, {left} of them not graded"
    times = [handed.time for handed in everybody if handed.time and handed.file not in received]
    close = len(times) > 1 and (max(times) - min(times)).total_seconds() < HOUR
    if deadline and close and max(times) > aware(deadline):
        done += (
            f"\nnote: the times of {len(times)} files lie after the deadline, within an hour of each other."
            f" If you copied them then, say in {submissions / 'received.csv'} when they were handed in, and"
            " grade again"
        )
    return done


def read_grades(folder: Path) -> tuple[Edition, list[Line]]:
    """What `grade_folder` wrote. Raises `ValueError` for another folder."""
    path = folder / "results.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no folder of grades: it has no results.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for says in content["lines"]:
        result = says.pop("result")
        result["tests"] = {task: [Marked(*test) for test in tests] for task, tests in result["tests"].items()}
        lines.append(Line(Result(**result), **says))
    return Edition(Path(content["edition"])), lines


def totals(
    folders: Sequence[Path], out: Path, roster: Sequence[Student] | None = None, late: Late = Late()
) -> str:
    """Write `totals.csv`, a line for each student over all assignments, after all pages were made again with
    the points that were typed in; returns what was done.

    Late days are counted in the order of the folders: the free ones first, then each day costs a share of
    that assignment's points. Raises `ValueError` where two submissions of an assignment would both count for
    one student: without an id of the roster, it is not known which replaces which.
    """
    students: dict[str, dict] = {}
    if roster is not None:
        students = {student.id: {"id": student.id, "name": student.name} for student in roster}
    used: dict[str, int] = {}
    columns, most = [], 0
    for folder in folders:
        edition, lines = read_grades(folder)
        write_grades(folder, edition, lines)
        hand = read_table(folder / "hand.csv")
        name, of = edition.name.upper(), sum(task["points"] for task in edition.tasks.values())
        columns, most = [*columns, name, f"{name} late", f"{name} off"], most + of
        counted: dict[str, str] = {}
        for line in lines:
            if line.result.status != "graded" or line.superseded_by:
                continue
            if line.key in counted:
                raise ValueError(
                    f"{folder}: {counted[line.key]!r} and {line.result.file!r} would both count for"
                    f" {line.key!r}: say in whose.csv whose work each is, with --roster, or leave one out,"
                    " and grade again"
                )
            counted[line.key] = line.result.file
            row = students.setdefault(line.key, {"id": line.key, "name": line.name})
            by_hand, still = hand_points(hand, line.key)
            before, used[line.key] = used.get(line.key, 0), used.get(line.key, 0) + line.late_days
            paid = max(0, used[line.key] - late.free_days) - max(0, before - late.free_days)
            whole = line.result.total + by_hand
            points = max(0.0, whole - paid * late.penalty * of)
            row |= {
                name: _short(points),
                f"{name} late": line.late_days,
                f"{name} off": _short(whole - points),
            }
            row["open"] = row.get("open", 0) + still
            row["total"] = _short(row.get("total", 0) + points)
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"total": 0, "of": most, "open": 0} | row for row in students.values()]
    write_table(out / "totals.csv", ["id", "name", *columns, "total", "of", "open"], rows)
    return f"{out / 'totals.csv'}: {len(rows)} students"
