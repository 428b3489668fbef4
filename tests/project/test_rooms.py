"""The rooms of `atlib`: dependence runs one way, and the front room stays small."""

import ast

import pytest

from tests.helpers import ROOT

# Who may import whom; "atlib" is the files at the top. Only `__main__` may import all.
CORE = {"atlib", "data"}
MAY = {
    "atlib": {"atlib"},
    "data": CORE,
    "methods": CORE | {"methods"},
    "train": CORE | {"methods", "train"},
    "analysis": CORE | {"methods", "train", "analysis"},
    "teachers": CORE | {"methods", "train", "analysis", "teachers"},
    "detection": CORE | {"train", "detection"},
    "lab": CORE | {"methods", "train", "analysis", "teachers", "detection", "lab"},
    "run": CORE | {"methods", "train", "analysis", "teachers", "detection", "run"},
    "explorer": CORE | {"lab", "explorer"},
    "exercises": CORE | {"methods", "train", "analysis", "exercises"},
}
FILES = sorted(
    path.relative_to(ROOT) for path in (ROOT / "atlib").rglob("*.py") if path.name != "__main__.py"
)


def room(*parts: str) -> str:
    """The room of a module or file, given the parts of its name after "atlib"."""
    return parts[0] if parts and parts[0] in MAY else "atlib"


def imported_rooms(path) -> set[str]:
    """The rooms that a file imports from, also within its functions."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute, so that a room is seen in them"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {room(*name.split(".")[1:]) for name in names if name.split(".")[0] == "atlib"}
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_dependence_runs_one_way(path):
    assert imported_rooms(path) <= MAY[room(*path.parts[1:])]


def test_the_rooms_are_these_and_the_front_room_is_small():
    folders = {path.parent.name for path in (ROOT / "atlib").glob("*/__init__.py")}
    assert folders == set(MAY) - {"atlib"}
    assert len(list((ROOT / "atlib").glob("*.py"))) <= 20
