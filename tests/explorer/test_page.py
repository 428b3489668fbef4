"""The explorer as a reader uses it: state and address, edits, undo, keyboard, names, and a narrow page."""

import html
import re

import pytest

from tests.explorer.conftest import address, chosen, nameless, says
from tests.helpers import ROOT


@pytest.fixture
def explorer(play):
    """A function that opens the explorer at an address."""
    return lambda asked="", width=1000: play("explorer", address=asked, width=width)


def test_a_state_in_the_address_is_restored(explorer):
    asked = "#world=find&model=copy&beside=scratch&maps=painted,twin,teacher,uniform&twin=message&seed=4"
    asked += "&edits=shape.3.5_cue.7&paint=0.8.00000k00000000005&blur=0.5&token=8&layer=1&head=2&noise=0.4"
    asked += "&rendering=dotted"
    page = explorer(asked)
    assert address(page) == dict(part.split("=") for part in asked[1:].split("&"))
    assert [chosen(page, name) for name in ("World", "Model", "Twin")] == ["find", "copy", "message"]
    layers = [chosen(page, f"Layer {layer}") for layer in range(4)]
    assert layers == ["painted", "twin", "teacher", "uniform"]
    again = explorer(page.evaluate("location.hash"))
    assert says(again) == says(page) and "maps chosen layer by layer" in says(page)


def test_what_the_address_asks_for_and_is_not_here_is_said(explorer):
    page = explorer("#world=find&model=resnet&noise=7&colour=red&seed=3&edits=shape.99.1&paint=0.3.k")
    said = page.inner_text(".explorer-notice")
    parts = ("model=resnet", "noise=7", "colour", "edits=shape.99.1", "paint=0.3.k")
    assert all(part in said for part in parts)
    assert address(page) == {"world": "find", "model": "scratch", "seed": "3"}
    page.get_by_role("button", name="New scene").click()
    assert page.inner_text(".explorer-notice") == ""


def test_the_links_of_chapters_ask_for_what_is_here(explorer):
    chapters = (file.read_text(encoding="utf-8") for file in sorted((ROOT / "notebooks").glob("*.md")))
    links = [state for text in chapters for state in re.findall(r'href="\.\./book/play\.html(#[^"]+)"', text)]
    assert len(links) >= 6
    for link in links:
        assert explorer(html.unescape(link)).inner_text(".explorer-notice") == "", link


def test_edits_change_the_answer_and_undo_takes_them_back(explorer):
    page = explorer("#world=find&model=fine-tune&seed=2")
    marked = page.evaluate("Explorer.draw('find', 2).cell")
    states = [(page.evaluate("location.hash"), says(page))]
    page.locator(".explorer-cells button").nth(marked).click()
    for name in ("ring", "wedge"):
        page.get_by_label("Shape", exact=True).select_option(label=name)
        assert f"answers {name}" in says(page) and "right" in says(page)
        states.append((page.evaluate("location.hash"), says(page)))
    page.get_by_role("button", name="Undo").click()
    assert (page.evaluate("location.hash"), says(page)) == states[1]
    for _ in range(2):
        page.get_by_role("button", name="Undo").click()
    assert (page.evaluate("location.hash"), says(page)) == states[0]
    assert page.get_by_role("button", name="Undo").is_disabled()


def test_a_row_is_painted_with_sliders(explorer):
    page = explorer("#world=match&model=copy&layer=3")
    page.get_by_text("Paint a map").click()
    share = page.get_by_label("share of row 1, column 2", exact=True)
    share.focus()
    page.keyboard.press("End")
    painted = address(page)
    assert painted["maps"] == "teacher,teacher,teacher,painted"
    layer, token, digits = painted["paint"].split(".")
    assert (layer, token, digits[7], len(digits)) == ("3", "0", "k", 17)
    shares = [int(digit, 36) for digit in digits]
    looks = page.locator(".explorer-cells button").nth(6).get_attribute("aria-label")
    assert f"{round(100 * 20 / sum(shares))} % of the attention" in looks
    page.get_by_role("button", name="Only the answer's cell").click()
    cell = page.evaluate("Explorer.draw('match', Explorer.TYPICAL.match).cell")
    assert address(page)["paint"] == "3.0." + "".join("k" if to == cell + 1 else "0" for to in range(17))
    named = page.locator(".explorer-cells button").nth(cell)
    assert "100 % of the attention" in named.get_attribute("aria-label")
    page.locator(".explorer-palette input").nth(cell + 1).fill("0")  # nothing would be left to give
    assert address(page)["paint"].endswith("k" + "0" * (15 - cell))
    page.get_by_role("button", name="As it was").click()
    assert "paint" not in address(page)


def test_arrows_go_from_cell_to_cell(explorer):
    page = explorer("#world=find&model=copy&maps=twin&token=6")
    page.locator(".explorer-cells button").nth(5).focus()
    for key, token in (("ArrowRight", 7), ("ArrowDown", 11), ("ArrowLeft", 10), ("ArrowUp", 6)):
        page.keyboard.press(key)
        assert address(page)["token"] == str(token)
    for _ in range(3):
        page.keyboard.press("ArrowUp")
    assert "token" not in address(page) and "class token" in page.evaluate("document.activeElement.ariaLabel")


def test_everything_has_a_name(explorer):
    page = explorer("#world=match&model=teacher&maps=twin&token=6")
    assert nameless(page) == []
    scene = page.locator(".explorer-scene").get_attribute("aria-label")
    assert scene.startswith("A scene of Match: row 0, column 0,") and scene.count("the key in") == 1


def test_accuracy_is_measured_while_the_page_stays_alive(explorer):
    page = explorer("#world=find&model=copy&maps=twin&twin=distractors&noise=0.2")
    page.get_by_role("button", name="Measure on 500 scenes").click()
    page.locator(".explorer-cells button").nth(3).click()  # looking elsewhere does not end it
    assert address(page)["token"] == "4" and page.locator("progress").is_visible()
    page.get_by_label("Twin", exact=True).select_option("message")  # a change of what is measured does
    assert page.locator("progress").is_hidden() and page.inner_text(".explorer-measured") == ""
    page.get_by_label("Maps of all layers").select_option("teacher")
    page.get_by_role("button", name="Measure on 500 scenes").click()
    page.wait_for_function("document.querySelector('.explorer-measured').textContent", timeout=120_000)
    measured, recorded = map(float, re.findall(r"([\d.]+) %", page.inner_text(".explorer-measured")))
    error = 100 * (0.94 * 0.06 / 500) ** 0.5
    assert abs(measured - recorded) < 4 * error
