"""From the names under which others keep a ViT's weights to timm's, and to the architecture that they are of:
what weights do not show is what the code that wrote them used, and where that is open, it is asked for."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlib.checkpoint import count, read_tensors
from atlib.maps import Grid
from atlib.vit import Architecture
from atrun.teachers.files import Weights

# How the weights of the patch embedding are called by timm, torchvision and transformers.
PATCHES = re.compile(
    r"^(.*\.)?(patch_embed\.proj|conv_proj|embeddings\.patch_embeddings?(\.projection)?)\.weight$"
)
# To timm's names; transformers' q, k and v stay apart.
TO_TIMM = (
    # DeiT III and DINOv2, which trains its blocks in chunks
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),
    (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),
    (r"^register_tokens$", "reg_token"),
    (r"^(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."),
    (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
    # torchvision
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^class_token$", "cls_token"),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_", "blocks."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(linear_1|0)\.", ".mlp.fc1."),
    (r"\.mlp\.(linear_2|3)\.", ".mlp.fc2."),
    # transformers
    (r"^embeddings\.(cls_token|class_embedding)$", "cls_token"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings?(\.weight)?$", "pos_embed"),
    (r"^embeddings\.patch_embeddings?\.(projection\.)?", "patch_embed.proj."),
    (r"^(layernorm|post_layernorm)\.", "norm."),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^pooler\.layernorm\.", "fc_norm."),
    (r"^encoder\.relative_position_bias\.", "rel_pos_bias."),
    (r"^(encoder\.)?layers?\.", "blocks."),
    (r"\.(layernorm_before|layer_norm1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2)\.", ".norm2."),
    (r"\.attention\.output\.dense\.|\.attention\.o_proj\.|\.self_attn\.out_proj\.", ".attn.proj."),
    (r"\.(attention\.attention|attention|self_attn)\.", ".attn."),
    (r"\.attn\.relative_position_bias\.", ".attn."),
    (r"\.attn\.(query|q_proj)\.", ".attn.q."),
    (r"\.attn\.(key|k_proj)\.", ".attn.k."),
    (r"\.attn\.(value|v_proj)\.", ".attn.v."),
    (r"\.(intermediate\.dense|mlp\.up_proj|mlp\.weights_in)\.", ".mlp.fc1."),
    (r"\.(output\.dense|mlp\.down_proj|mlp\.weights_out)\.", ".mlp.fc2."),
    (r"\.(?:layer_scale|lambda_)([12])(?:\.lambda1)?$", r".ls\1.gamma"),
)
# What a teacher needs nothing of: class heads and projections, and what pre-training alone used.
UNNEEDED = re.compile(
    r"head|fc\.|pre_logits|mlp_head|projector|predictor|decoder|mask_token|masked_|logit_|pooler|embeddings\."
    r"|.*position_index$"
)
# Who writes a file, by a name that nobody else writes, the first that is there; all normalise as ImageNet.
# Sources: github.com/facebookresearch/{dino, mae, deit, dinov2}.
MAE, TORCHVISION = "MAE pre-training, the encoder without its decoder", "torchvision's VisionTransformer"
WRITERS = {
    "head.last_layer.weight_g": "DINO",
    "decoder_embed.weight": MAE,
    "dist_token": "DeiT with a distillation token",
    "blocks.0.gamma_1": "DeiT III",
    "mask_token": "DINOv2",
    "encoder.pos_embedding": TORCHVISION,
}
# Heads by width, the same in DeiT, MAE, DINO, DINOv2, MoCo-v3 and I-JEPA; of smaller ones by their writer.
HEADS: Mapping[int, int] = {768: 12, 1024: 16, 1280: 16, 1408: 16, 1536: 24}
SMALL: Mapping[int, int] = {192: 3, 384: 6}
DINOV3 = {384: "small", 768: "base", 1024: "large", 1280: "huge_plus", 4096: "7b"}  # Meta's, by width

# Of each `model_type` of transformers: the timm name of its family, the ε of that family's norms, and the
# activation and the heads that transformers takes where config.json does not say them.
KINDS: Mapping[str, tuple[str, float, str, int]] = {
    "vit": ("vit_base_patch16_224", 1e-6, "gelu", 12),
    "vit_mae": ("vit_base_patch16_224", 1e-6, "gelu", 12),
    "deit": ("deit_base_distilled_patch16_224", 1e-6, "gelu", 12),
    "dinov2": ("vit_base_patch14_dinov2", 1e-6, "gelu", 12),
    "dinov2_with_registers": ("vit_base_patch14_reg4_dinov2", 1e-6, "gelu", 12),
    "dinov3_vit": ("vit_small_patch16_dinov3", 1e-5, "gelu", 6),
    "clip": ("vit_base_patch16_clip_224", 1e-5, "quick_gelu", 12),
    "siglip": ("vit_base_patch16_224", 1e-6, "gelu_pytorch_tanh", 12),
    "siglip2": ("vit_base_patch16_224", 1e-6, "gelu_pytorch_tanh", 12),
    "beit": ("beit_base_patch16_224", 1e-6, "gelu", 12),
    "data2vec-vision": ("beit_base_patch16_224", 1e-6, "gelu", 12),
}
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "silu"}


class Encoder(NamedTuple):
    """A ViT's weights found in a file. state: by timm's names; unused: the file's names of the others;
    source: what kind of file it is; writer: whose code made it ("": not known)."""

    state: dict[str, Tensor]
    unused: list[str]
    source: str
    writer: str = ""


def find_encoder(weights: Weights, names: Sequence[tuple[str, str]] = TO_TIMM) -> Encoder:
    """The ViT among a file's tensors, by timm's names, as `names` say."""
    tensors = weights.tensors
    if any("visual.class_embedding" in name for name in tensors):
        raise ValueError("CLIP: name it, architecture='vit_base_patch16_clip_quickgelu_224.openai'")
    matches = [match for name in tensors if (match := PATCHES.match(name))]
    if len(matches) != 1:
        where = [match[0] for match in matches] or f"no patch_embed.proj among {[*tensors][:6]}"
        raise ValueError(f"{len(matches)} ViTs, {where}: save one alone")
    prefix = matches[0][1] or ""
    if "embeddings" in matches[0][2]:
        raise ValueError("weights of transformers: put their config.json beside them")
    bare = {name.removeprefix(prefix) for name in tensors}
    writer = next((WRITERS[mark] for mark in WRITERS if mark in bare), "")
    if "pytorch-lightning_version" in weights.beside:  # anybody's training, which the names do not tell
        writer = ""
    source = writer or f"timm's names{f' after {prefix!r}' if prefix else ''}"
    state, unused = renamed(tensors, prefix, names)
    if "register_tokens" in bare:
        without_register_positions(state)
    return Encoder(state, unused, source, writer)


def renamed(
    tensors: Mapping[str, Tensor], prefix: str, names: Sequence[tuple[str, str]]
) -> tuple[dict[str, Tensor], list[str]]:
    """What is needed of weights whose names begin with a prefix, renamed, and the names of the rest."""
    state, unused = {}, []
    for name, value in tensors.items():
        new_name = name.removeprefix(prefix)
        for pattern, replacement in names:
            new_name = re.sub(pattern, replacement, new_name)
        if name.startswith(prefix) and not UNNEEDED.match(new_name):
            state[new_name] = value
        else:
            unused.append(name)
    return state, unused


def without_register_positions(state: dict[str, Tensor]) -> None:
    """DINOv2 gives its registers no position; timm then keeps the class token's in the token."""
    if "reg_token" in state:
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]


