"""Photographs to train on, decoded once and held on the device that trains."""

import numpy as np
import torch
from torch import Tensor

from atlib.data import Images
from atlib.loading import loader_of
from atrun.data.decoding import CorruptImage, decode, large_pictures
from atrun.data.photos import Photos
from atrun.data.transforms import Augmentation, in_two


def held(photos: Photos, device: torch.device, most: float, workers: int = 0) -> Images | None:
    """Photographs to train on, decoded once and held on a device, where they are then augmented: batches of
    the same bits.

    most: bytes that they may take; workers: processes that decode. None where they take more, where one
    cannot be decoded, where their augmentation needs Pillow (`atrun.data.transforms.in_two`), and where they
    are not of one size.
    """
    a, prepare, augment = photos.augmentation, None, None
    if a is not None:
        parts = in_two(a) if photos.train and isinstance(a, Augmentation) else None
        if parts is None:
            return None
        prepare, augment = parts

    def made(indices: list[int]) -> Tensor | None:
        try:
            pictures = [decode(file) for file in photos.rows[indices][photos.image_column]]
        except CorruptImage:
            return None
        with large_pictures():
            arrays = [np.array(picture if prepare is None else prepare(picture)) for picture in pictures]
        alike = len({array.shape for array in arrays}) == 1
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2) if alike else None

    count, first = len(photos), made([0])
    if first is None or first.numel() * count > most:
        return None
    if a is not None and a.crop == "padded" and a.padding >= min(first.shape[-2:]):
        return None  # torchvision reflects reflections
    pixels = torch.empty((count, *first.shape[1:]), dtype=torch.uint8, device=device)
    batches = torch.arange(count).split(256)
    for batch, part in zip(batches, loader_of(made, [batch.tolist() for batch in batches], workers)):
        if part is None or part.shape[1:] != pixels.shape[1:]:
            return None
        pixels[batch[0] : batch[-1] + 1] = part
    scaled = photos.normalisation
    return Images(pixels, photos.targets.to(device), photos.classes, scaled.mean, scaled.std, augment)
