"""Run a stock timm ViT block by block, hand back what every attention layer saw, and replace what is asked
for.

No hooks and no rewritten model: `walk` calls the ViT's own modules in the order of timm's `forward`. What
happened inside is a return value, with gradients; what should happen instead is an argument; nothing is
stored on the modules.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from timm.layers import Attention
from timm.models import eva
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atlib.attention import Instead, MaskedAttention, Seen, attend, see


class Walk(NamedTuple):
    """The outcome of a walk."""

    #: (B, classes); None after `stop_after` or without `head`.
    logits: Tensor | None
    #: What each layer that was walked saw.
    layers: tuple[Seen, ...]
    #: The residual stream where the walk ended, (B, N, D), before the final norm.
    tokens: Tensor
    #: The residual stream after every block that was run, (B, N, D) each.
    stream: tuple[Tensor, ...]


# One layer's stochastic-depth factors for the attention and the MLP branch: (B, 1, 1) each, 0 or 1 / (1 -
# rate).
DropPathMasks = tuple[Tensor, Tensor]


def walk(
    vit: VisionTransformer | Eva,
    images: Tensor,
    *,
    replace: Mapping[int, Instead] | None = None,
    stop_after: int | None = None,
    values: bool = False,
    head: bool = True,
    drop_path: Sequence[DropPathMasks] | None = None,
    checked: bool = False,
) -> Walk:
    """Compute what `vit(images)` computes, and return what every attention layer saw on the way.

    `images`: (B, 3, height, width). `replace` maps a layer's index to what its attention shall use instead.
    `stop_after=i` ends the walk as soon as layer i's q and k are known: its values, its attention, its MLP,
    all later layers and the head are not computed, and `logits` is None; with `values` that layer's v is
    computed too. `head=False` runs all blocks but neither the final norm nor the head: `logits` is None.
    `drop_path` gives the stochastic-depth masks of every layer (`sample_drop_path`), so that two models can
    share them; None leaves them to the ViT's own modules.

    Every walk checks that the model can be walked, unless `checked` says that the caller did: a module that
    holds a ViT calls `check_walkable` once, when it is built, and then walks on and on. What changes when a
    model is trained is looked at all the same: its mode, and the classes of its blocks, which FSDP replaces.

    Raises `atlib.walking.Unwalkable` for a model that cannot be walked faithfully (by name, with the reason),
    and `ValueError` for a layer out of range or a replacement of the wrong shape.
    """
    if not (checked and _still_walkable(vit)):
        check_walkable(vit)
    outcome = _walk_blocks(vit, *_embed(vit, images), replace, stop_after, values, drop_path)
    if stop_after is not None or not head:
        return outcome
    return outcome._replace(logits=vit.forward_head(vit.norm(outcome.tokens)))


def walk_tokens(vit: VisionTransformer, tokens: Tensor, *, stop_after: int | None = None) -> Walk:
    """Walk the blocks from tokens (B, N, D) that are embedded already, positions included, such as those of
    the visible patches of masked auto-encoding. `logits` is None.

    `stop_after` is that of `walk`. Raises as `walk` does, and `Unwalkable` for an `Eva`, whose rotations
    would have to be chosen with the tokens.
    """
    if not isinstance(vit, VisionTransformer):
        raise Unwalkable(
            f"cannot walk a {type(vit).__name__} from tokens alone: it may rotate q and k by place"
        )
    check_walkable(vit)
    return _walk_blocks(vit, tokens, [None] * len(vit.blocks), stop_after=stop_after)


def _walk_blocks(
    vit: VisionTransformer | Eva,
    tokens: Tensor,
    ropes: Sequence[Tensor | None],
    replace: Mapping[int, Instead] | None = None,
    stop_after: int | None = None,
    values: bool = False,
    drop_path: Sequence[DropPathMasks] | None = None,
) -> Walk:
    """The walk through the blocks alone, from embedded tokens (B, N, D), with each layer's rotary embedding:
    without logits."""
    replace = dict(replace or {})
    depth = len(vit.blocks)
    for index in [*replace, *([] if stop_after is None else [stop_after])]:
        if not 0 <= index < depth:
            raise ValueError(
                f"layer {index} does not exist: this ViT has depth {depth}, layers 0 to {depth - 1}"
            )
    if drop_path is not None and len(drop_path) != depth:
        raise ValueError(f"drop_path has masks for {len(drop_path)} layers, this ViT has depth {depth}")

    layers: list[Seen] = []
    stream: list[Tensor] = []
    for index, (block, rope) in enumerate(zip(vit.blocks, ropes)):
        instead = replace.get(index, Instead())
        if index == stop_after:
            layers.append(see(block.attn, block.norm1(tokens), instead, index, rope=rope, values=values))
            break
        masks = None if drop_path is None else drop_path[index]
        if vit.grad_checkpointing and torch.is_grad_enabled():
            tokens, seen = checkpoint(_step, block, tokens, instead, masks, index, rope, use_reentrant=False)
        else:
            tokens, seen = _step(block, tokens, instead, masks, index, rope)
        layers.append(seen)
        stream.append(tokens)
    return Walk(None, tuple(layers), tokens, tuple(stream))


def sample_drop_path(vit: VisionTransformer | Eva, images: Tensor) -> list[DropPathMasks]:
    """Draw one set of stochastic-depth masks, at `vit`'s own rates, for a batch of `images` (B, ...): per
    layer two (B, 1, 1).

    The same distribution as timm's `DropPath`: a sample's branch is kept with probability 1 - rate and then
    scaled up by 1 / (1 - rate). Source: Huang et al. 2016, "Deep Networks with Stochastic Depth".
    """

    def mask(module: nn.Module) -> Tensor:
        keep = 1 - getattr(module, "drop_prob", 0.0)
        scale = keep if getattr(module, "scale_by_keep", True) and keep > 0 else 1.0
        return images.new_empty(len(images), 1, 1).bernoulli_(keep) / scale

    return [(mask(block.drop_path1), mask(block.drop_path2)) for block in vit.blocks]


def _embed(vit: VisionTransformer | Eva, images: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The residual stream before the first block, (B, N, D), and each layer's rotary embedding, None where
    there is none."""
    embedded = vit._pos_embed(vit.patch_embed(images))
    if isinstance(vit, VisionTransformer):
        return vit.norm_pre(vit.patch_drop(embedded)), [None] * len(vit.blocks)
    tokens, rope = embedded  # Eva drops patches in there already, because their rotations must go with them
    per_layer = rope is not None and vit.rope_mixed  # learned frequencies: every layer has its own rotation
    return vit.norm_pre(tokens), rope if per_layer else [rope] * len(vit.blocks)