def dinov3(tensors: Mapping[str, Tensor]) -> Architecture | None:
    """The DINOv3 that Meta's own checkpoint holds; None for other files."""
    if not {"storage_tokens", "cls_token"} <= tensors.keys():
        return None
    width = tensors["cls_token"].shape[-1]
    if width not in DINOV3:
        raise ValueError(f"a DINOv3 of width {width}: name it with architecture=")
    plus = "_plus" if width == 384 and "blocks.0.mlp.w1.weight" in tensors else ""
    # of the distilled models the biases of q and v are all 0, and timm has a model without them
    biases = [value.chunk(3) for name, value in tensors.items() if name.endswith("attn.qkv.bias")]
    biased = "_qkvb" if any(of_q.any() or of_v.any() for of_q, _, of_v in biases) else ""
    return Architecture(f"vit_{DINOV3[width]}{plus}_patch16_dinov3{biased}")


def infer_architecture(encoder: Encoder, heads: int | None = None) -> tuple[Architecture, list[str]]:
    """The architecture that an encoder's weights are of, without a class head, and what was taken for granted
    because weights do not show it: first the heads."""
    state = encoder.state
    _shape(state, "blocks.0.mlp.fc1.weight", 2)
    if "attn_pool.latent" in state:  # whose GELU is another; other strangers do not fit into what is built
        raise ValueError("weights with attention pooling, as in SigLIP: name the model with architecture=")
    width, _, *patch = _shape(state, "patch_embed.proj.weight", 4)
    prefix, grid = prefix_and_grid(state)
    chosen = _heads(encoder, width, prefix) if heads is None else heads
    if chosen < 1 or width % chosen:
        raise ValueError(f"heads={chosen}: it must divide the width, {width}")
    blocks = {int(match[1]) for name in state if (match := re.match(r"blocks\.(\d{1,6})\.", name))}
    if gaps := set(range(len(blocks))) - blocks:
        raise ValueError(f"no whole ViT: of {len(blocks)} blocks there is no block {min(gaps)}")
    size = [side * pixels for side, pixels in zip(grid, patch)]
    config = _sizes(state, size, len(blocks), chosen) | _parts(state, prefix)
    why = f"usual at width {width}" if heads is None else "as given"
    taken = [f"{chosen} heads, {why}", "LayerNorm with ε 1e-06", "GELU", "a square grid of patches"]
    if "dist_token" in state:
        return Architecture("deit_tiny_distilled_patch16_224", config), taken
    return Architecture(config), taken


