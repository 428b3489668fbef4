"""Do two models attend alike? Jensen-Shannon divergence between attention maps, with the heads paired in four
ways.

Sources: Li et al. 2024 (arXiv 2411.09702), appendix, for the pairings and for the question whether unlike
maps can do the same operation. The three layers that answer it here are built by us.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from atlib._util import require_known
from atlib.analysis.checks import as_double, check_maps, check_probabilities
from atlib.analysis.streaming import vit_of, walks
from atlib.data.images import Images

PAIRINGS = ("direct", "bipartite", "minimum", "average")


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of distributions over the last axis, (..., N) each: (...), in nats, float64,
    from 0 to ln 2.

    With m = (p + q) / 2 it is H(m) - (H(p) + H(q)) / 2, where an entry of 0 adds nothing. Source: Lin 1991,
    IEEE Transactions on Information Theory 37(1). Raises `ValueError` for unequal shapes and for what is no
    distribution: not finite, negative, or not of sum 1.
    """
    if p.shape != q.shape or p.ndim == 0:
        raise ValueError(
            f"p and q are distributions over the same last axis, got {tuple(p.shape)} and {tuple(q.shape)}"
        )
    for name, each in (("p", p), ("q", q)):
        check_probabilities(each.reshape(-1, each.shape[-1]), name)
    return _divergence(p, q)


def head_divergence(maps_a: Tensor, maps_b: Tensor, pairing: str) -> float:
    """How far the heads of two layers are apart, in nats from 0 to ln 2, for the maps (B, H, N, N) of the
    same images.

    The divergence of every head of a from every head of b is first averaged over images and queries; then
    heads are paired. `pairing`: "direct", head h with head h; "bipartite", one to one so that the mean is
    least (heads left over where the numbers differ do not count); "minimum", every head of a with the nearest
    of b, which several may share; "average", one divergence, of the maps averaged over heads. Raises
    `ValueError` for another word, for what `checks.check_maps` refuses, for maps of other images or tokens,
    and for "direct" with different numbers of heads. Source: arXiv 2411.09702, appendix.
    """
    divergence = StreamingDivergence()
    divergence.update(maps_a, maps_b)
    return divergence.value(pairing)


class StreamingDivergence:
    """`head_divergence` of maps that come in batches; it keeps H x H numbers, and works on one pair of heads
    at a time."""

    def __init__(self):
        self.images = 0
        self._heads: Tensor | None = None  # sum over images of the mean over queries, (H_a, H_b)
        self._averaged = 0.0  # the same for the maps averaged over heads

    def update(self, maps_a: Tensor, maps_b: Tensor, layers: tuple[int, int] | None = None) -> None:
        """Add the maps (B, H, N, N) of the same images. Raises `ValueError` as `head_divergence` does, naming
        `layers`, a's and b's."""
        where = "" if layers is None else f"layers {layers[0]} of a and {layers[1]} of b: "
        for name, maps, layer in zip("ab", (maps_a, maps_b), layers or (None, None)):
            check_maps(maps, layer, name)
        if maps_a[:, 0].shape != maps_b[:, 0].shape:
            raise ValueError(
                f"{where}maps of a are {tuple(maps_a.shape)}, of b {tuple(maps_b.shape)} (B, H, N, N): both"
                " need the same images and tokens; atlib.maps.resample and keep_tokens bring maps to other"
                " tokens"
            )
        heads = maps_a.shape[1], maps_b.shape[1]
        if self._heads is None:
            self._heads = torch.zeros(heads, dtype=torch.float64)
        if self._heads.shape != heads:
            raise ValueError(
                f"{where}maps had {tuple(self._heads.shape)} heads of a and b, this batch has {heads}"
            )
        # One head at a time: (B, N, N) in float64 is all that is ever made.
        entropies_b = [_entropy(as_double(q)) for q in maps_b.unbind(1)]
        for h, p in enumerate(maps_a.unbind(1)):
            p = as_double(p)
            entropy = _entropy(p)
            for g, (q, entropy_b) in enumerate(zip(maps_b.unbind(1), entropies_b)):
                found = _from_entropies(p, as_double(q).to(p.device), entropy, entropy_b.to(p.device))
                self._heads[h, g] += found.mean(-1).sum().item()
        means = [sum(as_double(p) for p in maps.unbind(1)) / maps.shape[1] for maps in (maps_a, maps_b)]
        self._averaged += _divergence(means[0], means[1].to(means[0].device)).mean(-1).sum().item()
        self.images += len(maps_a)

    def matrix(self) -> Tensor:
        """The divergence of every head of a from every head of b, mean over images and queries: (H_a, H_b),
        float64, nats."""
        if self._heads is None:
            raise ValueError("no maps were given yet: call update first")
        return self._heads / self.images

    def value(self, pairing: str) -> float:
        """The divergence for one `pairing` of the heads, in nats. Raises `ValueError` as `head_divergence`
        does."""
        require_known("pairing", pairing, PAIRINGS)
        matrix = self.matrix()
        if pairing == "average":
            return self._averaged / self.images
        if pairing == "minimum":
            return matrix.min(1).values.mean().item()
        if pairing == "bipartite":
            return matrix[linear_sum_assignment(matrix.numpy())].mean().item()
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(
                f"a has {matrix.shape[0]} heads, b {matrix.shape[1]}: a direct pairing needs the same number;"
                f" take one of {', '.join(map(repr, PAIRINGS[1:]))}"
            )
        return matrix.diagonal().mean().item()


