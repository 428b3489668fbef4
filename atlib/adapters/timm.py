"""timm's ViTs: `VisionTransformer`, `Eva` (rotary positions), `Beit` and `VisionTransformerRelPos` (a bias by
relative position), and `NaFlexVit` on images of one size.

Which of them are walked is decided by class: those of timm whose forward is written out here, with that
forward unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from timm.layers import Attention, apply_rot_embed_cat
from timm.models import beit, eva
from timm.models import vision_transformer as vit
from timm.models import vision_transformer_relpos as relpos
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from atlib.adapters.adapter import Adapter, Sizes, Unwalkable
from atlib.attention import DropPathMasks, Instead, Layer, plus, see
from atlib.timm_config import Settings, head_width, read_settings


class MaskedAttention(Attention, ABC):
    """timm's self-attention with a learned factor for every head, softmax(factor · q kᵀ + mask), and pairs of
    tokens that the mask forbids. A subclass says which: `factors` and `mask`."""

    @abstractmethod
    def factors(self) -> Tensor:
        """What q kᵀ of every head is multiplied with, in place of `scale`: (H,)."""

    @abstractmethod
    def mask(self, x: Tensor) -> Tensor:
        """For tokens x (B, N, D) what is added to the scores, 0 or `FORBIDDEN`: (N, N)."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens (B, N, D) to tokens (B, N, D). Raises ValueError for a mask besides its own."""
        if attn_mask is not None or is_causal:
            raise ValueError(f"a {type(self).__name__} has a mask of its own: call it without another")
        layer = AttentionModule(self)
        mixed = layer.mix(see(layer, x, Instead(), 0))
        return self.proj_drop(self.proj(self.norm(mixed.transpose(1, 2).flatten(2))))


def masked_attention(blocks: Iterable[nn.Module]) -> type[MaskedAttention] | None:
    """The kind of masked attention that one of the blocks has; None where none has any."""
    kinds = (type(getattr(block, "attn", None)) for block in blocks)
    return next((kind for kind in kinds if issubclass(kind, MaskedAttention)), None)


# --- The layers ---


class AttentionModule(Layer):
    """An attention module of timm by itself, without a block around it: x is its input and what `after`
    returns its output."""

    def __init__(self, attn: nn.Module, rope: Tensor | None = None, shared_bias: Tensor | None = None):
        self.module, self.attn, self.rope, self.shared_bias = attn, attn, rope, shared_bias
        self.heads, self.width, self.scale = attn.num_heads, head_width(attn), attn.scale
        self.dropout = attn.attn_drop.p if attn.training else 0.0
        self.fused = attn.fused_attn

    def before(self, tokens: Tensor) -> Tensor:
        """The tokens as they are."""
        return tokens

    def project(self, x: Tensor, needed: str) -> dict[str, Tensor]:
        """See `Layer`."""
        projected = _project(self.attn, x, needed, self.width)
        return {name: _finish(self.attn, name, part, self.rope) for name, part in projected.items()}

    def bias(self, x: Tensor) -> Tensor | None:
        """A bias by relative position, the layer's own and that which all layers share: (H, N, N)."""
        own = None
        if getattr(self.attn, "relative_position_bias_table", None) is not None:
            own = self.attn._get_rel_pos_bias()
        elif getattr(self.attn, "rel_pos", None) is not None:
            own = self.attn.rel_pos.get_bias()
        added = plus(own, self.shared_bias)
        return None if added is None else added.squeeze(0)

    def mask(self, x: Tensor) -> Tensor | None:
        """What masked attention forbids."""
        return self.attn.mask(x) if isinstance(self.attn, MaskedAttention) else None

    def after(self, tokens: Tensor, x: Tensor, mixed: Tensor, drop_path: DropPathMasks | None) -> Tensor:
        """The output of attention, without residual."""
        return self._projected(x, mixed)

    def _projected(self, x: Tensor, mixed: Tensor) -> Tensor:
        """What comes after the mixing in timm's attention."""
        attn = self.attn
        norm = getattr(attn, "norm", None)  # identity unless the ViT was built with a norm inside attention
        mixed = mixed if norm is None else norm(mixed)
        if getattr(attn, "gate", None) is not None:  # timm >= 1.0.28: an elementwise gate on the output
            mixed = mixed * attn.gate(x).sigmoid()
        return attn.proj_drop(attn.proj(mixed))


