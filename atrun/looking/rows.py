"""Rows of a model's attention maps on one image, in eight bits: what a page can hold."""

import base64
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlib._util import in_eval_mode
from atlib.analysis import check_maps, rollouts
from atlib.attention import walk
from atlib.compatibility import sizes_of
from atlib.maps import Grid, check_grid
from atlib.pair import student_of
from atrun.looking.panels import Panels, components, cosines, gradients

LEVELS = 255
BESIDE = ("mean", "rollout", "similarity")  # rows of a token and layer besides those of its heads


class Tokens(NamedTuple):
    """The tokens of a model for one image, in timm's order."""

    prefix: tuple[str, ...]  #: Names of those before the patches: "class token", "register 0".
    grid: Grid  #: Patches down and across.


class Coarse(NamedTuple):
    """The rows of all patches as queries over blocks of keys, where whole rows of all do not fit; in the
    order of `Rows.levels`, without prefix queries."""

    side: int  #: Patches a side of a block, fewer at the lower and the right edge.
    #: (rows, prefix + blocks), uint8: the shares of prefix tokens, and the mean share of a block's patches.
    levels: Tensor
    largest: Tensor  #: The largest number of each row, (rows,), float32.


class Rows(NamedTuple):
    """The rows of one model that are kept, quantised by `quantise`.

    The rows are in this order: layers, of each layer its heads, then those that `beside` names, and of each
    the queries: prefix tokens, then the patches at `down` x `across`, row by row.
    """

    tokens: Tokens
    heads: tuple[int, ...]  #: How many heads each layer of the model has, kept or not.
    layers: tuple[tuple[int, tuple[int, ...]], ...]  #: Which layers are kept, and which heads of each.
    down: tuple[int, ...]  #: The grid's rows and columns whose patches are kept as queries.
    across: tuple[int, ...]
    levels: Tensor  #: (rows, N), uint8, N being the number of all tokens: the keys are complete.
    largest: Tensor  #: The largest share of each row, (rows,), float32.
    #: What of `BESIDE` there is: the mean of the heads, the rollout up to the layer, and the cosines between
    #: the query's features and those of all tokens, which need a residual stream.
    beside: tuple[str, ...]
    panels: Panels
    #: Of the patches that are not kept as queries; None where all are, and where this does not fit either.
    coarse: Coarse | None = None

    def arrays(self) -> dict[str, Tensor]:
        """All of it as numbers, float32: {"layer 0/head 1": (queries, N), ..., "layer 0/mean", ...}, with
        "queries", the tokens that these are, and of each layer "norms" (N,), "components" (P, 3) and
        "gradient" (P,)."""
        shares = self.largest[:, None] * (self.levels.float() / LEVELS).square()
        queries = self.queries
        named = {"queries": queries}
        blocks = iter(shares.split(len(queries)))
        for at, (layer, heads) in enumerate(self.layers):
            columns = [*(f"head {head}" for head in heads), *self.beside]
            named |= {f"layer {layer}/{column}": next(blocks) for column in columns}
            for name, values in self.panels._asdict().items():
                if values is not None:
                    named[f"layer {layer}/{name}"] = values[at].float()
        return named

    @property
    def queries(self) -> Tensor:
        """The tokens whose rows are kept, (queries,)."""
        return _tokens_at(self.tokens, self.down, self.across)

    def content(self) -> dict:
        """As JSON, the numbers in base64, the lowest byte of a float32 first."""
        numbers = {"levels": self.levels, "largest": self.largest, **self.panels._asdict()}
        content = {
            "prefix": self.tokens.prefix,
            "grid": self.tokens.grid,
            "layers": [{"layer": layer, "heads": heads} for layer, heads in self.layers],
            "down": self.down,
            "across": self.across,
            "beside": self.beside,
            **{name: _text(values) for name, values in numbers.items() if values is not None},
        }
        if (coarse := self.coarse) is not None:
            parts = {"levels": _text(coarse.levels), "largest": _text(coarse.largest)}
            content["coarse"] = {"side": coarse.side, **parts}
        return content


