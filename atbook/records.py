"""The committed records of the book's experiments: results/EXPERIMENT/SCALE.jsonl, a line for each run; and
how a page writes what it reads in them."""

import base64
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from atlib._util import require_known, write_atomically
from atrun.record import Record, as_json, parsed

# --- The records of an experiment at a scale: results/EXPERIMENT/SCALE.jsonl, one in a line ---


def records_file(experiment: str, scale: str | None = "find", results: Path | None = None) -> Path:
    """The file of an experiment's records, below `results`, by default the book's. scale: None for
    "notebooks" and "benchmarks", which have no scale."""
    results = results_folder() if results is None else results
    return results / f"{experiment}.jsonl" if scale is None else results / experiment / f"{scale}.jsonl"


def add_record(path: str | Path, record: Record) -> Path:
    """Add a record to a file of records, in place of the one with the same key where there is one.

    At every moment the old file or the whole new one is there, and only one process writes at a time. Raises
    `ValueError` when the record breaks the schema, and `OSError` naming a line that is damaged, before
    anything is written.
    """
    path, line = Path(path), as_json(record).encode()
    with _only_writer(path.parent):
        lines = {recorded.key: raw for raw, recorded in _lines(path)} | {record.key: line}
        return write_atomically(path, b"\n".join(lines.values()) + b"\n")


def read_file(path: str | Path) -> list[Record]:
    """All records of a file, and none where it does not exist yet. Raises `OSError` naming a line that is no
    record.

    A file that has not changed is not read again: an experiment with everything recorded asks two hundred
    times.
    """
    path = Path(path).resolve()
    if not path.exists():
        return []
    now = path.stat()  # a file of records is replaced, never written into: another one has another number
    return list(_read_once(path, (now.st_ino, now.st_mtime_ns, now.st_size)))


@lru_cache(maxsize=64)
def _read_once(path: Path, stamp: tuple[int, int, int]) -> tuple[Record, ...]:
    return tuple(record for _, record in _lines(path))


def read_records(
    experiment: str, scale: str | None = "find", kind: str = "run", results: Path | None = None
) -> list[Record]:
    """An experiment's records of one kind, by method, seed and trial; none where it has not been run.

    kind: one of `KINDS`. results: the folder of the records, by default the book's.
    """
    everything = read_file(records_file(experiment, scale, results))
    of_kind = (record for record in everything if record.kind == kind)
    return sorted(of_kind, key=lambda record: (record.method, record.seed, record.trial or 0))


def find_record(
    experiment: str, method: str, seed: int = 0, scale: str | None = "find", results: Path | None = None
) -> Record:
    """One reported run. Raises `FileNotFoundError` where it is not recorded, and `ValueError` for a method
    that the others of its file do not have."""
    runs = read_records(experiment, scale, results=results)
    for record in runs:
        if (record.method, record.seed) == (method, seed):
            return record
    if runs:
        require_known("method", method, sorted({record.method for record in runs}))
    where = f" --scale {scale}" if scale else ""
    raise FileNotFoundError(
        f"{records_file(experiment, scale, results)} has no run of {method!r} with seed {seed}:"
        f" `python -m atbook experiment {experiment}{where} --seeds {seed + 1}` writes it"
    )


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    lines, seen = path.read_bytes().splitlines() if path.exists() else [], {}
    for number, line in enumerate(lines, start=1):
        record = parsed(line, f"{path}, line {number},")
        if (first := seen.setdefault(record.key, number)) != number:  # as a merge by hand leaves them
            raise OSError(f"{path}, line {number}, is of the same run as line {first}: keep one of them")
        yield line, record


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Let one process write at a time: it locks the folder, because each of them replaces the file itself."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def by_method(records: list[Record], metric: str) -> dict[str, list[float]]:
    """A metric of all records, grouped by method: for each a list over seeds, in the order of the seeds."""
    grouped: dict[str, list[float]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        grouped.setdefault(record.method, []).append(record.results[metric])
    return grouped


def results_folder(start: str | Path = ".") -> Path:
    """The book's `results/` folder: in `start` or the nearest folder above. Raises `FileNotFoundError`."""
    start = Path(start).resolve()
    for folder in (start, *start.parents):
        if (folder / "results").is_dir() and (folder / "atlib").is_dir():
            return folder / "results"
    raise FileNotFoundError(f"no results/ in or above {start}: run this from a clone of the repository")


def cost(notebook: str) -> str:
    """One sentence that says what running a notebook of the book takes, from its committed measurement."""
    for measured in read_records("notebooks", None):
        if measured.method == notebook:
            return (
                f"Measured on {measured.about['device']}, {measured.about['threads']} threads: "
                f"{measured.seconds / 60:.1f} minutes, {measured.peak_memory_mb / 1000:.1f} GB of memory."
            )
    return f"The cost of {notebook} is not measured yet."


# --- Which of many images were right, as text ---


def pack_bits(bits: Sequence[bool]) -> str:
    """Yes and no of many images, as a record keeps them: their number, a colon, and base64 of bytes of
    eight."""
    return f"{len(bits)}:{base64.b64encode(np.packbits(np.asarray(bits, bool)).tobytes()).decode()}"


def unpack_bits(text: str) -> np.ndarray:
    """The bools (n,) that `pack_bits` packed."""
    number, packed = text.split(":")
    return np.unpackbits(np.frombuffer(base64.b64decode(packed), np.uint8), count=int(number)).astype(bool)


# --- Markdown tables for the book's pages, and how a page writes a mean over seeds ---


def markdown_table(*rows: Sequence) -> str:
    """A Markdown table; the first row is its head. Raises `ValueError` for rows of unequal length."""
    head, *body = [[str(cell) for cell in row] for row in rows]
    for row in body:
        if len(row) != len(head):
            raise ValueError(f"the head has {len(head)} cells, this row {len(row)}: {row}")
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation over seeds, the mean alone for one value; `sign="+"` writes the plus too."""
    around = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.1f}".replace("-", "−") + around
