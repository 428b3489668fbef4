"""One JSON file per run: what was run, on what, and what came out."""

import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev

import torch

from atlib._util import write_atomically


@dataclass(frozen=True)
class Record:
    """A finished run. seconds: wall clock of training; peak_memory_mb: of the process (of the GPU where there
    is one).

    `results` are the figures the book reads; `history` one dict per pass over the data; `config` all that is
    needed to repeat the run; `about` versions, device, threads, commit.
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
}
ABOUT = ("python", "torch", "timm", "atlib", "device", "threads", "commit", "date")


def write_record(path: str | Path, record: Record) -> Path:
    """Write a record atomically. Raises `ValueError`, before anything is written, when it breaks the schema."""
    values = asdict(record)
    _check(values, "this record")
    return write_atomically(Path(path), (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def read_record(path: str | Path) -> Record:
    """Read and check one record. Raises `OSError` naming a file that is missing, cut off or breaks the
    schema."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        values = json.loads(path.read_text())
        _check(values, str(path))
    except (json.JSONDecodeError, UnicodeDecodeError, ValueError) as error:
        raise OSError(f"{path} is no valid record ({error}); it was left as it is") from error
    return Record(**values)


def read_records(folder: str | Path) -> list[Record]:
    """All records below a folder, sorted by path. Raises `FileNotFoundError` when there is none."""
    paths = sorted(Path(folder).rglob("*.json"))
    if not paths:
        raise FileNotFoundError(f"no records (*.json) below {folder}")
    return [read_record(path) for path in paths]


def by_method(records: list[Record], metric: str) -> dict[str, list[float]]:
    """A metric of all records, grouped by method: a list over seeds each, in the order of the seeds."""
    grouped: dict[str, list[float]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        grouped.setdefault(record.method, []).append(record.results[metric])
    return grouped


def results_folder(start: str | Path = ".") -> Path:
    """The book's `results/` folder: in `start` or the nearest folder above it. Raises `FileNotFoundError`
    with the way out."""
    for folder in [Path(start).resolve(), *Path(start).resolve().parents]:
        if (folder / "results").is_dir() and (folder / "atlib").is_dir():
            return folder / "results"
    raise FileNotFoundError(
        f"no results/ folder in or above {Path(start).resolve()}: run this from a clone of the book's"
        " repository"
    )


def cost(notebook: str) -> str:
    """One sentence: what running a notebook of the book takes, from its committed measurement."""
    path = results_folder() / "notebooks" / f"{notebook}.json"
    if not path.exists():
        return f"The cost of {notebook} is not measured yet."
    measured = read_record(path)
    return (
        f"Measured on {measured.about['device']}, {measured.about['threads']} threads: "
        f"{measured.seconds / 60:.1f} minutes, {measured.peak_memory_mb / 1000:.1f} GB of memory."
    )


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


def _check(values: dict, what: str) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{what} is a JSON {type(values).__name__}, not an object")
    if set(values) != set(FIELDS):
        missing, extra = sorted(set(FIELDS) - set(values)), sorted(set(values) - set(FIELDS))
        raise ValueError(f"{what}: fields missing: {missing}, unknown: {extra}")
    for name, kind in FIELDS.items():
        if not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise ValueError(f"{what}: {name} is {values[name]!r}, which has the wrong type")
    missing = [name for name in ABOUT if name not in values["about"]]
    if missing:
        raise ValueError(f"{what}: about lacks {missing}")
    for name, value in values["results"].items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{what}: results[{name!r}] is {value}, not a finite number")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} CPUs"


def _commit() -> str:
    """The commit of the checkout that holds atlib, with "+" when files differ from it; "unknown" outside a
    checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--", "."], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


# --- Markdown tables for the book's pages, and how a page writes a mean over seeds ---


def markdown_table(*rows: Sequence) -> str:
    """A Markdown table; the first row is its head. Raises `ValueError` when a row has another number of cells
    than the head."""
    head, *body = [[str(cell) for cell in row] for row in rows]
    for row in body:
        if len(row) != len(head):
            raise ValueError(f"the head has {len(head)} cells, this row {len(row)}: {row}")
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation over seeds with one decimal, the mean alone for one value; `sign="+"` writes
    the plus too."""
    return f"{mean(values):{sign}.1f}".replace("-", "−") + (
        f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    )
