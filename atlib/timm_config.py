"""A timm ViT's constructor arguments, read off its modules: most timm versions do not keep them.

`VisionTransformer` and `Eva` call the same things by different names; `Settings` uses the names of
`VisionTransformer` for what both have, and keeps as `rope`, `num_kv_heads`, `attn_only_layer_scale` ... what
only `Eva` has.
"""

import inspect
from functools import partial
from typing import Any, NamedTuple

import timm
from timm.layers import GluMlp, Mlp, PatchEmbed, SwiGLU
from timm.models import beit, eva
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

Settings = dict[str, Any]

USUAL_LAYER_SCALE = 1e-5  # timm's `LayerScale` and its DINOv2, DINOv3 and SO ViTs
ROPE_TYPES = {
    "RotaryEmbeddingCat": "cat",
    "RotaryEmbeddingMixed": "mixed",
    "RotaryEmbeddingDinoV3": "dinov3",
    "RotaryEmbeddingMRope": "mrope",
}
SIZES = {"img_size", "patch_size", "embed_dim", "depth", "num_heads", "hidden"}
# Eva's constructor arguments that are attributes of its rotary embedding.
ROPE_ATTRIBUTES = {
    "rope_temperature": "temperature",
    "rope_grid_offset": "grid_offset",
    "rope_grid_indexing": "grid_indexing",
    "rope_shift_coords": "shift_coords",
    "rope_jitter_coords": "jitter_coords",
    "rope_rescale_coords": "rescale_coords",
    "rope_mrope_section": "mrope_section",
    "ref_feat_shape": "ref_feat_shape",
}


# The settings that make up a component, with the values they have in a standard ViT.
STANDARD_SETTINGS: dict[str, Settings] = {
    "layer_scale": {"init_values": None, "attn_only_layer_scale": False},
    "registers": {"reg_tokens": 0},
    "pre_norm": {"pre_norm": False},
    "activation": {"act_layer": nn.GELU},
    "pooling": {
        "global_pool": "token",
        "class_token": True,
        "fc_norm": False,
        "pool_include_prefix": False,
        "distilled": False,
        "attn_pool_num_heads": None,
        "attn_pool_mlp_ratio": None,
    },
    "positions": {"pos_embed": "learn", "no_embed_class": False, "rope": None, "relative": None},
    "qk_norm": {"qk_norm": False},
    "mlp": {"mlp": "plain"},
    "norm": {
        "norm_layer": None,
        "final_norm": True,
        "embed_norm_layer": None,
        "scale_attn_norm": False,
        "scale_mlp_norm": False,
    },
    "qkv_bias": {"biases": "qkv", "proj_bias": True},
    "grouped_queries": {"num_kv_heads": None},
    "tokeniser": {},  # of others nothing can be read off
}


class Parts(NamedTuple):
    """The parts of a timm ViT, wherever its class keeps them."""

    block: nn.Module  # the first
    attn: nn.Module  # of that block; the block itself where both are one
    mlp: nn.Module | None  # None where it has no module of its own
    embed: nn.Module
    norm: nn.Module  # the first of the block
    proj: nn.Module | None  # after attention
    activation: nn.Module
    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    pos_embed: Any
    no_embed_class: bool  # whether prefix tokens have no position
    relative: list[str]  # in words: a bias by relative position
    post_norm: bool  # whether norms come after attention and the MLP


