"""What is made of results: whose, when, alike, points by hand, tables and pages."""

import csv
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from tests.course.helpers import Work, as_notebook, read_here, replace, solution
from tools import gradebook
from tools.grades import Marked, Result
from tools.handed import Handed, Owner, owner_of

DEADLINE = datetime(2027, 1, 31, 23, 59, tzinfo=UTC)


@pytest.fixture
def graded_by_points(monkeypatch):
    """Grades that need no cage: every submission has 3 of 5 points in each task."""

    def grade(edition, everybody, jobs, use_namespaces, done):
        tests = {task: [Marked("The maps.", 3, 5, "not <b>right</b>")] for task in edition.automatic}
        for handed in everybody:
            read_here(handed, edition)
        results = [Result(h.file, h.reading.name.value or "", "graded", tests, [], 1.0) for h in everybody]
        for result in results:
            done(result)
        return results

    monkeypatch.setattr(gradebook, "grade", grade)


def rows_of(path):
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


ROSTER = (
    "id,name,email,canvas,moodle\n"
    "al1,Ada Lovelace,ada@example.org,123,\n"
    "bb2,Bob Bob,bob@example.org,,55\n"
    "cc3,=cmd|'/c calc'!A1,,,\n"
)


@pytest.fixture
def grade(edition, tmp_path, graded_by_points):
    """A function that grades what a class handed in, named as platforms name it: {file: row of the table}."""
    handed = tmp_path / "handed"
    handed.mkdir()
    (tmp_path / "roster.csv").write_text(ROSTER)
    for name, student in {
        "lovelaceada_123_9001_a1.ipynb": "Ada Lovelace",
        "lovelaceada_123_9007_a1-1.ipynb": "al1",
        "Bob Bob_55_assignsubmission_file_a1.ipynb": "Bob Bob",
        "calc.ipynb": "=cmd|'/c calc'!A1",
        "stranger.ipynb": "Eve",
    }.items():
        (handed / name).write_bytes(as_notebook(solution(edition, student)))
    (handed / "received.csv").write_text(
        f"file,time\nlovelaceada_123_9001_a1.ipynb,{(DEADLINE - timedelta(days=1)).isoformat()}\n"
        f"lovelaceada_123_9007_a1-1.ipynb,{(DEADLINE + timedelta(hours=30)).isoformat()}\n"
    )

    def grade():
        roster = gradebook.read_roster(tmp_path / "roster.csv")
        gradebook.grade_folder(edition, handed, tmp_path / "a1", roster, DEADLINE)
        return {row["file"]: row for row in rows_of(tmp_path / "a1" / "grades.csv")}

    return grade


def test_a_class_is_graded_into_a_folder(grade, tmp_path):
    rows = grade()
    first, second = rows["lovelaceada_123_9001_a1.ipynb"], rows["lovelaceada_123_9007_a1-1.ipynb"]
    assert (first["id"], first["status"], first["late days"]) == ("al1", "superseded", "0")
    assert (second["id"], second["status"], second["late days"]) == ("al1", "graded", "2")
    assert rows["Bob Bob_55_assignsubmission_file_a1.ipynb"]["id"] == "bb2"
    assert "not in the roster" in rows["stranger.ipynb"]["remarks"]
    assert rows["calc.ipynb"]["name"].startswith("'="), "no formula for a spreadsheet"
    canvas = {row["ID"]: row for row in rows_of(tmp_path / "a1" / "canvas.csv")}
    assert canvas["123"]["Student"] == "Ada Lovelace" and len(canvas) == 2
    moodle = rows_of(tmp_path / "a1" / "moodle.csv")
    assert "Participant 55" in {row["Identifier"] for row in moodle}
    page = (tmp_path / "a1" / "feedback" / "al1.html").read_text()
    assert "Heads that talk: 3 of 5" in page and "not &lt;b&gt;right&lt;/b&gt;" in page
    assert "Bob" not in page and "stranger" not in page
    pairs = rows_of(tmp_path / "a1" / "similar.csv")
    assert {"first", "second", "task", "per cent"} == pairs[0].keys() and pairs[0]["per cent"] == "100"


