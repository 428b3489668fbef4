"""Checkpoints of a run: whole or not there, checked when they are read, and enough to go on bit for bit."""

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atlib._util import as_plain, write_atomically
from atlib.pair import Pair
from atlib.plan import Plan
from atlib.train import Position, Training

MANIFEST, FACTS, PROCESS = "manifest.json", "facts.json", "process-{:05d}.safetensors"


class CheckpointError(OSError):
    """A checkpoint could not be written; the earlier ones are as they were."""


class CheckpointManager:
    """Keeps the checkpoints of one run in FOLDER/step-00000123, which all its machines must see, and brings
    it back to the newest: the `keeper` of `atlib.train.train`.

    every: steps between checkpoints. The newest `last` are kept.
    config: JSON values that must be the same when the run goes on, but for those named in `free`.

    A checkpoint is written under another name, forced to the disk, described by a manifest with every file's
    SHA-256, and renamed: it is there as a whole or not at all. Nothing that is read back can run code.
    """

    def __init__(
        self,
        folder: str | Path,
        every: int,
        last: int = 2,
        config: Mapping | None = None,
        free: Iterable[str] = (),
    ):
        if every < 1 or last < 1:
            raise ValueError(f"every and last must be at least 1, got every={every} and last={last}")
        self.folder, self.every, self.last = Path(folder), every, last
        self.config, self.free = dict(config or {}), tuple(free)
        self.reported: set[Path] = set()  # damaged ones that were warned about

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole; a damaged one is warned about, once, and left where it is."""
        for path in reversed(self._checkpoints()):
            if (damage := damage_of(path)) is None:
                return path
            if path not in self.reported:
                self.reported.add(path)
                warnings.warn(f"the checkpoint {path} is damaged ({damage}) and was left out", stacklevel=2)
        return None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step`."""
        return step % self.every == 0

    def keep(self, run: Training) -> Path:
        """Write a checkpoint; every process must call it. Raises `CheckpointError` where it cannot."""
        accelerator, main = run.accelerator, run.accelerator.is_main_process
        path = self.folder / f"step-{run.position.step:08d}"
        temporary = path.with_name(f".{path.name}.tmp")
        facts = run.position.facts() | {"corrupt": run.corrupt()}
        of_process, shared = {"total": run.position.total}, {}
        if run.average is not None:  # each process has its shards of it, or all have the same
            sharded = accelerator.distributed_type == DistributedType.FSDP
            (of_process if sharded else shared).update(run.average.tensors())
        try:
            if main:
                self._clear()
                temporary.mkdir(parents=True)
            accelerator.wait_for_everyone()
            if not temporary.is_dir():
                raise OSError(errno.ENOENT, "the folder must be one that all machines see")
            accelerator.save_state(str(temporary))
            _save_tensors(of_process, temporary / PROCESS.format(accelerator.process_index))
            if main:
                _save_tensors(shared, temporary / "shared.safetensors")
                setting = {"config": self.config, "processes": accelerator.num_processes}
                write_atomically(temporary / FACTS, json.dumps(facts | setting).encode())
            accelerator.wait_for_everyone()
            if main:
                self._seal(temporary, path)
                self._prune(path)
            accelerator.wait_for_everyone()
        except (OSError, RuntimeError, SafetensorError) as error:
            if "DataLoader worker" in str(error):  # it died meanwhile: no matter of the disk
                raise
            # a full disk is an OSError, a RuntimeError or a SafetensorError: it depends on what writes
            if main:
                shutil.rmtree(temporary, ignore_errors=True)
            last = (self._checkpoints() or [None])[-1]
            raise CheckpointError(f"{path} could not be written ({error}); kept: {last}") from error
        return path

    def resume(self, run: Training) -> Path | None:
        """Bring a run to the newest whole checkpoint, and return its path; None without one. Every process
        must call it, before the first step. With another number of processes bits differ: each draws its own
        random numbers. Raises `ValueError` naming what has changed since, and `CheckpointError` for a folder
        that cannot be written to.
        """
        accelerator, newest = run.accelerator, None
        self.config = self.config | what_is_trained(run)
        if accelerator.is_main_process:
            try:  # not after hours; nor is a file left of a run that is killed meanwhile
                self.folder.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=self.folder).close()
                self._clear()
            except OSError as error:
                raise CheckpointError(f"checkpoints cannot be written to {self.folder} ({error})") from error
            newest = self.latest()
        if (path := run.of_main(newest)) is None:
            return None
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
        now = self.config | {"processes": accelerator.num_processes}
        then = {**facts.pop("config"), "processes": facts.pop("processes")}
        for name in self.free:
            then.pop(name, None), now.pop(name, None)
        if changed := changes_between(then, json.loads(json.dumps(now))):
            raise ValueError(f"the run in {self.folder} was started otherwise: {'; '.join(changed)}")
        accelerator.load_state(str(path))
        file = path / PROCESS.format(accelerator.process_index)
        if not file.exists():  # of a process more than there were
            file = path / PROCESS.format(0)
        tensors = load_file(path / "shared.safetensors") | load_file(file)
        run.position = Position(tensors["total"].to(accelerator.device), **facts)
        if run.average is not None:
            run.average.load(tensors)
        return path

    def _checkpoints(self) -> list[Path]:
        """Everything under a checkpoint's name, oldest first, whole or not."""
        return sorted(path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))

    def _clear(self) -> None:
        """Remove what a run that was killed while it wrote has left behind."""
        for left in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(left)

    def _seal(self, temporary: Path, path: Path) -> None:
        """Force all files to the disk, write the manifest, and give the folder its name."""
        files = {
            str(file.relative_to(temporary)): {"sha256": digest(file), "bytes": file.stat().st_size}
            for file in _files(temporary)
        }
        for entry in temporary.rglob("*"):
            _force(entry)
        write_atomically(temporary / MANIFEST, json.dumps({"files": files}, indent=1).encode())
        _force(temporary)
        if path.exists():  # damaged, or it would have been gone on from
            shutil.rmtree(path)
        os.replace(temporary, path)
        _force(self.folder)

    def _prune(self, written: Path) -> None:
        """Remove what need not be kept after `written`; later ones, which were damaged, do not count."""
        whole = [path for path in self._checkpoints() if path <= written and _manifest(path) is not None]
        for path in whole[: -self.last]:  # a half-deleted one must not look like a checkpoint
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.tmp")))


