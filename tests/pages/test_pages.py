"""What every page of the built book must do in a browser, from a folder and without a network."""

import re
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tools.book_pages import MOVED

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"


def test_panels_of_the_front_page_stand_side_by_side_and_below_each_other_on_a_phone(tab):
    tab.goto((HTML / "book" / "index.html").as_uri())
    for width, below in ((1280, False), (390, True)):
        tab.set_viewport_size({"width": width, "height": 844})
        for panels in tab.locator(".panels").all():
            boxes = [one.bounding_box() for one in panels.locator("> div").all()]
            assert len(boxes) >= 2
            for one, other in pairwise(boxes):
                assert (other["y"] >= one["y"] + one["height"]) == below


def test_scenes_of_the_front_page_are_drawn_without_scripts_too(browser):
    tab = browser.new_page(java_script_enabled=False)
    tab.goto((HTML / "book" / "index.html").as_uri())
    assert [one.is_visible() for one in tab.locator(".tour-here svg").all()] == [True, True]
    tab.close()


def test_the_front_door_and_old_addresses_lead_on(tab):
    for old, new in {"index": "book/index", **MOVED}.items():
        tab.goto((HTML / f"{old}.html").as_uri(), wait_until="commit")
        tab.wait_for_url(f"**/{new}.html", wait_until="commit")
        assert tab.url == (HTML / f"{new}.html").as_uri()


def test_page_loads_without_complaints(page):
    assert page.complaints == []


def test_nothing_is_asked_of_the_network(page):
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_math_is_set(page):
    raw = page.all(".math", "e.querySelector('mjx-container') ? '' : e.textContent")
    assert [text for text in raw if text] == [], "formulas that stayed as they are typed"
    assert page.all("mjx-merror, [data-mjx-error]", "e.getAttribute('title') ?? e.textContent") == []
    source = page.file.read_text(encoding="utf-8")
    if 'class="math' in source:
        assert page.all("mjx-container", "1"), "the page has formulas and MathJax set none"


