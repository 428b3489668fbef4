"""The cage on machines that have all of it, and on those that do not: what is missing is said."""

import os
import shutil
import subprocess
import sys

import pytest

from atbook.cage.outside import Cage, missing, namespaces
from tests.course.helpers import as_notebook, edition_of, solution
from tests.helpers import ROOT
from tools import course

USER = "import os\ndef f():\n    return os.getuid()\n"
FORK = "import os\ndef f():\n    os.fork()\n"


@pytest.fixture
def bubblewrap(tmp_path, monkeypatch):
    """A function that puts another program, or none, in the place of bubblewrap."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def put(script: str | None) -> None:
        if script is not None:
            (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
            (folder / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        namespaces.cache_clear()

    yield put
    monkeypatch.undo()
    namespaces.cache_clear()


@pytest.mark.parametrize("script, says", [(None, "is not installed"), ("exit 1", "may make no namespaces")])
def test_without_namespaces_the_limits_hold_and_what_is_missing_is_said(bubblewrap, script, says):
    bubblewrap(script)
    assert says in missing() and "limits of time, output and processes hold" in missing()
    with Cage(["numpy"]) as cage:
        assert isinstance(cage.call(USER, "f", []).value, int)
        assert "not permitted" in cage.call(FORK, "f", []).error


@pytest.mark.slow
def test_the_grader_refuses_without_a_sandbox_unless_it_is_asked_to(bubblewrap, tmp_path, capsys):
    edition = edition_of(tmp_path, "a1", "a")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a1.ipynb").write_bytes(as_notebook(solution(edition)))
    bubblewrap("exit 1")
    command = ["grade", str(edition.folder), str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert course.main(command) == 2
    assert not (tmp_path / "out").exists() and "--without-sandbox" in capsys.readouterr().err
    assert course.main([*command, "--without-sandbox"]) == 0
    said = capsys.readouterr()
    assert "note: bubblewrap may make no namespaces here" in said.err and "graded, 15" in said.out


AS_A_USER = """
import os
from atbook.cage.outside import Cage
assert os.geteuid() == 1000
for use_namespaces in (True, False):
    with Cage(["numpy"], use_namespaces=use_namespaces) as cage:
        print(cage.call(USER, "f", []).value, "not permitted" in cage.call(FORK, "f", []).error)
"""


@pytest.mark.slow
def test_a_user_who_is_not_root_has_a_cage_too():
    become = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    if not shutil.which("unshare") or subprocess.run([*become, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here (unshare --user)")
    code = f"USER, FORK = {USER!r}, {FORK!r}\n{AS_A_USER}"
    done = subprocess.run(
        [*become, sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    caged, bare = (line.split() for line in done.stdout.splitlines())
    assert caged[1] == bare[1] == "True" and bare[0] == "1000" and caged[0] in ("65534", "1000")
