"""Run every notebook and build the book in _build/html; says where it is. Called by `make book`.

Two caches lie between a source and a page, and both can serve yesterday's result:

- Jupyter Book keeps a notebook's outputs as long as its *cells* are the same. A change in the library, in a record
  of results/, or in the installed versions does not count, so a broken library would still build "green". Here the
  outputs are thrown away when the hash of all of these changes. (Each notebook's own text is not part of
  the hash: the cache looks at that itself, and so runs only the notebook that was edited.)
- Sphinx reads again only pages whose source changed, and repeats the warnings of no other page, so a second build
  after a failed one can pass. Here every build reads every page; that takes seconds, running the notebooks minutes.

A book is at _build/html only if its build passed. What a failed build left is moved to _build/failed-html.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
OUTPUTS = BUILD / ".jupyter_cache"


def outputs_depend_on() -> str:
    """One hash over everything outside a notebook that its outputs depend on."""
    files = [
        ROOT / "requirements.lock",
        *(ROOT / "atlib").rglob("*.py"),
        *(ROOT / "configs").rglob("*"),
        *(ROOT / "results").rglob("*"),
    ]
    total = hashlib.sha256(sys.version.encode())
    for path in sorted(path for path in files if path.is_file()):
        total.update(f"{path.relative_to(ROOT).as_posix()} {path.stat().st_size}\n".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def forget_stale_outputs() -> None:
    key = BUILD / "outputs.key"
    now = outputs_depend_on()
    if not key.exists() or key.read_text() != now:
        shutil.rmtree(OUTPUTS, ignore_errors=True)
        BUILD.mkdir(exist_ok=True)
        key.write_text(now)


def surroundings() -> dict[str, str]:
    """The environment the notebooks run in: ours with the things fixed that would change what they print."""
    # The notebooks need no network; with the hub off, one that comes to need it fails here, not at a
    # reader's.
    fixed = {
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "COLUMNS": "100",
    }
    # Debugger checks that print a warning into the first cell when the standard library is frozen.
    fixed |= {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return environment | fixed


def seconds_per_notebook() -> list[tuple[str, float]]:
    """What each notebook took when it last ran (cached notebooks too), in the order of their names."""
    from jupyter_cache import get_cache

    records = get_cache(OUTPUTS).list_cache_records()
    newest = {}
    for record in sorted(records, key=lambda record: record.created):
        newest[Path(record.uri).stem] = record.data.get("execution_seconds", float("nan"))
    return sorted(newest.items())


def size(folder: Path) -> float:
    """Megabytes (10^6 bytes) of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    start = time.monotonic()
    forget_stale_outputs()
    for stale in ("html", "failed-html", ".doctrees"):
        shutil.rmtree(BUILD / stale, ignore_errors=True)
    # -W: warnings are errors, all of them reported before giving up; -n: so are links to names that do not
    # exist.
    command = [Path(sys.executable).with_name("jupyter-book"), "build", ".", "-W", "--keep-going", "-n"]
    code = subprocess.call(command, cwd=ROOT, env=surroundings())
    html = BUILD / "html"
    if code != 0:
        if html.exists():
            html.rename(BUILD / "failed-html")
        sys.exit(
            f"\nThe book did not build (exit status {code}); the reasons are above. A cell that failed is"
            " there with its traceback.\nPages written so far, if any: _build/failed-html"
        )
    print(
        "\nSeconds per notebook:",
        ", ".join(f"{name} {seconds:.0f}" for name, seconds in seconds_per_notebook()),
    )
    print(f"The book is built ({time.monotonic() - start:.0f} s, {size(html):.1f} MB): {html / 'index.html'}")
    print(
        f"Open it: {'open' if sys.platform == 'darwin' else 'xdg-open'} _build/html/index.html"
        "   (or any browser; it needs no network and no server)"
    )
    print(
        "On a machine without a screen: python3 -m http.server --directory _build/html"
        ", then http://localhost:8000"
    )


if __name__ == "__main__":
    main()
