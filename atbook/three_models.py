"""Three attention layers with unlike maps that compute the same: maps alone do not say what a layer does."""

from typing import NamedTuple

import torch
from torch import Tensor


class TinyLayer(NamedTuple):
    """One attention layer, written out. maps: (1, H, N, N); values: (1, H, N, d); projection: (H·d, D)."""

    maps: Tensor
    values: Tensor
    projection: Tensor

    @property
    def output(self) -> Tensor:
        """What the layer adds to its tokens: (1, N, D)."""
        return (self.maps @ self.values).transpose(1, 2).flatten(2) @ self.projection


def three_models() -> dict[str, TinyLayer]:
    """Three attention layers, "A", "B" and "C", with one and the same output: the same operation with other
    maps.

    B is A with its heads in another order, their values and projections with them. C is A with attention
    moved: tokens 0 and 1 have equal values in every head, so that looking at one does what looking at the
    other does, and C looks only at token 1.
    """
    H, N, d, D = 3, 5, 2, 6
    generator = torch.Generator().manual_seed(0)
    maps, values, projection = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((1, H, N, N), (1, H, N, d), (H * d, D))
    )
    maps = (2 * maps).softmax(-1)
    values[:, :, 1] = values[:, :, 0]
    order = [1, 2, 0]
    moved = maps.clone()
    moved[..., 1] += moved[..., 0]
    moved[..., 0] = 0
    return {
        "A": TinyLayer(maps, values, projection),
        "B": TinyLayer(
            maps[:, order], values[:, order], projection.unflatten(0, (H, d))[order].flatten(0, 1)
        ),
        "C": TinyLayer(moved, values, projection),
    }