def config_says(path: Path, name: str) -> bool:
    """Whether a folder's config.json has an entry: "model_type", where `save_pretrained` wrote it."""
    try:
        return name in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def read_folder(path: Path) -> tuple[Architecture, Encoder, Sequence[str]]:
    """The timm architecture of the ViT in a folder of `save_pretrained`, its weights, and what timm has
    otherwise; nothing of transformers is needed."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    kind = config["model_type"].removesuffix("_vision_model")
    if kind not in KINDS:
        raise ValueError(f"{path} holds a {kind}: folders of {', '.join(KINDS)} are read")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise OSError(f"{path} has a config.json and no model.safetensors: put that file beside it")
    tensors = {name: value for file in files for name, value in read_tensors(file)[0].items()}
    try:
        state, unused = of_transformers(tensors, kind)
        architecture, assumed = _architecture_from_config(kind, config.get("vision_config") or config, state)
        # what comes after the blocks may be missing
        architecture.require_numbers(count(tensors) + 2 * architecture.overrides["embed_dim"])
    except (LookupError, StopIteration, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{path} is no {kind} that timm builds ({type(error).__name__}: {error})") from error
    return architecture, Encoder(state, unused, f"transformers' {kind}, a folder of save_pretrained"), assumed


def of_transformers(tensors: Mapping[str, Tensor], kind: str) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a model of transformers, of the type `kind`, by timm's names, and what is not needed.
    Raises `KeyError` and `StopIteration` for weights that are missing."""
    prefix = next(match[1] or "" for name in tensors if (match := PATCHES.match(name)))
    state, unused = renamed(tensors, prefix, TO_TIMM)
    state = {name: value.float() for name, value in state.items()}
    for name in {"cls_token", "dist_token", "reg_token", "pos_embed"} & state.keys():
        state[name] = state[name].reshape(1, -1, state[name].shape[-1])
        if not state[name].numel():  # DINOv3 may have no registers
            del state[name]
    if kind.startswith("dinov2"):
        without_register_positions(state)
    patches = state["patch_embed.proj.weight"]
    if patches.ndim == 2:  # SigLIP 2 with images of any shape: rows of pixels with their three colours
        side = round((patches.shape[1] / 3) ** 0.5)
        patches = patches.unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
        state["patch_embed.proj.weight"] = patches.contiguous()
    for name in [name for name in state if name.endswith(".attn.q.weight")]:
        at = name.removesuffix("q.weight")
        state[f"{at}qkv.weight"] = torch.cat([state.pop(f"{at}{part}.weight") for part in "qkv"])
        biases = {part: state.pop(f"{at}{part}.bias", None) for part in "qkv"}
        if biases["k"] is not None:
            state[f"{at}qkv.bias"] = torch.cat([biases[part] for part in "qkv"])
        elif biases["q"] is not None:
            state[f"{at}q_bias"], state[f"{at}v_bias"] = biases["q"], biases["v"]
    has_gammas = kind in ("dinov3_vit", "beit", "data2vec-vision")
    for name in [name for name in state if has_gammas and ".ls" in name]:
        state[name.replace(".ls", ".gamma_").removesuffix(".gamma")] = state.pop(name)
    for name in [name for name in state if ".mlp.gate_proj." in name]:  # of DINOv3
        state[name.replace("gate_proj", "fc1_x")] = state.pop(name.replace("gate_proj", "fc1"))
        state[name.replace("gate_proj", "fc1_g")] = state.pop(name)
    return state, unused


