"""One layer of a ViT as the walk sees it: its q, k and v, what they are replaced by, and what is mixed with
them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atlib.maps import keep_own

# One layer's stochastic-depth factors for the attention and the MLP branch: (B, 1, 1) each, 0 or 1 / (1 -
# rate).
DropPathMasks = tuple[Tensor, Tensor]

# Added to the score of a token that must not be looked at. Its share is exactly 0, and unlike minus infinity
# it leaves 0 · log 0 = 0 in a cross-entropy.
FORBIDDEN = -1e9


SDPA = F.scaled_dot_product_attention  # torch's own, also while `atlib.watching` stands in its place


class Seen(NamedTuple):
    """What one attention layer saw and used.

    q and k are what the map is really made of: those *after* q-norm and k-norm and *after* rotation by
    position (RoPE), where a ViT has them, and with shared keys and values (grouped queries) repeated for
    every head. A factor of a head's own (a learned temperature) is part of q.
    """

    #: Queries, (B, H, N, d); None where a whole map was put in (`Instead(map=...)`), as they were never
    #: computed.
    q: Tensor | None
    #: Keys, as q.
    k: Tensor | None
    #: Values, (B, H, N, d); None at the layer where a walk stops (`stop_after`), as nothing is mixed there.
    v: Tensor | None
    #: The factor on q kᵀ, usually 1/√d.
    scale: float
    #: The whole map that was put in, (B, H, N, N).
    given: Tensor | None = None
    #: What the layer adds to the scores of every image, such as relative positions (BEiT): (H, N, N), or (N,
    #: N) for all heads. It belongs to q and k: where both are replaced, so is the bias. None for no bias.
    bias: Tensor | None = None
    #: (N, N), constant, added to the scores of every image and head: 0 where a query may look and `FORBIDDEN`
    #: where it must not; None where it may look anywhere. It belongs to the layer, and stays.
    mask: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        """Attention logits z = scale · q kᵀ + bias + mask: (B, H, N, N). Raises ValueError where a map was
        given instead."""
        if self.given is not None:
            raise ValueError("this layer was given a map: it has no q and k, hence no attention logits")
        scores, added = self.scale * self.q @ self.k.mT, self.added
        return scores if added is None else scores + added

    @property
    def added(self) -> Tensor | None:
        """All that is added to q kᵀ, bias and mask: (H, N, N) or (N, N); None for nothing."""
        return plus(self.bias, self.mask)

    @property
    def map(self) -> Tensor:
        """The attention map the layer used, softmax(z): (B, H, N, N), rows sum to 1."""
        return self.scores.softmax(-1) if self.given is None else self.given

    def without(self, mask: Tensor | None) -> "Seen":
        """The same layer, had it not looked at what a mask (N, N) forbids too."""
        given = None if self.given is None else forbid(self.given, mask)
        return self._replace(given=given, mask=plus(self.mask, mask))


class Own(NamedTuple):
    """What of a layer's own map stays where another is put in (`atlib.maps.keep_own`)."""

    #: The tokens whose rows stay.
    queries: tuple[int, ...] = ()
    #: The tokens that keep their weight in every other row, and take it from what is put in.
    keys: tuple[int, ...] = ()


class Instead(NamedTuple):
    """What a layer's attention shall use instead of its own; None: its own.

    New q and k are taken as they are: where a layer rotates its own (RoPE), new ones come rotated, as `Seen`
    has them. With both replaced the layer's own are not computed, and its own `Seen.bias` goes with them.
    What a layer forbids stays forbidden: its `Seen.mask` is added to the scores of new q and k too, and a new
    map loses those entries, rows renormalised.
    """

    #: Queries, (B, H, N, d).
    q: Tensor | None = None
    #: Keys, as q.
    k: Tensor | None = None
    #: Values, as q.
    v: Tensor | None = None
    #: A whole map, (B, H, N, N), in place of q and k.
    map: Tensor | None = None
    #: The factor that belongs to new q and k; without both it is refused.
    scale: float | None = None
    #: The heads to replace, H being their number; None for all.
    heads: Sequence[int] | None = None
    #: Which rows and columns of a replaced map stay the layer's own, with their gradients.
    own: Own | None = None
    #: The bias that belongs to new q and k: (N, N), or (H, N, N); without both it is refused.
    bias: Tensor | None = None
    #: (N, N), on top of what the layer forbids, with q and k that belong to it; among some heads only a map
    #: can have one.
    mask: Tensor | None = None


