"""Weights on disk: safetensors with the architecture in the file's header, written whole or not at all."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib._util import as_plain, write_atomically
from atlib.attention_transfer import AttentionTransfer
from atlib.pair import Normalisation, attach
from atlib.plan import Plan
from atlib.student import unlike
from atlib.vit import Architecture


def save_vit(
    path: str | Path, vit: VisionTransformer, architecture: Architecture, more: Mapping = {}
) -> Path:
    """Write a ViT's weights, a plain timm state, with its architecture and its images' normalisation in the
    header. more: JSON values for the header; `python -m atlib predict` needs "augmentation" and "classes".
    Raises `ValueError` when `architecture` does not describe `vit`."""
    _check_architecture(vit, architecture)
    normalisation = as_plain(header_normalisation(more) or Normalisation.of(vit))
    header = {"normalisation": normalisation, **more, "architecture": architecture._asdict()}
    return write_tensors(path, vit.state_dict(), header)


def load_vit(path: str | Path) -> VisionTransformer:
    """Rebuild a ViT saved by `save_vit`. Raises `OSError` naming a file that cannot be read or is another."""
    tensors, header = read_tensors(path)
    if "needs_teacher" in header:
        raise OSError(f"{path} is a bundle, written by save_bundle: read it with load_bundle")
    with _naming(path):
        return _rebuilt(header, "architecture", tensors)


def header_normalisation(header: Mapping) -> Normalisation | None:
    """How images are normalised for the ViT of a file, as its header says; None where it does not."""
    augmentation = header.get("augmentation") or {}
    return Normalisation.read(
        header.get("normalisation") or (augmentation if "mean" in augmentation else None)
    )


def seen_by_pair(transfer: AttentionTransfer) -> dict:
    """What a header says of a pair's images, for `read_pair`."""
    return {
        "pair_normalisation": as_plain(transfer.normalisation),
        "teacher_normalisation": as_plain(transfer.views[0].normalisation),
    }


def read_pair(header: Mapping, teacher: nn.Module, student: nn.Module) -> AttentionTransfer:
    """The pair of a header's plan; where it says nothing, the teacher sees images as the student does."""
    attach(teacher, Normalisation.read(header.get("teacher_normalisation")))
    given = Normalisation.read(header.get("pair_normalisation"))
    return AttentionTransfer(teacher, student, Plan(**header["plan"]), normalisation=given)


def save_bundle(
    path: str | Path,
    transfer: AttentionTransfer,
    student: Architecture,
    teacher: Architecture,
    more: Mapping = {},
) -> Path:
    """Write what inference needs: after Copy student *and* teacher, after Distill the student alone. more: as
    in `save_vit`."""
    _check_architecture(transfer.student, student)
    header = {
        "normalisation": as_plain(header_normalisation(more) or Normalisation.of(transfer.student)),
        **more,
        "needs_teacher": transfer.needs_teacher,
        "student": student._asdict(),
        "plan": transfer.plan.describe(),
    }
    tensors = {f"student.{name}": value for name, value in transfer.student.state_dict().items()}
    if transfer.needs_teacher:
        _check_architecture(transfer.teacher, teacher)
        header |= {"teacher": teacher._asdict(), **seen_by_pair(transfer)}
        tensors |= {f"teacher.{name}": value for name, value in transfer.teacher.state_dict().items()}
    return write_tensors(path, tensors, header)


def load_bundle(path: str | Path) -> nn.Module:
    """What `save_bundle` wrote, in eval mode: an `AttentionTransfer`, or after Distill a ViT."""
    tensors, header = read_tensors(path)

    def part(name: str) -> VisionTransformer:
        prefix = f"{name}."
        of_model = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
        return _rebuilt(header, name, of_model)  # as the student says; `read_pair` says the teacher's

    with _naming(path):
        if not header["needs_teacher"]:
            return part("student").eval()
        return read_pair(header, part("teacher").eval(), part("student")).eval()


def write_tensors(path: str | Path, tensors: dict[str, Tensor], header: dict) -> Path:
    """Write tensors by name with atlib's header."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return write_atomically(Path(path), save(tensors, {"atlib": json.dumps(header)}))


def read_header(path: str | Path) -> dict:
    """atlib's header of a safetensors file, {} in others'. Raises `OSError` naming a file it cannot read."""
    with _opened(path) as (_, header):
        return header


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict]:
    """A safetensors file's tensors by name, and what `read_header` reads. Raises `OSError` as that does."""
    with _opened(path) as (file, header):
        return {name: file.get_tensor(name) for name in file.keys()}, header


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[safe_open, dict]]:
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("atlib", "{}"))
            yield file, header if isinstance(header, dict) else {}
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        what = f"perhaps cut off ({error})" if path.suffix == ".safetensors" else "load_teacher reads others"
        raise OSError(f"{path} is no readable safetensors file: {what}") from error


def count(tensors: Mapping[str, Tensor]) -> int:
    """How many numbers there are in tensors."""
    return sum(value.numel() for value in tensors.values())


def _rebuilt(header: Mapping, name: str, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The model of the header's architecture of that name, with these weights."""
    architecture = Architecture.read(header[name])
    architecture.require_numbers(count(tensors))
    model = architecture.build_classifier()
    model.load_state_dict(tensors)
    attach(model, header_normalisation(header))
    return model


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Within it any error is an `OSError` that names the file."""
    try:
        yield
    except Exception as error:  # a stranger's file: whatever its values make others raise
        raise OSError(f"{path} cannot be rebuilt: {error!r}; it was left as it is") from error


def _check_architecture(vit: VisionTransformer, architecture: Architecture) -> None:
    Architecture.read(architecture._asdict())  # or the file could not be read
    with torch.random.fork_rng(devices=[]):  # its weights are drawn for nothing
        built = architecture.build_classifier()
    if wrong := unlike(built, vit):
        raise ValueError(f"{architecture} does not build this ViT: they differ in {', '.join(wrong[:5])}")