def test_no_sideways_scroll_on_a_desktop_and_on_a_phone(page):
    for width in (1280, 390):
        with page.of_width(width):
            page.tab.evaluate(
                "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )
            # What reaches beyond the right edge, outermost first, but for boxes that scroll themselves.
            wide = page.tab.evaluate("""() => {
                const {clientWidth: edge, scrollWidth: total} = document.documentElement;
                if (total <= edge) return [];
                const visible = e => getComputedStyle(e).overflowX == 'visible';
                const scrolls = e => e && (!visible(e) || scrolls(e.parentElement));
                return [...document.querySelectorAll('body *')]
                    .filter(e => e.getBoundingClientRect().right > edge + 1 && !scrolls(e.parentElement))
                    .slice(0, 3).map(e => e.outerHTML.slice(0, 120)).concat(`${total} px in all`);
            }""")
            assert wide == [], f"{page.name} is wider than {width} px"


def test_no_cell_of_the_claims_is_taller_than_three_lines(tab):
    tab.set_viewport_size({"width": 1300, "height": 900})
    tab.goto((HTML / "book" / "claims.html").as_uri())
    tall = tab.evaluate("""() => {
        const lines = e => {
            const style = getComputedStyle(e), range = document.createRange();
            range.selectNodeContents(e);
            return Math.round(range.getBoundingClientRect().height / parseFloat(style.lineHeight));
        };
        const shown = [...document.querySelectorAll('table td')].filter(e => e.offsetParent);
        return shown.filter(e => !e.closest('details:not([open])') && lines(e) > 3).map(e => e.textContent);
    }""")
    assert tall == []


def test_every_image_loads_and_says_what_it_shows(page):
    images = page.all(
        "img", "({alt: e.alt.trim(), source: e.getAttribute('src').slice(0, 80), width: e.naturalWidth})"
    )
    for image in images:
        assert image["width"] > 0, f"the image {image['source']} does not load"
        # Without an alt text of its own an image gets its file's name from Sphinx, which tells nothing.
        # A code cell's figure takes its own from the cell's metadata, mystnb: image: alt.
        assert image["alt"] and not re.search(r"\.(png|svg|jpe?g|gif)$", image["alt"]), image


def test_drawings_are_legible_on_a_phone_and_nothing_in_them_overlaps(page):
    with page.of_width(390):
        drawn = page.all(
            "figure.drawing > svg",
            """(({svg, edge}) => ({
                label: svg.getAttribute('aria-label'),
                texts: [...svg.querySelectorAll('text')].map(text => {
                    const {left, right, top, bottom} = text.getBoundingClientRect();
                    const size = text.getAttribute('font-size') * edge.width / svg.viewBox.baseVal.width;
                    const inside = left >= edge.left - 1 && right <= edge.right + 1;
                    return {says: text.textContent, left, right, top, bottom, size, inside};
                }),
            }))({svg: e, edge: e.getBoundingClientRect()})""",
        )
    for drawing in drawn:
        assert drawing["label"]
        for text in drawing["texts"]:
            assert text["size"] > 11 and text["inside"], text
        for one, other in combinations(drawing["texts"], 2):
            across = min(one["right"], other["right"]) - max(one["left"], other["left"])
            down = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
            assert across < 1 or down < 3, (one["says"], other["says"])


def test_figures_have_the_colour_of_the_page_and_letters_of_nine_pixels_on_a_phone(page):
    sizes = """(scale => ({
        label: e.getAttribute('aria-label'),
        colour: getComputedStyle(e).color === getComputedStyle(e.closest('article')).color,
        smallest: Math.min(...[...e.querySelectorAll('text')].map(
            text => parseFloat(getComputedStyle(text).fontSize) * scale)),
    }))(e.getBoundingClientRect().width / e.viewBox.baseVal.width)"""
    with page.of_width(390):
        drawn = page.all("svg.plot", sizes)
        wide = page.tab.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390
    for figure in drawn:
        assert figure["label"] and figure["colour"]
        assert figure["smallest"] is None or figure["smallest"] > 8.9, figure


@cache
def anchors(file: Path) -> set[str]:
    return set(re.findall(r'\bid="([^"]+)"', file.read_text(encoding="utf-8")))


def test_links_lead_somewhere(page):
    for link in page.all("a[href]", "e.href"):
        parts = urlsplit(link)
        if parts.scheme == "file":
            target = Path(unquote(parts.path))
            assert target.exists(), f"link to a missing file: {link}"
            # of "Play with it" the part after # is a state, which the page itself reads
            place = parts.fragment and target.suffix == ".html" and target.name != "play.html"
            if place and target != page.file:
                assert unquote(parts.fragment) in anchors(target), f"link to a missing place: {link}"
        elif parts.netloc == "colab.research.google.com":
            notebook = ROOT / unquote(parts.path.split("/blob/main/")[1])
            assert notebook.suffix == ".ipynb" and notebook.exists(), link


def test_sliders_move_their_picture(page):
    # What a slider leaves behind that shows no static form: a live widget's box, or its repr.
    assert page.all("script[type*='widget-view']", "1") == []
    assert "Slider over" not in page.tab.inner_text("body")
    for slider in page.tab.query_selector_all(".frames-slider"):
        knob, pictures = slider.query_selector("input[type=range]"), slider.query_selector_all("img")
        assert len(pictures) == 1 and knob.get_attribute("aria-label")

        def seen():
            return pictures[0].get_attribute("src"), slider.query_selector("output").inner_text()

        before = seen()
        there, back = "ArrowRight", "ArrowLeft"
        if knob.input_value() == knob.get_attribute("max"):
            there, back = back, there
        knob.focus()
        knob.press(there)
        assert seen()[0] != before[0] and seen()[1] != before[1], "the knob moved and the picture stayed"
        assert pictures[0].get_attribute("alt").strip()
        assert pictures[0].evaluate("e => e.decode().then(() => e.naturalWidth)") > 0
        knob.press(back)
        assert seen() == before


def test_pictures_of_sliders_have_their_own_width_on_a_phone(page):
    """Drawn at 72 dots an inch, a letter of 9 points has 9 pixels there."""
    with page.of_width(390):
        widths = page.all(".frames-slider img", "[e.getBoundingClientRect().width, e.naturalWidth]")
        knobs = page.all(".frames-slider input", "e.getBoundingClientRect().right")
    for width, natural in widths:
        assert width >= natural
    assert all(right <= 390 for right in knobs)


def test_a_click_on_a_choice_opens_the_explanation(page, tab):
    if not page.all(".predict", "1"):
        return
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.emulate_media(color_scheme="dark")
    tab.goto(page.file.as_uri())
    for predict in tab.query_selector_all(".predict"):
        explained = predict.query_selector("details > p")
        choices = predict.query_selector_all("button[aria-pressed]")
        assert 2 <= len(choices) <= 4 and not explained.is_visible()
        choices[-1].click()
        assert explained.is_visible()
        assert predict.query_selector("[role=status]").inner_text().startswith("You predicted")
        assert len(predict.query_selector_all("button.right")) == 1


def test_results_are_open(page):
    """No table and no figure with a caption is in a closed block of a chapter, its exercises aside."""
    if not re.match(r"notebooks/\d\d-|book/index", page.name):
        return
    results = page.all(
        "article :is(table, figure:has(figcaption))",
        "({text: e.textContent.trim().slice(0, 80),"
        " closed: !!e.closest('details') && !e.closest('#exercises')})",
    )
    assert results
    assert [result["text"] for result in results if result["closed"]] == []


def test_the_page_look_answers_a_click_and_is_readable_in_the_dark(tab):
    tab.emulate_media(color_scheme="dark")
    tab.goto((HTML / "book" / "look.html").as_uri())
    before = tab.inner_text(".look-says")
    tab.get_by_role("application").first.click(position={"x": 10, "y": 10})
    after = tab.inner_text(".look-says")
    assert "Class token" in before and "Patch row 0, column 0" in after
    # The theme lays a light ground under the output of a cell.
    grounds = tab.evaluate("""() => {
        const grounds = [];
        for (let e = document.querySelector(".look"); e; e = e.parentElement)
            grounds.push(getComputedStyle(e).backgroundColor);
        return grounds.filter(colour => !/, 0\\)$/.test(colour));
    }""")
    light = sum(map(int, re.findall(r"\d+", grounds[0])[:3])) / 3
    assert light < 60, f"the ground of the page is {grounds[0]}"
