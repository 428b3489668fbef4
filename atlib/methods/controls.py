"""Controls of attention transfer: maps that keep one thing of the teacher's maps and lose another.

A copied map can do two things for a student: fetch what is in the image at the right place (routing), and say
something of the image by itself (a message). Each control takes one of them away.

- **jigsaw**: the image's own maps, over patches in one fixed shuffled order. What a map says stays, its
  sharpness stays, and it points at the wrong patches. The same as showing the student its patches in another
  order.
- **mean map**: one map for all images. It says nothing of an image.
- **blank**: a grey image for the student (`atlib.data.pair`). What it gets right it has read in the maps.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from atlib._util import in_eval_mode
from atlib.transfer import TeacherMaps
from atlib.walking import walk


def maps_of(teacher: nn.Module) -> TeacherMaps:
    """The teacher's own maps, made anew for every batch: what `AttentionTransfer(maps=)` takes.

    images (B, 3, height, width), as the teacher was trained to see them, to {layer: (B, H, N, N)}.
    """

    @torch.no_grad()
    def maps(images: Tensor) -> Mapping[int, Tensor]:
        with in_eval_mode(teacher):
            layers = walk(teacher, images, head=False).layers
        return {layer: seen.map for layer, seen in enumerate(layers)}

    return maps


def patch_order(patches: int, prefix: int, seed: int) -> Tensor:
    """A shuffled order of tokens, (prefix + patches,), in which the prefix tokens stay where they are.

    No patch stays at its place: another order is drawn until that is so. Raises `ValueError` for one patch.
    """
    if patches < 2:
        raise ValueError(f"{patches} patch cannot be shuffled: at least 2 are needed")
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(patches)
    while ((order := torch.randperm(patches, generator=generator)) == places).any():
        pass
    return torch.cat([torch.arange(prefix), prefix + order])


def jigsaw(maps: TeacherMaps, order: Tensor) -> TeacherMaps:
    """Maps whose queries and keys are in another order, the same for all images, layers and heads:
    new(i, j) = old(order[i], order[j])."""

    def shuffled(images: Tensor) -> Mapping[int, Tensor]:
        return {layer: p[:, :, order][:, :, :, order] for layer, p in maps(images).items()}

    return shuffled


def mean_map(maps: TeacherMaps, batches: Iterable[Tensor]) -> TeacherMaps:
    """The mean of the maps over some images, in batches (B, 3, height, width): one map for all images."""
    sums, count = {}, 0
    for images in batches:
        count += len(images)
        for layer, p in maps(images).items():
            sums[layer] = sums.get(layer, 0) + p.sum(0)
    means = {layer: total / count for layer, total in sums.items()}

    def mean_of_all(images: Tensor) -> Mapping[int, Tensor]:
        return {layer: p.expand(len(images), -1, -1, -1) for layer, p in means.items()}

    return mean_of_all
