"""What is made for photographs, done to images in memory."""

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from atlib.data import Augment
from atlib.loading import rng_put_back, seed_generators


def as_pictures(operation: Callable[[Image.Image], Image.Image]) -> Augment:
    """An operation on RGB pictures, such as timm's, as what changes images in memory: for
    `Images.with_augment`.

    It may draw from the global generators of Python, NumPy and torch: each image is made by a seed of its
    own, and the generators are as before afterwards. Pictures are made one by one, on the CPU, some 10,000 a
    second of a few operations on 32 x 32 pixels. What it returns raises `ValueError` for images of other than
    three channels, as pairs have.
    """

    def augment(images: Tensor, seeds: Tensor) -> Tensor:
        if images.shape[1] != 3:
            raise ValueError(
                f"pictures have 3 channels, got images {tuple(images.shape)}: of a pair, both must be changed"
                " by an operation on tensors"
            )
        made = []
        with rng_put_back():
            for pixels, seed in zip(images.permute(0, 2, 3, 1).cpu().numpy(), seeds.tolist()):
                seed_generators(seed)
                made.append(np.asarray(operation(Image.fromarray(pixels))))
        return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).to(images.device)

    return augment
