"""Run models over a data set and look at what happens inside, one batch at a time."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from atlib._util import in_eval_mode
from atlib.attention import Walk, walk
from atlib.compatibility import sizes_of
from atlib.data.images import Images
from atlib.pair import student_of
from atlib.vit import check_timm

# Bytes that the walks of one batch may hold: with them and the models, an analysis of ViT-S stays far below 2
# GB.
AT_ONCE = 2**28


@torch.no_grad()
def walks(models: Sequence[nn.Module], images: Images, batch_size: int) -> Iterator[tuple[Walk, ...]]:
    """Every batch of `images`, in order, walked by every model: one tuple of walks a batch, one walk a model.

    A model is a ViT that `atlib.walk` takes, or a module with a `walk(images)` method, such as
    `AttentionTransfer`, whose student may need its teacher. All models see the same batches, in eval mode,
    without gradients and in their own precision, and are left in the mode they were in; logits may be None.
    batch_size: images at once, fewer where what the walks hold would not fit `AT_ONCE`. Raises `ValueError`
    where there is no image or batch_size is below 1, and for images of another size than a model takes.
    """
    if len(images) == 0 or batch_size < 1:
        raise ValueError(f"{len(images)} images in batches of {batch_size}: both must be at least 1")
    vits = [vit_of(model) for model in models]
    at_once = min(batch_size, max(1, AT_ONCE // sum(map(_bytes_of_a_walk, vits))))
    kinds = [next(model.parameters()) for model in models]
    with in_eval_mode(*models):
        for batch, _ in images.loader(at_once):
            for vit in vits:
                check_size(vit, batch)
            placed = zip(models, (batch.to(kind.device, kind.dtype) for kind in kinds))
            yield tuple(
                model.walk(images) if hasattr(model, "walk") else walk(model, images, head=False)
                for model, images in placed
            )


def vit_of(model: nn.Module) -> nn.Module:
    """The ViT whose layers `walks` goes through: the model itself, or the student of a module such as
    `AttentionTransfer`.

    Raises `atlib.attention.Unwalkable` for anything else.
    """
    vit = student_of(model)
    check_timm(vit)
    return vit


def _bytes_of_a_walk(vit: nn.Module) -> int:
    """About what one image's walk holds in float32: q, k, v and two states a layer, and a layer's maps in
    float64 while they are looked at."""
    tokens = (vit.patch_embed.num_patches or 0) + vit.num_prefix_tokens
    return 4 * 5 * len(vit.blocks) * tokens * vit.embed_dim + 8 * 4 * sizes_of(vit).heads * tokens**2


def check_size(vit: nn.Module, batch: torch.Tensor) -> None:
    """Raise `ValueError` for images (B, 3, height, width) of another size than a ViT takes, where it takes
    one only."""
    wanted, size = vit.patch_embed.img_size, tuple(batch.shape[-2:])
    if wanted is not None and vit.patch_embed.strict_img_size and size != tuple(wanted):
        raise ValueError(
            f"the images have {size[0]} x {size[1]} pixels, this {type(vit).__name__} takes"
            f" {wanted[0]} x {wanted[1]}: resize them, or build the model with img_size="
        )
