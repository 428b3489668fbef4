"""Run every notebook and build the book in _build/html; says where it is. Called by `make book`.

Two caches lie between a source and a page, and both can serve yesterday's result:

- A notebook's outputs are kept as long as its *cells* are the same (tools/execute.py). A change in the
  library, in a record of results/, or in the installed versions does not count there, so a broken library
  would still build "green". Here the outputs are thrown away when the hash of all of these changes.
- Sphinx reads again only pages whose source changed, and repeats the warnings of no other page, so a second
  build after a failed one can pass. Here every build reads every page; that takes seconds, running the
  notebooks minutes.

A book is at _build/html only if its build passed: it is written elsewhere and moved there at the end. The
pages of a failed build are at _build/failed-html. A build that was stopped goes on with the notebooks that
had not yet run.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing import util
from pathlib import Path

import yaml

from atbook.records import read_records
from tools import execute, figures

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"
OUTPUTS = BUILD / ".jupyter_cache"  # as in _config.yml
KEY = BUILD / "outputs.key"
UNFINISHED = BUILD / "unfinished"
SLIDES = ROOT / "course" / "slides"


def outputs_depend_on() -> str:
    """One hash over everything outside a notebook that its outputs depend on."""
    folders = [
        ROOT / name for name in ("atlib", "atfamily", "atrun", "atbook", "configs", "results", "book/papers")
    ]
    files = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    total = hashlib.sha256(f"{sys.version} {execute.FIXED} {figures.KERNEL}".encode())
    for path in sorted(path for path in [ROOT / "requirements.lock", *files] if path.is_file()):
        total.update(f"{path.relative_to(ROOT).as_posix()} {path.stat().st_size}\n".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def forget_stale_outputs(key: str) -> None:
    if not KEY.exists() or KEY.read_text() != key:
        # The old key first: with it, what is left of a removal that was stopped would pass for all of it.
        KEY.unlink(missing_ok=True)
        shutil.rmtree(OUTPUTS, ignore_errors=True)
        BUILD.mkdir(exist_ok=True)
        KEY.write_text(key)


def pages() -> list[Path]:
    """The sources of all pages of the table of contents."""
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [chapter["file"] for part in contents["parts"] for chapter in part["chapters"]]
    return [ROOT / f"{name}.md" for name in [contents["root"], *chapters]]


def run_notebooks(jobs: int) -> None:
    """Run the notebooks that have not yet run; stops the build when a cell failed."""
    key = outputs_depend_on()
    forget_stale_outputs(key)
    limit = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["execute"]["timeout"]
    measured = {record.method: record.seconds for record in read_records("notebooks", None)}
    sources = execute.with_code([*pages(), *sorted(SLIDES.glob("*.md"))])
    failed = execute.execute(sources, OUTPUTS, limit, jobs, measured, lambda: outputs_depend_on() == key)
    if failed:
        names = ", ".join(sorted(source.name for source in failed))
        sys.exit(f"The book did not build: {names} failed, see above. The others need not run again.")


def build_pages(html: Path, jobs: int) -> bool:
    """Make the pages from the notebooks' outputs, `jobs` at a time; returns whether that passed.

    This is `jupyter-book build . -W --keep-going -n`, which has no option for more than one process: warnings
    are errors, and so are links to names that do not exist; all are reported before giving up.
    """
    from jupyter_book.sphinx import build_sphinx

    os.environ.update(execute.FIXED)
    toc = (ROOT / "_toc.yml").as_posix()
    overrides = {"external_toc_path": toc, "nitpicky": True, "latex_individualpages": False}
    strict = {"warningiserror": True, "keep_going": True}
    config = ROOT / "_config.yml"
    # an exit code, or the exception that ended it
    return 0 == build_sphinx(
        ROOT, html, path_config=config, noconfig=True, confoverrides=overrides, jobs=jobs, **strict
    )


def build_slides(html: Path) -> bool:
    """Make the course's slides, to which the teaching page links, in a folder; returns whether that
    passed."""
    options = ["-q", "-b", "revealjs", "-W", "--keep-going", "-d", str(html.parent / ".slides-doctrees")]
    # They have run already, with the book's notebooks; `make slides` runs them itself.
    options += ["-D", "nb_execution_mode=cache", "-D", f"nb_execution_cache_path={OUTPUTS}"]
    command = [sys.executable, "-m", "sphinx", *options, str(SLIDES), str(html)]
    return subprocess.run(command, cwd=ROOT, env=execute.surroundings()).returncode == 0


def size(folder: Path) -> float:
    """Megabytes (10^6 bytes) of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--jobs", type=int, default=2, help="notebooks that run at a time, each with one thread"
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    util.get_temp_dir()  # multiprocessing's, which it removes itself, after the next one is gone
    temporary = tempfile.TemporaryDirectory()  # pages make folders and leave them: it goes when this ends
    os.environ["TMPDIR"] = tempfile.tempdir = temporary.name
    for stale in ("html", "failed-html", UNFINISHED.name):
        shutil.rmtree(BUILD / stale, ignore_errors=True)
    run_notebooks(arguments.jobs)
    built, html = UNFINISHED / "_build" / "html", BUILD / "html"
    if not (build_pages(built, arguments.jobs) and build_slides(built / "slides")):
        if built.exists():
            built.rename(BUILD / "failed-html")
        sys.exit(
            "\nThe book did not build; the reasons are above."
            "\nPages written so far, if any: _build/failed-html"
        )
    built.rename(html)
    shutil.rmtree(UNFINISHED)
    seconds = execute.seconds_per_notebook(OUTPUTS).items()
    print("\nSeconds per notebook:", ", ".join(f"{name} {took:.0f}" for name, took in seconds))
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
