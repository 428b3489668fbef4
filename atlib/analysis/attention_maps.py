"""What attention maps look like: how far they reach, how spread out they are, and pictures of them.

A map is (B, H, N, N), rows (queries) sum to 1; tokens are in timm's order, prefix tokens (class token,
registers) first, then patches row by row. Statistics are one number a head, means over images and queries.
Maps that are none are refused with the head named (`atlib.analysis.checks`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlib.analysis.checks import check_maps
from atlib.analysis.streaming import vit_of, walks
from atlib.data.images import Images
from atlib.maps import Grid, check_grid


class LayerStatistics(NamedTuple):
    """One layer's maps in three numbers a head, (H,) each. distance: in patches; entropy: in nats;
    prefix_share: 0 to 1."""

    distance: Tensor
    entropy: Tensor
    prefix_share: Tensor


def attention_distance(maps: Tensor, grid: Grid, prefix_tokens: int) -> Tensor:
    """Mean distance between a patch and the patches it attends to, weighted by the map (B, H, N, N): (H,), in
    patches.

    The distance is Euclidean on the patch `grid`, 1 between neighbours. Prefix tokens have no place: as
    queries they are left out, and of a patch's row what goes to them is taken out (`prefix_share` says how
    much) and the rest rescaled to sum to 1, so that a head that leans on the class token does not seem
    short-sighted. A row that gives the patches nothing has no distance and is left out of the mean. Raises
    `ValueError` when the grid does not fit, and for a head none of whose rows has a distance. Source: Wang et
    al. 2023, lightweight ViTs (arXiv 2205.14443); whether it rescales we could not find out, so the rescaling
    is our choice. Implementations in wide use drop the prefix tokens without it.
    """
    check_maps(maps)
    return _mean_distance(*_distances(maps, grid, prefix_tokens))


def prefix_share(maps: Tensor, prefix_tokens: int) -> Tensor:
    """The share of the patches' attention (B, H, N, N) that goes to prefix tokens: (H,), from 0 to 1.

    It is what `attention_distance` takes out. Raises `ValueError` for a number of prefix tokens that leaves
    no patch.
    """
    check_maps(maps)
    if not 0 <= prefix_tokens < maps.shape[-1]:
        raise ValueError(f"prefix_tokens={prefix_tokens} leaves no patch of {maps.shape[-1]} tokens")
    return _exact(maps[:, :, prefix_tokens:, :prefix_tokens]).sum(-1).mean((0, 2))


def attention_entropy(maps: Tensor) -> Tensor:
    """Mean entropy of the rows of maps (B, H, N, N), prefix tokens included: (H,), in nats, from 0 (one key)
    to log N (uniform).

    Source: Wang et al. 2023 (arXiv 2205.14443).
    """
    check_maps(maps)
    return torch.special.entr(_exact(maps)).sum(-1).mean((0, 2))


def rollout(maps: Sequence[Tensor], residual: float = 0.5) -> Tensor:
    """From which input token each output token's information comes, by attention alone: (B, N, N), rows sum
    to 1.

    maps: one (B, H, N, N) per layer, first layer first. Every layer is taken as residual · identity + (1 -
    residual) · mean of its heads, and the layers are multiplied. Raises `ValueError` without maps, for
    unequal shapes, and for `residual` outside 0 to 1. Source: Abnar & Zuidema 2020, attention rollout (arXiv
    2005.00928), with residual = 1/2.
    """
    return rollouts(maps, residual)[-1]


def rollouts(maps: Sequence[Tensor], residual: float = 0.5) -> list[Tensor]:
    """`rollout` up to each layer: one (B, N, N) per layer, the last that of all. Arguments and errors are
    those of `rollout`."""
    if len(maps) == 0 or not 0 <= residual <= 1:
        raise ValueError(
            f"{len(maps)} maps, residual={residual}: give at least one map, and a share of the skip"
            " connection from 0 to 1; the paper uses 0.5"
        )
    for layer, map in enumerate(maps):
        check_maps(map, layer)
        if (map.shape[0], map.shape[2]) != (maps[0].shape[0], maps[0].shape[2]):
            raise ValueError(
                f"layer {layer}: the map is {tuple(map.shape)}, that of layer 0 {tuple(maps[0].shape)}:"
                " images and tokens must agree"
            )
    identity = torch.eye(maps[0].shape[-1], dtype=_exact(maps[0]).dtype, device=maps[0].device)
    rolled = [identity.expand(len(maps[0]), -1, -1)]
    for map in maps:
        rolled.append((residual * identity + (1 - residual) * _exact(map).mean(1).to(identity)) @ rolled[-1])
    return rolled[1:]


def class_attention(map: Tensor, grid: Grid, prefix_tokens: int) -> Tensor:
    """What the class token gives to every patch, as pictures: a map (B, H, N, N) to (B, H, rows, columns).

    Not rescaled: a picture sums to 1 less what goes to prefix tokens. Raises `ValueError` when the grid does
    not fit, or without a class token, which is the first of the prefix tokens.
    """
    check_maps(map)
    grid = check_grid(map.shape[-1], grid, prefix_tokens)
    if prefix_tokens == 0:
        raise ValueError("prefix_tokens=0: no class token, no class attention; take map.mean(2) instead")
    return map[:, :, 0, prefix_tokens:].unflatten(-1, grid)


def describe_layers(model: nn.Module, images: Images, batch_size: int = 100) -> list[LayerStatistics]:
    """`LayerStatistics` of every layer of a model over a data set, on the CPU; the maps of one layer and
    batch exist at a time.

    model: a ViT or an `AttentionTransfer`, of which the student's layers are described, with the teacher's
    maps in them where the plan copies. Raises as `attention_distance` does, naming the layer.
    """
    vit = vit_of(model)
    grid, prefix_tokens = vit.patch_embed.grid_size, vit.num_prefix_tokens
    totals = [torch.zeros((), dtype=torch.float64) for _ in vit.blocks]  # each becomes (4, H)
    for (seen,) in walks([model], images, batch_size):
        for layer, one in enumerate(seen.layers):
            map = one.map
            check_maps(map, layer)
            distance, rows = _distances(map, grid, prefix_tokens)
            entropy, share = len(map) * attention_entropy(map), len(map) * prefix_share(map, prefix_tokens)
            totals[layer] = totals[layer] + torch.stack([distance, rows, entropy, share]).cpu().double()
    return [
        LayerStatistics(
            _mean_distance(distance, rows, f"layer {layer}: "), entropy / len(images), share / len(images)
        )
        for layer, (distance, rows, entropy, share) in enumerate(totals)
    ]


def _distances(maps: Tensor, grid: Grid, prefix_tokens: int) -> tuple[Tensor, Tensor]:
    """Per head the sum over images and patches of their distances, and how many rows have one: (H,) and
    (H,)."""
    check_grid(maps.shape[-1], grid, prefix_tokens)
    patches = _exact(maps[:, :, prefix_tokens:, prefix_tokens:])
    down, across = torch.meshgrid(
        *(torch.arange(side, dtype=patches.dtype, device=maps.device) for side in grid), indexing="ij"
    )
    places = torch.stack([down.flatten(), across.flatten()], -1)
    apart = (places[:, None] - places).norm(dim=-1)  # (P, P)
    share = patches.sum(-1)  # (B, H, P)
    placed = share >= torch.finfo(patches.dtype).tiny
    distance = (patches * apart).sum(-1) / share.where(placed, 1)
    return distance.where(placed, 0).sum((0, 2)), placed.sum((0, 2)).to(patches.dtype)


def _mean_distance(total: Tensor, rows: Tensor, where: str = "") -> Tensor:
    if (rows == 0).any():
        head = (rows == 0).nonzero()[0].item()
        raise ValueError(
            f"{where}head {head}: every patch gives all its attention to prefix tokens, so there is no"
            " distance; see prefix_share"
        )
    return total / rows


def _exact(maps: Tensor) -> Tensor:
    """In float32 at least: sums over many keys would lose the digits that half precision has."""
    return maps.to(torch.promote_types(maps.dtype, torch.float32))
