"""pyproject.toml, requirements.lock, environment.yml and the set-up tell one story."""

import glob
import os
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.helpers import ROOT
from tools import bootstrap, lock

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
ENVIRONMENT = (ROOT / "environment.yml").read_text(encoding="utf-8")


def wanted() -> list[Requirement]:
    """Every range of pyproject.toml, the build's own and the extras included, but for one."""
    extras = lock.extras()
    assert {*PROJECT["project"]["optional-dependencies"]} - {*extras} == lock.LEFT_OUT == {"real"}
    lines = [*PROJECT["project"]["dependencies"], *(line for extra in extras.values() for line in extra)]
    return [Requirement(line) for line in lines + PROJECT["build-system"]["requires"]]


def locked(lines: list[str]) -> dict[str, list[Requirement]]:
    """Name to its pins: one, or several that markers keep apart."""
    pins = {}
    for requirement in map(Requirement, lines):
        pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return pins


def version(requirement: Requirement) -> Version:
    """The one version of a pin `name==version`."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "==" and "*" not in specifier.version, requirement
    return Version(specifier.version)


def test_every_dependency_is_locked_within_its_range():
    pins = locked(lock.locked_lines(LOCK))
    for requirement in wanted():
        locked_pins = pins.get(canonicalize_name(requirement.name))
        assert locked_pins, f"{requirement.name} is not in requirements.lock: run `make lock`"
        for pin in locked_pins:
            inside = requirement.specifier.contains(version(pin), prereleases=True)
            assert inside, f"{pin} is outside {requirement}: run `make lock`"


def test_every_locked_file_has_its_sum_and_every_action_its_commit():
    pins = re.split(r"\n(?=\S)", LOCK.strip())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", pin) for pin in pins)
    for path in (ROOT / ".github" / "workflows").iterdir():
        used = re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used), path


def test_conda_environment_has_the_same_versions():
    assert ENVIRONMENT == lock.environment(LOCK, lock.lower_bound()), "run `make lock`"


def test_it_is_flat_and_no_more_than_30_files():
    files = list((ROOT / "atlib").rglob("*.py"))
    assert {file.parent.name for file in files} == {"atlib"} and len(files) <= 30


# --- The set-up of .venv: what it never empties, and what it says on an old Python


def test_a_folder_that_is_no_environment_of_this_project_is_never_emptied(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "ROOT", str(tmp_path))
    monkeypatch.setattr(bootstrap.subprocess, "call", lambda *given, **options: 1)
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
