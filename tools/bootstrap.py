"""Make the book's own Python environment: `python3 tools/bootstrap.py .venv`; `make` does it when needed.

Its stamp is written last and removed first: an environment without one is made again, and one with that of a
different lock is brought up to date (a reader's packages stay). An old Python must be able to read this."""

import hashlib
import os
import re
import shutil
import subprocess
import sys

NEEDED, ROOT = (3, 11), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def stamp_of(python):  # the place, to which the install points, and the version, which the system may upgrade
    version = subprocess.check_output([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    files = [open(os.path.join(ROOT, name), "rb").read() for name in ("requirements.lock", "pyproject.toml")]
    return "%s %s\n%s" % (ROOT, version.decode().strip(), hashlib.sha256(b"".join(files)).hexdigest())


def main(venv):
    venv = os.path.abspath(os.path.join(ROOT, venv))
    python, stamp = os.path.join(venv, "bin", "python"), os.path.join(venv, "installed.stamp")
    before = open(stamp).read() if os.path.exists(stamp) and os.path.exists(python) else ""
    wanted = before and stamp_of(python)
    if before and before == wanted:
        return
    version = sys.version_info[:2]
    if version < NEEDED:  # only now: what a newer one has finished is good
        sys.exit("set-up: Python %d.%d is needed, not %d.%d: make PYTHON=python3.12" % (NEEDED + version))
    if before and before.split("\n")[0] == wanted.split("\n")[0]:
        os.remove(stamp)
    else:
        of_project = venv.startswith(ROOT + os.sep) and os.path.exists(os.path.join(venv, "pyvenv.cfg"))
        if os.path.exists(venv) and not of_project:
            sys.exit("set-up: %s is no environment of this folder; name another: make VENV=..." % venv)
        shutil.rmtree(venv, ignore_errors=True)
        make, pip = [sys.executable, "-m", "venv", venv], [sys.executable, "-m", "pip", "--python", python]
        if subprocess.call(make, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):  # Debian's lacks pip
            if subprocess.call(make + ["--without-pip"]) or subprocess.call(pip + ["install", "-q", "pip"]):
                sys.exit("set-up: %s lacks venv or pip: sudo apt-get install python3-venv" % sys.executable)
    # uv does not read pip's settings, which may name a mirror. Where they name more than one index, all are
    # looked at, as pip does: a stranger's file of the same name has not the sum in the lock, and is refused.
    settings = subprocess.check_output([python, "-m", "pip", "config", "list"]).decode().replace("\\n", " ")
    addresses = re.findall(r"\.(index-url|extra-index-url|find-links)='(.*)'", settings)
    uv = {"UV_" + name.replace("-", "_").upper(): value for name, value in reversed(addresses)}
    if "UV_EXTRA_INDEX_URL" in uv:
        uv["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    uv = dict(uv, **dict(os.environ, UV_PYTHON=python))
    lock, pin = open(os.path.join(ROOT, "requirements.lock")).read(), os.path.join(venv, "uv.lock")
    with open(pin, "w") as file:
        file.write(re.search(r"(?m)^uv==.*(?:\n .*)*\n", lock).group())
    sys.stderr.write("set-up: installing requirements.lock into %s, on Linux about 6 GB\n" % venv)
    install = "uv pip install -q --no-deps "
    parts = "--require-hashes -r requirements.lock", "--no-build-isolation -e ."
    steps = "pip install -q --require-hashes -r", install + parts[0], "uv pip check -q", install + parts[1]
    for step in steps:
        words = [python, "-m"] + step.split() + [pin] * step.startswith("pip")
        if subprocess.call(words, cwd=ROOT, env=uv) != 0:
            sys.exit("set-up: `%s` failed, see above; repeat it, or take conda and environment.yml" % step)
    open(stamp, "w").write(stamp_of(python))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".venv")
