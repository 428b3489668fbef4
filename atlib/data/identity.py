"""What data are, told apart without reading all of them: what a checkpoint knows of the images of its run."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def identity_of(data: Any) -> dict[str, str]:
    """Digests of what data are: the names of their classes, their pixels where these are in memory, and of
    their files the names, the sizes and the times of the last change. What is not there is left out."""
    said = {}
    if classes := getattr(data, "classes", None):
        said["classes"] = _digest(map(str, classes))
    if isinstance(pixels := getattr(data, "pixels", None), Tensor):
        flat = pixels.detach().cpu().contiguous().flatten()
        said["pixels"] = hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()[:16]
    files = _files_of(data)
    if not files:
        return said
    facts = [_fact(file) for file in files]
    root = os.path.commonpath(files) if len(files) > 1 else os.path.dirname(files[0])
    said["names of files"] = _digest(os.path.relpath(file, root) for file in files)
    said["sizes of files"] = _digest(size for size, _ in facts)
    said["times of files"] = _digest(time for _, time in facts)
    return said


def _files_of(data: Any) -> Sequence[str]:
    """The files that data are read from, in their order: pictures, or tables of them."""
    samples = getattr(getattr(data, "dataset", None), "samples", None)  # torchvision's folders
    if isinstance(samples, list):
        return [str(one[0]) for one in samples if isinstance(one, tuple) and isinstance(one[0], str)]
    if isinstance(entries := getattr(data, "entries", None), list):  # COCO's form
        pictures = [str(Path(data.folder, one["file_name"])) for one in entries]
        return [*pictures, str(data.file)]
    rows = getattr(data, "rows", None)
    if not hasattr(rows, "cache_files") or len(rows) == 0:
        return []
    if rows.cache_files:
        first = rows[0][data.image_column]
        if isinstance(first, dict) and first.get("bytes") is not None:
            # tables: their copies in the cache are called after the sources' names, sizes and times
            return [each["filename"] for each in rows.cache_files]
    pictures = rows.with_format("arrow")[:][data.image_column].to_pylist()
    return [one["path"] for one in pictures if isinstance(one, dict) and one.get("path")]


def _fact(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:  # inside an archive, or gone: what reads it says so
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _digest(parts: Iterable[object]) -> str:
    content = hashlib.sha256()
    for part in parts:
        content.update(f"{part}\0".encode(errors="surrogateescape"))
    return content.hexdigest()[:16]
