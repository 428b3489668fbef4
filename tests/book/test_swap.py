"""A picture with several states: tabs in a browser, and all states below each other without JavaScript."""

import re

import pytest

from tests.helpers import ROOT

FRONT = (ROOT / "book" / "index.md").read_text(encoding="utf-8")
ASSETS = ROOT / "book" / "assets"
SWAP = re.compile(r'<div class="swap" data-label="([^"]+)">\n\n(.*?)\n\n</div>', re.S)


def states() -> list[tuple[str, str, str]]:
    """Of the front page's picture: (title, file, what is said below it) of each state."""
    ((_, inside),) = SWAP.findall(FRONT)
    title, picture, *more = inside.split("\n\n")
    blocks = [title, picture, *more]
    return [
        (title.strip("*"), re.fullmatch(r"!\[.+\]\(assets/(.+)\)", picture)[1], text)
        for title, picture, text in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True)
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The front page's picture as the book writes it: drawings in the page, paragraphs around them."""
    drawn = [(title, (ASSETS / file).read_text(encoding="utf-8"), text) for title, file, text in states()]
    inside = "".join(
        f"<p><strong>{title}</strong></p><figure>{svg}</figure><p>{text}</p>" for title, svg, text in drawn
    )
    css, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("book.css", "swap.js"))
    file = tmp_path_factory.mktemp("swap") / "page.html"
    file.write_text(
        f'<!doctype html><meta charset="utf-8"><style>{css}</style><article class="bd-article">'
        f'<div class="swap" data-label="What the teacher sees">{inside}</div>'
        f'<p id="after">After it.</p></article><script>{script}</script>',
        encoding="utf-8",
    )
    return file.as_uri()


def test_the_front_page_has_a_state_for_the_image_and_for_each_twin():
    assert [file for _, file, _ in states()] == [
        f"drawings/{name}.svg" for name in ("twin-none", "twin", "twin-message")
    ]


def test_without_javascript_all_states_are_there(page, browser):
    tab = browser.new_page(java_script_enabled=False)
    tab.goto(page)
    assert tab.locator("svg").count() == tab.locator("strong").count() == len(states())
    assert all(part.is_visible() for part in tab.locator(".swap p, .swap svg").all())
    tab.close()


def test_a_click_or_a_key_exchanges_the_picture_and_nothing_moves(page, visit):
    tab = visit(page, width=390)
    titles, texts = [title for title, _, _ in states()], tab.locator('[role="tabpanel"] > p')
    after = tab.locator("#after").bounding_box()

    def shown() -> list[int]:
        assert tab.locator("#after").bounding_box() == after
        visible = [i for i, text in enumerate(texts.all()) if text.is_visible()]
        selected = [
            i
            for i, one in enumerate(tab.get_by_role("tab").all())
            if one.get_attribute("aria-selected") == "true"
        ]
        assert selected == visible
        return visible

    assert [one.inner_text() for one in tab.get_by_role("tab").all()] == titles and shown() == [0]
    tab.get_by_role("tab", name=titles[1]).click()
    assert shown() == [1]
    tab.keyboard.press("ArrowRight")
    assert shown() == [2] and tab.evaluate("document.activeElement.textContent") == titles[2]
    tab.keyboard.press("ArrowRight")
    assert shown() == [0]
    tab.keyboard.press("End")
    assert shown() == [2]
    tab.keyboard.press("Tab")  # the tabs are one stop; what is hidden is none
    assert tab.evaluate("document.activeElement.getAttribute('role')") != "tab"
    tab.locator(".shown svg").click()
    assert shown() == [0]
