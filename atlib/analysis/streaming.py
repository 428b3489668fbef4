"""Run models over a data set and look at what happens inside, one batch at a time."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from atlib.data import Images
from atlib.walk import Walk, walk


@torch.no_grad()
def walks(models: Sequence[nn.Module], images: Images, batch_size: int) -> Iterator[tuple[Walk, ...]]:
    """Every batch of `images`, in order, walked by every model: one tuple of walks a batch, one walk a model.

    A model is a ViT that `atlib.walk` takes, or a module with a `walk(images)` method, such as `AttentionTransfer`, whose
    student may need its teacher. All models see the same batches, in eval mode and without gradients, and are left in the
    mode they were in; logits may be None. Raises `ValueError` where there is no image or batch_size is below 1.
    """
    if len(images) == 0 or batch_size < 1:
        raise ValueError(f"{len(images)} images in batches of {batch_size}: both must be at least 1")
    training = [model.training for model in models]
    devices = [next(model.parameters()).device for model in models]
    try:
        for model in models:
            model.eval()
        for batch, _ in images.loader(batch_size):
            yield tuple(_walk(model, batch.to(device)) for model, device in zip(models, devices))
    finally:
        for model, mode in zip(models, training):
            model.train(mode)


def vit_of(model: nn.Module) -> nn.Module:
    """The ViT whose layers `walks` goes through: the model itself, or the student of a module such as `AttentionTransfer`."""
    return getattr(model, "student", model)


def _walk(model: nn.Module, batch: torch.Tensor) -> Walk:
    return model.walk(batch) if hasattr(model, "walk") else walk(model, batch, head=False)
