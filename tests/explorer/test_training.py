"""Training in the page, in a browser: it goes on, stops, keeps the page alive, and says where it cannot."""

import re

import pytest

from tests.explorer.conftest import nameless


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
