"""The set-up of .venv: what it says when it cannot go on, and what it never takes for finished."""

import glob
import os
import re
import subprocess

import pytest

from tests.helpers import ROOT
from tools import bootstrap

LOCK = "uv pip install -q --no-deps --require-hashes -r requirements.lock"
LIBRARY = "uv pip install -q --no-deps --no-build-isolation -e ."


PIP_CONFIG = (
    b":env:.find-links='/near'\nglobal.find-links='/far'\nglobal.timeout='9'\n"
    b"global.extra-index-url='\\nfile:///one\\nfile:///two'\n"
)


@pytest.fixture
def fails():
    """Patterns of the commands that fail."""
    return set()


@pytest.fixture
def calls(monkeypatch, fails):
    """The words after Python's `-m` of what the set-up would run, with the environment; nothing is run."""
    made = {}

    def call(command, env=None, **options):
        words = " ".join(command[2:])
        made[words] = env
        if words.startswith("venv"):
            os.makedirs(os.path.join(command[3], "bin"), exist_ok=True)
            with open(os.path.join(command[3], "pyvenv.cfg"), "w"):
                pass
        return int(any(re.search(pattern, words) for pattern in fails))

    def said(command):
        return b"3.11\n" if "-c" in command else PIP_CONFIG

    monkeypatch.setattr(bootstrap.subprocess, "call", call)
    monkeypatch.setattr(bootstrap.subprocess, "check_output", said)
    return made


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A project with an environment that was begun."""
    monkeypatch.setattr(bootstrap, "ROOT", str(tmp_path))
    (tmp_path / "requirements.lock").write_text("tqdm==4.0\nuv==0.13.8 \\\n    --hash=sha256:0\n")
    (tmp_path / "pyproject.toml").write_text("")
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("")
    (folder / "pyvenv.cfg").write_text("")
    return folder


def test_an_interrupted_set_up_starts_over(venv, calls):
    (venv / "half").write_text("")
    bootstrap.main(str(venv))
    uv = f"pip install -q --require-hashes -r {venv}/uv.lock"
    assert list(calls) == [f"venv {venv}", uv, LOCK, "uv pip check -q", LIBRARY]
    assert (venv / "uv.lock").read_text() == "uv==0.13.8 \\\n    --hash=sha256:0\n"
    assert not (venv / "half").exists() and (venv / "installed.stamp").exists()


@pytest.mark.parametrize("step", ["pip install", LOCK, "uv pip check", LIBRARY])
def test_what_fails_is_named_and_leaves_no_stamp(venv, calls, fails, step):
    (venv / "installed.stamp").write_text(bootstrap.stamp_of("python"))  # it was finished
    (venv.parent / "requirements.lock").write_text("uv==0.14.0\n")
    fails.add(f"^{step}")
    with pytest.raises(SystemExit, match=step):
        bootstrap.main(str(venv))
    assert not (venv / "installed.stamp").exists()


def test_a_folder_that_is_no_environment_of_this_project_is_never_emptied(tmp_path, calls, venv):
    home, other = tmp_path / "home", tmp_path.parent / f"{tmp_path.name}-other"
    for folder in (home, other):
        folder.mkdir()
        (folder / "thesis.tex").write_text("years")
    (other / "pyvenv.cfg").write_text("")
    for folder in (home, other):
        with pytest.raises(SystemExit, match=str(folder)):
            bootstrap.main(str(folder))
        assert (folder / "thesis.tex").exists()


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.8", "3.10"])
def test_an_old_python_is_named_with_the_way_out(version, tmp_path):
    """One that is really old, since it has to be able to read the file."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    pythons = glob.glob(f"{root}/versions/{version}.*/bin/python")
    if not pythons:
        pytest.skip(f"needs pyenv's Python {version}")
    command = [pythons[0], ROOT / "tools" / "bootstrap.py", tmp_path / "new"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "new").exists()
    assert f"3.11 is needed, not {version}: make PYTHON=python3.12" in done.stderr