def compare_layers(
    a: nn.Module, b: nn.Module, images: Images, layers: Mapping[int, int] | None = None, batch_size: int = 50
) -> list[StreamingDivergence]:
    """The divergence of the maps of `a` and `b`, one for each pair of layers, over all images in one pass:
    any pairing can be read off.

    a, b: what `streaming.walks` takes. `layers`: {layer of a: layer of b}; without it layers are paired index
    by index. Raises `ValueError` for layers that cannot be paired and as `StreamingDivergence.update` does.
    """
    pairs = _layer_pairs(len(vit_of(a).blocks), len(vit_of(b).blocks), layers)
    divergences = [StreamingDivergence() for _ in pairs]
    for of_a, of_b in walks((a, b), images, batch_size):
        for divergence, (i, j) in zip(divergences, pairs):
            divergence.update(of_a.layers[i].map, of_b.layers[j].map, (i, j))
    return divergences


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


def same_operation() -> dict[str, dict[str, float]]:
    """How far B and C of `three_models` are from A for every pairing, {"B": {pairing: nats}, "C": ...},
    although their outputs are equal."""
    a, *others = three_models().items()
    return {
        name: {pairing: head_divergence(a[1].maps, layer.maps, pairing) for pairing in PAIRINGS}
        for name, layer in others
    }


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def _from_entropies(p: Tensor, q: Tensor, entropy_p: Tensor, entropy_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence where the entropies of p and q are known already; rounding may not make it
    negative."""
    return (_entropy((p + q) / 2) - (entropy_p + entropy_q) / 2).clamp(min=0)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    p, q = as_double(p), as_double(q)
    return _from_entropies(p, q, _entropy(p), _entropy(q))


def _layer_pairs(depth_a: int, depth_b: int, layers: Mapping[int, int] | None) -> list[tuple[int, int]]:
    if layers is None and depth_a != depth_b:
        raise ValueError(
            f"these are models whose layers cannot be paired index by index: a has {depth_a}, b {depth_b};"
            " say which belong together with layers={layer of a: layer of b}"
        )
    pairs = [(i, i) for i in range(depth_a)] if layers is None else list(layers.items())
    if not pairs or any(not (0 <= i < depth_a and 0 <= j < depth_b) for i, j in pairs):
        raise ValueError(
            f"layers={layers} does not pair layers of a, 0 to {depth_a - 1}, with layers of b, 0 to"
            f" {depth_b - 1}"
        )
    return pairs