def _step(
    block: nn.Module,
    tokens: Tensor,
    instead: Instead,
    masks: DropPathMasks | None,
    layer: int,
    rope: Tensor | None,
) -> tuple[Tensor, Seen]:
    """One pre-norm block: x + attention(norm(x)), then x + MLP(norm(x)); timm's `Block.forward` with the
    inside visible."""
    attn, x = block.attn, block.norm1(tokens)
    seen = see(attn, x, instead, layer, rope=rope)
    mixed = attend(attn, seen).transpose(1, 2).flatten(2)  # (B, N, H·d)
    mixed = attn.norm(mixed)  # identity unless the ViT was built with a norm inside attention
    if getattr(attn, "gate", None) is not None:  # timm >= 1.0.28: an elementwise gate on the output
        mixed = mixed * attn.gate(x).sigmoid()
    routed = _layer_scale(block, 1, attn.proj_drop(attn.proj(mixed)))
    tokens = tokens + (block.drop_path1(routed) if masks is None else masks[0].to(routed.dtype) * routed)
    local = _layer_scale(block, 2, block.mlp(block.norm2(tokens)))
    return tokens + (block.drop_path2(local) if masks is None else masks[1].to(local.dtype) * local), seen


def _layer_scale(block: nn.Module, branch: int, x: Tensor) -> Tensor:
    """Layer scale of branch 1 (attention) or 2 (MLP): a module in `Block`, a parameter or None in
    `EvaBlock`."""
    if hasattr(block, "ls1"):
        return getattr(block, f"ls{branch}")(x)
    gamma = getattr(block, f"gamma_{branch}")
    return x if gamma is None else gamma * x


# --- Which models can be walked faithfully, and for the others why not ---


class Unwalkable(TypeError):
    """`walk` would not compute what this model computes; the message names the part and the reason."""


# Why classes of timm and torch are not walked. By name, because several exist only in some of the timm
# versions that are supported. A class of our own says it itself, in its attribute `not_walkable`.
RELATIVE = "it adds a relative-position bias to the attention logits, so q and k alone do not make the map"
AFTERWARDS = "it normalises after attention and after the MLP, not before"
WINDOWS = "it attends inside shifted windows: there is no map over all tokens"
REASONS = {
    "ParallelScalingBlock": "it computes attention and MLP side by side from one joint projection",
    "DiffParallelScalingBlock": "it subtracts two attention maps and runs the MLP beside them",
    "ParallelThingsBlock": "it sums several attention branches, so a layer has no single map",
    "ResPostBlock": AFTERWARDS,
    "EvaBlockPostNorm": AFTERWARDS,
    "DiffAttention": "it subtracts two attention maps, so what mixes the values is no softmax",
    **dict.fromkeys(("RelPosBlock", "RelPosAttention", "VisionTransformerRelPos", "Beit"), RELATIVE),
    "NaFlexVit": "it packs images of different sizes with padding masks",
    **dict.fromkeys(("SwinTransformer", "SwinTransformerV2", "SwinTransformerV2Cr"), WINDOWS),
    "Cait": "its talking heads mix the maps of several heads, and class attention comes in separate layers;"
    " atlib.methods.cait.walk_cait walks it",
    "MlpMixer": "it has no attention: what mixes patches are weights, the same for all images; of a ResMLP"
    " atlib.methods.resmlp.static_maps shows them",
    "DistributedDataParallel": "it is a wrapper: pass its .module",
    "FullyShardedDataParallel": "it is a wrapper: pass the module inside",
    "OptimizedModule": "it is a wrapper made by torch.compile: pass the module inside (its ._orig_mod)",
}


