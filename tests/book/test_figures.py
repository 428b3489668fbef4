"""Figures of matplotlib as parts of a page: what is drawn stays, ids are used once, colours are the page's"""

import io
import re
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

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
