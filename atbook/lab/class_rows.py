"""Where a published teacher's class token looks in photographs, in a file that comes with the book: the class
token's rows of the maps, in 8 bits. The teacher's weights are handed on in no form."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from atbook.records import results_folder
from atlib._util import require_known

FILE = "real/class-rows.safetensors"  # below the folder of the records
STUDENTS = ("scratch", "distill")  # whose own rows are there too, of the photographs that are shown


@dataclass(frozen=True)
class ClassRows:
    """The class token's rows of all layers and heads, (images, L, H, N) each, of photographs of CIFAR-10."""

    # The teacher's rows of training photographs (2,000: those of seed 0) and their labels (images,).
    train: Tensor
    train_labels: Tensor
    # Of test photographs (1,000).
    test: Tensor
    test_labels: Tensor
    # Some test photographs, (S, 3, height, width), 8 bits, and their places among the test photographs.
    photographs: Tensor
    shown: Tensor
    # {student of seed 0: its own rows of those photographs}.
    students: dict[str, Tensor]


def in_8_bits(rows: Tensor) -> Tensor:
    """Shares from 0 to 1 as 8-bit numbers, by their square roots: small shares keep more of their digits."""
    return (255 * rows.sqrt()).round().to(torch.uint8)


def from_8_bits(rows: Tensor) -> Tensor:
    """The shares again, within 0.004, and rows sum to 1."""
    shares = (rows.float() / 255) ** 2
    return shares / shares.sum(-1, keepdim=True)


def write_class_rows(path: Path, rows: ClassRows, source: str) -> None:
    """Write them; source: of the maps, in words."""
    tensors = {
        "train": in_8_bits(rows.train),
        "test": in_8_bits(rows.test),
        "train labels": rows.train_labels.to(torch.uint8),
        "test labels": rows.test_labels.to(torch.uint8),
        "photographs": rows.photographs.to(torch.uint8),
        "shown": rows.shown.to(torch.int64),
        **{name: in_8_bits(of_student) for name, of_student in rows.students.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"source": source})


def read_class_rows(path: Path | None = None) -> ClassRows:
    """Those that come with the book, or those of another file that `write_class_rows` wrote. Raises
    `FileNotFoundError`, and `ValueError` for a file without one of the tensors."""
    path = results_folder() / FILE if path is None else path
    with safe_open(path, "pt") as file:
        for name in ("train", "test", "train labels", "test labels", "photographs", "shown", *STUDENTS):
            require_known(f"tensor (in {path})", name, list(file.keys()))
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return ClassRows(
        from_8_bits(tensors["train"]),
        tensors["train labels"].long(),
        from_8_bits(tensors["test"]),
        tensors["test labels"].long(),
        tensors["photographs"],
        tensors["shown"],
        {name: from_8_bits(tensors[name]) for name in STUDENTS},
    )
