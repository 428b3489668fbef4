"""A whole detector in one file of safetensors, with all that rebuilds it in the file's header."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from atfamily.detection.detector import DETECTORS, Detector, Sizes
from atlib.attention_transfer import AttentionTransfer
from atlib.checkpoint import count, read_pair, read_tensors, seen_by_pair, write_tensors
from atlib.pair import student_of
from atlib.vit import Architecture, without_weights

LARGEST = 2**13  # of a detector's sizes


class Loaded(NamedTuple):
    """What a file holds. classes: their names, in the order of the labels; student: of the ViT."""

    detector: Detector
    classes: tuple[str, ...]
    student: Architecture


def save_detector(
    path: str | Path,
    detector: Detector,
    heads: str,
    classes: Sequence[str],
    student: Architecture,
    teacher: Architecture | None = None,
) -> Path:
    """Write what inference needs: pyramid, heads and ViT, and the teacher of a ViT that copies. After Distill
    the student alone is written. heads: the name in `DETECTORS`."""
    vit = detector.backbone.vit
    header = {
        "detector": {"heads": heads, "classes": list(classes), "sizes": asdict(detector.sizes)},
        "student": student._asdict(),
    }
    parts: dict[str, nn.Module] = {
        "pyramid": detector.pyramid,
        "heads": detector.heads,
        "student": student_of(vit),
    }
    if isinstance(vit, AttentionTransfer) and vit.needs_teacher:
        if teacher is None:
            raise ValueError("the ViT copies its teacher, which must be saved with it: teacher= is missing")
        header |= {"teacher": teacher._asdict(), "plan": vit.plan.describe(), **seen_by_pair(vit)}
        parts["teacher"] = vit.teacher
    tensors = {
        f"{part}.{name}": value
        for part, module in parts.items()
        for name, value in module.state_dict().items()
    }
    try:
        _assembled(header, tensors)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"{student}, {heads!r} and sizes= build another detector: {error}") from error
    return write_tensors(path, tensors, header)


def load_detector(path: str | Path) -> Loaded:
    """What `save_detector` wrote, in eval mode. Raises `OSError` naming a file that cannot be read, or that
    is another."""
    tensors, header = read_tensors(path)
    if "detector" not in header:
        raise OSError(f"{path} holds no detector: a run that detects leaves one, in detector.safetensors")
    try:
        return _assembled(header, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise OSError(f"{path} holds no detector ({type(error).__name__}: {error})") from error


def _assembled(header: Mapping, tensors: Mapping[str, Tensor]) -> Loaded:
    """The detector that a header describes, with its weights. Raises what the first part does that does not
    fit."""
    described, student = header["detector"], _read(header, "student", tensors)
    backbone = vit = student.build()
    if "teacher" in header:
        teacher = _read(header, "teacher", tensors).build()
        backbone = read_pair(header, teacher, vit)
    sizes = Sizes(**{name: tuple(x) if isinstance(x, list) else x for name, x in described["sizes"].items()})
    _require_bounded(sizes)
    make = DETECTORS[described["heads"]]
    with without_weights():
        skeleton = make(backbone, len(described["classes"]), sizes)
    needed = sum(count(part.state_dict()) for part in (skeleton.pyramid, skeleton.heads))
    if needed > (numbers := count(tensors)):
        raise ValueError(f"its heads have {needed:,} weights, its file {numbers:,}")
    detector = make(backbone, len(described["classes"]), sizes)
    parts: dict[str, nn.Module] = {"pyramid": detector.pyramid, "heads": detector.heads, "student": vit}
    if "teacher" in header:
        parts["teacher"] = backbone.teacher
    for part, module in parts.items():
        weights = {name: value for name, value in tensors.items() if name.startswith(f"{part}.")}
        module.load_state_dict({name.removeprefix(f"{part}."): value for name, value in weights.items()})
    return Loaded(detector.eval(), tuple(described["classes"]), student)


def _read(header: Mapping, part: str, tensors: Mapping[str, Tensor]) -> Architecture:
    architecture = Architecture.read(header[part])
    weights = {name: value for name, value in tensors.items() if name.startswith(f"{part}.")}
    architecture.require_numbers(count(weights))
    return architecture


def _require_bounded(sizes: Sizes) -> None:
    """Raise `ValueError` for sizes that no detector has, before anything is made of them."""
    for name, value in asdict(sizes).items():
        values = value if isinstance(value, tuple) else (value,)
        if len(values) > 16 or not all(isinstance(x, (int, float)) and 0 <= x <= LARGEST for x in values):
            raise ValueError(f"{name}={str(value)[:60]}: it must be numbers from 0 to {LARGEST:,}")