def parts_of(vit: nn.Module) -> Parts:
    """The parts of a timm ViT."""
    block = vit.blocks[0]
    attn, mlp = getattr(block, "attn", block), getattr(block, "mlp", None)
    embed = vit.embeds if hasattr(vit, "embeds") else vit.patch_embed
    holder = embed if hasattr(vit, "embeds") else vit  # NaFlexVit embeds all tokens in one module
    after = getattr(block, "attn_out_proj", None) or getattr(block, "out_proj", None)
    factors = [getattr(embed, f"pos_embed_{side}", None) for side in "yx"]
    return Parts(
        block,
        attn,
        mlp,
        embed,
        getattr(block, "norm1", getattr(block, "in_norm", None)),
        getattr(attn, "proj", after),
        # an MLP of an unknown kind is told by its own name
        block.mlp_act if mlp is None else getattr(mlp, "act", mlp),
        getattr(holder, "cls_token", None),
        getattr(holder, "reg_token", None),
        getattr(holder, "pos_embed", None) if factors[0] is None else factors,
        holder is embed or getattr(vit, "no_embed_class", False),
        _relative(vit, attn),
        "PostNorm" in type(block).__name__ or "ResPost" in type(block).__name__,
    )


def _relative(vit: nn.Module, attn: nn.Module) -> list[str]:
    shared = getattr(vit, "rel_pos_bias", None) or getattr(vit, "shared_rel_pos", None)
    if shared is not None:
        return [f"relative ({type(shared).__name__} for all layers)"]
    if getattr(attn, "relative_position_bias_table", None) is not None:
        return ["relative (a bias in each layer)"]
    own = getattr(attn, "rel_pos", None)
    return [] if own is None else [f"relative ({type(own).__name__} in each layer)"]


def can_be_read(vit: nn.Module) -> bool:
    """Whether a timm ViT's constructor arguments can be read off its modules (`read_settings`)."""
    plain = (Block, eva.EvaBlock, beit.Block)
    return (
        isinstance(vit, (VisionTransformer, Eva, Beit))
        and all(issubclass(type(block), plain) for block in vit.blocks)
        and type(vit.patch_embed) is PatchEmbed
    )


def build_by_name(vit: nn.Module, num_classes: int, drop_path_rate: float) -> nn.Module:
    """A second ViT like one that timm built by its name, freshly initialised, of the same
    depth and image size.

    Raises `ValueError` for a model that does not say its name, or was built otherwise.
    """
    name = (getattr(vit, "pretrained_cfg", None) or {}).get("architecture")
    has = f"this {type(vit).__name__} has a {type(parts_of(vit).embed).__name__}"
    if not name:
        raise ValueError(
            f"{has} and {type(vit.blocks[0]).__name__}s, which cannot be read off, and no timm name: build"
            " the student by name, with create_vit"
        )
    size = getattr(getattr(vit, "patch_embed", None), "img_size", None)
    sized = {"depth": len(vit.blocks)} | ({} if size is None else {"img_size": size})
    return timm.create_model(name, num_classes=num_classes, drop_path_rate=drop_path_rate, **sized)


def vit_settings(model: type[nn.Module] = VisionTransformer, **changes: Any) -> Settings:
    """The settings of a standard ViT with these `changes`, by the names of `read_settings`: for models of
    other libraries. The sizes, `img_size`, `patch_size`, `embed_dim`, `depth`, `num_heads` and `hidden`, must
    be among them."""
    standard = {name: value for component in STANDARD_SETTINGS.values() for name, value in component.items()}
    kept = {
        "model": model,
        "in_chans": 3,
        "dynamic_img_size": False,
        "dynamic_img_pad": False,
        "attn_type": "eva",
        "qkv_fused": True,
        "fix_init": False,
        "weight_init": "",
        "head_init_scale": None,
    }
    if unknown := changes.keys() - standard.keys() - kept.keys() - SIZES:
        raise ValueError(f"a timm ViT has no settings {sorted(unknown)}")
    return {**standard, **kept, **changes}


