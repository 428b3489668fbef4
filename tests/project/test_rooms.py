"""`atlib` stays small and flat. Who may import whom is `[tool.importlinter]`'s, in `make lint`."""

from tests.helpers import ROOT


def test_it_is_flat_and_no_more_than_30_files():
    files = list((ROOT / "atlib").rglob("*.py"))
    assert {file.parent.name for file in files} == {"atlib"} and len(files) <= 30
