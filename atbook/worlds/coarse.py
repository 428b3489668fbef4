"""Half of what there is to know: the eight shapes of the glyph worlds, two to a class; and views of a scene
that no label depends on."""

from dataclasses import replace

import torch
from torch import Tensor

from atbook.worlds.glyphs import CELL, GRID, SHAPES
from atlib.data import Images

TOGETHER = 2  # shapes that share a coarse class: the first two, the next two, and so on


def classes(together: int = TOGETHER) -> tuple[str, ...]:
    """The names of the coarse classes of so many shapes each."""
    return tuple(" or ".join(SHAPES[first : first + together]) for first in range(0, len(SHAPES), together))


def coarse(images: Images, together: int = TOGETHER) -> Images:
    """The same images of a glyph world with coarse labels, of `together` shapes each, in place of shapes.
    Raises `ValueError` for labels that are no shapes."""
    shapes = images.targets
    if shapes.ndim != 1 or not (0 <= shapes.min() and shapes.max() < len(SHAPES)):
        raise ValueError(
            f"coarse labels are made of shapes, 0 to {len(SHAPES) - 1}, one an image; got targets"
            f" {tuple(shapes.shape)} from {shapes.min().item()} to {shapes.max().item()}"
        )
    return replace(images, targets=shapes // together, classes=classes(together))


def another_view(images: Tensor, noise: float = 0.4) -> Tensor:
    """A view of each scene of a glyph world that has the same label, for images (B, 3, height, width): all
    cells moved around the grid together, the three colour channels in another order, which turns hues into
    hues, and new noise on top, of that standard deviation. Draws from torch's global generator.

    Scenes are as likely as their views: places and hues are drawn evenly in these worlds, but for those with
    `World(pointer=...)`.
    """
    B, device = len(images), images.device
    channels = torch.rand(B, 3, device=device).argsort(1)
    images = images.gather(1, channels[:, :, None, None].expand_as(images))
    for axis, side in ((2, images.shape[2]), (3, images.shape[3])):
        steps = torch.randint(GRID, (B, 1), device=device) * CELL
        places = (torch.arange(side, device=device) - steps) % side  # (B, side)
        shape = [B, 1, side, 1] if axis == 2 else [B, 1, 1, side]
        images = images.gather(axis, places.view(shape).expand_as(images))
    return images + noise * torch.randn_like(images)