def read_settings(vit: VisionTransformer | Eva, layer_scale_init: float | None = None) -> Settings:
    """All that decides a ViT's architecture, under common names. Raises `ValueError` for other parts."""
    if not can_be_read(vit) and type(vit.blocks[0]) not in (Block, eva.EvaBlock, beit.Block):
        kinds = f"{type(vit).__name__} of {type(vit.blocks[0]).__name__}s"
        raise ValueError(f"this {kinds} cannot be read off: build the student by name, with create_vit")
    parts = parts_of(vit)
    block, embed, attn, mlp = parts.block, parts.embed, parts.attn, parts.mlp
    for part, known in ((embed, (PatchEmbed,)), (mlp, (Mlp, GluMlp, SwiGLU))):
        if type(part) not in known:
            has = f"this {type(vit).__name__} has a {type(part).__name__}"
            raise ValueError(f"{has}, which cannot be read off: build the student by name, with create_vit")
    return {
        # size
        "model": type(vit),
        "img_size": embed.img_size,
        "patch_size": embed.patch_size,
        "in_chans": embed.proj.in_channels,
        "embed_dim": vit.embed_dim,
        "depth": len(vit.blocks),
        "num_heads": attn.num_heads,
        "hidden": mlp.fc2.in_features,
        "dynamic_img_size": getattr(vit, "dynamic_img_size", False),
        "dynamic_img_pad": embed.dynamic_img_pad,
        # how the weights are kept and initialised
        "attn_type": "rope" if type(attn).__name__ == "AttentionRope" else "eva",
        "qkv_fused": attn.qkv is not None,
        "fix_init": getattr(vit, "fix_init", False),
        "weight_init": getattr(vit, "weight_init_mode", ""),
        "head_init_scale": getattr(vit, "head_init_scale", None),
        # components
        "init_values": _layer_scale_init(block, layer_scale_init),
        "attn_only_layer_scale": present(getattr(block, "gamma_1", None)) and not present(block.gamma_2),
        "reg_tokens": 0 if parts.reg_token is None else parts.reg_token.shape[1],
        "pre_norm": present(getattr(vit, "norm_pre", None)),
        "act_layer": _kind(mlp.act, "approximate"),
        "global_pool": vit.global_pool,
        "class_token": vit.cls_token is not None,
        "fc_norm": present(vit.fc_norm),
        "pool_include_prefix": getattr(vit, "pool_include_prefix", False),
        "distilled": isinstance(vit, VisionTransformerDistilled),
        "attn_pool_num_heads": getattr(getattr(vit, "attn_pool", None), "num_heads", None),
        "attn_pool_mlp_ratio": (
            None
            if getattr(getattr(vit, "attn_pool", None), "mlp", None) is None
            else mlp_ratio_of(vit.attn_pool.mlp.fc1.out_features, vit.embed_dim)
        ),
        "pos_embed": "none" if vit.pos_embed is None else "learn",
        "no_embed_class": getattr(vit, "no_embed_class", False),
        "rope": _rope(vit),
        "relative": _kind_of_bias(vit, attn),
        "qk_norm": present(getattr(attn, "q_norm", None)),
        "mlp": "plain" if type(mlp) is Mlp else _kind(mlp, "gate_last"),
        "norm_layer": _kind(block.norm1, "eps"),
        "final_norm": present(vit.norm) or present(vit.fc_norm),
        "embed_norm_layer": _kind(embed.norm, "eps") if present(embed.norm) else None,
        "scale_attn_norm": present(getattr(attn, "norm", None)),
        "scale_mlp_norm": present(getattr(mlp, "norm", None)),
        "biases": biases_of(attn),
        "proj_bias": attn.proj.bias is not None,
        "num_kv_heads": _kv_heads(vit),
    }


def build(settings: Settings, num_classes: int, drop_path_rate: float) -> VisionTransformer | Eva:
    """The freshly initialised ViT of these settings. Raises `ValueError` for what its class cannot have."""
    model = settings["model"]
    if issubclass(model, VisionTransformer):
        arguments, known = _vit_arguments(settings), VisionTransformer
        if settings["distilled"] or model is VisionTransformerDistilled:
            model = VisionTransformerDistilled if settings["distilled"] else VisionTransformer
    elif model is Beit:
        arguments, known = _beit_arguments(settings), Beit
    else:
        arguments, known = _eva_arguments(settings), Eva
    # An argument that this version of timm does not have cannot have been used either.
    accepted = inspect.signature(known).parameters
    arguments = {name: value for name, value in arguments.items() if name in accepted}
    return model(**arguments, num_classes=num_classes, drop_path_rate=drop_path_rate)


