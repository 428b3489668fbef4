"""T5X checkpoints, as FLIP publishes them: a folder with one zarr array for each parameter, read with NumPy alone.

JAX, flax and tensorstore, which write them, are not needed: an array is a small JSON file `.zarray` and its chunks, each
compressed with gzip. What such a folder looks like is taken from T5X's `checkpoints.py` in FLIP's repository
(github.com/facebookresearch/flip), and from version 2 of the zarr format.
"""

import gzip
import itertools
import json
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TARGET = "target."  # the parameters; "state." are the optimiser's


def is_t5x(folder: Path) -> bool:
    """Whether a folder, or one inside it, is a T5X checkpoint."""
    return next(folder.rglob(f"{TARGET}*/.zarray"), None) is not None


def read_t5x(folder: Path) -> dict[str, Tensor]:
    """The parameters of a T5X checkpoint by their names with dots, such as "img_encoder.embedding.kernel"; the optimiser's state is left.

    Raises `OSError`, naming the array, for one that is damaged, incomplete or kept in another way.
    """
    steps = {found.parent.parent for found in folder.rglob(f"{TARGET}*/.zarray")}
    if len(steps) > 1:
        raise OSError(f"{folder} holds several checkpoints, {', '.join(sorted(step.name for step in steps))}: give the folder of one")
    return {array.name.removeprefix(TARGET): torch.from_numpy(_read_zarr(array)) for array in sorted(steps.pop().glob(f"{TARGET}*"))}


def _read_zarr(folder: Path) -> np.ndarray:
    try:
        about = json.loads((folder / ".zarray").read_text())
        shape, chunks, kind = about["shape"], about["chunks"], np.dtype(about["dtype"])
        compressor, separator = (about["compressor"] or {}).get("id"), about.get("dimension_separator", ".")
        if about["zarr_format"] != 2 or about["order"] != "C" or about["filters"] or compressor not in (None, "gzip") or kind.kind != "f":
            raise ValueError(f"arrays of floats in zarr format 2, compressed with gzip, are read, and this is {about}")
        whole = np.full(shape, about["fill_value"] or 0, kind)
        for at in itertools.product(*(range(math.ceil(side / step)) for side, step in zip(shape, chunks))):
            file = folder / (separator.join(map(str, at)) or "0")
            if not file.exists() and len(shape) == 1:
                continue  # zarr leaves out chunks of nothing but the fill value; of trained weights only biases can be that
            content = file.read_bytes() if compressor is None else gzip.decompress(file.read_bytes())
            chunk = np.frombuffer(content, kind).reshape(chunks)  # chunks at the edge are stored whole
            place = tuple(slice(i * step, min((i + 1) * step, side)) for i, step, side in zip(at, chunks, shape))
            whole[place] = chunk[tuple(slice(0, part.stop - part.start) for part in place)]
        return np.ascontiguousarray(whole, dtype=np.float32)
    except (KeyError, TypeError, ValueError, OSError, EOFError, zlib.error) as error:
        raise OSError(f"{folder} cannot be read as an array of a T5X checkpoint, perhaps it is incomplete ({type(error).__name__}: {error})") from error
