"""What was run, on what, and what came out: the record of a finished run."""

import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import get_type_hints

import torch

from atlib._util import write_atomically

SCHEMA = 1  # written into every record; another number: other fields, or another meaning of one
KINDS = ("run", "trial", "teacher")


@dataclass(frozen=True)
class Record:
    """A finished run. seconds: wall clock of training; peak_memory_mb: of the process, or of its GPU.

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


ABOUT = ("python", "torch", "timm", "atlib", "device", "threads", "commit", "date")


def write_record(path: str | Path, record: Record) -> Path:
    """Write a record atomically. Raises `ValueError`, with nothing written, when it breaks the schema."""
    return write_atomically(Path(path), (as_json(record, indent=1) + "\n").encode())


def read_record(path: str | Path) -> Record:
    """Read and check one record. Raises `OSError` naming a file that is missing or breaks the schema."""
    return parsed(Path(path).read_bytes(), str(path))


def about(device: torch.device | str = "cpu") -> dict:
    """Versions, device, threads of a process, number of processes, commit and date of this run."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": version("timm"),
        "atlib": version("attention-transfer"),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", 1)),  # as accelerate launch and torchrun say it
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def peak_memory_mb() -> float:
    """Largest memory of this process so far in MB; with a GPU in use, torch's largest allocation on it."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return torch.cuda.max_memory_allocated() / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, kibibytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def as_json(record: Record, indent: int | None = None) -> str:
    """A record as JSON. Raises `ValueError` when it breaks the schema."""
    values = asdict(record)
    _check(values)
    return json.dumps({"schema": SCHEMA} | values, indent=indent, allow_nan=False)


def parsed(text: bytes, where: str) -> Record:
    """The record that `as_json` wrote. Raises `OSError`, naming `where` it stands, for text that is none."""
    try:
        values = json.loads(text.decode())
        if not isinstance(values, dict):
            raise ValueError(f"it is a JSON {type(values).__name__}, not an object")
        if (schema := values.pop("schema", None)) != SCHEMA:
            raise ValueError(f"its schema is {schema}, this version of atlib reads {SCHEMA}")
        _check(values)
    except ValueError as error:
        raise OSError(f"{where} is no valid record ({error})") from error
    return Record(**values)


def _check(values: dict) -> None:
    kinds = get_type_hints(Record) | {"seconds": float | int, "peak_memory_mb": float | int}
    if set(values) != set(kinds):
        raise ValueError(f"fields missing or unknown: {sorted(set(values) ^ set(kinds))}")
    for name, kind in kinds.items():
        if not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise ValueError(f"{name} is {values[name]!r}, which has the wrong type")
    if values["kind"] not in KINDS:
        raise ValueError(f"kind is {values['kind']!r}, not one of {KINDS}")
    if missing := [name for name in ABOUT if name not in values["about"]]:
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
    """The commit of the checkout that holds atlib, "+" where files differ; "unknown" outside of one."""
    this_file = Path(__file__)

    def git(*arguments: str) -> str:
        options = {"cwd": this_file.parents[1], "text": True, "stderr": subprocess.DEVNULL}
        return subprocess.check_output(["git", *arguments], **options).strip()

    try:
        # An installed atlib may lie in the .venv of another project's checkout, whose commit is not its own.
        git("ls-files", "--error-unmatch", str(this_file))
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--", "atlib", "atfamily", "atrun", "atbook")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")
