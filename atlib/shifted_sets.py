"""Test sets that other people collected under a shift: CIFAR-10.1, ImageNetV2, -A, -R, -Sketch and the reassessed labels ReaL.

Labels come out in the class order of CIFAR-10 or ImageNet-1k, whatever a copy stores; class lists and reassessed labels are those
that timm ships. None of these sets was downloaded here (no network): hub ids and columns are as their users describe them.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atlib.analysis.checks import check_scores
from atlib.data import Images, decode, draw
from atlib.label_space import CIFAR10, IMAGENET, IMAGENET_A, IMAGENET_R, LabelSpace, timm_file
from atlib.names import require_known

IMAGE_COLUMNS = ("image", "img", "webp", "jpg", "jpeg", "png")  # the last four as WebDataset names them
LABEL_COLUMNS = ("wnid", "label", "labels", "cls", "class_name")


class ShiftedSet(NamedTuple):
    """Where a set is (hub id, split, `files`: the pattern of the split's files where others are large), the classes its labels mean,
    `read`: (rows, image column, space) to (positions of the rows used, their targets), and the source."""

    hub: str
    split: str
    space: LabelSpace
    read: Callable
    paper: str
    arxiv: str
    files: str | None = None

    @property
    def classes(self) -> tuple[int, ...] | None:
        """The classes that the set has, for `accuracy_on` (None: all of its label space)."""
        return self.space.classes


def load_shifted(name: str, path: str | Path | None = None, *, size: int | None = None, seed: int = 0, image_size: int | None = None) -> Images:
    """Load one of `SHIFTED`; targets are class indices of CIFAR-10 or ImageNet-1k, for ReaL the set of right ones, bool (n, 1000).

    path: a parquet file, a folder of them, or a folder with one folder per class, as the authors' archives unpack (None: from the
    hub). ReaL needs ImageNet's validation images under their own file names, which the hub gives after a login, and leaves out
    those without a label. size: a random choice by `seed`; pixels are held in memory, 150 KB an image at 224 pixels. image_size:
    as in `atlib.data.load`. Evaluate with `accuracy_on(logits, images.targets, SHIFTED[name].classes)`.

    Raises `ValueError` for an unknown name or size and for labels that are not, or not clearly, among the set's classes; for files
    and the network what `load` raises.
    """
    require_known("shifted set", name, SHIFTED)
    shifted = SHIFTED[name]
    from atlib.hub import find_column, open_rows  # imported here: `datasets` takes seconds

    rows = open_rows(shifted.hub, path, shifted.split, shifted.files)
    image_column = find_column(rows, IMAGE_COLUMNS, "image")
    positions, targets = shifted.read(rows, image_column, shifted.space)
    chosen = torch.as_tensor(draw(len(positions), size, seed, name))
    return Images(decode(rows.select(positions[chosen].tolist()), image_column, image_size), targets[chosen], shifted.space.names)


def restrict(logits: Tensor, classes: Sequence[int]) -> Tensor:
    """The logits of some classes only, (n, all classes) to (n, `classes`): what a set that lacks the others is evaluated on.

    Raises `ValueError` for fewer than two classes, among which nothing is left to decide, and for classes the model does not have.
    """
    if len(set(classes)) < 2:
        raise ValueError(f"a subset needs at least two classes to tell apart, got {list(classes)}")
    outside = [label for label in classes if not 0 <= label < logits.shape[1]]
    if outside:
        raise ValueError(f"class {outside[0]} is not one of the model's {logits.shape[1]} outputs: was it trained on other classes?")
    return logits[:, list(classes)]


def accuracy_on(logits: Tensor, labels: Tensor, classes: Sequence[int] | None = None) -> float:
    """Share of images whose largest logit, among those of `classes` (None: all), is a right one.

    logits: (n, all classes). labels: class indices (n,), or the set of right classes, bool (n, all classes), as ReaL has them.
    Raises `ValueError` without images, for labels of another shape, for logits with a NaN, and when an image has no right class among those
    compared.
    """
    wanted = logits.shape if labels.dtype == torch.bool else logits.shape[:1]
    if labels.shape != wanted or len(labels) == 0:
        raise ValueError(f"labels must be class indices (n,) or bool (n, classes) with n >= 1 for logits {tuple(logits.shape)}, "
                         f"got {labels.dtype} {tuple(labels.shape)}")
    check_scores(logits, "logits")
    compared = torch.arange(logits.shape[1]) if classes is None else torch.as_tensor(classes)
    best = restrict(logits, compared.tolist()).argmax(1, keepdim=True)
    right = labels[:, compared] if labels.dtype == torch.bool else labels[:, None] == compared  # (n, compared)
    missing = ~right.any(1)
    if missing.all():
        raise ValueError(f"the data and the {len(compared)} classes compared have no label in common")
    if missing.any():
        raise ValueError(f"{missing.sum()} of {len(labels)} images have no right class among the {len(compared)} compared, "
                         f"first image {missing.int().argmax()}")
    return right.gather(1, best).double().mean().item()


def _one_class(rows, image_column: str, space: LabelSpace) -> tuple[Tensor, Tensor]:
    """All rows, and the one class each is labelled with."""
    from atlib.hub import find_column

    column = find_column(rows, LABEL_COLUMNS, "label")
    indices = space.indices(rows[column][:], getattr(rows.features[column], "names", None))
    return torch.arange(len(rows)), torch.tensor(indices, dtype=torch.long)


def _reassessed(rows, image_column: str, space: LabelSpace) -> tuple[Tensor, Tensor]:
    """The rows with at least one reassessed label, and the set of right classes of each, bool (n, 1000); found by file name."""
    import pyarrow.compute as compute

    labels = json.loads(timm_file("imagenet_real_labels.json"))
    paths = compute.struct_field(rows.data.column(image_column), "path").to_pylist()  # the names alone, not gigabytes of images
    numbers = [_file_number(path, index, len(labels)) for index, path in enumerate(paths)]
    positions = [index for index, number in enumerate(numbers) if labels[number]]
    targets = torch.zeros(len(positions), len(space.names), dtype=torch.bool)
    for row, index in enumerate(positions):
        targets[row, labels[numbers[index]]] = True
    return torch.tensor(positions, dtype=torch.long), targets


def _file_number(path: str | None, index: int, count: int) -> int:
    """Which validation image a file name says: ILSVRC2012_val_00000001 is 0."""
    found = re.search(r"ILSVRC2012_val_(\d{8})", path or "")
    if found is None or not 1 <= int(found[1]) <= count:
        raise ValueError(f"image {index} has the file name {path!r}: the reassessed labels go by names like ILSVRC2012_val_00000001.JPEG")
    return int(found[1]) - 1


SHIFTED = {
    # Two versions were published, 4 (2,021 images) and 6 (2,000); which one this copy holds was not seen.
    "cifar10.1": ShiftedSet("XiangPan/CIFAR10.1", "test", CIFAR10, _one_class,
                            "Recht et al. 2018, Do CIFAR-10 Classifiers Generalize to CIFAR-10?", "1806.00451"),
    # "Matched frequency", 10,000 images. In the authors' own repository `datasets` joins all three variants into one split.
    "imagenetv2": ShiftedSet("clip-benchmark/wds_imagenetv2", "test", IMAGENET, _one_class,
                             "Recht et al. 2019, Do ImageNet Classifiers Generalize to ImageNet?", "1902.10811"),
    "imagenet-a": ShiftedSet("barkermrl/imagenet-a", "train", IMAGENET_A, _one_class,
                             "Hendrycks et al. 2021, Natural Adversarial Examples", "1907.07174"),
    "imagenet-r": ShiftedSet("axiong/imagenet-r", "test", IMAGENET_R, _one_class,
                             "Hendrycks et al. 2021, The Many Faces of Robustness", "2006.16241"),
    # The authors' own repository needs a loading script, which `datasets` no longer runs.
    "imagenet-sketch": ShiftedSet("clip-benchmark/wds_imagenet_sketch", "test", IMAGENET, _one_class,
                                  "Wang et al. 2019, Learning Robust Global Representations by Penalizing Local Predictive Power", "1905.13549"),
    "imagenet-real": ShiftedSet("ILSVRC/imagenet-1k", "validation", IMAGENET, _reassessed,
                                "Beyer et al. 2020, Are We Done with ImageNet?", "2006.07159", "data/validation-*.parquet"),
}
