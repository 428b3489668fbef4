"""Mixup and CutMix of a step's images, by timm; which images and how much is decided by seed and step, so that a resumed run repeats it."""

from collections.abc import Sequence

import numpy as np
import torch
from timm.data import Mixup
from torch import Tensor

from atlib.recipes import Recipe


def mixed(images: Tensor, targets: Tensor, recipe: Recipe, classes: int | None, draw: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Images (b, 3, height, width) mixed with one another, and as targets the classes' shares (b, classes); both unchanged without mixup and cutmix.

    `draw`: the numbers that decide the mix, such as (seed, step, rank). With both, a step uses one of the two, with equal chance, and mixes
    the i-th image with the i-th from the end; with an odd number the last image stays as it is. The images given may be written over.
    Source: Zhang et al. 2018 (arXiv 1710.09412), Yun et al. 2019 (arXiv 1905.04899), in the form of DeiT (arXiv 2012.12877).
    Raises `ValueError` for targets that are not class indices, and for a model that does not say how many classes it knows.
    """
    if not (recipe.mixup or recipe.cutmix):
        return images, targets
    if targets.ndim != 1 or targets.is_floating_point() or not classes:
        raise ValueError(f"mixup and cutmix mix classes: they need class indices (b,) and a model with num_classes, got targets {targets.dtype} "
                         f"{tuple(targets.shape)} and num_classes={classes}; set mixup and cutmix to 0")
    mix = Mixup(recipe.mixup, recipe.cutmix, prob=1.0, switch_prob=0.5, label_smoothing=0.0, num_classes=classes)  # the loss smooths
    even = len(images) - len(images) % 2
    state = np.random.get_state()  # timm draws from NumPy's global generator
    np.random.seed(list(draw))
    try:
        head, shares = mix(images[:even], targets[:even])
    finally:
        np.random.set_state(state)
    rest = torch.nn.functional.one_hot(targets[even:], classes).to(shares.dtype)
    return torch.cat([head, images[even:]]), torch.cat([shares, rest])
