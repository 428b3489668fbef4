"""What a run wrote while it trained: JSON lines for programs, the same lines as text for people, a tracker
when asked."""

import io
import json
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import Image

from atlib._util import naming, write_atomically


class RunLog:
    """Appends entries to FOLDER/log.jsonl and FOLDER/log.txt; call it with one dict per step or epoch, each
    with its "step", which gets "seconds", the training time so far over all starts of the run.

    after: the step a run goes on from; entries of later steps are dropped, so that every step is there once.
    tracker: Accelerate's of that name. also: is called with each entry, after it was written.
    """

    def __init__(
        self,
        folder: str | Path,
        after: int = 0,
        tracker: str | None = None,
        also: Callable[[dict], None] | None = None,
    ):
        self.folder, self.also = Path(folder), also
        kept = [entry for entry in read_log(folder) if entry["step"] <= after]
        self.before = kept[-1]["seconds"] if kept else 0.0
        self.start = time.perf_counter()
        for name, line_of in LINES.items():
            write_atomically(self.folder / name, "".join(line_of(entry) + "\n" for entry in kept).encode())
        self.after, self.tracks_with, self.tracker = after, tracker, None

    @property
    def seconds(self) -> float:
        """Training time so far, over all starts of the run."""
        return self.before + time.perf_counter() - self.start

    def __call__(self, entry: dict) -> None:
        """Append one entry; a number that is not finite is written as text."""
        entry = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in entry.items()
        }
        entry["seconds"] = round(self.seconds, 3)
        for name, line_of in LINES.items():
            path = self.folder / name
            with naming(path), open(path, "a", encoding="utf-8") as file:
                file.write(line_of(entry) + "\n")
        if self.tracks_with is not None:
            if self.tracker is None:
                self.tracker = self._start_tracker(self.tracks_with)
            numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
            del numbers["step"]
            self.tracker.log(numbers, step=entry["step"])
        if self.also is not None:
            self.also(entry)

    def picture(self, name: str, step: int, png: bytes) -> Path:
        """Write FOLDER/NAME/step-00000123.png, and send it to a tracker that takes pictures."""
        if hasattr(self.tracker, "log_images"):
            pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
            form = {"dataformats": "NHWC"} if self.tracks_with == "tensorboard" else {}
            self.tracker.log_images({name: pixels[None]}, step=step, **form)
        return write_atomically(self.folder / name / f"step-{step:08d}.png", png)

    def close(self) -> None:
        """Write out what the tracker still holds back."""
        if self.tracker is not None:
            self.tracker.finish()

    def _start_tracker(self, name: str):
        from accelerate import tracking  # runs without a tracker do not need it

        project, options = "atlib", {"run_name": self.folder.name}
        if name == "tensorboard":  # what a killed run wrote about later steps is not shown
            project, options = "tensorboard", {"logging_dir": self.folder, "purge_step": self.after + 1}
        elif name == "wandb":
            options = {"name": self.folder.name, "dir": self.folder}
        tracker = tracking.LOGGER_TYPE_TO_CLASS[name](project, **options)
        tracker.start()
        return tracker


def read_log(folder: str | Path) -> list[dict]:
    """All entries of a run's log; a last line that a kill cut off, and one that is no entry, are left out."""
    path = Path(folder) / "log.jsonl"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines, entries = text.splitlines(keepends=True), []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            _ = entry["step"] + entry["seconds"]  # both are there, and numbers
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            if number < len(lines):
                warnings.warn(f"{path}, line {number} is no entry ({error}): it is left out", stacklevel=2)
            continue
        if line.endswith("\n"):
            entries.append(entry)
    return entries


def as_line(entry: dict) -> str:
    """One entry as a line for people: step 20 · loss 1.234 · transfer_loss of layer_0 1.2, layer_1 1.1."""
    parts = []
    for whole, group in groupby(entry.items(), lambda item: item[0].rpartition("/")[0]):
        texts = [
            f"{name.rpartition('/')[2]} {f'{value:.4g}' if isinstance(value, float) else value}"
            for name, value in group
        ]
        parts += [f"{whole} of {', '.join(texts)}"] if whole else texts
    return " · ".join(parts)


LINES = {"log.jsonl": partial(json.dumps, allow_nan=False), "log.txt": as_line}


def require_tracker(name: str | None) -> None:
    """Raise `ValueError` for a tracker whose package, of the same name, is not installed."""
    if name is not None and find_spec(name) is None:
        raise ValueError(f"--tracker {name}: pip install {name}, or leave it out: log.jsonl has the numbers")
