"""Run a stock timm ViT block by block, hand back what every attention layer saw, and replace what is asked for.

No hooks and no rewritten model: `walk` calls the ViT's own modules in the order of timm's `forward`. What happened inside
is a return value, with gradients; what should happen instead is an argument; nothing is stored on the modules.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from atlib.walkable import check_walkable


class Seen(NamedTuple):
    """What one attention layer saw and used. q, k, v: (B, H, N, d); scale: the factor on q kᵀ, usually 1/√d.

    q and k are those *after* q-norm and k-norm, where a ViT has them: what the map is really made of.
    Where a whole map was put in (`Instead(map=...)`), q and k were never computed: they are None and `given` is that map.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor
    scale: float
    given: Tensor | None = None

    @property
    def scores(self) -> Tensor:
        """Attention logits z = scale · q kᵀ: (B, H, N, N). Raises ValueError where a map was given instead."""
        if self.given is not None:
            raise ValueError("this layer was given a map: it has no q and k, hence no attention logits")
        return self.scale * self.q @ self.k.mT

    @property
    def map(self) -> Tensor:
        """The attention map the layer used, softmax(z): (B, H, N, N), rows sum to 1."""
        return self.scores.softmax(-1) if self.given is None else self.given


class Instead(NamedTuple):
    """What a layer's attention shall use instead of its own: q, k, v (B, H, N, d), or a whole map (B, H, N, N).

    With q and k both replaced the layer's own are not computed and `scale` is the factor that belongs to the new ones
    (the layer's own where None). `heads` lists the heads to replace, H then being len(heads); None replaces all.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    map: Tensor | None = None
    scale: float | None = None
    heads: Sequence[int] | None = None


class Walk(NamedTuple):
    """The outcome of a walk. `logits`: (B, classes), None after `stop_after`; `layers`: one `Seen` per layer walked;
    `tokens`: the residual stream where the walk ended, (B, N, D), before the final norm."""

    logits: Tensor | None
    layers: tuple[Seen, ...]
    tokens: Tensor


# One layer's stochastic-depth factors for the attention and the MLP branch: (B, 1, 1) each, 0 or 1 / (1 - rate).
DropPathMasks = tuple[Tensor, Tensor]


def walk(
    vit: VisionTransformer,
    images: Tensor,
    *,
    replace: Mapping[int, Instead] | None = None,
    stop_after: int | None = None,
    drop_path: Sequence[DropPathMasks] | None = None,
) -> Walk:
    """Compute what `vit(images)` computes, and return what every attention layer saw on the way.

    `images`: (B, 3, height, width). `replace` maps a layer's index to what its attention shall use instead.
    `stop_after=i` ends the walk as soon as layer i's q, k, v are known: its attention, its MLP, all later layers and the
    head are not run, and `logits` is None. `drop_path` gives the stochastic-depth masks of every layer
    (`sample_drop_path`), so that two models can share them; None leaves them to the ViT's own modules.

    Raises `atlib.walkable.Unwalkable` for a model that cannot be walked faithfully (by name, with the reason),
    and `ValueError` for a layer out of range or a replacement of the wrong shape.
    """
    check_walkable(vit)
    replace = dict(replace or {})
    depth = len(vit.blocks)
    for index in [*replace, *([] if stop_after is None else [stop_after])]:
        if not 0 <= index < depth:
            raise ValueError(f"layer {index} does not exist: this ViT has depth {depth}, layers 0 to {depth - 1}")
    if drop_path is not None and len(drop_path) != depth:
        raise ValueError(f"drop_path has masks for {len(drop_path)} layers, this ViT has depth {depth}")

    tokens = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))  # (B, N, D)
    layers: list[Seen] = []
    for index, block in enumerate(vit.blocks):
        instead = replace.get(index, Instead())
        if index == stop_after:
            layers.append(see(block.attn, block.norm1(tokens), instead, index))
            return Walk(None, tuple(layers), tokens)
        masks = None if drop_path is None else drop_path[index]
        if vit.grad_checkpointing and torch.is_grad_enabled():
            tokens, seen = checkpoint(_step, block, tokens, instead, masks, index, use_reentrant=False)
        else:
            tokens, seen = _step(block, tokens, instead, masks, index)
        layers.append(seen)
    return Walk(vit.forward_head(vit.norm(tokens)), tuple(layers), tokens)


def sample_drop_path(vit: VisionTransformer, images: Tensor) -> list[DropPathMasks]:
    """Draw one set of stochastic-depth masks, at `vit`'s own rates, for a batch of `images` (B, ...): per layer two (B, 1, 1).

    The same distribution as timm's `DropPath`: a sample's branch is kept with probability 1 - rate and then scaled up by
    1 / (1 - rate). Source: Huang et al. 2016, "Deep Networks with Stochastic Depth".
    """

    def mask(module: torch.nn.Module) -> Tensor:
        keep = 1 - getattr(module, "drop_prob", 0.0)
        scale = keep if getattr(module, "scale_by_keep", True) and keep > 0 else 1.0
        return images.new_empty(len(images), 1, 1).bernoulli_(keep) / scale

    return [(mask(block.drop_path1), mask(block.drop_path2)) for block in vit.blocks]


def see(attn: torch.nn.Module, x: Tensor, instead: Instead, layer: int) -> Seen:
    """What the attention module `attn` makes of its normalised input x (B, N, D), with the replacements applied.

    Only what will be used is computed: replacing the map, or q and k, skips the projections to q and k.
    """
    B, N, _ = x.shape
    H, d = attn.num_heads, attn.head_dim
    _check_instead(instead, B, H, N, d, layer)
    whole = instead.heads is None

    def project(row: int) -> Tensor:  # rows 0, 1, 2 of the joint projection are q, k, v
        width = H * d
        part = slice(row * width, (row + 1) * width)
        if type(attn.qkv) is not torch.nn.Linear:  # an adapter or a quantised layer computes more than its weight says
            return attn.qkv(x)[..., part].reshape(B, N, H, d).transpose(1, 2)
        bias = None if attn.qkv.bias is None else attn.qkv.bias[part]
        return F.linear(x, attn.qkv.weight[part], bias).reshape(B, N, H, d).transpose(1, 2)  # (B, H, N, d)

    if whole and instead.map is not None:
        return Seen(None, None, project(2) if instead.v is None else instead.v, attn.scale, instead.map)
    if whole and (instead.q is not None or instead.k is not None or instead.v is not None):
        q = attn.q_norm(project(0)) if instead.q is None else instead.q
        k = attn.k_norm(project(1)) if instead.k is None else instead.k
        v = project(2) if instead.v is None else instead.v
        both = instead.q is not None and instead.k is not None
        return Seen(q, k, v, attn.scale if instead.scale is None or not both else instead.scale)

    q, k, v = attn.qkv(x).reshape(B, N, 3, H, d).permute(2, 0, 3, 1, 4).unbind(0)
    own = Seen(attn.q_norm(q), attn.k_norm(k), v, attn.scale)
    return own if whole else _merge(own, instead)


def attend(attn: torch.nn.Module, seen: Seen) -> Tensor:
    """Mix the values with the map, softmax(scale · q kᵀ) v: (B, H, N, d), fused or dense as the module itself would."""
    dropout = attn.attn_drop.p if attn.training else 0.0
    if seen.given is None and attn.fused_attn:
        return F.scaled_dot_product_attention(seen.q, seen.k, seen.v, dropout_p=dropout, scale=seen.scale)
    return attn.attn_drop(seen.map) @ seen.v


def _step(block: torch.nn.Module, tokens: Tensor, instead: Instead, masks: DropPathMasks | None, layer: int) -> tuple[Tensor, Seen]:
    """One pre-norm block: x + attention(norm(x)), then x + MLP(norm(x)); timm's `Block.forward` with the inside visible."""
    attn, x = block.attn, block.norm1(tokens)
    seen = see(attn, x, instead, layer)
    mixed = attend(attn, seen).transpose(1, 2).flatten(2)  # (B, N, H·d)
    mixed = attn.norm(mixed)  # identity unless the ViT was built with scale_attn_norm
    if getattr(attn, "gate", None) is not None:  # timm >= 1.0.28: an elementwise gate on the output
        mixed = mixed * attn.gate(x).sigmoid()
    routed = block.ls1(attn.proj_drop(attn.proj(mixed)))
    tokens = tokens + (block.drop_path1(routed) if masks is None else masks[0].to(routed.dtype) * routed)
    local = block.ls2(block.mlp(block.norm2(tokens)))
    return tokens + (block.drop_path2(local) if masks is None else masks[1].to(local.dtype) * local), seen


