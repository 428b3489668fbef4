"""What was run, on what, and what came out: a record a run, a line in its experiment's and scale's file."""

import base64
import fcntl
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch

from atlib._util import require_known, write_atomically

SCHEMA = 1  # written into every record; another number: other fields, or another meaning of one
KINDS = ("run", "trial", "teacher")


@dataclass(frozen=True)
class Record:
    """A finished run. seconds: wall clock of training; peak_memory_mb: of the process (of the GPU where there
    is one).

    `results` are the figures the book reads; `history` one dict per pass over the data; `config` all that is
    needed to repeat the run; `about` versions, device, threads, commit. kind: "run" for what is reported,
    "trial" for one of the tuning (`trial`: its index), "teacher" for a teacher's pre-training.
    """

    experiment: str
    method: str
    seed: int
    config: dict
    results: dict
    history: list
    seconds: float
    peak_memory_mb: float
    about: dict
    kind: str = "run"
    trial: int | None = None

    @property
    def key(self) -> tuple:
        """What tells it apart from the other records of its file."""
        return self.kind, self.method, self.seed, self.trial


FIELDS = {
    "experiment": str,
    "method": str,
    "seed": int,
    "config": dict,
    "results": dict,
    "history": list,
    "seconds": (int, float),
    "peak_memory_mb": (int, float),
    "about": dict,
    "kind": str,
    "trial": (int, type(None)),
}
ABOUT = ("python", "torch", "timm", "atlib", "device", "threads", "commit", "date")


# --- Which of many images were right, as text ---


def pack_bits(bits: Sequence[bool]) -> str:
    """Yes and no of many images as a record keeps them: their number, a colon, and base64 of eight a
    byte."""
    return f"{len(bits)}:{base64.b64encode(np.packbits(np.asarray(bits, bool)).tobytes()).decode()}"


def unpack_bits(text: str) -> np.ndarray:
    """The bools (n,) that `pack_bits` packed."""
    number, packed = text.split(":")
    return np.unpackbits(np.frombuffer(base64.b64decode(packed), np.uint8), count=int(number)).astype(bool)


# --- One record, as a file of its own ---


def write_record(path: str | Path, record: Record) -> Path:
    """Write a record atomically. Raises `ValueError`, with nothing written, when it breaks the schema."""
    return write_atomically(Path(path), (_json(record, indent=1) + "\n").encode())


def read_record(path: str | Path) -> Record:
    """Read and check one record. Raises `OSError` naming a file that is missing or breaks the schema."""
    return _parsed(Path(path).read_bytes(), str(path))


# --- The records of an experiment at a scale: results/EXPERIMENT/SCALE.jsonl, one a line ---


def records_file(experiment: str, scale: str | None = "find", results: Path | None = None) -> Path:
    """Where an experiment's records are: below `results`, by default the book's. scale: None for what has
    none, "notebooks" and "benchmarks"."""
    results = results_folder() if results is None else results
    return results / f"{experiment}.jsonl" if scale is None else results / experiment / f"{scale}.jsonl"


def add_record(path: str | Path, record: Record) -> Path:
    """Add a record to a file of records, in place of the one with the same key where there is one.

    At every moment the old file or the whole new one is there; of several processes one writes at a time.
    Raises `ValueError` when the record breaks the schema, and `OSError` naming a line that is damaged, before
    anything is written.
    """
    path, line = Path(path), _json(record).encode()
    with _only_writer(path.parent):
        lines = {found.key: raw for raw, found in _lines(path)} | {record.key: line}
        return write_atomically(path, b"\n".join(lines.values()) + b"\n")


def read_file(path: str | Path) -> list[Record]:
    """All records of a file, none where there is none yet. Raises `OSError` naming a line that is none."""
    return [record for _, record in _lines(Path(path))]


