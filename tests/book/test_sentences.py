"""Numbers in sentences are those of the records; a wrong one is found, and said with its place."""

import numpy as np
import pytest

from atbook.lab.papers import quoted
from atbook.records import pack_bits
from tests.toy import recorded
from tools import front_picture
from tools.sentences import functions, guarded, mend, pages, wrong

KNOWN = functions()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_number_of_the_book_is_what_its_record_says(page):
    assert [problem for number in guarded(page) if (problem := wrong(number, KNOWN))] == []


@pytest.fixture
def known(tmp_path):
    """The functions on records of two methods: 75 and 25 of 100 images right, in each of two seeds."""
    for method, right in (("copy", 75), ("scratch", 25), ("scratch-2", 25), ("scratch-3", 25)):
        for seed in range(2):
            results = {"test_right": pack_bits(np.arange(100) < right), "a": [0.5, {"b": 2.0 + seed}]}
            recorded(tmp_path, "transfer", "toy", method, seed, results)
    for method, share in (("fcos, copy", 0.4), ("fcos, scratch", 0.1)):
        for seed in range(2):
            results = {"test_ap": share + seed / 10, "test_ap50": 0.5}
            recorded(tmp_path, "detection", "scenes", method, seed, results)
    for trial, accuracy in enumerate((0.5, 0.7, 0.6)):
        results = {"validation_accuracy": accuracy}
        recorded(tmp_path, "transfer", "toy", "copy", 100, results, "trial", trial)
    return functions(tmp_path)


@pytest.mark.parametrize(
    "sentence, right",
    [
        ('It is 75.0 %<!-- = acc("toy", "copy") --> now', True),
        ('It is 75.1<!-- = acc("toy", "copy") -->', False),
        ('It is 75 %<!-- = one("toy", "copy", 1) --> there', True),
        ('1.0<!-- = acc("toy", "nothing") -->', False),
        ('It gains −50.0 points <!-- = diff("toy", "scratch",\n "copy") -->', True),
        ('two thirds, 67 %<!-- = 100 * acc("toy", "copy") / (1.5 * 75) -->', True),
        ('2.5<!-- = field("transfer", "toy", "copy", "a.1.b") -->', True),
        ('85.1<!-- = paper("main_result", "attn. copy") -->', True),
        ('85.8<!-- = paper("transfer", "Flowers", "mae", of="lightweight-vits") -->', True),
        ('70.0<!-- = searched("toy", "copy", "transfer") -->', True),
        ('45.0<!-- = acc("scenes", "fcos, copy", "detection", figure="ap") -->', True),
        ('30<!-- = diff("scenes", "fcos, copy", "fcos, scratch", "detection", figure="ap") -->', True),
        ("1.0<!-- = __import__('os').getpid() -->", False),
    ],
)
def test_a_number_is_compared_to_the_digits_that_are_printed(tmp_path, known, sentence, right):
    page = tmp_path / "page.md"
    page.write_text("First line.\n\n" + sentence)
    (number,) = guarded(page)
    assert number.line == 3
    problem = wrong(number, known)
    assert (problem is None) == right and (right or problem.startswith(f"{page}:3: "))


def test_mending_writes_wrong_numbers_as_they_were_printed_and_no_other(tmp_path, known):
    page = tmp_path / "page.md"
    right, gain = '75 %<!-- = acc("toy", "copy") -->', '<!-- = diff("toy", "copy", "scratch") -->'
    loss, many = '<!-- = diff("toy", "scratch", "copy") -->', '<!-- = 100 * acc("toy", "copy") -->'
    page.write_text(f"{right}, +49.9{gain}, −1{loss}, 7,501{many}, 12 of 30.")
    mend(page, known)
    assert page.read_text() == f"{right}, +50.0{gain}, −50{loss}, 7,500{many}, 12 of 30."


def test_a_comment_without_a_number_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('many<!-- = acc("toy", "copy") -->')
    with pytest.raises(ValueError, match="1 comments .* 0 follow"):
        guarded(page)


def test_the_papers_tables():
    copy = quoted("copy_target")
    assert copy.value("Q", "top1") == 85.6 and copy.source.startswith("Li et al. 2024, arXiv 2411.09702, ")
    assert quoted("ood_robustness").value("ImageNet-A", "fine_tune") == 56.5
    with pytest.raises(ValueError):
        copy.value("q", "top1")
    assert quoted("mix_and_match").value(("FLIP", "Random"), "top1") == 86.6
    with pytest.raises(ValueError):  # FLIP's maps are in two rows
        quoted("mix_and_match").value("FLIP", "top1")


def test_the_picture_of_the_readme_has_the_numbers_of_the_records():
    drawn = front_picture.PICTURE.read_text(encoding="utf-8")
    assert front_picture.says() in drawn, "draw it anew: python -m tools.front_picture"
