"""Print the newest Python of this machine that is newer than the running one, or an empty line.

It looks on PATH and among those of pyenv. It starts each, because a name on PATH may be a shim of pyenv that
starts nothing, and looks for venv and pip, which a Debian may lack.
"""

import os
import subprocess
import sys
from pathlib import Path

CANDIDATES = ("3.14", "3.13", "3.12")  # the versions for which the lock's packages are published


def newer() -> str | None:
    """Path of the newest Python that can make an environment and is newer than this one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in CANDIDATES:
        if tuple(map(int, version.split("."))) <= sys.version_info[:2]:
            return None
        for path in [f"python{version}", *sorted(pyenv.glob(f"{version}.*/bin/python"))]:
            program = "import ensurepip, sys, venv; print(sys.executable, '%d.%d' % sys.version_info[:2])"
            try:
                done = subprocess.run([path, "-c", program], capture_output=True, text=True)
            except OSError:  # there is none of this name
                continue
            if done.returncode == 0 and done.stdout.endswith(f" {version}\n"):
                return done.stdout.rpartition(" ")[0]
    return None


if __name__ == "__main__":
    print(newer() or "")