def _text(values: Tensor) -> str:
    little = values.numpy() if values.dtype == torch.uint8 else values.numpy().astype("<f4")
    return base64.b64encode(little.tobytes()).decode()


def quantise(shares: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of shares (..., N), not negative, as levels 0 to 255 (..., N), uint8, and the largest share of
    each row (...), float32: level = round(255 · √(share / largest)). The error is at most
    (√(share · largest) + largest / 1020) / 255, plus the rounding of `largest` to float32."""
    exact = shares.double()
    largest = exact.amax(-1).float()
    relative = (exact / largest.double().clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(-1)).sqrt()
    return (LEVELS * relative).round().clamp(max=LEVELS).to(torch.uint8), largest


@torch.no_grad()
def read_rows(
    model: nn.Module,
    pixels: Tensor,
    room: int,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Rows:
    """Walk a model over one image, in eval mode, and keep rows of its maps in at most `room` bytes.

    model: a ViT that `walk` takes, or a module with a `walk(images)` of its own, such as `AttentionTransfer`.
    pixels: (1, 3, height, width). layers, heads: those that are kept, None for all; mean and rollout are over
    all. Prefix tokens are always kept as queries; where all patches do not fit, those of every second row and
    column are, or every third, and so on, and the others over the smallest blocks of keys (`Coarse`) that
    take at most half of the room.
    """
    images = _images(model, pixels)
    with in_eval_mode(model):
        walked = model.walk(images) if hasattr(model, "walk") else walk(model, images)
    seen, vit = walked.layers, student_of(model)
    tokens = tokens_of(vit, pixels)
    counts = tuple((layer.q if layer.given is None else layer.given).shape[1] for layer in seen)
    chosen = _chosen("layer", layers, len(seen))
    kept = tuple((layer, _chosen(f"layer {layer}: head", heads, counts[layer])) for layer in chosen)
    first = len(tokens.prefix)
    N = first + tokens.grid[0] * tokens.grid[1]
    stream = [after[0].float().cpu() for after in walked.stream if after.shape[1:2] == (N,)]
    beside = BESIDE if len(stream) == len(seen) else BESIDE[:2]
    rows = sum(len(some) + len(beside) for _, some in kept)
    down, across = _queries(tokens, rows * (N + 4), room)
    side = None
    if len(down) * len(across) < N - first:
        side, left = _blocks(tokens, rows, room)
        if side is not None:
            down, across = _queries(tokens, rows * (N + 4), left)

    means, of_layer = [], {}
    of_blocks: dict[int, list] = {}
    queries = _tokens_at(tokens, down, across)

    def keep(layer: int, whole: Tensor) -> None:
        """Rows (heads, N, N) of a layer."""
        of_layer.setdefault(layer, []).append(quantise(whole[:, queries]))
        if side is not None:
            of_blocks.setdefault(layer, []).append(quantise(_pooled(whole[:, first:], tokens, side)))

    for layer, inside in enumerate(seen):
        map = inside.map.cpu()  # one layer's map exists at a time
        check_maps(map, layer)
        check_grid(map.shape[-1], tokens.grid, first)
        map = map.double()
        map /= map.sum(-1, keepdim=True)  # half precision misses 1 by up to a hundredth
        means.append(map.mean(1, keepdim=True))
        if layer in chosen:
            keep(layer, map[0, list(dict(kept)[layer])])
    for layer, rolled in enumerate(rollouts(means)):
        if layer in chosen:
            of_all = [means[layer][0, 0], rolled[0]]
            of_all += [cosines(stream[layer])] if "similarity" in beside else []
            keep(layer, torch.stack(of_all))

    def joined(parts: dict[int, list]) -> list[Tensor]:
        both = zip(*(part for layer in chosen for part in parts[layer]))  # levels, and the largest shares
        return [torch.cat([part.flatten(0, 1) for part in of_layers]) for of_layers in both]

    gained = gradients(vit, _images(vit, pixels), seen, chosen)
    gradient = torch.stack([gained[layer][first:].float() for layer in chosen])
    panels = Panels(None, None, gradient)
    if "similarity" in beside:
        norms = torch.stack([stream[layer].norm(dim=-1) for layer in chosen])
        panels = Panels(norms, torch.stack([components(stream[layer][first:]) for layer in chosen]), gradient)
    coarse = Coarse(side, *joined(of_blocks)) if of_blocks else None
    return Rows(tokens, counts, kept, down, across, *joined(of_layer), beside, panels, coarse)


def tokens_of(vit: nn.Module, pixels: Tensor) -> Tokens:
    """Names of a ViT's prefix tokens, and its grid for images (B, 3, height, width)."""
    sizes, kinds = sizes_of(vit), ("class token", "distillation token", "register")
    names = [
        f"{kind} {index}" if kind == "register" else kind
        for kind, count in zip(kinds, sizes.prefix_kinds)
        for index in range(count)
    ]
    embed, size = getattr(vit, "patch_embed", None), tuple(pixels.shape[-2:])
    if hasattr(embed, "dynamic_feat_size"):
        grid = embed.dynamic_feat_size(size)
    else:  # patches are of one size, in images of any
        grid = tuple(side * patches // whole for side, patches, whole in zip(size, sizes.grid, sizes.image))
    if 0 in grid or any(side % patches for side, patches in zip(size, grid)):
        raise ValueError(f"{size[0]} x {size[1]} pixels are no whole patches, {grid[0]} x {grid[1]}")
    return Tokens(tuple(names), (int(grid[0]), int(grid[1])))


def _images(model: nn.Module, pixels: Tensor) -> Tensor:
    weight = next(model.parameters())
    return pixels.to(weight.device, weight.dtype)


def _tokens_at(tokens: Tokens, down: Sequence[int], across: Sequence[int]) -> Tensor:
    first = len(tokens.prefix)
    patches = [first + row * tokens.grid[1] + column for row in down for column in across]
    return torch.tensor([*range(first), *patches])


def _chosen(what: str, asked: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if asked is None:
        return tuple(range(count))
    wrong = [index for index in asked if not 0 <= index < count]
    if wrong or len(asked) == 0:
        raise ValueError(f"{what}s {list(asked)}: name at least one, each from 0 to {count - 1}")
    return tuple(sorted(set(asked)))


def _blocks(tokens: Tokens, rows: int, room: int) -> tuple[int | None, int]:
    """The side of the smallest blocks of keys over which `rows` rows of every patch take at most half of the
    room, and what they leave of it; None where none do, or leave too little for prefix tokens and a patch."""
    (down, across), first = tokens.grid, len(tokens.prefix)
    for side in range(2, max(tokens.grid) // 2 + 1):
        blocks = ceil(down / side) * ceil(across / side)
        remaining = room - rows * down * across * (first + blocks + 4)
        if remaining >= room // 2 and remaining >= (first + 1) * rows * (first + down * across + 4):
            return side, remaining
    return None, room


def _pooled(shares: Tensor, tokens: Tokens, side: int) -> Tensor:
    """Rows (heads, queries, N) over prefix tokens and blocks, of which each has its patches' mean."""
    first = len(tokens.prefix)
    patches = shares[..., first:].unflatten(-1, tokens.grid)
    means = torch.nn.functional.avg_pool2d(patches, side, ceil_mode=True)
    return torch.cat([shares[..., :first], means.flatten(-2)], -1)


def _queries(tokens: Tokens, bytes_a_query: int, room: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows and the columns of the grid whose patches are kept: the finest stride that fits."""
    for stride in range(1, max(tokens.grid) + 1):
        down, across = (tuple(range(min(stride // 2, side - 1), side, stride)) for side in tokens.grid)
        if (len(tokens.prefix) + len(down) * len(across)) * bytes_a_query <= room:
            return down, across
    needed = ceil((len(tokens.prefix) + 1) * bytes_a_query * 4 / 3 / 1e5) / 10
    raise ValueError(f"one patch and the prefix tokens need megabytes={needed} for each model")
