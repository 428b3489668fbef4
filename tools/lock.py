"""Write requirements.lock from pyproject.toml, and environment.yml from the lock; called by `make lock`.

The lock holds one exact version of every package for every platform and every Python from the project's lower
bound on (uv's universal resolution); what differs between them carries a marker, which pip evaluates where it
installs, and the sums of the files that are it: whichever index they come from, no other is installed.

environment.yml repeats those lines in its pip section, markers included and sums left out: conda hands them
to pip as they are. The shorter `- -r requirements.lock` would do for a checkout, but it is resolved against
conda's temporary file, which not every conda, mamba and service puts into this folder, and never when the
file is given by its address. It takes PyPI's packages rather than conda-forge's, which are different builds
and appear at different times: only PyPI has the same versions.
"""

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
ENVIRONMENT = ROOT / "environment.yml"
# What neither the book nor its tests need: 90 MB of weights, with packages that would run them.
LEFT_OUT = {"real"}


def lower_bound() -> str:
    """The oldest Python of the project, as in "3.11"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["requires-python"].removeprefix(">=")


def extras() -> dict[str, list[str]]:
    """The optional dependencies that are locked, by the name of their extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {name: of for name, of in project["optional-dependencies"].items() if name not in LEFT_OUT}


def locked_lines(lock: str) -> list[str]:
    """The requirements in the text of a lock, without the sums of their files, and without comments."""
    return [line.removesuffix(" \\") for line in lock.splitlines() if line and line[0] not in "# "]


def environment(lock: str, python: str) -> str:
    """The text of environment.yml for the text of a lock."""
    return "\n".join(
        [
            "# Written by `make lock` from requirements.lock: the same versions, for conda and mamba.",
            "#   conda env create --file environment.yml && conda activate attention-transfer",
            "#   python -m pip install --no-deps --editable .",
            "name: attention-transfer",
            "channels: [conda-forge]",
            "dependencies:",
            f"  - python={python}",
            "  - pip",
            "  - pip:",
            *(f"      - {line}" for line in locked_lines(lock)),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest versions, not those already locked"
    )
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--universal", "--quiet"]
    command += ["--python-version", lower_bound(), *(f"--extra={name}" for name in extras())]
    command += ["--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links"]
    # uv reads the versions that are already there and writes only when it has found a complete answer.
    command += ["--output-file", LOCK.name] + (["--upgrade"] if arguments.upgrade else [])
    if subprocess.call(command, cwd=ROOT) != 0:
        sys.exit(
            "make lock: uv found no set of versions (its message is above); requirements.lock is unchanged."
        )
    ENVIRONMENT.write_text(environment(LOCK.read_text(encoding="utf-8"), lower_bound()), encoding="utf-8")
    print(f"wrote {LOCK.name} and {ENVIRONMENT.name}: {len(locked_lines(LOCK.read_text()))} packages")


if __name__ == "__main__":
    main()
