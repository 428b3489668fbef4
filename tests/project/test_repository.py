"""The repository's address is the same everywhere, and `make repository` changes all of its uses."""

import re
import shutil
from pathlib import Path

import pytest

from tools import repository

ROOT = Path(__file__).resolve().parents[2]
URL = repository.current()
OWNER, NAME = repository.parsed(URL)
OTHER = "https://github.com/someone/their-book"


def copied(folder: Path) -> Path:
    """The project's text files in a folder of their own."""
    for path in repository.text_files(ROOT):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return folder


@pytest.mark.parametrize("name", ["pyproject.toml", "_config.yml", "CITATION.cff", "README.md"])
def test_file_names_the_repository(name):
    assert f"github.com/{OWNER}/{NAME}" in (ROOT / name).read_text(encoding="utf-8")


def test_every_colab_and_edit_link_is_to_this_repository():
    for path in repository.text_files(ROOT):
        if "tools" in path.parts:  # the forms of the address, with gaps to fill
            continue
        text = path.read_text(encoding="utf-8")
        for owner, name in re.findall(r"colab\.research\.google\.com/github/([\w.-]+)/([\w.-]+)", text):
            assert (owner, name) == (OWNER, NAME), path
        for owner, name in re.findall(r"git\+https://github\.com/([\w.-]+)/([\w-]+)", text):
            assert (owner, name) == (OWNER, NAME), path


def test_new_address_replaces_every_use_and_the_old_one_comes_back(tmp_path):
    root = copied(tmp_path)
    before = {path: path.read_bytes() for path in repository.text_files(root)}
    assert repository.set_everywhere(root, OTHER)
    assert repository.current(root) == OTHER
    for path in repository.text_files(root):
        assert f"{OWNER}/{NAME}".lower() not in path.read_text(encoding="utf-8").lower(), path
    assert repository.set_everywhere(root, OTHER) == [], "a second time changes nothing"
    repository.set_everywhere(root, URL)
    assert {path: path.read_bytes() for path in repository.text_files(root)} == before


def test_all_forms_are_rewritten_and_other_repositories_left_alone():
    text = (
        f"{URL} {URL}.git git+{URL} {URL}/blob/main/x.md {URL}."
        f" https://colab.research.google.com/github/{OWNER}/{NAME}/blob/main/n.ipynb"
        f" https://{OWNER}.github.io/{NAME}/ {URL}-older https://github.com/{OWNER}/other"
    )
    result = repository.rewritten(text, URL, OTHER)
    assert (
        result == f"{OTHER} {OTHER}.git git+{OTHER} {OTHER}/blob/main/x.md {OTHER}."
        " https://colab.research.google.com/github/someone/their-book/blob/main/n.ipynb"
        f" https://someone.github.io/their-book/ {URL}-older https://github.com/{OWNER}/other"
    )


@pytest.mark.parametrize("url", [f"{OTHER}/", f"{OTHER}.git", OTHER])
def test_address_may_end_as_a_browser_or_git_writes_it(url):
    assert repository.parsed(url) == ("someone", "their-book")


@pytest.mark.parametrize(
    "url",
    ["", "someone/their-book", "http://github.com/a/b", "https://gitlab.com/a/b"]
    + [f"https://github.com/{path}" for path in ("a", "a/b/tree/main", "-a/b", "a/b c", "a/..", "a/b?x=1")],
)
def test_other_addresses_are_refused_and_nothing_changes(url, tmp_path):
    root = copied(tmp_path)
    with pytest.raises(ValueError, match=re.escape(repr(url))):
        repository.set_everywhere(root, url)
    assert repository.current(root) == URL
