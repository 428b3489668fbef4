"""Photographs of the hub or of files, held in memory."""

from pathlib import Path

import numpy as np
import torch
from PIL import ImageOps
from torch import Tensor

from atlib._util import require_known
from atlib.data import Images, draw
from atrun.data.decoding import as_rgb, large_pictures

# Where short names live on the hub.
HUB = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}


def load(
    name: str,
    path: str | Path | None = None,
    *,
    split: str = "train",
    size: int | None = None,
    seed: int = 0,
    image_size: int | None = None,
) -> Images:
    """Load a split of a data set by name.

    name: "cifar10", "cifar100", any hub id "owner/name", "parquet" or "imagefolder" with a `path`. With a
    `path`, "cifar10" and hub ids too are read from there, from parquet files named after the split, and no
    network is used. split: "train", "validation", "test". Where a data set has no validation split, a tenth
    of "train" becomes it, the same images always, and "train" is the rest; "train+validation" is all. size:
    the number of images, a random choice by `seed` (None: all). image_size: shorter side resized to it, then
    centre crop (None: as they are; they must then be of one size).

    Raises `ValueError` for unknown names, splits and columns, `FileNotFoundError` for a path that is not
    there, `OSError` naming the file for one that cannot be read, and `ConnectionError` saying what would have
    been downloaded.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, got {size}; leave it out for all images")
    if name not in ("parquet", "imagefolder") and "/" not in name:
        require_known("data set", name, (*HUB, "parquet", "imagefolder"))
    if name in ("parquet", "imagefolder") and path is None:
        raise ValueError(f"load({name!r}) needs a path: load({name!r}, '/where/the/files/are')")
    # imported here: `datasets` takes seconds
    from atrun.data.hub import class_names, open_labelled

    rows, image_column, label_column = open_labelled(HUB.get(name, name), path, split)
    classes = class_names(rows, label_column)
    rows = rows.select(draw(len(rows), size, seed, f"{name} {split}"))
    return Images(decode_rows(rows, image_column, image_size), torch.tensor(rows[label_column][:]), classes)


def decode_rows(rows, column: str, image_size: int | None) -> Tensor:
    """Decode every row to uint8 (n, 3, height, width); the index of an image that cannot be read or does not
    fit is named.

    image_size: shorter side resized to it, then centre crop (None: as they are).
    """
    decoded = []
    for index in range(len(rows)):
        try:
            with large_pictures():
                image = as_rgb(rows[index][column])
        except Exception as error:  # PIL raises half a dozen kinds for a damaged file
            raise OSError(
                f"image {index} of the split cannot be decoded ({type(error).__name__}: {error})"
            ) from error
        if image_size is not None:
            image = ImageOps.fit(image, (image_size, image_size))
        decoded.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        if decoded[-1].shape != decoded[0].shape:
            raise ValueError(
                f"image {index} is {tuple(decoded[-1].shape)}, the first is {tuple(decoded[0].shape)}: "
                "pass image_size= to bring all to one size"
            )
    return torch.stack(decoded)