def what_is_trained(run: Training) -> dict[str, Any]:
    """What must be the same when a run goes on: JSON values."""
    plan = getattr(run.given, "plan", None)
    planned = {"plan": plan.describe()} if isinstance(plan, Plan) else {}
    trained = {
        "recipe": run.recipe.describe(),
        "seed": run.seed,
        "images": len(run.data),
        "network": {"kind": type(run.given).__name__, **planned},
        "loss": _name_of(run.loss),
        # files can be seen otherwise elsewhere: the main process's answer counts
        "contents": run.of_main(identity_of(run.data) if run.accelerator.is_main_process else None),
    }
    if isinstance(targets := getattr(run.data, "targets", None), Tensor):
        trained["targets"] = digest_of_tensors({"targets": targets})
    if pairs := [part for part in run.given.modules() if isinstance(part, Pair)]:
        trained |= {
            "teachers": [digest_of_model(teacher) for pair in pairs for teacher in pair.teachers],
            "normalisation": [as_plain(pair.normalisation) for pair in pairs],
            "views": [as_plain(view) for pair in pairs for view in pair.views],
        }
    return trained


def _name_of(loss: Callable) -> str:
    """A loss by its name; a `partial` with the plain values that it was given, since others make another."""
    if not isinstance(loss, partial):
        return getattr(loss, "__qualname__", type(loss).__name__)

    def shown(value: object) -> str:
        return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__

    arguments = [*map(shown, loss.args), *(f"{name}={shown(value)}" for name, value in loss.keywords.items())]
    return f"{_name_of(loss.func)}({', '.join(arguments)})"


