"""Images and attention maps side by side, as a matplotlib Figure that is neither shown nor saved here."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor, nn

from atlib.analysis import class_attention


def image_grid(pixels: Tensor, titles: Sequence[str] = (), columns: int = 8) -> Figure:
    """Images (n, 3, height, width), uint8 or float in [0, 1], side by side in rows of `columns`."""
    rows = -(-len(pixels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(1.15 * columns, 1.35 * rows), squeeze=False, layout="constrained"
    )
    for index, axis in enumerate(axes.flat):
        axis.axis("off")
        if index < len(pixels):
            axis.imshow(np.asarray(pixels[index]).transpose(1, 2, 0))
            axis.set_title(titles[index] if index < len(titles) else "", fontsize=9)
    plt.close(figure)  # a notebook shows it once, as the value of its cell
    return figure


def first_middle_last(count: int) -> list[int]:
    """Which of so many layers are drawn, fewer than three of one or two."""
    return sorted({0, (count - 1) // 2, count - 1})


def looked_at(vit: nn.Module, map: Tensor) -> Tensor:
    """Where a ViT looks by a map (B, H, N, N), mean over heads, (B, rows, columns): what its class token
    gives to every patch; without one, and where maps are of patches alone, the mean over all queries."""
    rows, columns = vit.patch_embed.grid_size
    prefix = map.shape[-1] - rows * columns  # of the tokens that the map has
    if vit.cls_token is not None and prefix > 0:
        return class_attention(map, (rows, columns), prefix).mean(1)
    return map.mean((1, 2))[:, prefix:].unflatten(-1, (rows, columns))


def coloured(seen: Tensor, size: Sequence[int]) -> Tensor:
    """Pictures (n, rows, columns) in colours, float (n, 3, height, width) of `size`, each on a scale of its
    own, from 0 to its largest number."""
    shares = (seen / seen.amax((1, 2), keepdim=True).clamp(min=1e-12)).float().numpy()
    colours = torch.from_numpy(colormaps["magma"](shares)[..., :3]).movedim(-1, 1).float()
    return nn.functional.interpolate(colours, tuple(size))
