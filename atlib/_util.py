"""What several rooms need."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # seconds of torch, which not every command needs
    from torch import nn

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a command was stopped, and goes on when it is called again
INTERRUPTED = 130  # as a shell says it of a command that Ctrl-C has ended


def require_known(kind: str, name: object, choices: Iterable[str]) -> None:
    """Raise `ValueError`, naming the close ones, unless `name` is one of `choices`."""
    choices = list(choices)
    if name in choices:
        return
    close = difflib.get_close_matches(str(name), choices)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(map(repr, choices))}.")


def as_plain(value: Any) -> Any:
    """A value as JSON has it: of a dataclass and a named tuple their fields, of a tuple a list."""
    named = value._asdict() if hasattr(value, "_asdict") else value
    return json.loads(json.dumps(named, default=asdict))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within it an error of the disk names this file, which "No space left on device" alone does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_atomically(path: Path, content: bytes) -> Path:
    """Write a file so that at every moment either the old one or the whole new one is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def out_of_memory(error: Exception) -> bool:
    """Whether memory has run out, on a GPU or, which is a plain RuntimeError of torch, on the CPU."""
    import torch  # takes seconds

    kinds = MemoryError, torch.cuda.OutOfMemoryError
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def refuse_second_derivative() -> None:
    """Raise `RuntimeError` in a backward pass that keeps a graph: a second derivative of the map-free loss
    would miss that maps depend on q and k."""
    import torch

    # Not once_differentiable: at the end of the graph, that hands out constants without a word.
    if torch.is_grad_enabled():
        raise RuntimeError("first derivatives only: create_graph=True needs dense_attention_cross_entropy")


@contextmanager
def in_eval_mode(*models: "nn.Module") -> Iterator[None]:
    """Within it models are in eval mode; after it, every part of them is as it was."""
    modes = {part: part.training for model in models for part in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for part, training in modes.items():
            part.training = training
