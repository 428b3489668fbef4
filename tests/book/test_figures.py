"""Figures of matplotlib as parts of a page: what is drawn stays, ids are used once, colours are the page's"""

import base64
import io
import json
import re
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from atbook.slider import Slider
from tools.figures import KERNEL, inlined


def drawn() -> str:
    """As a kernel of the build draws it."""
    settings = dict(one.partition("rc=")[2].split("=") for one in KERNEL if ".rc=" in one)
    with matplotlib.rc_context(settings):
        figure, file = Figure(figsize=(4, 3)), io.StringIO()
        axis = figure.subplots()
        axis.plot([0, 1], [1, 0], "o", color="#444444")
        axis.imshow([[0, 1]])
        axis.set_title("Text", fontsize=6)
        figure.savefig(file, format="svg")
    return file.getvalue()


def test_a_figure_stands_in_the_page_whole():
    before, after = drawn(), inlined(drawn(), "f1", 'What "it" shows')
    tree = ElementTree.fromstring(after)
    assert tree.get("class") == "plot" and tree.get("aria-label") == 'What "it" shows'
    for part in ("<text", "<use", "<image"):
        assert after.count(part) == before.count(part) > 0
    assert "Text" in after and "font-family" not in after and "000000" not in after
    assert "var(--figure-444444, #444444)" in after
    # four inches are 288 units, in which letters of 6 have 9 pixels where the figure is 432 wide
    assert tree.get("style") == "--legible: 432px" and tree.get("width") is None


def test_ids_of_a_figure_are_those_that_it_uses_and_are_in_no_other():
    ids = [set(re.findall(r' id="([^"]+)"', inlined(drawn(), name, ""))) for name in ("f1", "f2")]
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', inlined(drawn(), "f1", "")))
    assert ids[0] == used and not ids[0] & ids[1]


# --- A slider shows itself twice: frames drawn in advance, and a live widget from the same function


def parabola(power):
    figure, axes = plt.subplots(figsize=(2, 1))
    axes.plot([0, 0.5, 1], [0, 0.5**power, 1])
    return figure


def make(**changed):
    options = {"draw": parabola, "values": [1, 2, 3], "label": "power"} | changed
    return Slider(alt=lambda power: f"x to the {power}", **options)


def frames(slider):
    return json.loads(re.search(r'application/json">(.*?)</script>', slider.html(), re.DOTALL)[1])


def test_one_frame_for_each_value_in_order():
    drawn = []
    slider = make(draw=lambda power: drawn.append(power) or parabola(power))
    assert drawn == [1, 2, 3]
    shown = frames(slider)
    assert [frame["value"] for frame in shown] == ["1", "2", "3"]
    assert [frame["alt"] for frame in shown] == ["x to the 1", "x to the 2", "x to the 3"]
    assert len({frame["src"] for frame in shown}) == 3
    for frame in shown:
        assert base64.b64decode(frame["src"].removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")


def test_it_opens_where_it_is_told():
    slider = make(start=3)
    first = re.search(r'<img src="([^"]+)" alt="([^"]+)"', slider.html())
    assert first[1] == frames(slider)[2]["src"] and first[2] == "x to the 3"
    assert 'value="2"' in slider.html() and slider.widget().children[0].value == 3
    with pytest.raises(ValueError):
        make(start=4)
