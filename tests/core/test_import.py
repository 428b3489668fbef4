"""`import atlib` is light: what takes seconds to import is imported where it is used."""

import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT

HEAVY = (
    "accelerate",
    "datasets",
    "pandas",
    "pyarrow",
    "matplotlib",
    "IPython",
    "ipywidgets",
    "jupyter_book",
    "ipykernel",
    "hypothesis",
)
STEPS = """
import json, sys
found = {}
def step(name, statement):
    exec(statement)
    found[name] = sorted({module.partition(".")[0] for module in sys.modules})
step("before", "import torch, timm")
step("atlib", "import atlib")
step("built-in data", "from atbook.worlds import marked_glyphs; marked_glyphs(size=1)")
step("training", "import atbook.lab.study")
step("plots", "import atbook.plot")
print(json.dumps(found))
"""


@pytest.mark.slow
def test_heavy_libraries_wait_until_they_are_used():
    done = subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {name: set(modules) for name, modules in json.loads(done.stdout).items()}
    assert found["atlib"] - found["before"] <= {"atlib"}, (
        "beyond torch and timm, import atlib takes nothing but itself"
    )
    assert not found["atlib"] & set(HEAVY)
    assert not found["built-in data"] & set(HEAVY), "the built-in world needs no `datasets`"
    assert "accelerate" in found["training"] and not found["training"] & {"datasets", "matplotlib"}, (
        "experiments need no plots"
    )
    assert "matplotlib" in found["plots"] and "ipywidgets" not in found["plots"]