def _vit_arguments(settings: Settings) -> dict[str, Any]:
    s = dict(settings)
    pooled = s["global_pool"] == "map" and (s.pop("attn_pool_num_heads"), s.pop("attn_pool_mlp_ratio"))
    hidden, kind = s.pop("hidden"), s.pop("mlp")
    # it is told the width before halving
    ratio = mlp_ratio_of(hidden * (2 if kind != "plain" and kind.func is GluMlp else 1), s["embed_dim"])
    impossible = {
        "positions": s["rope"] is not None or s["relative"] is not None,
        "grouped_queries": s["num_kv_heads"] is not None,
        "layer_scale": s["attn_only_layer_scale"],
        "qkv_bias": s["biases"] not in ("", "qkv"),
        "pooling": pooled and pooled != (s["num_heads"], ratio),
    }
    if wrong := ", ".join(name for name, value in impossible.items() if value):
        raise ValueError(
            f"timm's VisionTransformer cannot have this teacher's {wrong}; to keep them, take native=True and"
            " drop the other components"
        )
    layer = Mlp if kind == "plain" else kind
    return s | {"mlp_ratio": ratio, "mlp_layer": layer, "qkv_bias": s["biases"] == "qkv"}


def _eva_arguments(settings: Settings) -> dict[str, Any]:
    s = dict(settings)
    if s["relative"] is not None:
        raise ValueError("timm's Eva cannot have positions by a relative bias")
    gated = s["mlp"] != "plain"
    separate = gated and s["mlp"].func is SwiGLU  # its two halves lie in two matrices
    renamed = {
        "num_reg_tokens": "reg_tokens",
        "use_pre_transformer_norm": "pre_norm",
        "scale_attn_inner": "scale_attn_norm",
        "scale_mlp": "scale_mlp_norm",
    }
    s |= {name: s[common] for name, common in renamed.items()} | (s["rope"] or {})
    s |= {
        "use_fc_norm": s["final_norm"] and s["fc_norm"],
        "use_post_transformer_norm": s["final_norm"] and not s["fc_norm"],
        "use_abs_pos_emb": s["pos_embed"] == "learn",
        "use_rot_pos_emb": s["rope"] is not None,
        "mlp_ratio": mlp_ratio_of(s["hidden"], s["embed_dim"]),
        "swiglu_mlp": gated,
        "swiglu_align_to": 1 if separate else 0,
        "qkv_bias": bool(s["biases"]),
        "attn_type": {"qkv": "rope", "qv": "eva"}.get(s["biases"], s["attn_type"]),
    }
    for name in ("norm_layer", "head_init_scale"):
        if s[name] is None:  # timm's default
            del s[name]
    return s


def head_width(attn: nn.Module) -> int:
    """The width d of one head; timm's EVA attention has no `head_dim` in the oldest versions, but its scale
    is 1/√d in every version."""
    return attn.head_dim if hasattr(attn, "head_dim") else round(attn.scale**-2)


def _beit_arguments(settings: Settings) -> dict[str, Any]:
    s = dict(settings)
    gated = s["mlp"] != "plain"
    impossible = {
        "positions": s["rope"] is not None or s["no_embed_class"],
        "registers": s["reg_tokens"] > 0,
        "pre_norm": s["pre_norm"],
        "qk_norm": s["qk_norm"],
        "qkv_bias": s["biases"] not in ("", "qv") or not s["proj_bias"],
        "pooling": not s["class_token"] or s["distilled"],
        "mlp": gated and s["mlp"].func is not SwiGLU,
        "activation": not gated and s["act_layer"] not in (nn.GELU,) and _not_gelu(s["act_layer"]),
    }
    if wrong := ", ".join(name for name, value in impossible.items() if value):
        raise ValueError(f"timm's Beit cannot have the {wrong} that this student would have: drop others")
    for name in ("norm_layer", "head_init_scale"):
        if s[name] is None:  # timm's default
            del s[name]
    return s | {
        "mlp_ratio": mlp_ratio_of(s["hidden"], s["embed_dim"]),
        "swiglu_mlp": gated,
        "scale_mlp": s["scale_mlp_norm"],
        "qkv_bias": bool(s["biases"]),
        "use_abs_pos_emb": s["pos_embed"] == "learn",
        "use_rel_pos_bias": s["relative"] == "each",
        "use_shared_rel_pos_bias": s["relative"] == "shared",
        "use_fc_norm": s["fc_norm"],
    }


