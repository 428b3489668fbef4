"""Each notebook's MyST source and its .ipynb are in step, and read well where MyST is not understood."""

import json

import pytest

from tests.helpers import ROOT
from tools import notebooks

SOURCES = sorted((ROOT / "notebooks").glob("*.md"))

SAMPLE = """\
---
kernelspec:
  display_name: Python 3
  name: python3
---

# A title

The same. See [the next](02-b.md), [notation](../book/notation.md#letters), [a site](https://example.org/a.md).
![A drawing.](../book/assets/drawings/twin.svg)

```{code-cell} ipython3
x
```

```{code-cell} ipython3
x
```
"""


def test_pairs_are_in_step():
    assert SOURCES and notebooks.out_of_step(ROOT / "notebooks") == [], "run `make notebooks`"


@pytest.fixture
def sample(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/o/n"\n')
    (folder / "01-a.md").write_text(SAMPLE)
    return folder


def test_links_lead_somewhere_on_colab(sample):
    badge, set_up, title, *same = json.loads(notebooks.converted(sample / "01-a.md"))["cells"]
    addresses = {
        "https://colab.research.google.com/github/o/n/blob/main/notebooks/01-a.ipynb": badge,
        "git clone --quiet --depth 1 https://github.com/o/n": set_up,
        "(https://colab.research.google.com/github/o/n/blob/main/notebooks/02-b.ipynb)": title,
        "(https://github.com/o/n/blob/main/book/notation.md#letters)": title,
        "(https://example.org/a.md)": title,
        "![A drawing.](https://raw.githubusercontent.com/o/n/main/book/assets/drawings/twin.svg)": title,
    }
    for address, cell in addresses.items():
        assert address in "".join(cell["source"])
    assert [cell["source"] for cell in same] == [["x"], ["x"]] and same[0]["id"] != same[1]["id"]


def test_pairs_out_of_step_are_named(sample):
    assert notebooks.out_of_step(sample) == ["01-a.ipynb is missing"]
    (sample / "01-a.ipynb").write_text("{}")
    (sample / "07-b.ipynb").write_text("{}")
    differs, alone = "01-a.ipynb differs from what 01-a.md makes", "07-b.ipynb has no 07-b.md"
    assert notebooks.out_of_step(sample) == [differs, alone]
