"""The set-up of .venv: what it says when it cannot go on, and what it never takes for finished."""

import io
import os
import sys
from urllib.error import URLError

import pytest

from tools import bootstrap


@pytest.fixture
def calls(monkeypatch):
    """Commands that the set-up would run, instead of running them."""
    made = []

    def call(command, **options):
        made.append(command)
        if command[1:3] == ["-m", "venv"]:
            os.makedirs(command[-1])
        return 0

    monkeypatch.setattr(bootstrap.subprocess, "call", call)
    monkeypatch.setattr(bootstrap.subprocess, "check_output", lambda command: b"3.11\n")
    return made


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """A project with an environment that looks finished."""
    monkeypatch.setattr(bootstrap, "ROOT", str(tmp_path))
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text(name)
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text("")
    (folder / "pyvenv.cfg").write_text("")
    return folder


def finish(venv):
    (venv / "installed.stamp").write_text(bootstrap.wanted_stamp("python"))


def test_finished_environment_is_left_alone(venv, calls):
    finish(venv)
    bootstrap.main(str(venv))
    assert calls == []


def test_finished_environment_serves_an_older_python(venv, calls, monkeypatch):
    finish(venv)
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    bootstrap.main(str(venv))
    assert calls == []


def test_interrupted_set_up_starts_over(venv, calls):
    bootstrap.main(str(venv))
    assert [sys.executable, "-m", "venv", str(venv)] in calls
    assert any("--requirement" in command for command in calls)


def test_new_lock_updates_in_place_and_new_project_file_only_atlib(venv, calls):
    finish(venv)
    (venv.parent / "pyproject.toml").write_text("changed")
    bootstrap.main(str(venv))
    assert not any("--requirement" in command for command in calls)
    assert ["uninstall" in command for command in calls] == [True, False], "the old name, then the new one"
    assert any("--editable" in command for command in calls)
    calls.clear()
    (venv.parent / "requirements.lock").write_text("changed")
    bootstrap.main(str(venv))
    assert any("--requirement" in command for command in calls)
    assert not any("venv" in command for command in calls)


def test_failed_install_leaves_no_stamp(venv, calls, monkeypatch):
    finish(venv)
    (venv.parent / "requirements.lock").write_text("changed")
    monkeypatch.setattr(bootstrap.subprocess, "call", lambda command, **options: 1)
    with pytest.raises(SystemExit, match="requirements.lock"):
        bootstrap.main(str(venv))
    assert not (venv / "installed.stamp").exists()


def test_old_python_is_named_with_the_way_out(venv, calls, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    with pytest.raises(SystemExit, match=r"(?s)3\.11.*3\.9\.2.*make PYTHON=python3\.12"):
        bootstrap.main(str(venv))


def test_folder_that_is_no_environment_is_never_emptied(tmp_path, calls, venv):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    with pytest.raises(SystemExit, match=str(precious)):
        bootstrap.main(str(precious))
    assert (precious / "thesis.tex").exists()


def test_pip_that_cannot_be_fetched_or_is_another_file(tmp_path, monkeypatch):
    def offline(*arguments, **options):
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(SystemExit, match=r"(?s)pythonhosted.*no network.*python3-venv"):
        bootstrap.fetch_pip(str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", lambda *arguments, **options: io.BytesIO(b"something else"))
    with pytest.raises(SystemExit, match="SHA-256"):
        bootstrap.fetch_pip(str(tmp_path))
    assert os.listdir(tmp_path) == []
