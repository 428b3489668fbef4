"""Images with what is in them: boxes, classes and masks, in the form that the training loop takes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atlib.loading import Batch, ShardSpec, in_order, my_batches


class Found(NamedTuple):
    """What a detector says of one image, on the CPU, the surest first. boxes: (k, 4), left, top, right,
    bottom, in pixels; labels: (k,), classes from 0; scores: (k,); masks: bool (k, height, width), None from a
    detector without masks."""

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: Tensor | None = None


class Objects(NamedTuple):
    """What is in one image. boxes: (k, 4); labels: int64 (k,), classes from 0; masks: bool (k, height,
    width), None where they are unknown; crowd: bool (k,), a box around many objects, from which nothing
    learns."""

    boxes: Tensor
    labels: Tensor
    masks: Tensor | None
    crowd: Tensor


class ObjectBatch(Sequence[Objects]):
    """The objects of a batch of images, which moves and is divided like a tensor whose first axis is the
    batch."""

    def __init__(self, images: Sequence[Objects]):
        self.images = list(images)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index):
        return ObjectBatch(self.images[index]) if isinstance(index, slice) else self.images[index]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "ObjectBatch":
        """The same on a device."""
        moved = ((x if x is None else x.to(device, non_blocking=non_blocking) for x in item) for item in self)
        return ObjectBatch([Objects(*parts) for parts in moved])

    def tensor_split(self, parts: int) -> list["ObjectBatch"]:
        """In parts whose sizes differ by one at most, the larger ones first, as `Tensor.tensor_split`."""
        parts = torch.arange(len(self)).tensor_split(parts)
        return [ObjectBatch([self.images[i] for i in part]) for part in parts]


def check_objects(objects: Objects, height: int, width: int, name: str) -> Objects:
    """The objects of an image of that size, if nothing learns a wrong thing from them."""
    boxes, labels, masks, crowd = objects
    if boxes.ndim != 2 or boxes.shape[1] != 4 or not len(boxes) == len(labels) == len(crowd):
        raise ValueError(f"{name}: {len(labels)} labels, {len(crowd)} crowd, boxes {tuple(boxes.shape)}")
    if labels.dtype != torch.int64 or (labels < 0).any():
        raise ValueError(f"{name}: labels are int64 from 0, got {labels.dtype} {labels.tolist()[:10]}")
    if masks is not None and masks.shape != (len(boxes), height, width):
        raise ValueError(f"{name}: masks {tuple(masks.shape)}, not {(len(boxes), height, width)}")
    for left, top, right, bottom in boxes.tolist():
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            box = left, top, right, bottom
            raise ValueError(f"{name}: box {box} has no area, or leaves {width} x {height} pixels")
    return objects


class ObjectImages:
    """Images of one size in memory, each with its `Objects`: what `atlib.train.train` takes, and what
    `detect` evaluates. pixels: uint8 (n, 3, height, width); an image comes out as (pixel / 255 - mean) /
    std."""

    corrupt: Mapping[int, str] = {}  # pixels in memory are decoded already

    def __init__(
        self,
        pixels: Tensor,
        objects: Sequence[Objects],
        classes: Sequence[str] = (),
        mean: float = 0.5,
        std: float = 0.25,
    ):
        if len(pixels) != len(objects):
            raise ValueError(f"{len(pixels)} images, but objects of {len(objects)}")
        if pixels.dtype != torch.uint8 or pixels.ndim != 4:
            raise ValueError(f"pixels are uint8 (n, 3, h, w), got {pixels.dtype} {tuple(pixels.shape)}")
        height, width = pixels.shape[-2:]
        self.objects = [
            check_objects(target, height, width, f"image {number}") for number, target in enumerate(objects)
        ]
        self.pixels, self.classes, self.mean, self.std = pixels, tuple(classes), mean, std

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, indices: Sequence[int]) -> tuple[Tensor, ObjectBatch]:
        """The images at `indices`, float32 (B, 3, height, width), and their objects."""
        pixels = self.pixels[torch.as_tensor(indices)]
        return (pixels.float() / 255 - self.mean) / self.std, ObjectBatch([self.objects[i] for i in indices])

    def to(self, device: torch.device | str) -> "ObjectImages":
        """The same images and objects on a device, where training then takes them."""
        objects = ObjectBatch(self.objects).to(device)
        return ObjectImages(self.pixels.to(device), objects, self.classes, self.mean, self.std)

    def loader(self, batch_size: int) -> Iterator[tuple[Tensor, ObjectBatch]]:
        """All images in order."""
        return map(self.take, in_order(len(self), batch_size))

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of one epoch. They are in memory: `workers` are not started."""
        for indices, weight in my_batches(len(self), part):
            yield Batch(*self.take(indices), indices, weight)