def read_records(
    experiment: str, scale: str | None = "find", kind: str = "run", results: Path | None = None
) -> list[Record]:
    """An experiment's records of one kind, by method, seed and trial; none where it has not been run.

    kind: one of `KINDS`. results: the folder of the records, by default the book's.
    """
    found = (record for record in read_file(records_file(experiment, scale, results)) if record.kind == kind)
    return sorted(found, key=lambda record: (record.method, record.seed, record.trial or 0))


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
    raise FileNotFoundError(
        f"{records_file(experiment, scale, results)} has no run of {method!r} with seed {seed}:"
        f" `python -m atlib experiment {experiment}` writes it"
    )


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    lines, seen = path.read_bytes().splitlines() if path.exists() else [], {}
    for number, line in enumerate(lines, start=1):
        record = _parsed(line, f"{path}, line {number},")
        if (first := seen.setdefault(record.key, number)) != number:  # as a merge by hand leaves them
            raise OSError(f"{path}, line {number}, is of the same run as line {first}: keep one of them")
        yield line, record


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """One process at a time: the folder is locked, for the file itself is replaced by each of them."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def by_method(records: list[Record], metric: str) -> dict[str, list[float]]:
    """A metric of all records, grouped by method: a list over seeds each, in the order of the seeds."""
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
    """One sentence: what running a notebook of the book takes, from its committed measurement."""
    for measured in read_records("notebooks", None):
        if measured.method == notebook:
            return (
                f"Measured on {measured.about['device']}, {measured.about['threads']} threads: "
                f"{measured.seconds / 60:.1f} minutes, {measured.peak_memory_mb / 1000:.1f} GB of memory."
            )
    return f"The cost of {notebook} is not measured yet."


def about(device: torch.device | str = "cpu") -> dict:
    """Versions, device, threads, commit and date of this run."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": version("timm"),
        "atlib": version("attention-transfer"),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def peak_memory_mb() -> float:
    """Largest memory of this process so far in MB; with a GPU in use, torch's largest allocation on it."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return torch.cuda.max_memory_allocated() / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, kibibytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def _json(record: Record, indent: int | None = None) -> str:
    values = asdict(record)
    _check(values)
    return json.dumps({"schema": SCHEMA} | values, indent=indent, allow_nan=False)


def _parsed(text: bytes, where: str) -> Record:
    try:
        values = json.loads(text.decode())
        if not isinstance(values, dict):
            raise ValueError(f"it is a JSON {type(values).__name__}, not an object")
        if (schema := values.pop("schema", None)) != SCHEMA:
            raise ValueError(f"its schema is {schema}, this version of atlib reads {SCHEMA}")
        _check(values)
    except ValueError as error:
        raise OSError(f"{where} is no valid record ({error}); the file was left as it is") from error
    return Record(**values)


def _check(values: dict) -> None:
    if set(values) != set(FIELDS):
        missing, extra = sorted(set(FIELDS) - set(values)), sorted(set(values) - set(FIELDS))
        raise ValueError(f"fields missing: {missing}, unknown: {extra}")
    for name, kind in FIELDS.items():
        if not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise ValueError(f"{name} is {values[name]!r}, which has the wrong type")
    if values["kind"] not in KINDS:
        raise ValueError(f"kind is {values['kind']!r}, not one of {KINDS}")
    missing = [name for name in ABOUT if name not in values["about"]]
    if missing:
        raise ValueError(f"about lacks {missing}")
    for name, value in values["results"].items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"results[{name!r}] is {value}, not a finite number")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} CPUs"


def _commit() -> str:
    """The commit of the checkout that holds atlib, with "+" when files differ; "unknown" outside of one."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        return subprocess.check_output(
            ["git", *arguments], cwd=here.parent, text=True, stderr=subprocess.DEVNULL
        ).strip()

    try:
        # An installed atlib may lie in the .venv of another project's checkout, whose commit is not its own.
        git("ls-files", "--error-unmatch", here.name)
        head, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


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
