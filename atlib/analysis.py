"""Maps of students and teachers, described and compared. A map is (B, H, N, N), rows (queries) sum to 1;
prefix tokens (class token, registers) come first, then patches row by row."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from atlib._util import in_eval_mode, require_known
from atlib.attention import Walk, walk
from atlib.compatibility import sizes_of
from atlib.data import Images
from atlib.maps import Grid, check_grid
from atlib.pair import check_images, check_normalisation, student_of
from atlib.vit import check_timm

AT_ONCE = 2**28  # bytes that the walks of one batch may hold
# How far a row may be from 1: far above a softmax's rounding, far below one key lost.
TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
PAIRINGS = ("direct", "bipartite", "minimum", "average")


@torch.no_grad()
def walks(models: Sequence[nn.Module], images: Images, batch_size: int) -> Iterator[tuple[Walk, ...]]:
    """Every batch of `images`, in order, walked by every model, in eval mode and without gradients: a tuple
    of walks a batch, of fewer images where they would not fit `AT_ONCE`. A model is a ViT, or has a
    `walk(images)` method, such as `AttentionTransfer`."""
    if len(images) == 0 or batch_size < 1:
        raise ValueError(f"{len(images)} images in batches of {batch_size}: both must be at least 1")
    vits = [vit_of(model) for model in models]
    of_image = 0  # bytes of its walks, about: q, k, v, two states a layer, and a layer's maps in float64
    for vit in vits:
        tokens = (vit.patch_embed.num_patches or 0) + vit.num_prefix_tokens
        of_image += 4 * 5 * len(vit.blocks) * tokens * vit.embed_dim
        of_image += 8 * 4 * sizes_of(vit).heads * tokens**2
    at_once = min(batch_size, max(1, AT_ONCE // of_image))
    for model in models:
        check_normalisation(model, images)
    kinds = [next(model.parameters()) for model in models]
    with in_eval_mode(*models):
        for batch, _ in images.loader(at_once):
            for vit in vits:
                check_images(vit, batch[:, 0] if batch.ndim == 5 else batch)  # of pairs the student's
            placed = zip(models, (batch.to(kind.device, kind.dtype) for kind in kinds))
            yield tuple(
                model.walk(images) if hasattr(model, "walk") else walk(model, images, head=False)
                for model, images in placed
            )


def vit_of(model: nn.Module) -> nn.Module:
    """The ViT whose layers `walks` goes through. Raises `atlib.attention.Unwalkable` for anything else."""
    vit = student_of(model)
    check_timm(vit)
    return vit


class LayerStatistics(NamedTuple):
    """One layer's maps: a number a head each, (H,), the mean over images and queries; in patches, in nats,
    and from 0 to 1."""

    distance: Tensor
    entropy: Tensor
    prefix_share: Tensor


def attention_distance(maps: Tensor, grid: Grid, prefix_tokens: int) -> Tensor:
    """Mean distance between a patch and the patches it attends to, weighted by the map (B, H, N, N): (H,), in
    steps of the patch `grid`. Prefix tokens have no place: as queries they are left out, and a patch's row is
    rescaled without them; nan where no row gives the patches anything. Source: Wang et al. 2023 (arXiv
    2205.14443); that rows are rescaled is ours."""
    check_maps(maps)
    total, rows = _distances(maps, grid, prefix_tokens)
    return total / rows


def prefix_share(maps: Tensor, prefix_tokens: int) -> Tensor:
    """The share of the patches' attention (B, H, N, N) that goes to prefix tokens: (H,), from 0 to 1."""
    check_maps(maps)
    if not 0 <= prefix_tokens < maps.shape[-1]:
        raise ValueError(f"prefix_tokens={prefix_tokens} leaves no patch of {maps.shape[-1]} tokens")
    return _exact(maps[:, :, prefix_tokens:, :prefix_tokens]).sum(-1).mean((0, 2))


def attention_entropy(maps: Tensor) -> Tensor:
    """Mean entropy of the rows of maps (B, H, N, N), prefix tokens included: (H,), in nats, from 0 (one key)
    to log N (uniform). Source: Wang et al. 2023 (arXiv 2205.14443)."""
    check_maps(maps)
    return torch.special.entr(_exact(maps)).sum(-1).mean((0, 2))


def rollout(maps: Sequence[Tensor], residual: float = 0.5) -> Tensor:
    """From which input token each output token's information comes, by attention alone: (B, N, N), rows sum
    to 1. Every layer's maps (B, H, N, N) are taken as residual · identity + (1 - residual) · mean of the
    heads, and multiplied. Source: Abnar & Zuidema 2020 (arXiv 2005.00928), with residual = 1/2."""
    return rollouts(maps, residual)[-1]