class Layer(ABC):
    """One layer of a model while it is walked: one class for each kind of block (`atlib.adapters`).

    It holds the block and what belongs to this walk, such as rotations by position; nothing is stored on the
    block. Shapes: tokens and x (B, N, D); q, k, v (B, H, N, d).
    """

    #: The block: where its weights are divided among processes, they are gathered as for its forward.
    module: nn.Module
    #: The number of heads, H.
    heads: int
    #: The width of a head, d.
    width: int
    #: The factor on q kᵀ, usually 1/√d.
    scale: float
    #: The rate at which entries of the map are dropped now: 0 in eval mode.
    dropout: float = 0.0
    #: Whether maps stay inside a fused kernel (`scaled_dot_product_attention`), as in the model's forward.
    fused: bool = True

    @abstractmethod
    def before(self, tokens: Tensor) -> Tensor:
        """The input x of attention, from the residual stream: the first norm of a pre-norm block."""

    @abstractmethod
    def project(self, x: Tensor, needed: str) -> dict[str, Tensor]:
        """Those of q, k, v that `needed` names by letters of "qkv", as attention uses them: after norms of
        their own and rotations, and repeated for the heads that share them."""

    @abstractmethod
    def after(self, tokens: Tensor, x: Tensor, mixed: Tensor, drop_path: DropPathMasks | None) -> Tensor:
        """The residual stream after the block, from `mixed`, the heads' outputs side by side, (B, N, H·d):
        the output projection, the residual sums and the MLP.

        `drop_path`: the stochastic-depth masks of both branches in place of the block's own.
        """

    def mix(self, seen: Seen) -> Tensor:
        """The values, mixed by the map: (B, H, N, d). A layer that rounds its map, say, does it here, whether
        the map is its own or was put in."""
        return attend(seen, self.dropout, self.fused)

    def bias(self, x: Tensor) -> Tensor | None:
        """What the layer adds to q kᵀ: (N, N) or (H, N, N); None for nothing."""
        return None

    def mask(self, x: Tensor) -> Tensor | None:
        """What the layer forbids, 0 or `FORBIDDEN`: (N, N); None for nothing."""
        return None


def see(layer: Layer, x: Tensor, instead: Instead, index: int, *, values: bool = True) -> Seen:
    """What a layer's attention makes of its input x (B, N, D), with the replacements applied.

    Only what will be used is computed: replacing the map, or q and k, skips the projections to q and k, and
    without `values` v is None, whatever would have replaced it. Raises `ValueError` for a replacement of the
    wrong shape; `index` is for that message.
    """
    _check_instead(instead, len(x), layer.heads, x.shape[1], layer.width, index)
    whole = instead.heads is None and instead.own is None
    # with some heads, rows or columns replaced the layer's own are needed for the others
    known = instead if whole else Instead()
    used = ("" if known.map is not None else "qk") + ("v" if values else "")
    own = layer.project(x, "".join(name for name in used if getattr(known, name) is None))
    parts = {name: own[name] if name in own else getattr(known, name) for name in used}
    replaced = known.map is not None or (known.q is not None and known.k is not None)
    seen = Seen(
        parts.get("q"),
        parts.get("k"),
        parts.get("v"),
        layer.scale if known.scale is None else known.scale,
        bias=known.bias if replaced else layer.bias(x),
        mask=plus(layer.mask(x), known.mask),
    )
    if known.map is not None:
        seen = seen._replace(given=forbid(known.map, seen.mask))
    return seen if whole else _merge(seen, instead)


def merged(seen: Seen, instead: Instead, index: int) -> Seen:
    """What a layer uses, from what it would use by itself and what replaces it. Raises `ValueError` for a
    replacement of the wrong shape; `index`, of the layer, is for that message."""
    B, H, N, d = seen.q.shape
    _check_instead(instead, B, H, N, d, index)
    if instead.heads is not None or instead.own is not None:
        return _merge(seen, instead)
    mask = plus(seen.mask, instead.mask)
    v = seen.v if instead.v is None else instead.v
    if instead.map is not None:
        return Seen(None, None, v, seen.scale, forbid(instead.map, mask), mask=mask)
    q, k = (new if new is not None else its for new, its in ((instead.q, seen.q), (instead.k, seen.k)))
    both = instead.q is not None and instead.k is not None
    scale = seen.scale if instead.scale is None else instead.scale
    return Seen(q, k, v, scale, bias=instead.bias if both else seen.bias, mask=mask)


def attend(seen: Seen, dropout: float = 0.0, on_fused: bool = True) -> Tensor:
    """Mix the values with the map, softmax(scale · q kᵀ + bias + mask) v: (B, H, N, d), fused or dense."""
    if seen.given is None and on_fused:
        return fused(seen.q, seen.k, seen.v, seen.scale, dropout, seen.added)
    return F.dropout(seen.map, dropout, training=dropout > 0).to(seen.v.dtype) @ seen.v


def fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Fused attention for any widths: kernels want the same for all three, or maps get stored; columns of
    zeros change nothing. `bias`: what is added to the scores, (N, N) or (H, N, N)."""
    width = max(q.shape[-1], v.shape[-1])
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    mask = None if bias is None else bias.to(q.dtype)
    return SDPA(*padded, mask, dropout, scale=scale)[..., : v.shape[-1]]


def plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of what is added to scores by two; None adds nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def forbid(p: Tensor, mask: Tensor | None) -> Tensor:
    """Maps (..., N, N) without what a mask (N, N) forbids, rows renormalised: what the same mask on their
    scores would have made of them."""
    if mask is None:
        return p
    # A share that has underflowed is not known; all that remain of a row may be such ones.
    return (p.clamp(min=torch.finfo(p.dtype).tiny).log() + mask).softmax(-1).to(p.dtype)


def _merge(own: Seen, instead: Instead) -> Seen:
    """Replace some heads, rows or columns and keep the others; a map for some needs the dense map of the
    rest."""
    heads = torch.arange(own.q.shape[1], device=own.q.device)
    if instead.heads is not None:
        heads = torch.tensor(list(instead.heads), device=own.q.device)

    def put(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
        return mine if mine is None or theirs is None else mine.index_copy(1, heads, theirs.to(mine.dtype))

    if instead.map is not None:
        mine, theirs = own.map, forbid(instead.map, own.mask)
        if instead.own is not None:
            theirs = keep_own(theirs.to(mine.dtype), mine[:, heads], *instead.own)
        return Seen(None, None, put(own.v, instead.v), own.scale, put(mine, theirs), mask=own.mask)
    q, bias = instead.q, own.bias
    if q is not None and instead.k is not None:
        if instead.scale is not None:
            q = q * (instead.scale / own.scale)  # one layer has one scale: the difference goes into the new q
        if own.bias is not None or instead.bias is not None:
            bias = _merge_biases(own, instead.bias, heads)
    return own._replace(q=put(own.q, q), k=put(own.k, instead.k), v=put(own.v, instead.v), bias=bias)


def _merge_biases(own: Seen, new: Tensor | None, heads: Tensor) -> Tensor:
    """The layer's own bias with that of new q and k, or none, for some `heads`: (H, N, N)."""
    shape = own.q.shape[1], own.q.shape[2], own.k.shape[2]
    mine = own.q.new_zeros(shape) if own.bias is None else own.bias.expand(shape)
    theirs = 0.0 * mine[heads] if new is None else new.to(mine.dtype).expand(len(heads), *shape[1:])
    return mine.index_copy(0, heads, theirs)


def _check_instead(instead: Instead, B: int, H: int, N: int, d: int, layer: int) -> None:
    if instead.map is not None and (instead.q is not None or instead.k is not None):
        raise ValueError(f"layer {layer}: a map is made of q and k, so replace the map or q and k, not both")
    if instead.own is not None and instead.map is None:
        raise ValueError(
            f"layer {layer}: {instead.own} says what of a map stays, and none is put in: give map=, or leave"
            " own out"
        )
    if instead.scale is not None and (instead.q is None or instead.k is None):
        raise ValueError(
            f"layer {layer}: scale={instead.scale} belongs to a new q and k: replace both, or leave scale out"
        )
    alone = instead.q is None or instead.k is None
    heads = H if instead.heads is None else len(instead.heads)
    if instead.bias is not None and (alone or tuple(instead.bias.shape) not in ((N, N), (heads, N, N))):
        raise ValueError(
            f"layer {layer}: a bias {tuple(instead.bias.shape)} belongs to new q and k and has shape {(N, N)}"
            f" or {(heads, N, N)} here; without q and k replace the map"
        )
    alone = alone or instead.heads is not None
    if instead.mask is not None and (alone or tuple(instead.mask.shape) != (N, N)):
        raise ValueError(
            f"layer {layer}: a mask {tuple(instead.mask.shape)} belongs to new q and k of all heads and has"
            f" shape {(N, N)} here; for some heads or without q and k replace the map"
        )
    if instead.heads is not None:
        wrong = [head for head in instead.heads if not 0 <= head < H]
        if wrong or len(set(instead.heads)) != len(instead.heads) or len(instead.heads) == 0:
            raise ValueError(
                f"layer {layer}: heads {list(instead.heads)} must be distinct, at least one, and from 0 to"
                f" {H - 1}"
            )
    # The map's queries and keys need a common width, but not the layer's own: a wider teacher can teach a
    # narrow student.
    both = instead.heads is None and instead.q is not None and instead.k is not None
    width = instead.q.shape[-1] if both else d
    expected = dict(q=(B, heads, N, width), k=(B, heads, N, width), v=(B, heads, N, d), map=(B, heads, N, N))
    for name, shape in expected.items():
        new = getattr(instead, name)
        if new is not None and tuple(new.shape) != shape:
            raise ValueError(
                f"layer {layer}: {name} has shape {tuple(new.shape)}, this layer needs {shape} "
                f"(batch, heads, tokens, {'tokens' if name == 'map' else 'head width'})"
            )
