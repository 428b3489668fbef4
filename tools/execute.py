"""Run the notebooks of the book into the cache that Jupyter Book reads; called by tools/build_book.py.

Jupyter Book would run them one after the other, and would keep no result before all have passed. Here two run
side by side, each with one thread, and each is in the cache as soon as it is done: a build that is stopped
goes on with the notebooks that are left. On two idle cores one thread twice is as fast as two threads once;
on a machine that does other things too it is several times as fast, because threads that wait for each other
there wait for whole turns of the scheduler.

jupyter-cache's own `local-parallel` executor keeps each result as soon as it is there, too, but has no order,
no environment, no number of processes, and no question before it keeps a result. Its workers are processes,
which a killed build leaves running with their kernels.
"""

import os
import shutil
import signal
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn, JupyterCacheAbstract
from myst_nb.core.read import is_myst_markdown_notebook, myst_nb_reader_plugin
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal
from nbformat import NotebookNode

from tools import figures, forked

# Variables of the notebooks' environment that would change their output or their speed.
FIXED = {
    # One thread for each notebook, and threads that sleep while they wait instead of spinning.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONHASHSEED": "0",
    # The notebooks need no network; one that comes to need it fails here, and not for a reader.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "COLUMNS": "100",
    # Without this, the debugger prints a warning into the first cell when the standard library is frozen.
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
# Seconds for a kernel to start and for the last of a cell's output to arrive. nbclient's own 60 and 4 are for
# an idle machine; after the 4 it would go on without the output, and say so only in a log.
PATIENCE = 600


def surroundings() -> dict[str, str]:
    """The environment of the notebooks."""
    return {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | FIXED


def with_code(sources: list[Path]) -> list[Path]:
    """Those of `sources` that have cells to run."""
    return [source for source in sources if is_myst_markdown_notebook(source.read_text(encoding="utf-8"))]


def is_done(cache: JupyterCacheAbstract, notebook: NotebookNode) -> bool:
    """Whether the outputs of these cells are in the cache; removes results that a killed build left
    half-written."""
    try:
        record = cache.match_cache_notebook(notebook)
    except KeyError:
        return False
    try:
        cache.get_cache_bundle(record.pk)
    except (KeyError, ValueError):  # the record without its file, or with half of it
        shutil.rmtree(Path(cache.path) / "executed" / record.hashkey, ignore_errors=True)
        return False
    return True


def run(source: Path, limit: int) -> tuple[Path, NotebookNode, float, Exception | None]:
    """Run one notebook in a kernel of its own and its own folder; a cell may take `limit` seconds.

    Returns the source, the notebook with its outputs, the seconds, and the error that ended it if one did.
    """
    notebook = myst_nb_reader_plugin(str(source))
    client = NotebookClient(
        notebook,
        timeout=limit,
        startup_timeout=PATIENCE,
        iopub_timeout=PATIENCE,
        record_timing=False,  # it would be written into the cells, by which the cache finds them
        # A slide shows a picture, whose height is that of a slide.
        extra_arguments=["--log-level=ERROR", *(() if source.parent.name == "slides" else figures.KERNEL)],
        resources={"metadata": {"path": str(source.parent)}},
    )
    start, error = time.monotonic(), None
    try:
        client.execute(env=surroundings())
    except (CellControlSignal, RuntimeError) as failure:  # a cell raised or took too long; the kernel died
        error = failure
    return source, notebook, time.monotonic() - start, error


def stop(number, frame) -> None:
    """Ctrl-C and SIGTERM end the build as `kill -9` does: at once. The kernels end when they miss it."""
    os.write(1, b"\nStopped. What has run is kept: the next build goes on from there.\n")
    os._exit(128 + number)


def execute(
    sources: list[Path], folder: Path, limit: int, jobs: int = 2, seconds=None, still_valid=lambda: True
) -> list[Path]:
    """Run those of `sources` that are not in the cache at `folder`, `jobs` at a time; returns those that
    failed.

    The longest go first, so that all processes end together: `seconds` maps names to the seconds that they
    are expected to take. A failed notebook does not stop the others: one build reports all errors.
    `still_valid` is called before a result is kept.
    """
    cache, seconds = get_cache(folder), seconds or {}
    todo = [source for source in sources if not is_done(cache, myst_nb_reader_plugin(str(source)))]
    todo.sort(key=lambda source: -seconds.get(source.stem, 0.0))
    if len(todo) < len(sources):
        print(
            f"{len(sources) - len(todo)} of {len(sources)} notebooks and pages have run already", flush=True
        )
    failed = []
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    # Threads, because a thread here only waits for its kernel, which is a process.
    with forked.kernels(surroundings()), ThreadPool(jobs) as pool:
        results = pool.imap_unordered(lambda source: run(source, limit), todo)
        for count, (source, notebook, took, error) in enumerate(results, start=1):
            if error is not None:
                failed.append(source)
                print(f"\n{source.name} FAILED after {took:.0f} s:\n{error}\n", file=sys.stderr, flush=True)
                continue
            if not still_valid():
                sys.exit(f"What {source.name} depends on was changed while it ran: build again.")
            bundle = CacheBundleIn(notebook, str(source), data={"execution_seconds": took})
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
            print(f"{source.stem}: {took:.0f} s ({count} of {len(todo)})", flush=True)
    for number, handler in before.items():
        signal.signal(number, handler)
    return failed


def seconds_per_notebook(folder: Path) -> dict[str, float]:
    """The seconds that each notebook took when it last ran, in the order of their names."""
    records = sorted(get_cache(folder).list_cache_records(), key=lambda record: record.created)
    return dict(sorted((Path(record.uri).stem, record.data["execution_seconds"]) for record in records))
