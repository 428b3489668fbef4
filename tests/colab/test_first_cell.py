"""A notebook's first cell on Colab: in an empty environment, with this checkout in place of GitHub."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tools import notebooks
from tools.pythons import newer

# Runs cells as a notebook does; by that module the first one knows Colab.
PROGRAM = """
import json, sys, types
from IPython.core.interactiveshell import InteractiveShell
sys.modules["google.colab"] = types.ModuleType("google.colab")
for cell in json.loads(sys.argv[1]):
    InteractiveShell.instance().run_cell(cell).raise_error()
"""
# What any notebook may do next: the packages come from the environment, the records from the clone.
NEXT = """
import importlib, os, torch
for package in {packages}:
    assert sys.prefix in importlib.import_module(package).__file__
assert Path("../results").is_dir() and Path("01-what-a-map-does.md").exists()
from atlib import create_vit
print(sys.version_info[:2], create_vit("glyphs")(torch.zeros(1, 3, 32, 32)).shape)
"""


def run(*command, cwd):
    """A command that sees no Python but its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"MPLBACKEND": "agg", "GIT_CONFIG_GLOBAL": os.devnull, "IPYTHONDIR": str(cwd)}
    command = list(map(str, command))
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)


@pytest.mark.slow
def test_it_installs_the_book_on_a_newer_python(tmp_path):
    python = newer()
    if python is None:
        pytest.skip("needs a Python that is newer than this one")
    environment, content = tmp_path / "environment", tmp_path / "content"
    content.mkdir()
    assert run(python, "-m", "venv", environment, cwd=tmp_path).returncode == 0
    done = run(environment / "bin/python", "-m", "pip", "install", "--quiet", "ipython", cwd=tmp_path)
    if done.returncode != 0:
        pytest.skip(f"needs a network: {done.stderr.strip().splitlines()[-1]}")

    url = notebooks.repository()
    github = tmp_path / Path(url).name
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists():  # one that was removed and not committed is still listed
            (github / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, github / name)
    run("git", "init", "--quiet", cwd=github)
    run("git", "add", "--all", cwd=github)
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    assert run("git", *author, "commit", "--quiet", "-m", "All", cwd=github).returncode == 0

    book = json.loads((ROOT / "notebooks" / "01-what-a-map-does.ipynb").read_text(encoding="utf-8"))
    first = "".join(book["cells"][1]["source"])
    assert first.count(url) == 1
    packages = sorted(path.parent.name for path in ROOT.glob("at*/__init__.py"))
    cells = [first.replace(url, github.as_uri()), NEXT.format(packages=packages)]
    done = run(environment / "bin/python", "-c", PROGRAM, json.dumps(cells), cwd=content)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch.Size" in done.stdout