class PreNorm(AttentionModule):
    """x + attention(norm(x)), then x + MLP(norm(x)): timm's `Block`, `EvaBlock`, `RelPosBlock` and BEiT's."""

    def __init__(self, block: nn.Module, rope: Tensor | None = None, shared_bias: Tensor | None = None):
        super().__init__(block.attn, rope, shared_bias)
        self.module = block

    def before(self, tokens: Tensor) -> Tensor:
        """See `Layer`."""
        return self.module.norm1(tokens)

    def after(self, tokens: Tensor, x: Tensor, mixed: Tensor, drop_path: DropPathMasks | None) -> Tensor:
        """See `Layer`."""
        block = self.module
        routed = _layer_scale(block, 1, self._projected(x, mixed))
        tokens = tokens + _dropped(block.drop_path1, routed, drop_path, 0)
        local = _layer_scale(block, 2, block.mlp(block.norm2(tokens)))
        return tokens + _dropped(block.drop_path2, local, drop_path, 1)


class PostNorm(PreNorm):
    """x + norm(attention(x)), then x + norm(MLP(x)): timm's `ResPostBlock` and its like."""

    def before(self, tokens: Tensor) -> Tensor:
        """The residual stream as it is."""
        return tokens

    def after(self, tokens: Tensor, x: Tensor, mixed: Tensor, drop_path: DropPathMasks | None) -> Tensor:
        """See `Layer`."""
        block = self.module
        tokens = tokens + _dropped(block.drop_path1, block.norm1(self._projected(x, mixed)), drop_path, 0)
        return tokens + _dropped(block.drop_path2, block.norm2(block.mlp(tokens)), drop_path, 1)


class Parallel(Layer):
    """x + attention(norm(x)) + MLP(norm(x)), from one joint projection: timm's `ParallelScalingBlock`.

    Source: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters" (arXiv 2302.05442).
    """

    def __init__(self, block: nn.Module, rope: Tensor | None = None, shared_bias: Tensor | None = None):
        self.module, self.heads, self.width, self.scale = block, block.num_heads, block.head_dim, block.scale
        self.dropout = block.attn_drop.p if block.training else 0.0
        self.fused = block.fused_attn

    def before(self, tokens: Tensor) -> Tensor:
        """See `Layer`."""
        return self.module.in_norm(tokens)

    def project(self, x: Tensor, needed: str) -> dict[str, Tensor]:
        """See `Layer`."""
        block = self.module
        norms = {"q": block.q_norm, "k": block.k_norm, "v": nn.Identity()}
        hidden, wide, *_ = block.in_split  # the rows of the MLP come first, then those of q, k and v
        starts = {name: hidden + wide * index for index, name in enumerate("qkv")}
        flat = {name: self._rows(x, slice(starts[name], starts[name] + wide)) for name in needed}
        return {
            name: norms[name](part.unflatten(-1, (self.heads, self.width))).transpose(1, 2)
            for name, part in flat.items()
        }

    def after(self, tokens: Tensor, x: Tensor, mixed: Tensor, drop_path: DropPathMasks | None) -> Tensor:
        """See `Layer`; both branches are dropped together, by the first mask."""
        block = self.module
        hidden = self._rows(x, slice(0, block.in_split[0]))
        hidden = hidden if block.mlp_bias is None else hidden + block.mlp_bias
        hidden = block.mlp_drop(block.mlp_act(hidden))
        if block.out_proj is not None:
            both = block.out_proj(torch.cat((mixed, hidden), -1))
        else:
            both = block.attn_out_proj(mixed) + block.mlp_out_proj(hidden)
        return tokens + _dropped(block.drop_path, block.ls(both), drop_path, 0)

    def _rows(self, x: Tensor, rows: slice) -> Tensor:
        joint = self.module.in_proj
        return F.linear(x, joint.weight[rows], None if joint.bias is None else joint.bias[rows])


