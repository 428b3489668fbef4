"""The API page names every public module of the library, and nothing that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_module_is_on_the_api_page():
    listed = re.findall(r"automodule:: (atlib[\w.]+)", (ROOT / "book" / "api.md").read_text(encoding="utf-8"))
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "atlib").rglob("*.py")
        if not path.stem.startswith("__")
    }
    assert set(listed) == modules
    assert len(listed) == len(set(listed))
