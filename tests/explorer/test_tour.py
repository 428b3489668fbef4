"""The tour: what its steps say, addresses, the keyboard, a step inside a chapter."""

import re

import pytest

from tests.explorer.conftest import address, nameless
from tests.helpers import ROOT


@pytest.fixture
def tour(play):
    """A function that opens the tour at an address, with the explorer below it."""
    return lambda asked="", width=1000: play("tour", "explorer", address=asked, width=width)


def verdict(page):
    return page.inner_text(".explorer-tour .explorer-says")


def looks(page):
    return page.locator(".tour-drawing").get_attribute("aria-label")


MATCH, FIND = "the key's colour", "four white corners"
# Of every step: what the question asks for, the verdict on the typical scene, what the teacher sees.
EXPECTED = [
    (MATCH, r"answers (?!cup)\w+ .*: wrong, it is cup", "no teacher"),
    (MATCH, r"answers cup .*: right\.", "teacher"),
    (MATCH, r"answers cup .*: right, although the teacher sees ring there", "teacher: a twin"),
    (FIND, r"answers tee .*: that is what the teacher sees there\. .* it is plus", "teacher: a twin"),
    (MATCH, r"answers wedge .*: that is what you point at\. .*the target is cup", "you"),
    (FIND, r"answers (?!plus)\w+ .*: wrong, it is plus", "teacher"),
]


def test_six_steps_say_what_is_seen(tour):
    page = tour()
    for number, (asks, said, teacher) in enumerate(EXPECTED, 1):
        assert address(page) == {"tour": str(number)}
        assert page.inner_text(".explorer-title >> nth=0").startswith(f"{number} of 6.")
        assert asks in page.inner_text(".tour-asks") and re.search(said, verdict(page))
        assert page.locator(".tour-drawing text").all_text_contents().count(teacher) == 1
        assert page.locator(".tour-answers li").count() == 8
        if number < 6:
            page.get_by_role("button", name="Next").click()


def test_two_maps_are_compared_and_differ_where_a_message_leaks(tour):
    page = tour("#tour=3")

    def texts():
        return " ".join(page.locator(".tour-drawing text").all_text_contents())

    assert "the two are alike" in texts() and page.locator(".tour-differs").count() == 0
    page.get_by_role("button", name="Next").click()
    assert "red: they differ" in texts()
    assert page.locator(".tour-differs").count() == 4  # two tokens, two maps
    above, below = map(int, re.search(r"target: (\d+) % above, (\d+) % here", texts()).groups())
    assert f"the target gets {above} % in this map, and {below} %" in looks(page) and below - above > 20
    page.get_by_label("The teacher looks at").select_option("scene")
    assert "to compare" not in texts()


def test_a_map_is_painted_with_mouse_and_keyboard(tour):
    page = tour("#tour=5")
    cell, shapes = page.evaluate(
        """() => {
            const scene = Explorer.draw("match", Explorer.TYPICAL.match);
            return [scene.cell, scene.cells.map(one => ExplorerWeights.shapes[one.shape])];
        }"""
    )
    page.locator(f'[data-at="map-{cell}"]').click()
    assert address(page) == {"tour": "5", "cell": str(cell)}
    assert f"answers {shapes[cell]}" in verdict(page) and verdict(page).endswith("right.")
    page.keyboard.press("ArrowLeft" if cell % 4 else "ArrowRight")
    beside = cell - 1 if cell % 4 else cell + 1
    assert address(page)["cell"] == str(beside)
    assert page.evaluate("document.activeElement.dataset.at") == f"map-{beside}"
    assert "100 %" in looks(page)
    assert re.search(rf"answers {shapes[beside]} .*: that is what you point at", verdict(page))


def test_pages_with_a_step_ask_for_steps_that_there_are():
    sources = [ROOT / "book" / "index.md", *(ROOT / "notebooks").glob("*.md")]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    asked = " ".join(re.findall(r'class="tour-here" data-steps="([\d ]+)"', text)).split()
    assert len(asked) >= 6 and {*map(int, asked)} <= {*range(1, len(EXPECTED) + 1)}


# --- Training in the page: it goes on, stops, and keeps the page alive


@pytest.fixture
def training(play):
    """A function that opens the training, with the fewest labels."""

    def opened(width=1000):
        page = play("training", width=width)
        page.set_default_timeout(60_000)
        page.get_by_label("Labelled scenes").select_option("200")
        return page

    return opened


def status(page):
    return page.inner_text(".explorer-status")


def step(page):
    found = re.match(r"Step (\d+) of 500", status(page))
    return int(found[1]) if found else 0


def button(page, name):
    return page.get_by_role("button", name=name, exact=True)


def wait_for_step(page, number):
    page.wait_for_function(
        "n => +(/Step (\\d+)/.exec(document.querySelector('.explorer-status').textContent)?.[1] ?? 0) >= n",
        arg=number,
        timeout=120_000,
    )


def test_two_students_learn_stop_and_go_on(training):
    page = training()
    assert "same weights" in status(page)
    button(page, "Train").click()
    wait_for_step(page, 3)
    beats = page.evaluate(
        """() => new Promise(done => {
            let beats = 0;
            const timer = setInterval(() => { beats += 1; }, 20);
            setTimeout(() => { clearInterval(timer); done(beats); }, 1000);
        })"""
    )
    assert beats >= 5, "the page stays alive while its workers learn"
    button(page, "Stop").click()
    assert "Stopped" in status(page)
    page.wait_for_timeout(1500)  # the step in progress is finished
    stopped = step(page)
    page.wait_for_timeout(1500)
    assert step(page) == stopped
    button(page, "Go on").click()
    wait_for_step(page, stopped + 2)
    points = page.eval_on_selector_all(".explorer-chart polyline", "all => all.map(e => e.points.length)")
    assert len(points) == 4 and all(points[:2]) and all(count > 2 for count in points[2:])
    page.get_by_label("The second one copies").select_option("routing")  # another question ends the run
    assert "same weights" in status(page) and button(page, "Train").is_enabled()
    assert "Student with maps of a routing twin" in page.inner_text(".explorer-two >> nth=0")


@pytest.mark.parametrize("width", (1000, 390))
def test_it_is_no_wider_than_the_page_and_everything_has_a_name(training, width):
    page = training(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert nameless(page) == []