def _dropped(own: nn.Module, branch: Tensor, masks: DropPathMasks | None, which: int) -> Tensor:
    """A branch under stochastic depth: the block's own, or the mask that was given."""
    return own(branch) if masks is None else masks[which].to(branch.dtype) * branch


def _layer_scale(block: nn.Module, branch: int, x: Tensor) -> Tensor:
    """Layer scale of branch 1 (attention) or 2 (MLP): a module in `Block`, a parameter or None in `EvaBlock`
    and BEiT's."""
    if hasattr(block, "ls1"):
        return getattr(block, f"ls{branch}")(x)
    gamma = getattr(block, f"gamma_{branch}")
    return x if gamma is None else gamma * x


def _project(attn: nn.Module, x: Tensor, needed: str, width: int) -> dict[str, Tensor]:
    """The projections of x (B, N, D) named in `needed`, letters of "qkv": each (B, heads, N, d = width),
    before norms and rotation.

    Only here it matters in which form timm keeps them: three projections (`EvaAttention`, `AttentionRope`),
    or one joint projection with its bias (`Attention`, `AttentionRope`) or with the biases beside it, k's a
    constant zero (`EvaAttention`, BEiT's).
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
    norm = None if name == "v" else getattr(attn, f"{name}_norm", None)  # BEiT's attention has none
    part = projected if norm is None else norm(projected)
    if rope is not None and name != "v":
        # a class token has no place to turn to
        prefix, rest = (part[:, :, : attn.num_prefix_tokens], part[:, :, attn.num_prefix_tokens :])
        rotated = apply_rot_embed_cat(rest, rope, half=getattr(attn, "rotate_half", False))
        part = torch.cat([prefix, rotated], 2).to(projected.dtype)
    if name == "q" and isinstance(attn, MaskedAttention):
        part = part * (attn.factors() / attn.scale)[:, None, None].to(part.dtype)
    shared = attn.num_heads // part.shape[1]
    return part if shared == 1 else part.repeat_interleave(shared, 1)


# --- The models ---


class TimmAdapter(Adapter):
    """What timm's ViTs have in common."""

    family: type[nn.Module]

    @property
    def exact_by_class(self) -> bool:
        """See `Adapter`. A walk calls neither the model, nor its blocks and their attention, so it does not
        call their hooks, which may change what the model computes."""
        inside = (part for block in self.model.blocks for part in (block, getattr(block, "attn", None)))
        parts = (part for part in (self.model, self.model.blocks, *inside) if part is not None)
        return not any(part._forward_hooks or part._forward_pre_hooks for part in parts)

    @property
    def masked(self) -> bool:
        """Whether a layer forbids pairs of tokens."""
        return masked_attention(self.model.blocks) is not None

    @property
    def checkpointing(self) -> bool:
        """Whether timm's `set_grad_checkpointing` was called."""
        return self.model.grad_checkpointing

    def layers(
        self, ropes: Sequence[Tensor | None] | None = None, shared_bias: Tensor | None = None
    ) -> Sequence[Layer]:
        """The blocks' layers, each with its rotations (None: none) and the bias that all share."""
        blocks = self.model.blocks
        ropes = [None] * len(blocks) if ropes is None else ropes
        return [LAYERS[_class_of(block)](block, rope, shared_bias) for block, rope in zip(blocks, ropes)]

    def head(self, tokens: Tensor) -> Tensor:
        """See `Adapter`."""
        return self.model.forward_head(self.model.norm(tokens))

    def sizes(self) -> Sizes:
        """See `Adapter`."""
        vit, embed = self.model, self.model.patch_embed
        has_class = int(vit.cls_token is not None)
        has_distillation = int(getattr(vit, "dist_token", None) is not None)
        kinds = has_class, has_distillation, vit.num_prefix_tokens - has_class - has_distillation
        return self._sizes(tuple(embed.grid_size), tuple(embed.img_size), kinds)

    def _sizes(self, grid: tuple[int, int], image: tuple[int, int], kinds: tuple[int, int, int]) -> Sizes:
        first = getattr(self.model.blocks[0], "attn", self.model.blocks[0])
        return Sizes(len(self.model.blocks), first.num_heads, head_width(first), grid, image, kinds)

    def settings(self, layer_scale_init: float | None = None) -> Settings:
        """See `Adapter`."""
        return read_settings(self.model, layer_scale_init)

    def drop_paths(self) -> Sequence[tuple[nn.Module, nn.Module]]:
        """See `Adapter`."""
        return [
            (block.drop_path, block.drop_path)
            if hasattr(block, "drop_path")
            else (block.drop_path1, block.drop_path2)
            for block in self.model.blocks
        ]

    def check(self) -> None:
        """Look at the classes of the ViT, its blocks and their attention, at methods that were replaced, and
        at the mode."""
        vit, name = self.model, type(self.model).__name__
        # a subclass may change what is fed to the blocks, as DeiT's does, but not these
        for method, stock in STOCK_MODEL[self.family].items():
            if getattr(type(vit), method) is not stock:
                raise Unwalkable(f"cannot walk a {name}: it has its own {method}, which walk does not know")
        if _in_distilled_training(vit):
            raise Unwalkable(
                "cannot walk a ViT in distilled_training mode: it returns two predictions; call"
                " set_distilled_training(False)"
            )
        for index, block in enumerate(vit.blocks):
            where = f"layer {index} of this {name}"
            _check_part(block, BLOCKS[self.family], where)
            if LAYERS[_class_of(block)] is not Parallel:
                attn = getattr(block, "attn", None)
                _check_part(attn, ATTENTIONS[self.family], where)
                if hasattr(attn, "unshard"):
                    raise Unwalkable(
                        f"cannot walk {where}: FSDP divides its attention by itself, and its weights are read"
                        " outside of its forward; divide whole blocks, fully_shard(block)"
                    )

    def still_walkable(self) -> bool:
        """See `Adapter`: the classes of blocks, and the mode."""
        stock = all(
            _class_of(block) in STOCK and (not hasattr(block, "attn") or _class_of(block.attn) in STOCK)
            for block in self.model.blocks
        )
        return stock and not _in_distilled_training(self.model)


