"""The built book in a real browser: each page opened once."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"


def names() -> list[str]:
    """Every page that a reader can reach, from the table of contents, whether the book is built or not."""
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [chapter["file"] for part in contents["parts"] for chapter in part["chapters"]]
    return [contents["root"], *chapters, "genindex", "search"]


@pytest.fixture(scope="session", autouse=True)
def built_book():
    """Skips, and says why, where there is no built book."""
    if not (HTML / "index.html").exists():
        pytest.skip("the book is not built: run `make book` first")


class Opened:
    """A page of the book in the browser, and what it asked for and complained about while it loaded."""

    def __init__(self, browser, name: str):
        self.name, self.file = name, HTML / f"{name}.html"
        assert self.file.exists(), f"{name} is in _toc.yml but not in the built book; run `make book` again"
        self.requests, self.complaints = [], []
        self.tab = browser.new_page(viewport={"width": 1280, "height": 900})
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("requestfailed", lambda request: self.complaints.append(f"failed: {request.url}"))
        self.tab.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.tab.on(
            "console",
            lambda message: (
                message.type in {"error", "warning"}
                and self.complaints.append(f"{message.type}: {message.text}")
            ),
        )
        self.tab.goto(self.file.as_uri(), wait_until="load")
        # Math is set after loading; the promise is there only on pages that have math.
        self.tab.evaluate("() => window.MathJax?.startup?.promise")
        # What a prediction keeps closed belongs to the page, too.
        self.tab.eval_on_selector_all(".predict > details", "found => found.forEach(e => { e.open = true; })")

    def all(self, selector: str, expression: str) -> list:
        """`expression` of every element e that `selector` finds."""
        return self.tab.eval_on_selector_all(selector, f"found => found.map(e => {expression})")

    @contextmanager
    def of_width(self, width: int):
        """The page in a window of that width, for a while."""
        self.tab.set_viewport_size({"width": width, "height": 844})
        try:
            yield
        finally:
            self.tab.set_viewport_size({"width": 1280, "height": 900})


@pytest.fixture(scope="module", params=names())
def page(request, browser):
    opened = Opened(browser, request.param)
    yield opened
    opened.tab.close()


@pytest.fixture
def tab(browser):
    """An empty tab."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    yield opened
    opened.close()
