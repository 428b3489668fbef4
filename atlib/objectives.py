"""What a step minimises: the task's loss and the transfer loss, on images that may be mixed."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from torch import Tensor, nn

from atlib.attention import output_tensor
from atlib.attention_transfer import Transferred
from atlib.data import UNLABELLED
from atlib.loading import rng_put_back
from atlib.losses import note
from atlib.processes import require_undivided
from atlib.recipe import Recipe

# (model, images, targets, recipe) -> scalar, the mean over the images
Loss = Callable[[nn.Module, Tensor, Tensor, Recipe], Tensor]


def outputs(model: nn.Module, images: Tensor) -> Transferred:
    """A model's output in the form that training and evaluation use."""
    return as_transferred(model(images))


def as_transferred(output: Any) -> Transferred:
    """What a model returned, in that form: a plain classifier has a transfer loss of 0."""
    if isinstance(output, Transferred):
        return output
    logits = output_tensor(output)
    return Transferred(logits, logits.new_zeros(()))


def student_loss(model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """task_weight · task loss + λ · transfer loss; both are noted without their weights."""
    output = model(images)
    logits, transfer_loss = as_transferred(output)
    of_task = note("task_loss", task_loss(logits, labels, recipe))
    if isinstance(output, Transferred):
        note("transfer_loss", transfer_loss)
    return recipe.task_weight * of_task + recipe.transfer_weight * transfer_loss


def unlabelled_loss(model: nn.Module, images: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    """λ · the transfer loss of a pair that learns from its teacher alone; labels are not used."""
    return recipe.transfer_weight * note("transfer_loss", model(images).transfer_loss)


def check_labels(targets: Tensor, classes: int | None) -> None:
    """Raise `ValueError` for class indices (n,) that are none of a model's nor `UNLABELLED`."""
    if targets.ndim != 1:
        return
    if targets.is_floating_point():
        raise ValueError(f"labels are {targets.dtype}, not class indices: call .long()")
    labels = targets[targets != UNLABELLED]
    wrong = labels[(labels < 0) | (labels >= classes)] if classes else labels[labels < 0]
    if len(wrong):
        raise ValueError(f"label {wrong[0].item()} is none of the model's {classes} classes (num_classes=)")


def task_loss(logits: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """Cross-entropy of logits (B, classes) with labels, class indices (B,) or shares (B, classes), smoothed:
    the mean over the images that have a label, 0 where none has one. With `recipe.binary` the mean over batch
    and classes of binary cross-entropy, in which every class with a share counts as a full yes (Wightman et
    al. 2021, arXiv 2110.00476; DeiT III, arXiv 2204.07118)."""
    if labels.ndim == 1 and (labels == UNLABELLED).any():
        require_undivided(recipe, "the parts of a step have unequally many labels")
        labelled = labels != UNLABELLED
        logits, labels = logits[labelled], labels[labelled]
        if len(labels) == 0:
            return logits.sum()
    if not recipe.binary:
        return nn.functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
    shares = labels if labels.ndim == 2 else nn.functional.one_hot(labels, logits.shape[1])
    yes = (shares > 0).to(logits.dtype)
    smooth = (1 - recipe.label_smoothing) * yes + recipe.label_smoothing / logits.shape[1]
    return nn.functional.binary_cross_entropy_with_logits(logits, smooth)


def mixed(
    images: Tensor, targets: Tensor, recipe: Recipe, classes: int | None, draw: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Images (b, 3, height, width), the i-th mixed with the i-th from the end, and as targets the classes'
    shares (b, classes); both unchanged without mixup and cutmix. The images given may be written over. draw:
    the numbers that decide the mix, such as (seed, step, rank). Source: Zhang et al. 2018 (arXiv 1710.09412),
    Yun et al. 2019 (arXiv 1905.04899), in the form of DeiT (arXiv 2012.12877)."""
    if not (recipe.mixup or recipe.cutmix):
        return images, targets
    if images.ndim == 5:
        raise ValueError(f"mixup and cutmix mix single images, not pairs {tuple(images.shape)}")
    if targets.ndim != 1 or targets.is_floating_point() or not classes or (targets == UNLABELLED).any():
        raise ValueError(f"mixup and cutmix need a label of each image, one of {classes} classes")
    # the loss smooths
    mix = Mixup(recipe.mixup, recipe.cutmix, switch_prob=0.5, label_smoothing=0.0, num_classes=classes)
    even = len(images) - len(images) % 2
    with rng_put_back():  # timm draws from NumPy's global generator
        np.random.seed(list(draw))
        head, shares = mix(images[:even], targets[:even])
    rest = torch.nn.functional.one_hot(targets[even:], classes).to(shares.dtype)
    return torch.cat([head, images[even:]]), torch.cat([shares, rest])
