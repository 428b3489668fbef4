"""Operations on attention maps (B, H, N, N), whose rows (queries) sum to 1 over the last axis (keys). Tokens
are in timm's order: prefix tokens (class token, registers), then patches row by row."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from atlib._util import require_known

AVERAGES = ("examples", "layers", "heads", "queries")  # of a plan: all but the first
Grid = tuple[int, int]  # patches down, patches across


def average_over(maps: Sequence[Tensor], what: str) -> list[Tensor]:
    """The maps, one (B, H, N, N) per layer, averaged over `what` ("examples", "layers", "heads" or
    "queries"), in their own shapes; they may be expanded views. Source: arXiv 2411.09702, appendix."""
    require_known("average", what, AVERAGES)
    for map in maps:
        _check_map(map)
    if what == "layers":
        if len(maps) < 2:
            raise ValueError("an average over 'layers' needs at least two layers")
        return [torch.stack(list(maps)).mean(0)] * len(maps)
    if what == "examples" and any(len(map) == 1 for map in maps):
        raise ValueError("an average over 'examples' needs at least two, and the batch is 1")
    axis = {"examples": 0, "heads": 1, "queries": 2}[what]
    return [map.mean(axis, keepdim=True).expand_as(map) for map in maps]


def mean_heads(map: Tensor) -> Tensor:
    """The mean of a map's heads: (B, H, N, N) to (B, 1, N, N)."""
    _check_map(map)
    return map.mean(1, keepdim=True)


def aggregate_heads(
    map: Tensor | None = None, temperature: float = 10.0, *, scores: Tensor | None = None
) -> Tensor:
    """All heads merged into one by the product of their maps, softened: softmax_j(Σ_h log p_h(i, j) / T), (B,
    1, N, N); or rows alone, (B, H, 1, N) to (B, 1, 1, N). Give either the `map` or, to be exact where a
    probability underflows, the `scores` it is the softmax of. With equal scales in all heads this is
    attention of one head with `join_heads`' q and k and the scale divided by T. Source: AttnDistill (arXiv
    2210.00944), T = 10."""
    if (map is None) == (scores is None):
        raise ValueError("give the map or the scores it is made of, one of the two")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: it must be above 0")
    if scores is None:
        scores = map.clamp(min=torch.finfo(map.dtype).tiny).log()
    if scores.ndim != 4:
        raise ValueError(f"maps and scores are (B, H, queries, keys), got {tuple(scores.shape)}")
    return (scores.sum(1, keepdim=True) / temperature).softmax(-1)


def join_heads(x: Tensor) -> Tensor:
    """The q or k of all heads side by side as one wide head: (B, H, N, d) to (B, 1, N, H·d)."""
    return x.transpose(1, 2).flatten(2).unsqueeze(1)


def resample(map: Tensor, grid_from: Grid, grid_to: Grid, prefix_tokens: int) -> Tensor:
    """The map (B, H, N, N) of one patch grid as it would be on another: (B, H, M, M), M = prefix tokens +
    patches of `grid_to`. Keys as in `resample_class_attention`; then the rows of the patches in the same way,
    each key by itself, with both parts rescaled to their interpolated shares. Source: ours."""
    _check_map(map)
    grid_from = check_grid(map.shape[-1], grid_from, prefix_tokens, "grid_from")
    grid_to = tuple(grid_to)
    if grid_from == grid_to:
        return map
    n = prefix_tokens
    rows = _resample_keys(map, grid_from, grid_to, n)  # (B, H, N, M), rows sum to 1
    patches = _interpolate(rows[:, :, n:].mT, grid_from, grid_to).mT  # over queries; rows still sum to 1
    share = patches[..., :n].sum(-1, keepdim=True).clamp(0, 1)
    patches = torch.cat([rescale(patches[..., :n], share), rescale(patches[..., n:], 1 - share)], -1)
    return torch.cat([rows[:, :, :n], patches], 2)


def resample_class_attention(
    attention: Tensor, grid_from: Grid, grid_to: Grid, prefix_tokens: int = 1
) -> Tensor:
    """One query's attention (B, H, prefix tokens + patches) on another patch grid: what goes to the patches
    is interpolated bicubically, antialiased where a side shrinks more than twofold, clamped at 0 and rescaled
    to its former sum. Source: AttnDistill (arXiv 2210.00944); antialiasing and the clamp at 0 are ours."""
    if attention.ndim != 3:
        raise ValueError(f"class attention is (B, H, tokens), got {tuple(attention.shape)}")
    grid_from = check_grid(attention.shape[-1], grid_from, prefix_tokens, "grid_from")
    grid_to = tuple(grid_to)
    if grid_from == grid_to:
        return attention
    return _resample_keys(attention.unsqueeze(2), grid_from, grid_to, prefix_tokens).squeeze(2)


