"""Folders that `save_pretrained` of transformers writes: the same ViT, built by timm. Nothing of transformers
is needed, and no code of the folder is run."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atlib.checkpoint import count, read_tensors
from atlib.vit import Architecture
from atrun.teachers.layouts import Encoder, Layout, mlp_ratio_of, without_register_positions

# Of each `model_type`: the timm name of its family, the ε of that family's norms, and the activation and the
# heads that transformers takes where config.json does not say them.
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
# To timm's names, with the attention's q, k and v apart.
NAMES = (
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
OF_A_VIT = (
    r"(cls_token|dist_token|reg_token|pos_embed)$|(patch_embed|norm|norm_pre|fc_norm|rel_pos_bias|blocks)\."
)


def is_pretrained_folder(path: Path) -> bool:
    """Whether a path is a folder that `save_pretrained` of transformers wrote."""
    try:
        return "model_type" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def read_folder(path: Path) -> tuple[Architecture, Encoder, Sequence[str]]:
    """The timm architecture of the ViT in such a folder, its weights, and what timm has otherwise. Raises
    `OSError` for one without safetensors, `ValueError` for a model of another type, and for one that timm's
    ViT does not compute."""
    said = json.loads((path / "config.json").read_text(encoding="utf-8"))
    kind = said["model_type"].removesuffix("_vision_model")
    if kind not in KINDS:
        raise ValueError(f"{path} holds a {kind}: folders of {', '.join(KINDS)} are read")
    said = said.get("vision_config") or said
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise OSError(f"{path} has a config.json and no model.safetensors: put that file beside it")
    tensors = {name: value for file in files for name, value in read_tensors(file)[0].items()}
    try:
        state, unused = by_timms_names(tensors, kind)
        architecture, assumed = _architecture(kind, said, state)
        # what comes after the blocks may be missing
        architecture.require_numbers(count(tensors) + 2 * architecture.overrides["embed_dim"])
    except (LookupError, StopIteration, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{path} is no {kind} that timm builds ({type(error).__name__}: {error})") from error
    layout = Layout(f"transformers' {kind}, a folder of save_pretrained")
    return architecture, Encoder(layout, state, {name: name for name in state}, unused), assumed


def by_timms_names(tensors: Mapping[str, Tensor], kind: str) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a model of transformers, of the type `kind`, by timm's names, and what is not needed.
    Raises `KeyError` and `StopIteration` for weights that are missing."""
    prefix = next(name for name in tensors if "embeddings.patch_embedding" in name).split("embeddings.")[0]
    state, unused = {}, []
    for name, value in tensors.items():
        ours = name.removeprefix(prefix)
        for theirs, timms in NAMES:
            ours = re.sub(theirs, timms, ours)
        if name.startswith(prefix) and re.match(OF_A_VIT, ours) and not ours.endswith("position_index"):
            state[ours] = value.float()
        else:
            unused.append(name)
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
    of_eva = kind in ("dinov3_vit", "beit", "data2vec-vision")
    for name in [name for name in state if name.endswith(".attn.q.weight")]:
        at = name.removesuffix("q.weight")
        state[f"{at}qkv.weight"] = torch.cat([state.pop(f"{at}{part}.weight") for part in "qkv"])
        biases = {part: state.pop(f"{at}{part}.bias", None) for part in "qkv"}
        if biases["k"] is not None:
            state[f"{at}qkv.bias"] = torch.cat([biases[part] for part in "qkv"])
        elif biases["q"] is not None:
            state[f"{at}q_bias"], state[f"{at}v_bias"] = biases["q"], biases["v"]
    for name in [name for name in state if of_eva and ".ls" in name]:
        state[name.replace(".ls", ".gamma_").removesuffix(".gamma")] = state.pop(name)
    for name in [name for name in state if ".mlp.gate_proj." in name]:  # of DINOv3
        state[name.replace("gate_proj", "fc1_x")] = state.pop(name.replace("gate_proj", "fc1"))
        state[name.replace("gate_proj", "fc1_g")] = state.pop(name)
    return state, unused


def _architecture(
    kind: str, said: Mapping[str, Any], state: Mapping[str, Tensor]
) -> tuple[Architecture, tuple[str, ...]]:
    """The timm architecture of these weights, every size said, and what it has otherwise."""
    name, eps, activation, heads = KINDS[kind]
    width, channels, *patch = state["patch_embed.proj.weight"].shape
    gated = "blocks.0.mlp.fc1_g.weight" in state
    first = state["blocks.0.mlp.fc1_x.weight" if gated else "blocks.0.mlp.fc1.weight"]
    packed = len(first) != state["blocks.0.mlp.fc2.weight"].shape[1]  # DINOv2's gated MLP, both halves in one
    size = said.get("image_size", 224)
    if kind == "siglip2":
        size = round(state["pos_embed"].shape[1] ** 0.5) * patch[0]
    scale = 1e-5 if {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & state.keys() else None
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    options: dict[str, Any] = {
        "img_size": size if isinstance(size, int) else list(size),
        "patch_size": list(patch),
        "in_chans": channels,
        "embed_dim": width,
        "depth": said.get("num_hidden_layers", 12),  # not as many as there are: some may be missing
        "num_heads": said.get("num_attention_heads", heads),
        "mlp_ratio": mlp_ratio_of(len(first), width),
        "num_classes": 0,
    }
    if not (gated or packed):
        options["act_layer"] = ACTIVATIONS[said.get("hidden_act", activation)]
    match kind:
        case "dinov3_vit":
            biased = "_qkvb" if "blocks.0.attn.q_bias" in state else ""
            name = f"vit_{'small_plus' if gated else 'small'}_patch16_dinov3{biased}"
            rope = said.get("rope_theta") or (said.get("rope_parameters") or {}).get("rope_theta", 100.0)
            options |= {"init_values": scale, "num_reg_tokens": registers, "rope_temperature": rope}
            options.pop("act_layer", None)
        case "beit" | "data2vec-vision":
            options.pop("act_layer")
            options |= {
                "init_values": scale,
                "use_abs_pos_emb": "pos_embed" in state,
                "use_rel_pos_bias": "blocks.0.attn.relative_position_bias_table" in state,
                "use_shared_rel_pos_bias": "rel_pos_bias.relative_position_bias_table" in state,
                "global_pool": "avg" if said.get("use_mean_pooling", True) else "token",
            }
        case "dinov2" | "dinov2_with_registers":
            name = name.replace("base", "giant") if packed else name
            options |= {"init_values": scale, "reg_tokens": registers}
        case "siglip" | "siglip2":
            options |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
        case _:
            options["qkv_bias"] = "blocks.0.attn.qkv.bias" in state
    of_file, assumed = said.get("layer_norm_eps", eps), ()
    if of_file != eps:
        assumed = (f"LayerNorm with ε {eps:g}, as timm has it, in place of {of_file:g}",)
    return Architecture.read({"name": name, "overrides": options}), assumed
