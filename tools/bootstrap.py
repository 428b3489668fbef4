"""Make the book's own Python environment: `python3 tools/bootstrap.py .venv`.

Called by every target of the Makefile; it needs nothing but Python's standard library, and returns at once
when the environment is already what requirements.lock asks for.

The file `installed.stamp` inside the environment is written last and removed first, so an interrupted set-up
is never taken for a finished one. No stamp: start from an empty folder. A stamp for another lock: bring the
installed packages up to date in place (what a reader added, an editor say, stays). A stamp that differs in
pyproject.toml only: install atlib anew, a second.

This file has to be readable by an old Python too, which is how it can say that it is too old.
"""

from __future__ import print_function

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile

NEEDED = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# The pip that is fetched where Python comes without one (Debian without python3-venv, Colab). Exactly this
# file: it is going to run, so its hash is checked first.
PIP_WHEEL = "pip-26.3-py3-none-any.whl"
PIP_URL = (
    "https://files.pythonhosted.org/packages/07/25/"
    "ee8c38ae72d66b844ce8eb9711ba905dba21ca1a8a0c960057c41cd23337/" + PIP_WHEEL
)
PIP_SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"


def stop(message):
    sys.exit("set-up: " + message)


def digest(name):
    with open(os.path.join(ROOT, name), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def wanted_stamp(python):
    """What a finished environment's stamp says: one line each for the lock, the project, its place and its
    Python.

    The place, because an editable install points to a folder; the Python, because an upgrade of the system's
    Python leaves an environment that starts and finds no packages.
    """
    version = subprocess.check_output([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    return "\n".join(
        [digest("requirements.lock"), digest("pyproject.toml"), ROOT, version.decode().strip(), ""]
    )


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except (IOError, OSError):
        return ""


def fetch_pip(folder):
    """Download the pinned pip wheel into `folder`; its path. Stops when it cannot be fetched or is not the
    one meant."""
    from urllib.request import urlopen

    print("set-up: this Python brings no pip; fetching " + PIP_WHEEL, flush=True)
    try:
        content = urlopen(PIP_URL, timeout=60).read()
    except OSError as error:
        stop(
            "could not fetch %s: %s.\nA network connection is needed once, or Python's own pip:"
            " on Debian and Ubuntu `sudo apt-get install python3-venv`." % (PIP_URL, error)
        )
    if hashlib.sha256(content).hexdigest() != PIP_SHA256:
        stop("%s is not the file that was expected (its SHA-256 differs); it was not used." % PIP_URL)
    path = os.path.join(folder, PIP_WHEEL)
    with open(path, "wb") as file:
        file.write(content)
    return path


def create(venv, python):
    """An empty environment with pip in it."""
    if os.path.isdir(venv):
        # A folder is emptied here: never one that is no environment (VENV=~), nor one of another checkout.
        if not os.path.exists(os.path.join(venv, "pyvenv.cfg")) or not venv.startswith(ROOT + os.sep):
            stop(
                "%s exists and was not made by this set-up; remove it, or name another folder: make VENV=..."
                % venv
            )
        print("set-up: %s is not a finished environment; starting over" % venv, flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    # Trying is the only sure test: Debian and Colab have `venv`, and lack what it needs to put a pip inside.
    if (
        subprocess.call(
            [sys.executable, "-m", "venv", venv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        == 0
    ):
        return
    shutil.rmtree(venv, ignore_errors=True)
    if subprocess.call([sys.executable, "-m", "venv", "--without-pip", venv]) != 0:
        stop("%s -m venv failed; on Debian and Ubuntu `sudo apt-get install python3-venv`." % sys.executable)
    folder = tempfile.mkdtemp()
    try:
        wheel = fetch_pip(folder)
        # A wheel is a zip file, and Python runs the pip inside it without unpacking.
        subprocess.check_call([python, wheel + "/pip", "install", "--quiet", "--no-index", wheel])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(python, arguments, what):
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"] + arguments
    if subprocess.call(command, cwd=ROOT) != 0:
        stop(
            "could not fetch or install %s: pip's message above names the package.\nThe packages come from"
            " PyPI (about 6 GB on Linux, torch with its CUDA libraries), so a network connection is needed"
            " once.\nNothing half-done is kept as finished: run the same command again." % what
        )


def main(venv):
    venv = os.path.abspath(os.path.join(ROOT, venv))
    python = os.path.join(venv, "bin", "python")
    stamp = os.path.join(venv, "installed.stamp")
    before = read(stamp).split("\n") if os.path.exists(python) else []
    wanted = wanted_stamp(python).split("\n") if before else []
    if before and before == wanted:
        return
    # Only now: an environment that some newer Python made is good whatever `python3` is.
    if sys.version_info[:2] < NEEDED:
        stop(
            "Python %d.%d or newer is needed, and %s is Python %d.%d.%d.\nName a newer one that is installed:"
            " make PYTHON=python3.12 ..." % (NEEDED + (sys.executable,) + sys.version_info[:3])
        )
    if before and before[2:] == wanted[2:]:
        os.remove(stamp)
        # The library's name until it was attention-transfer; both would hold the import `atlib`.
        subprocess.call([python, "-m", "pip", "uninstall", "--yes", "--quiet", "--quiet", "atlib"])
        lock_changed = before[0] != wanted[0]
    else:
        create(venv, python)
        lock_changed = True
    if lock_changed:
        print(
            "set-up: installing requirements.lock into %s (a few minutes the first time)" % venv, flush=True
        )
        # --no-deps: the lock is complete, so nothing is left to choose; `pip check` below holds it to that.
        install(python, ["--quiet", "--requirement", "requirements.lock"], "requirements.lock")
        if (
            subprocess.call([python, "-m", "pip", "check"], stdout=subprocess.DEVNULL if before else None)
            != 0
        ):
            stop("requirements.lock is not complete or contradicts itself; `make lock` makes it anew.")
    # --no-build-isolation: setuptools is in the lock, so this step fetches nothing.
    install(python, ["--quiet", "--no-build-isolation", "--editable", "."], "atlib itself")
    with open(stamp, "w") as file:
        file.write(wanted_stamp(python))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".venv")