def _architecture_from_config(
    kind: str, config: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[Architecture, tuple[str, ...]]:
    """The timm architecture of a folder's weights, every size said, and what it has otherwise."""
    name, eps, activation, heads = KINDS[kind]
    patch = state["patch_embed.proj.weight"].shape[-1]
    size = config.get("image_size", 224)
    if kind == "siglip2":
        size = round(state["pos_embed"].shape[1] ** 0.5) * patch
    # not as many layers as there are: some may be missing
    depth, chosen = config.get("num_hidden_layers", 12), config.get("num_attention_heads", heads)
    options = _sizes(state, size if isinstance(size, int) else list(size), depth, chosen)
    scale = 1e-5 if "blocks.0.gamma_1" in state else None
    if kind == "dinov3_vit":
        biased = "_qkvb" if "blocks.0.attn.q_bias" in state else ""
        plus = "_plus" if "blocks.0.mlp.fc1_g.weight" in state else ""
        name = f"vit_small{plus}_patch16_dinov3{biased}"
        rope = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 100.0)
        registers = state["reg_token"].shape[1] if "reg_token" in state else 0
        options |= {"init_values": scale, "num_reg_tokens": registers, "rope_temperature": rope}
    elif kind in ("beit", "data2vec-vision"):
        options |= {
            "init_values": scale,
            "use_abs_pos_emb": "pos_embed" in state,
            "use_rel_pos_bias": "blocks.0.attn.relative_position_bias_table" in state,
            "use_shared_rel_pos_bias": "rel_pos_bias.relative_position_bias_table" in state,
            "global_pool": "avg" if config.get("use_mean_pooling", True) else "token",
        }
    else:
        options |= _parts(state, 0 if kind.startswith("siglip") or "reg_token" in state else 1)
        first, second = (state[f"blocks.0.mlp.fc{number}.weight"] for number in (1, 2))
        if len(first) == second.shape[1]:
            options["act_layer"] = ACTIVATIONS[config.get("hidden_act", activation)]
        else:  # DINOv2's gated MLP, both halves in one
            name = name.replace("base", "giant")
    if "act_layer" not in options and not kind.startswith("dinov2"):  # timm's EVA and BEiT take no other
        built = "silu" if "blocks.0.mlp.fc1_g.weight" in state else "gelu"
        if (activation_asked := config.get("hidden_act", activation)) != built:
            raise ValueError(f"its activation is {activation_asked}, timm's {built}")
    of_file, assumed = config.get("layer_norm_eps", eps), ()
    if of_file > 1e-4:
        raise ValueError(f"its LayerNorms have ε {of_file:g}, timm's {eps:g}: maps would differ")
    if of_file != eps:
        assumed = (f"LayerNorm with ε {eps:g}, as timm has it, in place of {of_file:g}",)
    return Architecture.read({"name": name, "overrides": options}), assumed


