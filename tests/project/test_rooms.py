"""The front room of `atlib` stays small. Who may import whom is `[tool.importlinter]`'s, in `make lint`."""

from tests.helpers import ROOT


def test_at_most_16_files_are_at_the_top():
    assert len(list((ROOT / "atlib").glob("*.py"))) <= 16, "a new file belongs into a room"