def damage_of(path: Path) -> str | None:
    """What is wrong with a checkpoint: None if every file is as its manifest says."""
    manifest = _manifest(path)
    if manifest is None:
        return f"it has no readable {MANIFEST}"
    named, there = manifest["files"], {str(file.relative_to(path)) for file in _files(path)} - {MANIFEST}
    if lacks := {FACTS, "shared.safetensors", PROCESS.format(0)} - named.keys():
        return f"its {MANIFEST} names no {min(lacks)}"
    if differ := named.keys() ^ there:
        return f"{min(differ)} is {'missing' if min(differ) in named else 'none of its files'}"
    for name, written in named.items():
        file = path / name
        if file.stat().st_size != written["bytes"] or digest(file) != written["sha256"]:
            return f"{name} is not the file that was written"
    return None


def changes_between(then: Mapping, now: Mapping, prefix: str = "") -> list[str]:
    """Where two nested mappings of JSON values differ, one sentence each: "recipe.lr was 0.1 and is 0.2"."""
    changed = []
    for name in sorted({*then, *now}):
        left, right = then.get(name), now.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            changed += changes_between(left, right, f"{prefix}{name}.")
        elif left != right:
            changed.append(f"{prefix}{name} was {left!r} and is {right!r}")
    return changed


def digest(path: Path) -> str:
    """The SHA-256 of a file, or of the names and digests of all files in a folder."""
    if path.is_dir():
        listed = "".join(f"{file.relative_to(path)} {digest(file)}\n" for file in _files(path))
        return hashlib.sha256(listed.encode()).hexdigest()
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of tensors by their names, in whatever order they come and on whatever device they are."""
    content = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        content.update(name.encode())
        # as bytes: NumPy has no bf16
        content.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return content.hexdigest()


def digest_of_model(model: nn.Module) -> str:
    """The SHA-256 of a model's weights and of what they do not show of its modules."""
    keys = ("num_heads", "num_attention_heads", "scale", "scaling", "eps", "approximate")
    shown = []
    for name, part in model.named_modules():
        values = (getattr(part, key, None) for key in keys)
        plain = [str(value) if isinstance(value, (int, float, str)) else None for value in values]
        shown.append((name, type(part).__name__, *plain))
    return hashlib.sha256((json.dumps(shown) + digest_of_tensors(model.state_dict())).encode()).hexdigest()


def _manifest(path: Path) -> dict | None:
    """What a checkpoint says of itself; None where it says something else than is written there."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"].values()
        readable = all(isinstance(file["sha256"], str) and type(file["bytes"]) is int for file in files)
        return manifest if readable else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _force(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- What data are, told apart without reading all of them ---


def identity_of(data: Any) -> dict[str, str]:
    """Digests of what data are: the names of their classes, their pixels where these are in memory, and of
    their `source_files` the names, the sizes and the times of the last change."""
    digests, data = {}, getattr(data, "source", None) or data
    if classes := getattr(data, "classes", None):
        digests["classes"] = _digest(map(str, classes))
    if isinstance(pixels := getattr(data, "pixels", None), Tensor):
        flat = pixels.detach().cpu().contiguous().flatten()
        digests["pixels"] = hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()[:16]
    if not (files := getattr(data, "source_files", ())):
        return digests
    facts = []
    for file in files:
        try:
            stat = os.stat(file)
            facts.append((stat.st_size, stat.st_mtime_ns))
        except OSError:  # inside an archive, or gone: what reads it says so
            facts.append((-1, -1))
    root = os.path.commonpath(files) if len(files) > 1 else os.path.dirname(files[0])
    digests["names of files"] = _digest(os.path.relpath(file, root) for file in files)
    digests["sizes of files"] = _digest(size for size, _ in facts)
    digests["times of files"] = _digest(time for _, time in facts)
    return digests


def _digest(parts: Iterable[object]) -> str:
    joined = "".join(f"{part}\0" for part in parts).encode(errors="surrogateescape")
    return hashlib.sha256(joined).hexdigest()[:16]
