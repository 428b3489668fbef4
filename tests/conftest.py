"""What all tests share: fixed seeds, no network where a test asks for it, small models, a browser."""

import gc
import os
import shutil
import socket
from tempfile import TemporaryDirectory

import pytest
import torch

from atbook.worlds import glyph_images
from atbook.worlds.glyphs import generate
from tests import helpers

BROWSERS = [
    *("chromium", "google-chrome", "google-chrome-stable", "chromium-browser"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
]
# --no-sandbox: containers have no user namespaces. The others keep the browser itself from calling home.
ARGUMENTS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
ARGUMENTS += " disable-component-update disable-sync"
# Of `datasets`, which is imported later: nothing is left in the user's cache, and nothing found there.
CACHE = TemporaryDirectory()
os.environ |= {"HF_DATASETS_CACHE": CACHE.name, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def pytest_collection_finish():
    """What is there once everything is imported stays: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()
    CACHE.cleanup()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def browser():
    """One Chromium for all tests of a process, as playwright cannot be started twice."""
    executable = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if executable is None:
        pytest.skip("no Chromium or Chrome was found on this machine (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = [f"--{argument}" for argument in ARGUMENTS.split()]
        opened = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """A function that opens an address; nothing may complain or ask the network. (Blobs are a page's own.)"""
    complaints, opened = [], []

    def go(address, width=1000):
        page = browser.new_page()
        opened.append(page)
        page.set_default_timeout(5000)
        page.set_viewport_size({"width": width, "height": 900})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda x: x.url.startswith(("file:", "blob:")) or complaints.append(x.url))
        page.goto(address)
        return page

    yield go
    for page in opened:
        page.close()
    assert complaints == []


@pytest.fixture
def no_network(monkeypatch):
    """Every connection fails at once, so that what a test sees is what a machine without a network sees."""

    def refuse(self, address):
        raise OSError(f"no network in this test (wanted {address})")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def small_vit():
    return helpers.small_vit


@pytest.fixture(scope="session")
def glyphs64():
    """64 labelled images of the built-in world."""
    return glyph_images(generate("train", 64))
