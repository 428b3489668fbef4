"""The slides of the course: all weeks, numbers of the records, no network."""

import inspect
import re
from importlib.util import find_spec

import pytest

from tests.helpers import ROOT, made_once
from tools import build_book
from tools.sentences import guarded, pages

SLIDES = ROOT / "course" / "slides"
WEEKS = [f"week{number}" for number in range(1, 7)]
WIDTH, HEIGHT = 1280, 720


def slides(week: str) -> int:
    """How many slides a week has."""
    text = (SLIDES / f"{week}.md").read_text(encoding="utf-8").split("---\n", 2)[2]
    return len(re.findall(r"^#{1,2} .+$", text, flags=re.MULTILINE))


def test_the_teaching_page_links_to_the_slides_that_the_book_publishes():
    page = (ROOT / "book" / "teaching.md").read_text(encoding="utf-8")
    linked = set(re.findall(r'href="\.\./slides/(\w+)\.html"', page))
    assert linked == {"index", *WEEKS}
    assert 'build_slides(built / "slides")' in inspect.getsource(build_book.main)


def test_numbers_of_slides_are_held_to_records_with_those_of_the_book():
    """`tests/book/test_sentences.py` compares them."""
    assert {SLIDES / f"{week}.md" for week in WEEKS} <= set(pages())
    assert all(guarded(SLIDES / f"{week}.md") for week in WEEKS)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The slides, built as the book builds them, but from no outputs of another build."""
    for module in ("sphinx_revealjs", "myst_nb"):
        if not find_spec(module):
            pytest.skip(f"{module} is not installed (the extras `course` and `book`)")

    def build(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build_book, "OUTPUTS", folder / "outputs")
            assert build_book.build_slides(folder / "slides")

    return made_once(tmp_path_factory, "slides", build)[0] / "slides"


@pytest.mark.slow
@pytest.mark.parametrize("week", WEEKS)
def test_a_built_week_has_its_slides_and_numbers_and_asks_nobody_for_anything(built, week):
    html = (built / f"{week}.html").read_text(encoding="utf-8")
    plain = re.sub(r"<!--.*?-->", "", html, flags=re.DOTALL)
    assert html.count("<h2>") + html.count("<h1>") == slides(week)
    assert [number.number for number in guarded(SLIDES / f"{week}.md") if number.number not in plain] == []
    loaded = re.findall(r"<(?:script|link|img|iframe|video)[^>]*?\b(?:src|href)=\"([^\"]+)\"", html)
    assert loaded and not [address for address in loaded if re.match(r"(?:\w+:)?//", address)]
    files = [address.split("?")[0] for address in loaded if not address.startswith("data:")]
    assert all((built / file).exists() for file in files)
    assert all('alt="' in image for image in re.findall(r"<img[^>]*>", html))


@pytest.mark.slow
@pytest.mark.parametrize("week", WEEKS)
def test_nothing_of_a_slide_is_cut_off(built, browser, week):
    tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    asked, complaints = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto((built / f"{week}.html").as_uri(), wait_until="load")
    tab.evaluate("() => window.MathJax?.startup?.promise")
    sizes = tab.evaluate(
        """() => Reveal.getSlides().map(slide => {
            const {h, v} = Reveal.getIndices(slide);
            Reveal.slide(h, v);
            const parts = [...slide.querySelectorAll(":scope > :not(aside)")];
            const bottom = Math.max(...parts.map(part => part.offsetTop + part.offsetHeight));
            return [slide.querySelector("h1, h2")?.innerText, slide.scrollWidth, slide.scrollHeight, bottom];
        })"""
    )
    tab.close()
    assert len(sizes) == slides(week) and complaints == []
    assert [size for size in sizes if size[1] > WIDTH or size[2] > HEIGHT] == []
    assert [size for size in sizes if size[3] < HEIGHT / 2] == [], "half of a slide is empty"
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
