"""Chapter 10: the guide's advice, its costs and its drawing agree, and the findings are decided ones."""

import re
import shlex

import pytest

from atbook.lab.verdicts import accuracies
from atfamily.measures.accounting import method_costs
from tests.book.test_chapter_form import section
from tests.book.test_taught import taught
from tests.helpers import ROOT
from tools.claims_in_sentences import COMMENT, recorded_verdicts

NAME = "10-when-it-fails-when-to-use-it"
CHAPTER = ROOT / "notebooks" / f"{NAME}.md"
SIZE = {"img_size": 56, "patch_size": 14, "depth": 12, "num_heads": 6, "num_classes": 10}


START = {"teacher": True, "own_size": False, "trains": True, "labels": 1000, "unlabelled": 0}


@pytest.mark.parametrize(
    "given, tries",
    [
        ({}, ["features", "maps", "scratch"]),
        ({"own_size": True}, ["probe", "probe with a hidden layer", "fine-tune", "scratch"]),
        ({"explain": True, "own_size": True}, ["copy", "scratch"]),
        ({"explain": True, "teacher": False}, ["scratch"]),
        ({"teacher": False, "own_size": True}, ["scratch"]),
        ({"trains": False}, ["scratch"]),
        ({"unlabelled": 8000}, ["answers", "features", "maps", "scratch"]),
        ({"unlabelled": 8000, "labels": 32_000}, ["scratch", "features", "maps"]),
    ],
)
def test_the_guides_advice(given, tries):
    advice = taught(NAME).advise(**START | given)
    assert [step for step, _ in advice] == tries and all(len(why) > 10 for _, why in advice)


def test_the_guide_in_code_and_the_drawing_give_one_answer():
    """From the top: each question's way out, where all those before it were answered the other way."""
    drawn = (ROOT / "book" / "assets" / "drawings" / "guide.svg").read_text(encoding="utf-8")
    *answers, last = re.findall(r'font-weight="700">([^<]+)<', drawn)
    ways = [{"explain": True}, {"own_size": True}, {"trains": False}, {"unlabelled": 8000}]
    assert answers[::3] == ["no", "yes", "no", "yes"] and answers[2::3] == ["yes", "no", "yes", "no"]
    for tries, way in zip(answers[1::3], ways, strict=True):
        assert taught(NAME).advise(**START | way)[0][0] == tries
    steps = [step for step, _ in taught(NAME).advise(**START)]
    assert steps == [*last.split(", then "), "scratch"]


def test_there_are_ten_findings_and_each_cites_what_the_records_have_decided():
    judged = recorded_verdicts()
    findings = re.findall(r"^\d+\. .+", section(CHAPTER, "What was found"), re.M)
    assert len(findings) == 10
    for finding in findings:
        comments = [comment["what"].removeprefix("not ").split() for comment in COMMENT.finditer(finding)]
        assert comments, finding
        for claim, *scales in comments:
            assert {judged[claim, scale].verdict for scale in scales} <= {"holds", "does not hold"}, finding


def test_what_it_says_of_costs():
    """Copy at inference costs about as much as the teacher, Distill as much as the student, in both pairs."""
    wide, narrow = SIZE | {"embed_dim": 384}, SIZE | {"embed_dim": 96}
    for costs in (method_costs("glyphs"), method_costs(narrow, teacher=wide)):
        image = {cost.method: cost.inference_flops for cost in costs}
        assert image["distill"] == image["scratch"]
        assert 0.9 < image["copy"] / image["fine-tune"] < 1.7
        assert image["frozen probe"] == image["fine-tune attention"] == image["fine-tune"]
    assert round(image["fine-tune"] / image["scratch"]) == 15, "about 15 times the student"


def test_no_number_of_labels_takes_the_place_of_maps_in_match_within_500_steps():
    match = accuracies("labels", "match")
    assert all(match[f"scratch, {n} labels"].mean < 0.16 for n in (250, 4000, 32_000))


def test_the_projects_three_students_are_of_one_size_and_all_searched():
    text = CHAPTER.read_text().replace("\\\n", "")
    lines = re.findall(r"^python -m atlib ((?:train|transfer|controls) .+)$", text, re.M)
    run, control = map(shlex.split, lines)  # scratch, own maps and blank are rows of the second
    assert run[0] == "train" and "--student" in run
    assert control[:2] == ["controls", run[run.index("--out") + 1]] and "--rates" in control