class ViT(TimmAdapter):
    """timm's `VisionTransformer`, with DeiT's distillation token and hybrids."""

    family = vit.VisionTransformer

    def embed(self, images: Tensor) -> tuple[Tensor, Sequence[Layer]]:
        """See `Adapter`."""
        model = self.model
        tokens = model.patch_drop(model._pos_embed(model.patch_embed(images)))
        return model.norm_pre(tokens), self.layers()


class EvaViT(TimmAdapter):
    """timm's `Eva`: EVA, EVA-02, DINOv3, the perception encoder, ViTs with rotary positions."""

    family = eva.Eva

    def embed(self, images: Tensor) -> tuple[Tensor, Sequence[Layer]]:
        """See `Adapter`."""
        # it drops patches in there already, because their rotations must go with them
        tokens, rope = self.model._pos_embed(self.model.patch_embed(images))
        # learned frequencies: every layer has its own rotation
        per_layer = rope is not None and self.model.rope_mixed
        ropes = rope if per_layer else [rope] * len(self.model.blocks)
        return self.model.norm_pre(tokens), self.layers(ropes)


class BeitViT(TimmAdapter):
    """timm's `Beit`: BEiT and BEiTv2, with a bias by relative position in each layer, or one that all
    share."""

    family = beit.Beit

    def embed(self, images: Tensor) -> tuple[Tensor, Sequence[Layer]]:
        """See `Adapter`."""
        model = self.model
        tokens = model.patch_embed(images)
        tokens = torch.cat((model.cls_token.expand(len(tokens), -1, -1), tokens), 1)
        tokens = model.pos_drop(tokens if model.pos_embed is None else tokens + model.pos_embed)
        return tokens, self.layers(shared_bias=None if model.rel_pos_bias is None else model.rel_pos_bias())