def _merge(own: Seen, instead: Instead) -> Seen:
    """Replace some heads and keep the others; a map for some heads needs the dense map of the rest."""
    heads = torch.tensor(list(instead.heads), device=own.q.device)

    def put(mine: Tensor, theirs: Tensor | None) -> Tensor:
        return mine if theirs is None else mine.index_copy(1, heads, theirs.to(mine.dtype))

    if instead.map is not None:
        return Seen(None, None, put(own.v, instead.v), own.scale, put(own.map, instead.map))
    q = instead.q
    if q is not None and instead.k is not None and instead.scale is not None:
        q = q * (instead.scale / own.scale)  # one layer has one scale, so the difference goes into the new q
    return own._replace(q=put(own.q, q), k=put(own.k, instead.k), v=put(own.v, instead.v))


def _check_instead(instead: Instead, B: int, H: int, N: int, d: int, layer: int) -> None:
    if instead.map is not None and (instead.q is not None or instead.k is not None):
        raise ValueError(f"layer {layer}: a map is made of q and k, so replace the map or q and k, not both")
    if instead.heads is not None:
        wrong = [head for head in instead.heads if not 0 <= head < H]
        if wrong or len(set(instead.heads)) != len(instead.heads) or len(instead.heads) == 0:
            raise ValueError(f"layer {layer}: heads {list(instead.heads)} must be distinct, at least one, and from 0 to {H - 1}")
    heads = H if instead.heads is None else len(instead.heads)
    # The map's queries and keys need a common width, but not the layer's own: a wider teacher can teach a narrow student.
    both = instead.heads is None and instead.q is not None and instead.k is not None
    width = instead.q.shape[-1] if both else d
    expected = dict(q=(B, heads, N, width), k=(B, heads, N, width), v=(B, heads, N, d), map=(B, heads, N, N))
    for name, shape in expected.items():
        given = getattr(instead, name)
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"layer {layer}: {name} has shape {tuple(given.shape)}, this layer needs {shape} "
                             f"(batch, heads, tokens, {'tokens' if name == 'map' else 'head width'})")
