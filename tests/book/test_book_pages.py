"""What the build adds to the pages: old addresses that lead on, and the explorer's files."""

import re
from types import SimpleNamespace

import yaml

from tests.helpers import ROOT
from tools.book_pages import MOVED, lead_on, put_explorer


def test_old_addresses_lead_to_pages_that_are_there(tmp_path):
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    there = {chapter["file"] for part in contents["parts"] for chapter in part["chapters"]}
    assert set(MOVED.values()) <= there and not set(MOVED) & there
    for old in MOVED:
        (tmp_path / old).parent.mkdir(exist_ok=True)
    app = SimpleNamespace(outdir=tmp_path, builder=SimpleNamespace(format="html"))
    lead_on(app, RuntimeError("the build failed"))
    assert not list(tmp_path.rglob("*.html"))
    lead_on(app, None)
    for old, new in MOVED.items():
        page = tmp_path / f"{old}.html"
        (address,) = re.findall(r'url=([^"]+)\.html"', page.read_text())
        assert (page.parent / address).resolve() == (tmp_path / new).resolve()


def test_the_explorer_has_all_the_files_that_its_page_asks_for(tmp_path):
    app = SimpleNamespace(outdir=tmp_path, builder=SimpleNamespace(format="html"))
    put_explorer(app, RuntimeError("the build failed"))
    assert not list(tmp_path.iterdir())
    put_explorer(app, None)
    page = (ROOT / "book" / "play.md").read_text(encoding="utf-8")
    asked = set(re.findall(r'"\.\./(_static/explorer/[^"]+)"', page))
    embed = (ROOT / "atbook" / "explorer" / "embed.js").read_text(encoding="utf-8")
    (names,) = re.findall(r"SCRIPTS = \[(.+)\]", embed)
    asked |= {f"_static/explorer/{name}.js" for name in re.findall(r'"([\w-]+)"', names)}
    asked |= {"_static/explorer/embed.js"}  # which pages with a step of the tour are given
    files = (file for file in tmp_path.rglob("*") if file.is_file())
    assert asked == {file.relative_to(tmp_path).as_posix() for file in files}