def keep_tokens(map: Tensor, tokens: Sequence[int]) -> Tensor:
    """The map among `tokens` only, in their order: (B, H, n, n), each row rescaled to sum to 1."""
    _check_map(map)
    N, tokens = map.shape[-1], list(tokens)
    if not tokens or len({*tokens} & {*range(N)}) < len(tokens):
        raise ValueError(f"tokens={tokens}: distinct, at least one, from 0 to {N - 1}")
    if tokens == list(range(N)):
        return map
    index = torch.tensor(tokens, device=map.device)
    kept = map.index_select(2, index).index_select(3, index)
    mass = kept.sum(-1, keepdim=True)
    empty = mass.detach().squeeze(-1) < torch.finfo(map.dtype).tiny
    if empty.any():
        b, h, i = empty.nonzero()[0].tolist()
        raise ValueError(f"batch {b}, head {h}, row {tokens[i]} gives nothing to the kept tokens")
    return kept / mass


def place_tokens(map: Tensor, tokens: Sequence[int], number: int) -> Tensor:
    """The map of some tokens, (B, H, n, n), at `tokens`, in their order, among `number`: (B, H, N, N). Rows
    and columns of the others are 0."""
    _check_map(map)
    tokens = list(tokens)
    if tokens == list(range(number)):
        return map
    placed = map.new_zeros(*map.shape[:2], number, number)
    index = torch.tensor(tokens, device=map.device)
    placed[:, :, index[:, None], index] = map
    return placed


def keep_own(map: Tensor, kept: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    """`map` with parts of `kept`, both (B, H, N, N): the rows `queries` are all of `kept`; in the other rows
    the columns `keys` are, and the rest is `map` · (1 - s), where s is what such a row of `kept` gives to
    `keys`. Rows of `map` are 0 on `keys`. Source: ours."""
    tokens = torch.arange(map.shape[-1], device=map.device)
    is_query, is_key = (torch.isin(tokens, tokens.new_tensor(list(some))) for some in (queries, keys))
    share = kept.where(is_key, 0).sum(-1, keepdim=True)
    return torch.where(is_query[:, None] | is_key, kept, (1 - share) * map)


def _resample_keys(rows: Tensor, grid_from: Grid, grid_to: Grid, prefix_tokens: int) -> Tensor:
    """(B, H, queries, prefix + patches of grid_from) to (B, H, queries, prefix + patches of grid_to), row
    sums of both parts kept."""
    prefix, patches = rows[..., :prefix_tokens], rows[..., prefix_tokens:]
    moved = _interpolate(patches, grid_from, grid_to)
    return torch.cat([prefix, rescale(moved, patches.sum(-1, keepdim=True))], -1)


def _interpolate(x: Tensor, grid_from: Grid, grid_to: Grid) -> Tensor:
    """Bicubic over the patches of the last axis, one side of the grid after the other."""
    kind = x.dtype
    images = x.reshape(-1, 1, *grid_from)
    images = images.float() if kind in (torch.float16, torch.bfloat16) else images
    for sides in ((grid_to[0], grid_from[1]), grid_to):
        shrinks = 2 * sides[0] < images.shape[2] or 2 * sides[1] < images.shape[3]
        images = F.interpolate(images, size=sides, mode="bicubic", align_corners=False, antialias=shrinks)
    return images.reshape(*x.shape[:-1], grid_to[0] * grid_to[1]).to(kind)


def rescale(x: Tensor, total: Tensor) -> Tensor:
    """x, clamped at 0, with the sum `total` over its last axis; all zero where there is nothing."""
    x = x.clamp(min=0)
    return x * (total / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny))


def _check_map(map: Tensor) -> None:
    if map.ndim != 4 or map.shape[-1] != map.shape[-2]:
        raise ValueError(f"a map is (B, H, N, N), got {tuple(map.shape)}")


def check_grid(tokens: int, grid: Grid, prefix_tokens: int, name: str = "grid") -> Grid:
    """`grid` as a tuple. Raises `ValueError` unless `tokens` are `prefix_tokens` and its patches."""
    down, across = grid = tuple(grid)
    if prefix_tokens < 0 or min(grid) < 1 or down * across != tokens - prefix_tokens:
        raise ValueError(f"{name}={grid} does not fit {tokens} tokens, {prefix_tokens} of them prefix tokens")
    return grid