def test_a_last_attempt_that_cannot_be_read_is_refused_and_the_one_before_it_counts(grade, monkeypatch):
    everybody, last = gradebook.grade, "lovelaceada_123_9007_a1-1.ipynb"

    def refusing(*given):
        results = everybody(*given)
        return [Result(r.file, "", "refused", {}, ["no"], 0.0) if r.file == last else r for r in results]

    monkeypatch.setattr(gradebook, "grade", refusing)
    rows = grade()
    assert (rows[last]["status"], rows[last]["points"]) == ("refused", "")
    assert rows["lovelaceada_123_9001_a1.ipynb"]["status"] == "graded"


def test_points_by_hand_survive_grading_again_and_count_in_the_totals(grade, tmp_path):
    rows = grade()
    assert rows["stranger.ipynb"]["points"] == "" and rows["stranger.ipynb"]["still by hand"] == "5"
    path = tmp_path / "a1" / "hand.csv"
    hand = rows_of(path)
    for row in hand:
        if row["key"] == "al1":
            row["points"], row["remark"] = "1", "well seen"
    gradebook.write_table(path, gradebook.HAND, hand)
    row = grade()["lovelaceada_123_9007_a1-1.ipynb"]
    assert (row["by hand"], row["points"], row["of"]) == ("5", "14", "20")
    assert "well seen" in (tmp_path / "a1" / "feedback" / "al1.html").read_text()
    roster = gradebook.read_roster(tmp_path / "roster.csv")
    gradebook.totals([tmp_path / "a1"], tmp_path, roster, gradebook.Late(1, 0.1))
    totals = {row["id"]: row for row in rows_of(tmp_path / "totals.csv")}
    assert totals["al1"]["total"] == "12", "one of two late days is free, the other costs 2 of 20 points"
    assert (totals["al1"]["A1 off"], totals["bb2"]["A1 off"]) == ("2", "0")
    assert "In all: 14 of 20, without" in (tmp_path / "a1" / "feedback" / "al1.html").read_text()
    assert totals["bb2"]["open"] == "5" and totals["bb2"]["total"] == "9"


@pytest.mark.parametrize("separator", [";", "\t"])
def test_points_typed_in_are_read_as_a_spreadsheet_saves_them(separator, grade, tmp_path):
    grade()
    path = tmp_path / "a1" / "hand.csv"
    hand = rows_of(path)
    hand[0]["points"] = "0,5"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, gradebook.HAND, delimiter=separator)
        writer.writeheader()
        writer.writerows(hand)
    gradebook.totals([tmp_path / "a1"], tmp_path, gradebook.read_roster(tmp_path / "roster.csv"))
    totals = {row["id"]: row for row in rows_of(tmp_path / "totals.csv")}
    assert totals[hand[0]["key"]]["total"] == "9.5"
    hand[0]["points"] = "7"
    gradebook.write_table(path, gradebook.HAND, hand)
    with pytest.raises(ValueError, match="'7' of 1"):
        gradebook.totals([tmp_path / "a1"], tmp_path)


def test_the_teacher_says_whose_a_work_is_and_a_pair_has_both_its_points(grade, tmp_path):
    (tmp_path / "handed" / "whose.csv").write_text("file,id\nstranger.ipynb,al1\nstranger.ipynb,bb2\n")
    grade()
    rows = rows_of(tmp_path / "a1" / "grades.csv")
    assert "whose.csv" not in {row["file"] for row in rows}  # it is no work
    rows = [row for row in rows if row["file"] == "stranger.ipynb"]
    assert [(row["id"], row["name"]) for row in rows] == [("al1", "Ada Lovelace"), ("bb2", "Bob Bob")]
    assert all("roster" not in row["remarks"] for row in rows)
    assert (tmp_path / "a1" / "feedback" / "bb2.html").is_file()
    nobody = r"no submission 'nobody\.ipynb'"
    for line, says in (("stranger.ipynb,zz9", "'zz9'"), ("nobody.ipynb,al1", nobody)):
        (tmp_path / "handed" / "whose.csv").write_text(f"file,id\n{line}\n")
        with pytest.raises(ValueError, match=says):
            grade()
    (tmp_path / "handed" / "whose.csv").unlink()
    with open(tmp_path / "handed" / "received.csv", "a", encoding="utf-8") as file:
        file.write(f"nobody.ipynb,{DEADLINE.isoformat()}\n")
    with pytest.raises(ValueError, match="received.csv"):
        grade()


