"""One attention module of timm: its q, k and v, what they are replaced by, and what is mixed with them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, apply_rot_embed_cat
from torch import Tensor, nn

from atlib.maps import keep_own

# Added to the score of a token that must not be looked at. Its share is exactly 0, and unlike minus infinity
# it leaves 0 · log 0 = 0 in a cross-entropy.
FORBIDDEN = -1e9


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
    #: (N, N), constant, added to the scores of every image and head: 0 where a query may look and `FORBIDDEN`
    #: where it must not; None where it may look anywhere.
    bias: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        """Attention logits z = scale · q kᵀ + bias: (B, H, N, N). Raises ValueError where a map was given
        instead."""
        if self.given is not None:
            raise ValueError("this layer was given a map: it has no q and k, hence no attention logits")
        scores = self.scale * self.q @ self.k.mT
        return scores if self.bias is None else scores + self.bias

    @property
    def map(self) -> Tensor:
        """The attention map the layer used, softmax(z): (B, H, N, N), rows sum to 1."""
        return self.scores.softmax(-1) if self.given is None else self.given

    def without(self, bias: Tensor | None) -> "Seen":
        """The same layer, had it not looked at what a bias (N, N) forbids too."""
        given = None if self.given is None else forbid(self.given, bias)
        return self._replace(given=given, bias=add_biases(self.bias, bias))


class Own(NamedTuple):
    """What of a layer's own map stays where another is put in (`atlib.maps.keep_own`)."""

    #: The tokens whose rows stay.
    queries: tuple[int, ...] = ()
    #: The tokens that keep their weight in every other row, and take it from what is put in.
    keys: tuple[int, ...] = ()


class Instead(NamedTuple):
    """What a layer's attention shall use instead of its own; None: its own.

    New q and k are taken as they are: where a layer rotates its own (RoPE), new ones come rotated, as `Seen`
    has them. With both replaced the layer's own are not computed. What a layer forbids stays forbidden: its
    own `Seen.bias` is added to the scores of new q and k too, and a new map loses those entries, rows
    renormalised.
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
    #: (N, N), on top of what the layer forbids, with q and k that belong to it; among some heads only a map
    #: can have one.
    bias: Tensor | None = None


class MaskedAttention(Attention, ABC):
    """timm's self-attention with a learned factor for every head, softmax(factor · q kᵀ + bias), and pairs of
    tokens that the bias forbids. A subclass says which: `factors` and `bias`."""

    @abstractmethod
    def factors(self) -> Tensor:
        """What q kᵀ of every head is multiplied with, in place of `scale`: (H,)."""

    @abstractmethod
    def bias(self, x: Tensor) -> Tensor:
        """For tokens x (B, N, D) what is added to the scores, 0 or `FORBIDDEN`: (N, N)."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens (B, N, D) to tokens (B, N, D). Raises ValueError for a mask besides its own."""
        if attn_mask is not None or is_causal:
            raise ValueError(f"a {type(self).__name__} has a mask of its own: call it without another")
        mixed = attend(self, see(self, x, Instead(), layer=0))
        return self.proj_drop(self.proj(self.norm(mixed.transpose(1, 2).flatten(2))))


def see(
    attn: nn.Module,
    x: Tensor,
    instead: Instead,
    layer: int,
    *,
    rope: Tensor | None = None,
    values: bool = True,
) -> Seen:
    """What the attention module `attn` makes of its normalised input x (B, N, D), with the replacements
    applied.

    `rope`: the rotary embedding of the patch tokens, None where positions do not rotate. Only what will be
    used is computed: replacing the map, or q and k, skips the projections to q and k, and without `values` v
    is None, whatever would have replaced it. Raises `ValueError` for a replacement of the wrong shape;
    `layer` is for that message.
    """
    width = head_width(attn)
    _check_instead(instead, len(x), attn.num_heads, x.shape[1], width, layer)
    whole = instead.heads is None and instead.own is None
    # with some heads, rows or columns replaced the layer's own are needed for the others
    known = instead if whole else Instead()
    used = ("" if known.map is not None else "qk") + ("v" if values else "")
    own = _project(attn, x, "".join(name for name in used if getattr(known, name) is None), width)
    parts = {
        name: _finish(attn, name, own[name], rope) if name in own else getattr(known, name) for name in used
    }
    scale = attn.scale if known.scale is None else known.scale
    bias = add_biases(attn.bias(x) if isinstance(attn, MaskedAttention) else None, known.bias)
    given = None if known.map is None else forbid(known.map, bias)
    seen = Seen(parts.get("q"), parts.get("k"), parts.get("v"), scale, given, bias)
    return seen if whole else _merge(seen, instead)


def attend(attn: nn.Module, seen: Seen) -> Tensor:
    """Mix the values with the map, softmax(scale · q kᵀ + bias) v: (B, H, N, d), fused or dense as the module
    itself would."""
    dropout = attn.attn_drop.p if attn.training else 0.0
    if seen.given is None and attn.fused_attn:
        return fused(seen.q, seen.k, seen.v, seen.scale, dropout, seen.bias)
    return attn.attn_drop(seen.map).to(seen.v.dtype) @ seen.v


def fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Fused attention for any widths: kernels want the same for all three, or maps get stored; columns of
    zeros change nothing. `bias`: (N, N), as in `Seen`."""
    width = max(q.shape[-1], v.shape[-1])
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    mask = None if bias is None else bias.to(q.dtype)
    return F.scaled_dot_product_attention(*padded, mask, dropout, scale=scale)[..., : v.shape[-1]]


def add_biases(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Forbids what either of two biases (N, N) forbids; None forbids nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def forbid(p: Tensor, bias: Tensor | None) -> Tensor:
    """Maps (..., N, N) without what a bias (N, N) forbids, rows renormalised: what the same bias on their
    scores would have made of them."""
    if bias is None:
        return p
    # A share that has underflowed is not known; all that remain of a row may be such ones.
    return (p.clamp(min=torch.finfo(p.dtype).tiny).log() + bias).softmax(-1).to(p.dtype)


def head_width(attn: nn.Module) -> int:
    """The width d of one head; timm's EVA attention has no `head_dim` in the oldest versions, but its scale
    is 1/√d in every version."""
    return attn.head_dim if hasattr(attn, "head_dim") else round(attn.scale**-2)


def _project(attn: nn.Module, x: Tensor, needed: str, width: int) -> dict[str, Tensor]:
    """The projections of x (B, N, D) named in `needed`, letters of "qkv": each (B, heads, N, d = width),
    before norms and rotation.

    Only here it matters in which form timm keeps them: three projections (`EvaAttention`, `AttentionRope`),
    or one joint projection with its bias (`Attention`, `AttentionRope`) or with the biases beside it, k's a
    constant zero (`EvaAttention`).
    """
    if attn.qkv is None:
        flat = {name: getattr(attn, f"{name}_proj")(x) for name in needed}
    else:
        flat = _project_jointly(attn, x, needed, attn.num_heads * width)
    return {name: part.unflatten(-1, (-1, width)).transpose(1, 2) for name, part in flat.items()}


def _project_jointly(attn: nn.Module, x: Tensor, needed: str, rows_each: int) -> dict[str, Tensor]:
    joint = attn.qkv
    beside = (
        None if getattr(attn, "q_bias", None) is None else torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    )
    apart = beside is not None and attn.qkv_bias_separate
    # An adapter or a quantised layer computes more than its weight says, so it is called; EVA itself reads
    # the weight in one case.
    called = beside is None or apart
    if called and (needed == "qkv" or type(joint) is not nn.Linear):
        everything = joint(x)
        if apart:
            everything += beside
        return {name: part for name, part in zip("qkv", everything.chunk(3, -1)) if name in needed}
    bias = joint.bias if beside is None else beside
    flat = {}
    for run in [needed] if needed in "qkv" else needed:  # neighbouring rows in one product
        if run:
            rows = slice("qkv".index(run[0]) * rows_each, ("qkv".index(run[-1]) + 1) * rows_each)
            together = F.linear(x, joint.weight[rows], None if bias is None else bias[rows])
            flat |= zip(run, together.chunk(len(run), -1))
    return flat


def _finish(attn: nn.Module, name: str, projected: Tensor, rope: Tensor | None) -> Tensor:
    """From a projection (B, heads, N, d) to what attention uses: normalised, rotated, and repeated for the
    heads that share it."""
    part = projected if name == "v" else (attn.q_norm if name == "q" else attn.k_norm)(projected)
    if rope is not None and name != "v":
        # a class token has no place to turn to
        prefix, rest = (part[:, :, : attn.num_prefix_tokens], part[:, :, attn.num_prefix_tokens :])
        rotated = apply_rot_embed_cat(rest, rope, half=getattr(attn, "rotate_half", False))
        part = torch.cat([prefix, rotated], 2).to(projected.dtype)
    if name == "q" and isinstance(attn, MaskedAttention):
        part = part * (attn.factors() / attn.scale)[:, None, None].to(part.dtype)
    shared = attn.num_heads // part.shape[1]
    return part if shared == 1 else part.repeat_interleave(shared, 1)


def _merge(own: Seen, instead: Instead) -> Seen:
    """Replace some heads, rows or columns and keep the others; a map for some needs the dense map of the
    rest."""
    heads = torch.arange(own.q.shape[1], device=own.q.device)
    if instead.heads is not None:
        heads = torch.tensor(list(instead.heads), device=own.q.device)

    def put(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
        return mine if mine is None or theirs is None else mine.index_copy(1, heads, theirs.to(mine.dtype))

    if instead.map is not None:
        mine, theirs = own.map, forbid(instead.map, own.bias)
        if instead.own is not None:
            theirs = keep_own(theirs.to(mine.dtype), mine[:, heads], *instead.own)
        return Seen(None, None, put(own.v, instead.v), own.scale, put(mine, theirs), own.bias)
    q = instead.q
    if q is not None and instead.k is not None and instead.scale is not None:
        q = q * (instead.scale / own.scale)  # one layer has one scale, so the difference goes into the new q
    return own._replace(q=put(own.q, q), k=put(own.k, instead.k), v=put(own.v, instead.v))


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
    alone = instead.q is None or instead.k is None or instead.heads is not None
    if instead.bias is not None and (alone or tuple(instead.bias.shape) != (N, N)):
        raise ValueError(
            f"layer {layer}: a bias {tuple(instead.bias.shape)} belongs to new q and k of all heads and has"
            f" shape {(N, N)} here; for some heads or without q and k replace the map"
        )
    if instead.heads is not None:
        wrong = [head for head in instead.heads if not 0 <= head < H]
        if wrong or len(set(instead.heads)) != len(instead.heads) or len(instead.heads) == 0:
            raise ValueError(
                f"layer {layer}: heads {list(instead.heads)} must be distinct, at least one, and from 0 to"
                f" {H - 1}"
            )
    heads = H if instead.heads is None else len(instead.heads)
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