def _not_gelu(layer: Any) -> bool:
    return not (getattr(layer, "func", None) is nn.GELU and layer.keywords.get("approximate") != "tanh")


def present(part: Any) -> bool:
    """Whether an optional part is there: timm leaves `Identity` or None where it is not."""
    return part is not None and not isinstance(part, nn.Identity)


def is_gated(mlp: nn.Module) -> bool:
    """Whether one half of the hidden units is multiplied with the other (GLU, SwiGLU)."""
    return isinstance(mlp, (GluMlp, SwiGLU))


def eps_of(norm: nn.Module) -> float:
    """The ε of a norm, 0 where it has none."""
    return getattr(norm, "eps", None) or 0.0


def biases_of(attn: nn.Module) -> str:
    """Which of the projections to q, k, v have a bias: letters of "qkv"."""
    if not hasattr(attn, "qkv"):  # one joint projection with that of the MLP
        return "qkv" if attn.in_proj.bias is not None else ""
    if attn.qkv is None:
        return "".join(name for name in "qkv" if getattr(attn, f"{name}_proj").bias is not None)
    if getattr(attn, "q_bias", None) is not None:
        return "qv"
    return "" if getattr(attn.qkv, "bias", None) is None else "qkv"


def _kind(module: nn.Module, option: str) -> Any:
    """The module's class, with the one option that its instances keep."""
    value = getattr(module, option, None)
    return partial(type(module), **({} if value is None else {option: value}))


def mlp_ratio_of(hidden: int, width: int) -> float:
    """The ratio from which timm computes this hidden width, int(width · ratio)."""
    return hidden / width if int(width * (hidden / width)) == hidden else (hidden + 0.5) / width


def _layer_scale_init(block: nn.Module, wanted: float | None) -> float | None:
    if not present(getattr(block, "ls1", getattr(block, "gamma_1", None))):
        return None
    noted = getattr(block, "init_values", getattr(getattr(block, "ls1", None), "init_values", None))
    return wanted or noted or USUAL_LAYER_SCALE


def _kind_of_bias(vit: nn.Module, attn: nn.Module) -> str | None:
    """BEiT's bias by relative position: "shared" by all layers, or "each" has its own."""
    if getattr(vit, "rel_pos_bias", None) is not None:
        return "shared"
    return None if getattr(attn, "relative_position_bias_table", None) is None else "each"


def _kv_heads(vit: nn.Module) -> tuple[int, ...] | None:
    heads = tuple(getattr(block.attn, "num_kv_heads", block.attn.num_heads) for block in vit.blocks)
    return None if set(heads) == {vit.blocks[0].attn.num_heads} else heads


def _rope(vit: nn.Module) -> dict[str, Any] | None:
    rope = getattr(vit, "rope", None)
    if rope is None:
        return None
    name, half = type(rope).__name__, getattr(vit.blocks[0].attn, "rotate_half", False)
    if name not in ROPE_TYPES:
        raise ValueError(f"this {type(vit).__name__} rotates with a {name}, which timm does not build")
    read = {to: getattr(rope, of) for to, of in ROPE_ATTRIBUTES.items() if hasattr(rope, of)}
    return read | {"rope_type": ROPE_TYPES[name], "rope_rotate_half": half}