def test_texts_stand_below_the_titles_of_their_questions(edition):
    handed = solution(edition, "Ada")
    handed.reading.texts = ["## 4. Sinks (5 points)", "I think so.\n# 20 points\n===", "## 5. Other"]
    some = SimpleNamespace(
        texts={"## 4. Sinks (5 points)", "## 5. Other"},
        by_hand={"q4": {"title": "Sinks"}, "q5": {"title": "Other"}},
    )
    assert gradebook.texts_by_question(handed, some) == [
        "## Sinks\n\n    I think so.\n    # 20 points\n    ===",
        "## Other\n\n*no text*",
    ]


def test_what_could_not_be_tested_counts_in_the_attempt_that_counts_alone(tmp_path):
    """Its test would have had its points, and a line for points by hand beside them."""
    lines = [
        gradebook.Line(
            Result(file, "Ada", "graded", {"q1": [Marked("The maps.", points, 5, "", points > 0)]}, [], 1.0),
            id="al1",
            superseded_by=by,
        )
        for file, points, by in (("a1.ipynb", 0, "a1-1.ipynb"), ("a1-1.ipynb", 5, ""))
    ]
    assert not gradebook.add_hand_lines(tmp_path / "hand.csv", lines, SimpleNamespace(by_hand={}))
    lines[0].superseded_by = ""
    assert len(gradebook.add_hand_lines(tmp_path / "hand.csv", lines[:1], SimpleNamespace(by_hand={}))) == 1


def test_what_two_students_share_is_noted_for_the_teacher(edition):
    def line(file, student):
        return gradebook.Line(Result(file, student, "graded", {}, [], 0.0))

    def handed(numbers):
        work = Work("x", Path("x.ipynb"), code=[f"SHARES = {numbers}"])
        read_here(work, edition)
        return work

    lines = [line("1", "ada"), line("2", "Bob"), line("3", "bob"), line("4", "")]
    everybody = [handed([[0.1, 0.2]]), handed([[0.1005, 0.2]]), handed([[0.5, 0.6]]), handed("{[]}")]
    gradebook.remark_what_is_shared(lines, everybody, edition)
    assert [line.notes for line in lines] == [
        ["SHARES is the same, although the images are others, as in 2"],
        ["SHARES is the same, although the images are others, as in 1", "the same STUDENT as 3"],
        ["the same STUDENT as 2"],
        [],
    ]


def test_a_renamed_copy_is_similar_and_another_answer_is_not(edition):
    own = solution(edition)
    copy = replace(
        solution(edition),
        "gradient",
        "def gradient(a, b, c, d):\n    s = a.shape[-1] ** -0.5\n    y = s * a @ b.mT\n"
        "    m = y.amax(-1, keepdim=True).clamp_min(0)\n    f = (y - m).exp()\n"
        "    r = f / ((-m).exp() + f.sum(-1, keepdim=True))\n    u = d @ c.mT\n"
        "    w = r * (u - (r * u).sum(-1, keepdim=True))\n    return s * w @ b",
    )
    other = replace(
        solution(edition), "gradient", "def gradient(q, k, v, grad):\n    return helper(q) + k[0]"
    )
    everybody = [own, copy, other]
    for number, handed in enumerate(everybody):
        handed.file, handed.owner = str(number), Owner("", "", "")
        read_here(handed, edition)
    found = gradebook.similar(everybody, edition)
    pairs = {(p["first"], p["second"]) for p in found if p["task"] == "q2 (code)"}
    assert ("0", "1") in pairs and not any("2" in pair for pair in pairs)


@pytest.mark.parametrize("student, noted", [("model solution", 1), ("Ada", 0)])
def test_who_hands_in_under_the_name_of_the_model_solution_is_noted(student, noted):
    """Its weights in A2 are refused under every other name."""
    works = [Handed("a2.ipynb", Path("a2.ipynb"))], [Result("a2.ipynb", student, "graded", {}, [], 0.0)]
    (line,) = gradebook.lines_of(*works, None, None, {})
    assert len(line.notes) == noted


