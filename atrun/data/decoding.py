"""From image files to tensors."""

import errno
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

ON_CORRUPT = ("raise", "skip")  # what is done with an image that cannot be decoded
# What the system lacks or a disk does: nothing that is wrong with an image.
NOT_THE_IMAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE)
# Pixels from which Pillow warns of a picture, and refuses twice as many: 3 GB in memory.
LARGEST = 500_000_000


class CorruptImage(OSError):
    """An image that cannot be decoded; the message says its index, its file where that is known, and why."""


class Made(NamedTuple):
    """What became of a share of images. images, targets: (b, 3, height, width) and (b,) of those that could
    be decoded, or of a blank one; indices: of the decoded; corrupt: {index: why} of the others."""

    images: Tensor
    targets: Tensor
    indices: list[int]
    corrupt: dict[int, str]


@contextmanager
def large_pictures() -> Iterator[None]:
    """Within it Pillow opens pictures of up to 2 · `LARGEST` pixels: scans and mosaics pass its own limit."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None if before is None else max(before, LARGEST)
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def decode(file: Mapping[str, object]) -> Image.Image:
    """The picture in {"bytes": of a file, or None, "path": its name, or None}, as `datasets` stores an image,
    made RGB by `as_rgb`. Raises `CorruptImage`."""
    import datasets  # takes seconds, and is there already where rows are

    try:
        with large_pictures():
            return as_rgb(datasets.Image().decode_example(file))
    except (ConnectionError, TimeoutError, MemoryError):
        raise  # the image was not seen, so nothing is known about it
    except Exception as error:  # PIL raises half a dozen kinds for a damaged file
        if isinstance(error, OSError) and error.errno in NOT_THE_IMAGES:
            raise
        path = (file or {}).get("path")
        raise CorruptImage(f"{type(error).__name__}: {error}{f', file {path}' if path else ''}") from error


def as_rgb(image: Image.Image) -> Image.Image:
    """A picture in RGB of 8 bits, turned as the camera says. Raises `ValueError` as `in_eight_bits` does."""
    return in_eight_bits(ImageOps.exif_transpose(image)).convert("RGB")


def in_eight_bits(image: Image.Image) -> Image.Image:
    """A picture with values in 0..255; of 16 bits the high byte is kept, where Pillow would cut off what is
    above 255. Raises `ValueError` for values that say no brightness."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= (255 if image.mode == "F" else 65535)):  # also where they are NaN
        raise ValueError(f"values from {low:g} to {high:g} (mode {image.mode}) say no brightness: scale them")
    if image.mode == "F":
        return Image.fromarray((values * 255).round().astype(np.uint8)) if high <= 1 else image
    if image.mode == "I" and high <= 255:
        return image
    if high < 4096:
        warnings.warn("16-bit pictures use 12 bits at most, and get dark: scale them by 16", stacklevel=2)
    return Image.fromarray((values >> 8).astype(np.uint8))