class RelativeViT(TimmAdapter):
    """timm's `VisionTransformerRelPos`."""

    family = relpos.VisionTransformerRelPos

    def embed(self, images: Tensor) -> tuple[Tensor, Sequence[Layer]]:
        """See `Adapter`."""
        model = self.model
        tokens = model.patch_embed(images)
        if model.cls_token is not None:
            tokens = torch.cat((model.cls_token.expand(len(tokens), -1, -1), tokens), 1)
        shared = None if model.shared_rel_pos is None else model.shared_rel_pos.get_bias()
        return tokens, self.layers(shared_bias=shared)


class NaFlex(TimmAdapter):
    """timm's `NaFlexVit` on images of one size: nothing is padded, so nothing is masked."""

    family = NaFlexVit

    def embed(self, images: Tensor) -> tuple[Tensor, Sequence[Layer]]:
        """See `Adapter`. Raises `ValueError` for a packed batch of patches, which is padded."""
        if not isinstance(images, Tensor) or images.ndim != 4:
            raise ValueError("a NaFlexVit is walked on images of one size, (B, 3, height, width), unpadded")
        model = self.model
        parts = model._forward_embeds(images, None, None, None)
        rope, kept = parts["rope_embeds"], parts["keep_indices"]
        if not (model.rope_is_mixed and rope is not None):
            return parts["patches"], self.layers([rope] * len(model.blocks))
        if kept is not None:
            raise ValueError("patches are dropped from rotations that each layer learns: patch_drop_rate=0")
        return parts["patches"], self.layers(list(rope))

    def sizes(self) -> Sizes:
        """See `Adapter`. It takes images of any size: this is the size that timm says it was trained at, else
        that of its positional embeddings, else 16 x 16 patches."""
        embeds = self.model.embeds
        said = (getattr(self.model, "pretrained_cfg", None) or {}).get("input_size")
        grid = tuple(embeds.pos_embed_grid_size or (16, 16))
        if said is not None:
            grid = tuple(side // pixels for side, pixels in zip(said[1:], embeds.patch_size))
        image = tuple(side * pixels for side, pixels in zip(grid, embeds.patch_size))
        registers = 0 if embeds.reg_token is None else embeds.reg_token.shape[1]
        return self._sizes(grid, image, (int(embeds.cls_token is not None), 0, registers))


# --- Which models can be walked faithfully, and for the others why not ---

# Why classes of timm and torch are not walked. By name, because several exist only in some of the timm
# versions that are supported. A class of our own says it itself, in its attribute `not_walkable`.
WINDOWS = "it attends inside shifted windows: there is no map over all tokens"
REASONS = {
    "DiffParallelScalingBlock": "it subtracts two attention maps and runs the MLP beside them",
    "ParallelThingsBlock": "it sums several attention branches, so a layer has no single map",
    "DiffAttention": "it subtracts two attention maps, so what mixes the values is no softmax",
    **dict.fromkeys(("SwinTransformer", "SwinTransformerV2", "SwinTransformerV2Cr"), WINDOWS),
    "VisionTransformerSAM": "most of its layers attend inside windows: there is no map over all tokens",
    "Cait": "its talking heads mix the maps of several heads, and class attention comes in separate layers;"
    " atlib.methods.cait.walk_cait walks it",
    "MlpMixer": "it has no attention: what mixes patches are weights, the same for all images; of a ResMLP"
    " atlib.methods.resmlp.static_maps shows them",
    "DataParallel": "it is a wrapper: pass its .module (`accelerate launch` trains on several GPUs)",
    "DistributedDataParallel": "it is a wrapper: build the pair with the model inside, and wrap the pair",
    "FullyShardedDataParallel": "it is a wrapper: build the pair with the model inside, and wrap the pair",
    "OptimizedModule": "it is a wrapper made by torch.compile: pass the module inside (its ._orig_mod)",
}

LAYERS: Mapping[type, Callable[..., Layer]] = {
    vit.Block: PreNorm,
    vit.ResPostBlock: PostNorm,
    vit.ParallelScalingBlock: Parallel,
    eva.EvaBlock: PreNorm,
    eva.EvaBlockPostNorm: PostNorm,
    beit.Block: PreNorm,
    relpos.RelPosBlock: PreNorm,
    relpos.ResPostRelPosBlock: PostNorm,
}
# Which attention classes timm's EVA family has depends on the timm version.
_ROTATED = tuple(getattr(eva, name) for name in ("EvaAttention", "AttentionRope") if hasattr(eva, name))
BLOCKS: Mapping[type, Sequence[type]] = {
    ViT.family: (vit.Block, vit.ResPostBlock, vit.ParallelScalingBlock),
    EvaViT.family: (eva.EvaBlock, eva.EvaBlockPostNorm),
    BeitViT.family: (beit.Block,),
    RelativeViT.family: (relpos.RelPosBlock, relpos.ResPostRelPosBlock),
    NaFlex.family: (vit.Block, eva.EvaBlock, vit.ParallelScalingBlock),
}
ATTENTIONS: Mapping[type, Sequence[type]] = {
    ViT.family: (Attention, MaskedAttention),
    EvaViT.family: _ROTATED,
    BeitViT.family: (beit.Attention,),
    RelativeViT.family: (relpos.RelPosAttention,),
    NaFlex.family: (Attention, *_ROTATED),
}

# Taken at import, so that a method that somebody replaces later for a whole class is noticed too.
STOCK = {part: part.forward for parts in (*BLOCKS.values(), *ATTENTIONS.values()) for part in parts}
STOCK_MODEL = {
    family: {method: getattr(family, method) for method in ("forward", "forward_features")}
    for family in BLOCKS
}


def is_plain(block: nn.Module) -> bool:
    """Whether a block is timm's usual one: `Block` or `EvaBlock`."""
    return _class_of(block) in (vit.Block, eva.EvaBlock)


def why_not(part: object, otherwise: str) -> str:
    """Why a model or a part of one is not walked: as its class says, as `REASONS` does, or `otherwise`."""
    kind = type(part)
    return getattr(kind, "not_walkable", None) or REASONS.get(kind.__name__, otherwise)


def _in_distilled_training(model: nn.Module) -> bool:
    return getattr(model, "distilled_training", False) and model.training


def _class_of(part: nn.Module | None) -> type:
    """The class whose `forward` a part must have: its own, that of all masked attention, or that of a block
    before FSDP2 divided its weights, which gives it a class of its own."""
    if isinstance(part, MaskedAttention):
        return MaskedAttention
    kind = type(part)
    return kind.__mro__[2] if kind.__name__.startswith("FSDP") and hasattr(part, "unshard") else kind


def _check_part(part: nn.Module | None, known: Sequence[type[nn.Module]], where: str) -> None:
    kind, stock = type(part), _class_of(part)
    if stock not in known:
        names = " and ".join(one.__name__ for one in known)
        reason = why_not(part, f"walk knows timm's {names} and cannot tell what this one computes")
        raise Unwalkable(f"cannot walk {where}, a {kind.__name__}: {reason}")
    if kind.forward is not STOCK[stock] or "forward" in vars(part):
        raise Unwalkable(f"cannot walk {where}: its {kind.__name__}.forward was replaced")
