"""Weights as others publish them, read as data: no code in a file is ever run."""

import argparse
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlib.checkpoint import read_tensors as read_safetensors
from atlib.pair import Normalisation

# Where a training checkpoint keeps the model, in order of preference. DINO's is evaluated by its "teacher",
# I-JEPA's by its "target_encoder".
CONTAINERS = ("teacher", "model", "state_dict", "model_ema", "student", "target_encoder")
TO_SAFETENSORS = "where you trust it, save its state dict with safetensors.torch.save_file"


class Weights(NamedTuple):
    """What a file holds. tensors: by their names in it; container: the entry that they were in ("" for the
    file itself); beside: the other entries; header: what atlib wrote into its own files."""

    tensors: dict[str, Tensor]
    container: str = ""
    beside: tuple[str, ...] = ()
    header: Mapping[str, Any] = {}


def read_weights(path: str | Path) -> Weights:
    """The tensors of a weight file, safetensors or `.pth`, told by its first bytes."""
    path = Path(path)
    with open(path, "rb") as file:
        start = file.read(9)
    if start[8:9] == b"{":
        tensors, header = read_safetensors(path)
        return Weights(tensors, header=header)
    if start[:1] == b"\x80" or start[:4] == b"PK\x03\x04":
        return _read_pickled(path)
    raise OSError(f"{path} is neither safetensors nor .pth: it starts with {start!r}")


def normalisation_beside(path: Path) -> tuple[Normalisation | None, str]:
    """How images are normalised for the weights in a file, or folder, as a file beside them says, and which:
    a processor of transformers, timm's `config.json`, or OpenCLIP's; (None, "") without."""
    # Transformers nests a processor of images in another since version 5, and reads that one first.
    places = (
        ("processor_config.json", lambda config: _of_processor(config.get("image_processor") or {})),
        ("preprocessor_config.json", lambda config: _of_processor(config.get("image_processor") or config)),
        ("config.json", lambda config: _of_data_config(config.get("pretrained_cfg") or config)),
        ("open_clip_config.json", lambda config: _of_data_config(config.get("preprocess_cfg") or {})),
    )
    for name, read in places:
        file = (path if path.is_dir() else path.parent) / name
        if not file.is_file():
            continue
        try:
            normalisation = read(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:  # of another form
            raise OSError(f"{file} does not say how images are normalised ({error})") from error
        if normalisation is not None:
            return normalisation, f"as {file} says"
    return None, ""


def _of_data_config(config: Mapping[str, Any]) -> Normalisation | None:
    return None if None in (mean_std := (config.get("mean"), config.get("std"))) else Normalisation(*mean_std)


def _of_processor(config: Mapping[str, Any]) -> Normalisation | None:
    """Of a processor of images: (pixel in 0..255 · rescale_factor - image_mean) / image_std."""
    largest = 255 * (config.get("rescale_factor") or 1 / 255) if config.get("do_rescale", True) else 255
    if config.get("do_normalize") is False:
        return Normalisation(0.0, 1 / largest)
    mean, std = config.get("image_mean"), config.get("image_std")
    if None in (mean, std) or math.isclose(largest, 1.0, rel_tol=1e-6):
        return _of_data_config({"mean": mean, "std": std})
    mean, std = (value if isinstance(value, list) else [value] * 3 for value in (mean, std))
    return Normalisation([value / largest for value in mean], [value / largest for value in std])


def _read_pickled(path: Path) -> Weights:
    try:
        # beside weights a bag of plain values, in which MAE's family keeps its options
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    # damaged pickles raise nearly anything: UnpicklingError, RuntimeError, EOFError, IndexError, KeyError ...
    except Exception as error:
        # not torch's own text, which advises to read the file in the unsafe way
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise OSError(f"{path} holds a {code[1]}, whose code would be run: {TO_SAFETENSORS}") from error
        raise OSError(f"{path} is no torch checkpoint, perhaps cut off ({type(error).__name__})") from error
    if not isinstance(content, Mapping):
        raise OSError(f"{path} holds a {type(content).__name__} and not a state dict: {TO_SAFETENSORS}")
    container = next((name for name in CONTAINERS if isinstance(content.get(name), Mapping)), "")
    if not (container or _tensors_in(content)):
        inside = [name for name, entry in content.items() if isinstance(name, str) and _tensors_in(entry)]
        if len(inside) > 1:
            raise OSError(f"{path} holds tensors in {', '.join(inside)}: save the one that teaches alone")
        container = "".join(inside)
    tensors = _tensors_in(content[container] if container else content)
    if not tensors:
        raise OSError(f"{path} holds no tensors at the top or under {', '.join(CONTAINERS)}")
    beside = tuple(str(name) for name in content if name != container) if container else ()
    return Weights(tensors, container, beside)


def _tensors_in(entry: Any) -> dict[str, Tensor]:
    named = entry.items() if isinstance(entry, Mapping) else ()
    return {str(name): value for name, value in named if isinstance(value, Tensor)}
