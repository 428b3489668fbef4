"""Positional embeddings on another patch grid: an image of another size has other patches, and learned positions must follow."""

import math

from timm.layers import resample_abs_pos_embed
from torch import Tensor

from atlib.maps import Grid


def square_grid(patches: int) -> Grid:
    """The grid of `patches` patches that a file says no more about: a square. Raises `ValueError` where there is none."""
    side = math.isqrt(max(patches, 0))
    if side < 1 or side * side != patches:
        raise ValueError(f"positions for {patches} patches are no square grid, and the weights do not say which other: name the model with "
                         "architecture=, or write the file with atlib.checkpoint.save_vit, which keeps img_size")
    return side, side


def resize_positions(positions: Tensor, prefix_tokens: int, grid_from: Grid, grid_to: Grid) -> Tensor:
    """Positional embeddings (1, prefix tokens + patches, D) bicubically on another patch grid; those of prefix tokens stay as they are.

    It is timm's own resizing, with its antialiasing, so that a file and a timm name give the same teacher at every image size.
    (MAE's published code does not antialias.) With equal grids they come back unchanged.
    Raises `ValueError` when the positions are not those of `grid_from`. Source: bicubic, as in DeiT (arXiv 2012.12877, section 3),
    because bilinear interpolation shrinks the embeddings' norm.
    """
    if positions.ndim != 3 or len(positions) != 1 or positions.shape[1] != prefix_tokens + grid_from[0] * grid_from[1]:
        raise ValueError(f"positional embeddings are (1, tokens, D), and {prefix_tokens} prefix tokens and a grid of {grid_from[0]} x {grid_from[1]} patches "
                         f"are {prefix_tokens + grid_from[0] * grid_from[1]} tokens; got {tuple(positions.shape)}")
    return resample_abs_pos_embed(positions, new_size=list(grid_to), old_size=list(grid_from), num_prefix_tokens=prefix_tokens)