class Family(NamedTuple):
    """A class of ViTs that `walk` knows."""

    #: Its subclasses may differ in what is fed to the blocks.
    vit: type[nn.Module]
    block: type[nn.Module]
    attentions: tuple[type[nn.Module], ...]


FAMILIES = (
    Family(VisionTransformer, Block, (Attention, MaskedAttention)),
    # Which attention classes timm's EVA family has depends on the timm version.
    Family(
        eva.Eva,
        eva.EvaBlock,
        tuple(getattr(eva, name) for name in ("EvaAttention", "AttentionRope") if hasattr(eva, name)),
    ),
)

# Taken at import, so that a method that somebody replaces later for a whole class is noticed too.
STOCK = {part: part.forward for family in FAMILIES for part in (family.block, *family.attentions)}
STOCK_VIT = {
    family.vit: {method: getattr(family.vit, method) for method in ("forward", "forward_features")}
    for family in FAMILIES
}


def check_walkable(vit: nn.Module) -> None:
    """Raise `Unwalkable`, naming the class and the reason, unless `walk(vit, x)` computes exactly what
    `vit(x)` computes.

    It looks at the classes of the ViT, its blocks and their attention, at methods that were replaced, and at
    the mode. `walk` calls it every time; `AttentionTransfer` and the methods call it once for each model,
    when they are built, and again where a class or the mode has changed since.
    """
    name = type(vit).__name__
    family = next((family for family in FAMILIES if isinstance(vit, family.vit)), None)
    if family is None:
        raise Unwalkable(
            f"cannot walk a {name}: "
            + _why_not(
                vit, "it is not a timm VisionTransformer or Eva (no self-attention blocks of the known form)"
            )
        )
    for method, stock in STOCK_VIT[
        family.vit
    ].items():  # a subclass may change what is fed to the blocks, as DeiT's does, but not these
        if getattr(type(vit), method) is not stock:
            raise Unwalkable(f"cannot walk a {name}: it has its own {method}, which walk does not know")
    if _in_distilled_training(vit):
        raise Unwalkable(
            "cannot walk a ViT in distilled_training mode: it returns two predictions; call"
            " set_distilled_training(False)"
        )
    for index, block in enumerate(vit.blocks):
        for part, known in ((block, (family.block,)), (getattr(block, "attn", None), family.attentions)):
            _check_part(part, known, f"layer {index} of this {name}")


def _why_not(part: object, otherwise: str) -> str:
    """Why a model or a part of one is not walked: as its class says, as `REASONS` does, or `otherwise`."""
    kind = type(part)
    return getattr(kind, "not_walkable", None) or REASONS.get(kind.__name__, otherwise)


def _in_distilled_training(vit: nn.Module) -> bool:
    return getattr(vit, "distilled_training", False) and vit.training


def _still_walkable(vit: nn.Module) -> bool:
    """Whether a ViT that was checked is still in a mode and of blocks that can be walked."""
    stock = all(type(block) in STOCK and _stock(block.attn) in STOCK for block in vit.blocks)
    return stock and not _in_distilled_training(vit)


def _stock(part: nn.Module | None) -> type:
    """The class whose `forward` a part must have: its own, or that of all masked attention."""
    return MaskedAttention if isinstance(part, MaskedAttention) else type(part)


def _check_part(part: nn.Module | None, known: tuple[type[nn.Module], ...], where: str) -> None:
    kind = type(part)
    if _stock(part) not in known:
        names = " and ".join(one.__name__ for one in known)
        reason = _why_not(part, f"walk knows timm's {names} and cannot tell what this one computes")
        raise Unwalkable(f"cannot walk {where}, a {kind.__name__}: {reason}")
    if kind.forward is not STOCK[_stock(part)] or "forward" in vars(part):
        raise Unwalkable(f"cannot walk {where}: its {kind.__name__}.forward was replaced")