def rollouts(maps: Sequence[Tensor], residual: float = 0.5) -> list[Tensor]:
    """`rollout` up to each layer: one (B, N, N) per layer, the last that of all."""
    if len(maps) == 0 or not 0 <= residual <= 1:
        raise ValueError(f"{len(maps)} maps, residual={residual}: at least one map, and a share from 0 to 1")
    for layer, map in enumerate(maps):
        check_maps(map, layer)
        if len(map) != len(maps[0]):  # one image would be broadcast
            raise ValueError(f"layer {layer} has the maps of {len(map)} images, not of {len(maps[0])}")
    identity = torch.eye(maps[0].shape[-1], dtype=_exact(maps[0]).dtype, device=maps[0].device)
    rolled = [identity.expand(len(maps[0]), -1, -1)]
    for map in maps:
        rolled.append((residual * identity + (1 - residual) * _exact(map).mean(1).to(identity)) @ rolled[-1])
    return rolled[1:]


def class_attention(map: Tensor, grid: Grid, prefix_tokens: int) -> Tensor:
    """What the class token gives to every patch, not rescaled: (B, H, N, N) to (B, H, rows, columns)."""
    check_maps(map)
    grid = check_grid(map.shape[-1], grid, prefix_tokens)
    if prefix_tokens == 0:
        raise ValueError("prefix_tokens=0: no class token, no class attention")
    return map[:, :, 0, prefix_tokens:].unflatten(-1, grid)


def describe_layers(model: nn.Module, images: Images, batch_size: int = 100) -> list[LayerStatistics]:
    """`LayerStatistics` of every layer of a model over a data set, on the CPU; of a pair the student's."""
    vit = vit_of(model)
    grid, prefix_tokens = vit.patch_embed.grid_size, vit.num_prefix_tokens
    totals, count = [torch.zeros((), dtype=torch.float64) for _ in vit.blocks], 0  # each becomes (4, H)
    for (seen,) in walks([model], images, batch_size):
        count += len(seen.tokens)  # not all of `images`, where some cannot be decoded
        for layer, map in enumerate(of_layer.map for of_layer in seen.layers):
            check_maps(map, layer)
            distance, rows = _distances(map, grid, prefix_tokens)
            entropy, share = len(map) * attention_entropy(map), len(map) * prefix_share(map, prefix_tokens)
            totals[layer] = totals[layer] + torch.stack([distance, rows, entropy, share]).cpu().double()
    return [
        LayerStatistics(distance / rows, entropy / count, share / count)
        for distance, rows, entropy, share in totals
    ]


def _distances(maps: Tensor, grid: Grid, prefix_tokens: int) -> tuple[Tensor, Tensor]:
    """The sum over images and patches of their distances, and how many rows have one: (H,) and (H,)."""
    check_grid(maps.shape[-1], grid, prefix_tokens)
    patches = _exact(maps[:, :, prefix_tokens:, prefix_tokens:])
    sides = (torch.arange(side, dtype=patches.dtype, device=maps.device) for side in grid)
    places = torch.cartesian_prod(*sides)  # (P, 2)
    apart = (places[:, None] - places).norm(dim=-1)  # (P, P)
    share = patches.sum(-1)  # (B, H, P)
    placed = share >= torch.finfo(patches.dtype).tiny
    distance = (patches * apart).sum(-1) / share.where(placed, 1)
    return distance.where(placed, 0).sum((0, 2)), placed.sum((0, 2)).to(patches.dtype)


