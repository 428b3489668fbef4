"""The explorer's JavaScript in a browser, from a folder, and what Python hands to it."""

import base64
import json
import re

import numpy as np
import pytest

from atbook.explorer import write_weights
from tests.helpers import ROOT, made_once

SCRIPTS = ROOT / "atbook" / "explorer"
BEGINS, ENDS = "globalThis.ExplorerWeights = ", ";\n"


@pytest.fixture(scope="session")
def weights_file(tmp_path_factory):
    """The script of weights, written from the committed ones."""
    folder, _ = made_once(
        tmp_path_factory,
        "explorer",
        lambda folder: str(write_weights(folder / "explorer-weights.js", ROOT / "results")),
    )
    return folder / "explorer-weights.js"


@pytest.fixture(scope="session")
def content(weights_file):
    """What the script says, read without JavaScript."""
    script = weights_file.read_text(encoding="utf-8")
    assert script.startswith(BEGINS) and script.endswith(ENDS)
    return json.loads(script.removeprefix(BEGINS).removesuffix(ENDS))


@pytest.fixture(scope="session")
def tab(browser, weights_file, tmp_path_factory):
    """A tab with the page open; it must neither complain nor ask the network for anything."""
    page = tmp_path_factory.mktemp("page") / "page.html"
    scripts = [weights_file, *(SCRIPTS / name for name in ("model.js", "scenes.js"))]
    tags = "".join(f'<script src="{script.as_uri()}"></script>' for script in scripts)
    page.write_text(f'<!doctype html><meta charset="utf-8"><title>test</title>{tags}')
    complaints = []
    tab = browser.new_page()
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
    tab.goto(page.as_uri())
    tab.evaluate("""() => {
        globalThis.models = {}; // opened by a test, kept for the next
        globalThis.bytesOf = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
        globalThis.textOf = arrays => {
            let text = "";
            for (const array of arrays)
                for (const byte of new Uint8Array(array.buffer)) text += String.fromCharCode(byte);
            return btoa(text);
        };
    }""")
    yield tab
    assert complaints == []


# The parts of the play page, and where each stands; in a page, in this order.
PARTS = {
    "tour": '<div class="tour-here"></div>',
    "training": '<div id="explorer-training"></div>',
    "explorer": '<div id="explorer"></div>',
}
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>play</title>
<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="{style}">
{parts}{scripts}</html>"""


@pytest.fixture
def play(visit, weights_file, tmp_path):
    """A function that opens parts of the play page at an address, with the scripts of `book/play.md`."""

    def opened(*parts, address="", width=1000):
        source = (ROOT / "book" / "play.md").read_text(encoding="utf-8")
        names = re.findall(r'<script src="\.\./_static/explorer/([^"]+)"', source)
        files = [weights_file if name == weights_file.name else SCRIPTS / name for name in names]
        page = PAGE.format(
            style=(SCRIPTS / "explorer.css").as_uri(),
            parts="".join(PARTS[part] for part in PARTS if part in parts),
            scripts="".join(f'<script src="{file.as_uri()}"></script>' for file in files),
        )
        file = tmp_path / f"{'-'.join(parts)}.html"
        file.write_text(page, encoding="utf-8")
        return visit(file.as_uri() + address, width)

    return opened


def address(page):
    """What the address asks for, {name: value}."""
    return dict(part.split("=") for part in page.evaluate("location.hash.slice(1)").split("&"))


def says(page):
    """What is said of the answer."""
    return page.inner_text(".explorer-says")


def chosen(page, label):
    return page.get_by_label(label, exact=True).input_value()


def nameless(page):
    """What can be used or seen in the page and has no name for a screen reader, as HTML."""
    return page.eval_on_selector_all(
        ":is(select, button, input, canvas, progress, svg[role], [role=button])",
        """all => {
            const names = e => [e.getAttribute('aria-label'), e.textContent, e.labels?.[0]?.textContent];
            const unnamed = e => !e.closest('[hidden]') && !names(e).some(text => text?.trim());
            return all.filter(unnamed).map(e => e.outerHTML);
        }""",
    )


def sent(array):
    """An array of bytes as text for the browser's `bytesOf`."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=np.uint8).tobytes()).decode()


def received(text, dtype=np.float32):
    """What the browser's `textOf` made of its arrays, one after the other."""
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def ask(tab, function, argument):
    """What a function of JavaScript returns; as JSON, which takes a tenth of the time of playwright's own."""
    text = tab.evaluate(f"text => JSON.stringify(({function})(JSON.parse(text)))", json.dumps(argument))
    return None if text is None else json.loads(text)
