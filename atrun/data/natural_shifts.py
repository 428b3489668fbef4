"""Test sets that other people collected under a shift: CIFAR-10.1, ImageNetV2, -A, -R, -Sketch, ReaL. Class
lists and reassessed labels are timm's. None was downloaded here: hub ids and columns are as users say.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor

from atlib._util import require_known
from atrun.data.catalogue import CATALOGUE
from atrun.data.photos import Photos, undecoded
from atrun.data.transforms import Augmentation


class LabelSpace(NamedTuple):
    """A classifier's classes by name and WordNet id; `classes`: those that a set has, None: all."""

    names: tuple[str, ...]
    ids: tuple[str, ...] = ()
    classes: tuple[int, ...] | None = None

    def spelled(self) -> dict[str, set[int]]:
        """The classes that may be meant by each way to write one."""
        spelled = defaultdict(set)
        for index in range(len(self.names)) if self.classes is None else self.classes:
            ways = {self.names[index], self.names[index].split(", ")[0], *self.ids[index : index + 1]}
            # ImageNetV2's folders are called 0 to 999; of 200 classes a number could count these or all
            for spelling in ways | ({str(index)} if self.classes is None else set()):
                spelled[spelling].add(index)
        return spelled

    def indices(self, labels: Sequence[str | int], given: Sequence[str] | None = None) -> list[int]:
        """The class index of every label, which may be a WordNet id, a name or, where all classes are there,
        a number; given: the names that numbers in `labels` count."""
        spelled = self.spelled()
        class_of = {}
        for label in set(labels):
            text = str(label if given is None else given[label]).replace("_", " ")
            means = spelled.get(text, set())
            if len(means) > 1 and given is not None and len(given) == len(self.names) and label in means:
                means = {label}  # a list of all classes, two of which are called the same: its order decides
            if len(means) != 1:
                raise ValueError(f"the label {text!r} can be classes {sorted(means)}: store WordNet ids")
            class_of[label] = next(iter(means))
        return [class_of[label] for label in labels]


CIFAR10 = LabelSpace(tuple("airplane automobile bird cat deer dog frog horse ship truck".split()))
IMAGENET = LabelSpace(tuple(ImageNetInfo().label_descriptions()), tuple(ImageNetInfo().label_names()))
_LISTS = resources.files("timm.data") / "_info"
# 200 classes each, as in their authors' eval.py
IMAGENET_A, IMAGENET_R = (
    IMAGENET._replace(classes=tuple(map(IMAGENET.ids.index, (_LISTS / name).read_text().split())))
    for name in ("imagenet_a_synsets.txt", "imagenet_r_synsets.txt")
)

IMAGE_COLUMNS = ("image", "img", "webp", "jpg", "jpeg", "png")  # the last four as WebDataset names them
LABEL_COLUMNS = ("wnid", "label", "labels", "cls", "class_name")


class ShiftedSet(NamedTuple):
    """Where a set is, and the classes its labels mean; files: the split's pattern, where others are large."""

    hub: str
    split: str
    space: LabelSpace
    files: str | None = None


class OpenedShift(NamedTuple):
    """A set under a shift, read by index. images: `Photos`, whose own targets only number the rows; targets:
    class indices (n,), or for ReaL the sets of right ones, bool (n, 1000); classes: those that the set has
    (None: all of its label space)."""

    images: Any
    targets: Tensor
    classes: tuple[int, ...] | None


def open_shifted(
    name: str,
    path: str | Path | None = None,
    *,
    augmentation: Augmentation | None = None,
    on_corrupt: str = "raise",
    workers: int = 0,
) -> OpenedShift:
    """Open one of `SHIFTED` for reading by index: then
    `accuracy_on(predict(model, opened.images), opened.targets, opened.classes)`.

    path: a parquet file, a folder of them, or a folder with one folder per class, as the authors' archives
    unpack (None: from the hub). ReaL needs ImageNet's validation images under their own file names and leaves
    out those without a label. augmentation, on_corrupt, workers: as in `atrun.data.photos.Photos`.
    """
    require_known("shifted set", name, SHIFTED)
    shifted = SHIFTED[name]
    from atrun.data.hub import find_column, open_rows  # imported here: `datasets` takes seconds

    rows = open_rows(shifted.hub, path, shifted.split, shifted.files)
    column = find_column(rows, IMAGE_COLUMNS, "image")
    pictures = undecoded(rows, column).select_columns([column])
    if name == "imagenet-real":
        positions, targets = _reassessed(rows, column)
    else:
        label = find_column(rows, LABEL_COLUMNS, "label")
        names = getattr(rows.features[label], "names", None)
        positions = range(len(rows))
        targets = torch.tensor(shifted.space.indices(rows[label][:], names), dtype=torch.long)
    numbers = torch.arange(len(positions))
    options = {"augmentation": augmentation, "on_corrupt": on_corrupt, "workers": workers}
    images = Photos(pictures.select(positions), column, numbers, shifted.space.names, **options)
    return OpenedShift(images, targets, shifted.space.classes)


def _reassessed(rows, image_column: str) -> tuple[Sequence[int], Tensor]:
    """The rows with a reassessed label, by file name, and the right classes of each, bool (n, 1000)."""
    import pyarrow.compute as compute

    published, positions, labels = RealLabelsImagenet([""] * 50_000).real_labels, [], []
    # the names alone, not gigabytes of images
    for row, path in enumerate(compute.struct_field(rows.data.column(image_column), "path").to_pylist()):
        name = re.search(r"ILSVRC2012_val_\d{8}", path or "")
        if name is None or f"{name[0]}.JPEG" not in published:
            raise ValueError(f"file {path!r}: reassessed labels need ILSVRC2012_val_00000001.JPEG")
        if of_image := published[f"{name[0]}.JPEG"]:
            positions.append(row)
            labels.append(of_image)
    targets = torch.zeros(len(positions), 1000, dtype=torch.bool)
    for row, of_image in enumerate(labels):
        targets[row, of_image] = True
    return positions, targets


SHIFTED = {
    # Recht et al. 2018 (1806.00451), published as version 4 (2,021 images) and 6 (2,000)
    "cifar10.1": ShiftedSet("XiangPan/CIFAR10.1", "test", CIFAR10),
    # Recht et al. 2019 (1902.10811), "matched frequency", 10,000 images
    "imagenetv2": ShiftedSet("clip-benchmark/wds_imagenetv2", "test", IMAGENET),
    # Hendrycks et al. 2021 (1907.07174), and (2006.16241)
    "imagenet-a": ShiftedSet("barkermrl/imagenet-a", "train", IMAGENET_A),
    "imagenet-r": ShiftedSet("axiong/imagenet-r", "test", IMAGENET_R),
    # Wang et al. 2019 (1905.13549)
    "imagenet-sketch": ShiftedSet("clip-benchmark/wds_imagenet_sketch", "test", IMAGENET),
    # Beyer et al. 2020 (2006.07159)
    "imagenet-real": ShiftedSet(
        CATALOGUE["imagenet-1k"].hub, "validation", IMAGENET, CATALOGUE["imagenet-1k"].files["validation"]
    ),
}
