"""Photographs of the hub or of files, held in memory."""

from pathlib import Path

import numpy as np
import torch
from PIL import ImageOps

from atlib.data import Images
from atrun.data.catalogue import draw
from atrun.data.decoding import as_rgb, large_pictures


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

    name, path, split: as in `atrun.data.hub.open_rows_of`, or "parquet" or "imagefolder" with a `path`.
    Where a data set has no validation split, a tenth of "train" becomes it, the same images always, and
    "train" is the rest. size: the number of images, a random choice by `seed` (None: all). image_size:
    shorter side resized to it, then centre crop (None: as they are; they must then be of one size).
    """
    from atrun.data.hub import open_rows_of  # `datasets` takes seconds

    rows, image_column, label_column, _ = open_rows_of(name, path, split)
    return images_in_memory(rows, image_column, label_column, size, seed, image_size, f"{name} {split}")


def images_in_memory(
    rows, image: str, label: str, size: int | None, seed: int, image_size: int | None, what: str
) -> Images:
    """Some rows of a `datasets.Dataset`, decoded; image, label: its columns, the others as in `load`."""
    from atrun.data.hub import class_names

    classes = class_names(rows, label)
    rows = rows.select(draw(len(rows), size, seed, what))
    decoded = []
    for index in range(len(rows)):
        try:
            with large_pictures():
                picture = as_rgb(rows[index][image])
        except Exception as error:  # PIL raises half a dozen kinds for a damaged file
            raise OSError(f"image {index} cannot be decoded ({type(error).__name__}: {error})") from error
        if image_size is not None:
            picture = ImageOps.fit(picture, (image_size, image_size))
        decoded.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    return Images(torch.stack(decoded), torch.tensor(rows[label][:]), classes)