def _exact(maps: Tensor) -> Tensor:
    """In float32 at least: sums over many keys would lose the digits that half precision has."""
    return maps.to(torch.promote_types(maps.dtype, torch.float32))


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions over the last axis, (..., N) each: (...), in nats, float64,
    from 0 to ln 2. With m = (p + q) / 2 it is H(m) - (H(p) + H(q)) / 2. Source: Lin 1991."""
    if p.shape != q.shape or p.numel() == 0:
        raise ValueError(f"p and q are of one shape, got {tuple(p.shape)} and {tuple(q.shape)}")
    for name, rows in (("p", p), ("q", q)):
        check_rows(rows, f"{name}: row")
    p, q = as_double(p), as_double(q)
    return _divergence(p, q, _entropy(p), _entropy(q))


def head_divergence(maps_a: Tensor, maps_b: Tensor, pairing: str) -> float:
    """How far the heads of two layers are apart, in nats from 0 to ln 2, for the maps (B, H, N, N) of the
    same images: the mean over images, queries and pairs of heads. pairing: "direct", head h with head h;
    "bipartite", one to one so that the mean is least; "minimum", every head of a with the nearest of b;
    "average", of the maps averaged over heads. Source: arXiv 2411.09702, appendix."""
    divergence = StreamingDivergence()
    divergence.update(maps_a, maps_b)
    return divergence.value(pairing)


class StreamingDivergence:
    """`head_divergence` of maps that come in batches."""

    def __init__(self):
        self.images = 0
        self._heads: Tensor | None = None  # sum over images of the mean over queries, (H_a, H_b)
        self._averaged = 0.0  # the same for the maps averaged over heads

    def update(self, maps_a: Tensor, maps_b: Tensor, layers: tuple[int, int] | None = None) -> None:
        """Add the maps (B, H, N, N) of the same images."""
        for name, maps, layer in zip("ab", (maps_a, maps_b), layers or (None, None)):
            check_maps(maps, layer, name)
        if maps_a[:, 0].shape != maps_b[:, 0].shape:
            raise ValueError(f"maps are {tuple(maps_a.shape)} and {tuple(maps_b.shape)}: the same tokens")
        heads = maps_a.shape[1], maps_b.shape[1]
        if self._heads is None:
            self._heads = torch.zeros(heads, dtype=torch.float64)
        if self._heads.shape != heads:
            raise ValueError(f"maps have {heads} heads, and had {tuple(self._heads.shape)}")
        # One head at a time: (B, N, N) in float64 is all that is ever made.
        entropies_b = [_entropy(as_double(q)) for q in maps_b.unbind(1)]
        for h, p in enumerate(maps_a.unbind(1)):
            p = as_double(p)
            entropy = _entropy(p)
            for g, (q, entropy_b) in enumerate(zip(maps_b.unbind(1), entropies_b)):
                apart = _divergence(p, as_double(q).to(p.device), entropy, entropy_b.to(p.device))
                self._heads[h, g] += apart.mean(-1).sum().item()
        mean_a, mean_b = (sum(map(as_double, maps.unbind(1))) / maps.shape[1] for maps in (maps_a, maps_b))
        mean_b = mean_b.to(mean_a.device)
        apart = _divergence(mean_a, mean_b, _entropy(mean_a), _entropy(mean_b))
        self._averaged += apart.mean(-1).sum().item()
        self.images += len(maps_a)

    def matrix(self) -> Tensor:
        """The divergence of every head of a from every head of b: (H_a, H_b), float64, nats."""
        return self._heads / self.images

    def value(self, pairing: str) -> float:
        """The divergence for one `pairing`, in nats."""
        require_known("pairing", pairing, PAIRINGS)
        matrix = self.matrix()
        if pairing == "average":
            return self._averaged / self.images
        if pairing == "minimum":
            return matrix.min(1).values.mean().item()
        if pairing == "bipartite":
            return matrix[linear_sum_assignment(matrix.numpy())].mean().item()
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"'direct' needs equal numbers of heads, got {tuple(matrix.shape)}")
        return matrix.diagonal().mean().item()


def compare_layers(
    a: nn.Module, b: nn.Module, images: Images, layers: Mapping[int, int] | None = None, batch_size: int = 50
) -> list[StreamingDivergence]:
    """The divergence of the maps of `a` and `b`, which `walks` takes, for each pair of layers, {layer of a:
    layer of b}; None: index by index."""
    depths = len(vit_of(a).blocks), len(vit_of(b).blocks)
    if layers is None and depths[0] != depths[1]:
        raise ValueError(f"depths {depths}: give layers={{layer of a: layer of b}}")
    pairs = [(i, i) for i in range(depths[0])] if layers is None else list(layers.items())
    if not pairs or any(not (0 <= i < depths[0] and 0 <= j < depths[1]) for i, j in pairs):
        raise ValueError(f"layers={layers} of depths {depths}")
    divergences = [StreamingDivergence() for _ in pairs]
    for of_a, of_b in walks((a, b), images, batch_size):
        for divergence, (i, j) in zip(divergences, pairs):
            divergence.update(of_a.layers[i].map, of_b.layers[j].map, (i, j))
    return divergences


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def _divergence(p: Tensor, q: Tensor, entropy_p: Tensor, entropy_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence; rounding may not make it negative."""
    return (_entropy((p + q) / 2) - (entropy_p + entropy_q) / 2).clamp(min=0)


def check_maps(maps: Tensor, layer: int | None = None, name: str = "") -> None:
    """Raise `ValueError` unless `maps` are (B, H, N, N), with rows that sum to 1."""
    where = (f"{name}: " if name else "") + ("" if layer is None else f"layer {layer}: ")
    square = maps.ndim == 4 and maps.shape[-1] == maps.shape[-2]
    if not square or maps.numel() == 0 or not maps.is_floating_point():
        raise ValueError(f"{where}maps are (B, H, N, N) and not empty, got {maps.dtype} {tuple(maps.shape)}")
    check_rows(maps, f"{where}(image, head, query)")


def check_rows(p: Tensor, name: str) -> None:
    """Raise `ValueError` unless rows over the last axis are distributions; a NaN shows in its sum."""
    half = p.is_floating_point() and torch.finfo(p.dtype).bits < 32
    sums, least = p.sum(-1, dtype=torch.float32 if half else None), p.amin(-1)
    fits = ((sums - 1).abs() <= (HALF_TOLERANCE if half else TOLERANCE)) & (least >= 0)
    if not fits.all():
        row = tuple((~fits).nonzero()[0].tolist())
        raise ValueError(f"{name} {row} sums to {sums[row]:.6g}, its least entry is {least[row]:.6g}")


def as_double(x: Tensor) -> Tensor:
    """x in float64, without gradients; on the CPU where its device has no float64 (Apple's GPUs)."""
    return x.detach().to("cpu" if x.device.type == "mps" else x.device, torch.float64)