def test_two_works_of_one_name_are_not_added_up(edition, tmp_path, graded_by_points):
    """Without a roster it is not known which of them counts; each has a page of its own."""
    work = as_notebook(solution(edition, "Eve"))
    for name in ("one/a1.ipynb", "two/a1.ipynb"):
        (tmp_path / "two" / name).parent.mkdir(parents=True)
        (tmp_path / "two" / name).write_bytes(work)
    gradebook.grade_folder(edition, tmp_path / "two", tmp_path / "a1")
    pages = {path.name for path in (tmp_path / "a1" / "feedback").iterdir()}
    assert {page.partition(".")[0] for page in pages} == {"Eve-one-a1-ipynb", "Eve-two-a1-ipynb"}
    with pytest.raises(ValueError, match=r"'one/a1.ipynb' and 'two/a1.ipynb' would both count for 'eve'"):
        gradebook.totals([tmp_path / "a1"], tmp_path)


def test_a_roster_in_which_two_have_one_id_is_refused(tmp_path):
    (tmp_path / "roster.csv").write_text("id,name\n1,Ada\n1,Bob\n")
    with pytest.raises(ValueError, match="id"):
        gradebook.read_roster(tmp_path / "roster.csv")


ADA, BOB = gradebook.Student("al1", "Ada Lovelace", canvas="123"), gradebook.Student("bb2", "Bob Bob")
BY_ADA, BY_NOBODY = Owner("lovelaceada", "123", "a1.ipynb"), Owner("", "", "a1.ipynb")


def attempts(*of: tuple[Owner, str], whose=()) -> list[gradebook.Line]:
    """The lines of works that came in this order: who handed each in, and the name that it says."""
    results = [Result(str(at), student, "graded", {}, [], 1.0) for at, (_, student) in enumerate(of)]
    hour = timedelta(hours=1)
    handed = [Handed(str(i), Path("x"), owner=o, time=DEADLINE + i * hour) for i, (o, _) in enumerate(of)]
    return gradebook.lines_of(handed, results, [ADA, BOB], None, {}, {str(at): [ADA] for at in whose})


def test_a_name_inside_a_file_takes_nobodys_attempt_away():
    lines = attempts(
        (BY_ADA, "Ada"), (Owner("Bob Bob", "55", ""), "Ada Lovelace"), (BY_NOBODY, "Ada Lovelace")
    )
    assert [line.id for line in lines] == ["al1", "bb2", "al1"]
    assert [line.superseded_by for line in lines] == ["", "", ""] and lines[0].is_disputed
    assert len({gradebook.page_name(line) for line in lines}) == 3


def test_no_file_has_the_key_or_the_page_of_a_student_of_the_roster():
    lines = attempts((BY_ADA, "Ada Lovelace"), (Owner("eve", "999", "a1.ipynb"), "al1"), (BY_NOBODY, ""))
    lines[2].result.file = "al1"
    assert [line.id for line in lines] == ["al1", "", ""] and not lines[0].is_disputed
    assert lines[1].key != "al1" and len({gradebook.page_name(line) for line in lines}) == 3


@pytest.mark.parametrize(
    "of, superseded",
    [
        ([(BY_ADA, "Ada Lovelace"), (BY_ADA, "al1")], True),
        ([(BY_ADA, ""), (BY_ADA, "Ada Lovelace")], True),  # the name was forgotten, and then filled in
        ([(BY_ADA, "Ada Lovelace"), (BY_ADA, "Bob Bob")], False),
        ([(BY_NOBODY, "Ada Lovelace"), (BY_NOBODY, "Ada Lovelace")], False),
        ([(BY_NOBODY, "Ada Lovelace"), (BY_ADA, "Ada Lovelace")], False),
    ],
)
def test_attempts_that_disagree_are_the_teachers_to_decide(of, superseded):
    first, second = attempts(*of)
    assert (first.superseded_by == "1") == superseded
    assert first.is_disputed == second.is_disputed == (not superseded)
    first, second = attempts(*of, whose=[0])
    assert (first.superseded_by, second.superseded_by) == ("", "0"), "the teacher's word counts"


@pytest.mark.parametrize(
    "path, owner",
    [
        ("Bob Bob_55_assignsubmission_file_/Eve_77_assignsubmission_file_/a1.ipynb", ("Bob Bob", "55")),
        ("dora/lovelaceada_123_9001_a1.ipynb", ("dora", "")),
        ("lovelaceada_123_9001_work/a1.ipynb", ("lovelaceada", "123")),
    ],
)
def test_the_outermost_name_is_the_platforms(path, owner):
    assert owner_of(PurePosixPath(path))[:2] == owner
