"""One headless Chromium or Chrome, for tests of pages and of JavaScript."""

import shutil
from contextlib import contextmanager

import pytest

BROWSERS = [
    "chromium",
    "google-chrome",
    "google-chrome-stable",
    "chromium-browser",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
]
# --no-sandbox: containers have no user namespaces. The others keep the browser itself from calling home.
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium():
    """A browser of playwright; skips the test, and says why, on a machine without one."""
    executable = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if executable is None:
        pytest.skip("no Chromium or Chrome was found on this machine (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield opened
        opened.close()
