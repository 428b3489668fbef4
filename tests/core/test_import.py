"""`import atlib` is light: what takes seconds to import is imported where it is used."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

HEAVY = {*"accelerate datasets pandas pyarrow matplotlib ipywidgets jupyter_book hypothesis".split()}
# What is imported, and which of the heavy ones may come with it.
STEPS = {
    "import torch, timm, atlib; from atlib import AttentionTransfer, create_student": set(),
    "from atbook.worlds import marked_glyphs; marked_glyphs(size=1)": set(),
    "import atbook.lab.study": {"accelerate"},
}


@pytest.mark.slow
def test_heavy_libraries_wait_until_they_are_used():
    count = "print(*{module.partition('.')[0] for module in sys.modules})"
    program = "import sys\n" + "\n".join(f"{step}; {count}" for step in STEPS)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for line, allowed in zip(done.stdout.splitlines(), STEPS.values(), strict=True):
        assert {*line.split()} & HEAVY <= allowed
