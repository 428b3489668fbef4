"""Sentences say no more than their verdicts: what they cite is so, and what cites nothing is found."""

import re

import pytest

from atbook.lab.findings import CLAIMS
from atbook.lab.verdicts import (
    DOES_NOT_HOLD,
    HOLDS,
    IN_ALL,
    IN_NONE,
    NOT_RECORDED,
    TOO_SMALL,
    UNSEEN,
    Estimate,
    Judged,
)
from tools.claims_in_sentences import cited, compares, passages, problems, recorded_verdicts
from tools.sentences import pages

VERDICTS = {
    ("a", "find"): HOLDS, ("a", "match"): TOO_SMALL, ("b", "find"): DOES_NOT_HOLD, ("d", "find"): IN_ALL,
    ("d", "match"): IN_NONE, ("e", "find"): UNSEEN, ("e", "match"): NOT_RECORDED,
}  # fmt: skip
MEASURED = Estimate(0.1, 0.0, 0.2, 0.05, 5, 1000, (0.1,) * 5)
JUDGED = {
    (claim, scale): Judged(CLAIMS[0], scale, None if verdict == NOT_RECORDED else MEASURED, verdict)
    for (claim, scale), verdict in VERDICTS.items()
}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_no_page_says_more_or_less_than_its_verdicts(page):
    assert problems(page, recorded_verdicts()) == []


@pytest.fixture
def page(tmp_path):
    def write(text):
        path = tmp_path / "page.md"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("**Maps help.**<!-- claim: a find --> In Match it is too small to tell.", None),
        (
            "**Maps help.**<!-- claim: a match --> It is too small to tell.",
            "a, match: too small to tell; other is said",
        ),
        ("Maps help<!-- claim: a find match -->.", "a, match"),
        ("Maps seem to help<!-- claim: a find --> (too small to tell).", "a, find: holds; other is said"),
        ("Maps do not help<!-- claim: not a find -->.", "a, find: holds; other is said"),
        ("Maps help<!-- claim:a find -->.", "not of the form"),
        ("Maps do not help<!-- claim: not b find -->.", None),
        ("Maps help<!-- claim: b find -->.", "b, find: does not hold"),
        ("Maps help in all five seeds<!-- claim: d find -->.", None),
        ("Maps help in all ten seeds<!-- claim: d find -->.", "d, find: in all seeds; other"),
        ("Maps help in no seed<!-- claim: d match -->.", None),
        ("Maps harm in all five seeds<!-- claim: not d match -->.", None),
        ("What maps add cannot be seen with five seeds<!-- claim: e find -->.", None),
        ("What maps add cannot be seen with ten seeds<!-- claim: e find -->.", "seen with 5 seeds; other"),
        ("Maps help<!-- claim: e match -->.", "e, match: not recorded; other is said"),
        ("Maps help<!-- claim: c find -->.", "no claim 'c' is asked at 'find'"),
        ("**Maps are better.** By 3.", "a lead compares and cites no claim"),
        ("## What we learned\n\n- One.\n- Maps beat\n  scratch.", "page.md:4: a learned compares"),
        (
            "```{code-cell}\n    figure:\n      caption: |\n        Maps beat scratch.\n      name: x\n```",
            "page.md:3: a caption",
        ),
        ('```{code-cell}\nprint("**Maps beat scratch.**")\n```', None),
        ("**Maps are better.**<!-- no claim: quoted -->", None),
        ("**Maps are better.**<!-- no claim: because -->", "'because' is not among the reasons"),
        ("**Maps are better.**<!-- no claim: observed -->", "in how many seeds is not said"),
    ],
)
def test_a_sentence_says_what_its_verdict_says(page, text, wrong):
    found = problems(page(text), JUDGED)
    if wrong is None:
        assert found == []
    else:
        (problem,) = found
        assert re.search(wrong, problem), problem


def test_numbers_and_their_comments_are_not_read_as_words(page):
    (passage,) = passages(page('**It is 75 %**<!-- = diff("match", "better", "worse") --> of them.'))
    assert passage.kind == "lead" and not compares(passage)


def test_the_claims_that_a_page_cites(page):
    text = "One<!-- claim: a find match -->, two<!-- claim: not b find -->, three<!-- no claim: quoted -->."
    assert cited(page(text)) == {"a", "b"}