def _sizes(state: Mapping[str, Tensor], size: int | list[int], depth: int, heads: int) -> dict[str, Any]:
    """The arguments of timm's ViTs that say how large one of these weights is, without a class head."""
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    gated = "blocks.0.mlp.fc1_g.weight" in state
    hidden = len(state["blocks.0.mlp.fc1_x.weight" if gated else "blocks.0.mlp.fc1.weight"])
    # timm computes int(width * ratio)
    ratio = hidden / width if int(width * (hidden / width)) == hidden else (hidden + 0.5) / width
    sizes = {"img_size": size, "patch_size": patch, "in_chans": channels, "embed_dim": width, "depth": depth}
    return sizes | {"num_heads": heads, "mlp_ratio": ratio, "num_classes": 0}


def _parts(state: Mapping[str, Tensor], prefix: int) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer that say what one of these weights is made of. prefix: how
    many prefix tokens have a position, all or none."""
    parts = {
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "global_pool": "avg" if "fc_norm.weight" in state or "cls_token" not in state else "token",
    }
    if "dist_token" in state:  # its class takes no others
        return parts
    return parts | {
        "reg_tokens": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "no_embed_class": prefix == 0,
        "class_token": "cls_token" in state,
        "fc_norm": "fc_norm.weight" in state,
    }


def prefix_and_grid(state: Mapping[str, Tensor]) -> tuple[int, Grid]:
    """How many prefix tokens have a position, all or none, and the square patch grid of the others."""
    tokens = _shape(state, "pos_embed", 3)[1]
    prefix = sum(state[name].shape[1] for name in ("cls_token", "dist_token", "reg_token") if name in state)
    fits = []
    for with_position in {prefix, 0}:
        patches = tokens - with_position
        if patches > 0 and (side := math.isqrt(patches)) ** 2 == patches:
            fits.append((with_position, (side, side)))
    if len(fits) != 1:
        raise ValueError(f"{tokens} positions, {prefix} or 0 of prefix tokens: no one grid: architecture=")
    return fits[0]


def _heads(encoder: Encoder, width: int, prefix: int) -> int:
    small = SMALL if encoder.writer not in ("", MAE, TORCHVISION) else {}
    if (heads := small.get(width, HEADS.get(width))) is not None:
        return heads
    # DeiT's and DINO's ViT-S under timm's names: positions are learned, so that the class token has one, too
    learned = prefix > 0 and encoder.state["pos_embed"][:, 0].any()
    if width == 384 and learned and not any("decoder" in name for name in encoder.unused):
        return 6
    # at widths 192 and 384 MoCo-v3's, MAE-Lite's and TinyMIM's have 12
    raise ValueError(f"the heads of this ViT of width {width} are not in its weights: give heads=")


def _shape(state: Mapping[str, Tensor], name: str, sides: int) -> tuple[int, ...]:
    """The shape of a weight, which must have so many sides."""
    shape = tuple(state[name].shape) if name in state else "missing"
    if len(shape) != sides or name not in state:
        raise ValueError(f"no whole ViT: {name} is {shape}")
    return shape
