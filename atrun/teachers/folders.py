"""Folders that `save_pretrained` of transformers writes, as the hub has them: the same ViT, built by timm.

`config.json` says what it is, and `model.safetensors` has its weights. Transformers reads both, so that all
names it ever gave to weights are known; no code of the folder is run, and nothing is downloaded.
"""

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atlib.attention import walk
from atlib.pair import usual_image_size
from atlib.vit import Architecture
from atrun.teachers.layouts import mlp_ratio_of

# The classes of models that are read, by the `model_type` that a folder's config.json says.
CLASSES: Mapping[str, str] = {
    "vit": "ViTModel",
    "deit": "DeiTModel",
    "vit_mae": "ViTMAEModel",
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "dinov3_vit": "DINOv3ViTModel",
    "clip": "CLIPVisionModel",
    "clip_vision_model": "CLIPVisionModel",
    "siglip": "SiglipVisionModel",
    "siglip_vision_model": "SiglipVisionModel",
    "beit": "BeitModel",
    "data2vec-vision": "Data2VecVisionModel",
}
# Sizes of a folder's config.json are at most these, other numbers 2**20.
SIZES = {"num_hidden_layers": 2**9, "hidden_size": 2**15, "image_size": 2**12, "num_register_tokens": 2**12}
# Fields of all configurations that say no size and no component, and can say what is run.
NOT_OF_A_FOLDER = {"architectures", "dtype", "problem_type", "transformers_version", "kwargs", "args", "self"}
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "silu"}
TOLERANCE = 1e-3  # of tokens far from zero; an ε of a norm that timm has otherwise changes less


class Folder(NamedTuple):
    """What was read: the model's name in transformers, the timm architecture, and its weights."""

    kind: str
    architecture: Architecture
    state: dict[str, Tensor]
    assumed: tuple[str, ...]


def is_pretrained_folder(path: Path) -> bool:
    """Whether a path is a folder that `save_pretrained` of transformers wrote."""
    config = path / "config.json"
    if not (path.is_dir() and config.is_file()):
        return False
    try:
        return "model_type" in json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, TypeError):
        return False


def read_folder(path: Path) -> Folder:
    """The ViT in such a folder.

    Raises `ImportError` without transformers, `OSError` for a folder without weights in safetensors,
    `ValueError` for a model of another kind, and for one that timm's ViT does not compute.
    """
    said = json.loads((path / "config.json").read_text(encoding="utf-8"))
    kind = said["model_type"]
    if kind not in CLASSES:
        raise ValueError(f"{path} holds a {kind}: folders of {', '.join(CLASSES)} are read")
    if not any(path.glob("*.safetensors")):
        raise OSError(
            f"{path} has a config.json and no model.safetensors: put the file of that name from the model's"
            " page beside it. A pytorch_model.bin is a pickle, and is not read here"
        )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{path} was written by transformers, which reads it:"
            " pip install 'attention-transfer[transformers]'"
        ) from error
    model_class = getattr(transformers, CLASSES[kind])
    config = _config(said, model_class, path)
    model = model_class.from_pretrained(
        path,
        config=config,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
    )
    model.eval()
    if kind == "vit_mae":
        model.config.mask_ratio = 0.0  # a teacher sees whole images
    architecture, assumed = _architecture(model)
    state = _state(model)
    _check_same(model, architecture, state, path)
    return Folder(CLASSES[kind], architecture, state, assumed)


def _config(said: Mapping[str, Any], model_class: Any, path: Path) -> Any:
    """The configuration that a folder says, of its model's own fields: others can name code, such as a kernel
    of a hub. Raises `ValueError` for sizes that no ViT has, and for a model of more weights than its files'
    bytes, before memory is taken for them."""
    kind = model_class.config_class
    if isinstance(said.get("vision_config"), Mapping):
        said = said["vision_config"]
    own = {*inspect.signature(kind).parameters, *kind.attribute_map} - NOT_OF_A_FOLDER
    fields = {name: value for name, value in said.items() if name in own}
    for name, value in fields.items():
        largest = max(
            [abs(x) for x in (value if isinstance(value, list) else [value]) if _is_number(x)] or [0]
        )
        if not largest <= SIZES.get(name, 2**20):
            raise ValueError(f"{path}: {name}={str(value)[:60]}, at most {SIZES.get(name, 2**20):,} is read")
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{path} has an adapter_config.json, which can name other weights: take it away")
    config = kind.from_dict(fields)
    with torch.device("meta"):
        needed = sum(value.numel() for value in model_class(config).parameters())
    if needed > (found := sum(file.stat().st_size for file in path.glob("*.safetensors"))):
        raise ValueError(f"{path}: its config.json has {needed:,} weights, its files {found:,} bytes")
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Names(NamedTuple):
    """What a class of blocks calls its parts; "" for a part that it does not have."""

    norm1: str
    attention: str
    norm2: str
    #: The projections to q, k, v and after attention, in the attention module.
    projections: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    scale1: str = ""
    scale2: str = ""


_BEFORE = Names("layernorm_before", "attention", "layernorm_after")
_DINO = Names("norm1", "attention", "norm2", scale1="layer_scale1", scale2="layer_scale2")
_CLIP = Names("layer_norm1", "self_attn", "layer_norm2", ("q_proj", "k_proj", "v_proj", "out_proj"))
LAYERS: Mapping[str, Names] = {
    "ViTLayer": _BEFORE,
    "DeiTLayer": _BEFORE,
    "ViTMAELayer": _BEFORE,
    "BeitLayer": _BEFORE._replace(scale1="lambda_1", scale2="lambda_2"),
    "Data2VecVisionLayer": _BEFORE._replace(
        projections=("attention.query", "attention.key", "attention.value", "output.dense"),
        scale1="lambda_1",
        scale2="lambda_2",
    ),
    "Dinov2Layer": _DINO,
    "Dinov2WithRegistersLayer": _DINO,
    "DINOv3ViTLayer": _DINO,
    "CLIPEncoderLayer": _CLIP,
    "SiglipEncoderLayer": _CLIP,
}


def _blocks(model: nn.Module) -> nn.ModuleList:
    return next(
        part
        for part in model.modules()
        if isinstance(part, nn.ModuleList) and type(part[0]).__name__ in LAYERS
    )


def _shared_bias(model: nn.Module) -> nn.Module | None:
    """The module for a bias by relative position that all layers share."""
    if hasattr(model, "encoder"):  # Data2Vec's
        return getattr(model.encoder, "relative_position_bias", None)
    return getattr(model, "shared_position_bias", None)


def _own_bias(block: nn.Module) -> nn.Module | None:
    """A block's own module for a bias by relative position."""
    own = getattr(block, "relative_position_bias", None)
    inside = getattr(getattr(block, "attention", None), "attention", None)
    return getattr(inside, "relative_position_bias", None) if own is None else own


def _architecture(model: nn.Module) -> tuple[Architecture, tuple[str, ...]]:
    """The timm architecture with the model's components, and what it has otherwise. A timm name stands for
    the family, and every size is said."""
    config, block = model.config, _blocks(model)[0]
    names = LAYERS[type(block).__name__]
    parts = [getattr(block, names.attention).get_submodule(path) for path in names.projections[:3]]
    biases = "".join(name for name, part in zip("qkv", parts) if part.bias is not None)
    mlp = block.intermediate.dense if hasattr(block, "intermediate") else block.mlp
    gated = hasattr(mlp, "gate_proj")
    first = mlp if hasattr(mlp, "out_features") else mlp.fc1 if hasattr(mlp, "fc1") else mlp.up_proj
    scaled = names.scale1 and isinstance(getattr(block, names.scale1), (nn.Module, nn.Parameter))
    noted = getattr(config, "layerscale_value", getattr(config, "layer_scale_init_value", None))
    scale = (noted or 1e-5) if scaled else None
    register_tokens = getattr(model.embeddings, "register_tokens", None)
    registers = 0 if register_tokens is None else register_tokens.shape[1]
    image, patch = (
        [side, side] if isinstance(side, int) else list(side)
        for side in (config.image_size, config.patch_size)
    )
    options: dict[str, Any] = {
        "img_size": image,
        "patch_size": patch,
        "in_chans": config.num_channels,
        "embed_dim": config.hidden_size,
        "depth": len(_blocks(model)),
        "num_heads": config.num_attention_heads,
        "mlp_ratio": mlp_ratio_of(first.out_features, config.hidden_size),
        "num_classes": 0,
    }
    family = type(model).__name__
    eps, its_eps = config.layer_norm_eps, 1e-6
    if family == "DINOv3ViTModel":
        size = "small_plus" if gated else "small"
        biased = {"": "", "qv": "_qkvb"}.get(biases)
        if biased is None:
            raise ValueError(f"timm's DINOv3 has no biases of {biases} alone")
        name, its_eps = f"vit_{size}_patch16_dinov3{biased}", 1e-5
        options |= {"init_values": scale, "num_reg_tokens": registers}
        options |= {"rope_temperature": config.rope_theta}
    elif family in ("BeitModel", "Data2VecVisionModel"):
        name = "beit_base_patch16_224"
        options |= {
            "init_values": scale,
            "use_abs_pos_emb": getattr(model.embeddings, "position_embeddings", None) is not None,
            "use_rel_pos_bias": _own_bias(block) is not None and _shared_bias(model) is None,
            "use_shared_rel_pos_bias": _shared_bias(model) is not None,
            "global_pool": "avg" if config.use_mean_pooling else "token",
        }
    elif family == "CLIPVisionModel":
        name, its_eps = "vit_base_patch16_clip_224", 1e-5
        options |= {"act_layer": ACTIVATIONS[config.hidden_act]}
    elif family == "DeiTModel":
        name = "deit_base_distilled_patch16_224"
    else:
        name = "vit_base_patch16_224"
        if family.startswith("Dinov2"):
            register = "reg4_" if registers else ""
            size = "giant" if gated else "base"
            name = f"vit_{size}_patch14_{register}dinov2"
            options |= {"init_values": scale, "reg_tokens": registers}
            if gated:  # timm is told both halves
                options["mlp_ratio"] = mlp_ratio_of(2 * first.out_features, config.hidden_size)
        if not gated:
            options |= {"act_layer": ACTIVATIONS[config.hidden_act]}
        if family == "SiglipVisionModel":
            options |= {"class_token": False, "global_pool": "avg", "fc_norm": False}
        elif not family.startswith("Dinov2"):
            options |= {"qkv_bias": biases == "qkv"}
    assumed = (
        () if eps == its_eps else (f"LayerNorm with ε {its_eps:g}, as timm has it, in place of {eps:g}",)
    )
    return Architecture(name, options), assumed


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights by timm's names."""
    embed, rotary = model.embeddings, hasattr(model, "rope_embeddings")
    relative = type(model).__name__ in ("BeitModel", "Data2VecVisionModel")
    state: dict[str, Tensor] = {}

    def put(name: str, module: nn.Module) -> None:
        for key, value in module.state_dict().items():
            state[f"{name}.{key}"] = value

    patches = getattr(embed, "patch_embeddings", getattr(embed, "patch_embedding", None))
    put("patch_embed.proj", getattr(patches, "projection", patches))
    for theirs, ours in (
        ("cls_token", "cls_token"),
        ("class_embedding", "cls_token"),
        ("distillation_token", "dist_token"),
        ("register_tokens", "reg_token"),
        ("position_embeddings", "pos_embed"),
    ):
        value = getattr(embed, theirs, None)
        if isinstance(value, Tensor) and value.numel():  # DINOv3 may have no registers
            state[ours] = value.detach().reshape(1, -1, value.shape[-1])
    if hasattr(embed, "position_embedding"):
        state["pos_embed"] = embed.position_embedding.weight.detach()[None]
    if "reg_token" in state and "pos_embed" in state:
        # DINOv2 gives registers no position; timm then keeps the class token's in the token
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]
    for name in ("layernorm", "norm", "post_layernorm"):
        if isinstance(getattr(model, name, None), nn.LayerNorm):
            put("norm", getattr(model, name))
    if hasattr(model, "pre_layrnorm"):
        put("norm_pre", model.pre_layrnorm)
    shared = _shared_bias(model)
    if shared is not None:
        put("rel_pos_bias", shared)
    for index, block in enumerate(_blocks(model)):
        names, at = LAYERS[type(block).__name__], f"blocks.{index}"
        attention = getattr(block, names.attention)
        query, key, value, out = (attention.get_submodule(path) for path in names.projections)
        put(f"{at}.norm1", getattr(block, names.norm1))
        put(f"{at}.norm2", getattr(block, names.norm2))
        put(f"{at}.attn.proj", out)
        state[f"{at}.attn.qkv.weight"] = torch.cat([query.weight, key.weight, value.weight]).detach()
        if key.bias is not None:
            state[f"{at}.attn.qkv.bias"] = torch.cat([query.bias, key.bias, value.bias]).detach()
        elif query.bias is not None:
            state[f"{at}.attn.q_bias"], state[f"{at}.attn.v_bias"] = query.bias.detach(), value.bias.detach()
        for branch, name in ((1, names.scale1), (2, names.scale2)):
            scale = getattr(block, name) if name else None
            if isinstance(scale, nn.Module):
                scale = scale.lambda1
            if isinstance(scale, Tensor):
                ours = f"{at}.gamma_{branch}" if rotary or relative else f"{at}.ls{branch}.gamma"
                state[ours] = scale.detach()
        if _own_bias(block) is not None:
            put(f"{at}.attn", _own_bias(block))
        _put_mlp(put, state, f"{at}.mlp", block, rotary)
    return state


def _put_mlp(put, state: dict[str, Tensor], at: str, block: nn.Module, rotary: bool) -> None:
    """The MLP of a block: plain, or gated, in two matrices or in one."""
    if hasattr(block, "intermediate"):
        put(f"{at}.fc1", block.intermediate.dense)
        put(f"{at}.fc2", block.output.dense)
        return
    mlp = block.mlp
    if not hasattr(mlp, "gate_proj"):
        put(f"{at}.fc1", mlp.fc1 if hasattr(mlp, "fc1") else mlp.up_proj)
        put(f"{at}.fc2", mlp.fc2 if hasattr(mlp, "fc2") else mlp.down_proj)
        return
    put(f"{at}.fc2", mlp.down_proj)
    if rotary:
        put(f"{at}.fc1_g", mlp.gate_proj)
        put(f"{at}.fc1_x", mlp.up_proj)
        return
    for kind in ("weight", "bias"):
        both = [getattr(part, kind) for part in (mlp.gate_proj, mlp.up_proj)]
        state[f"{at}.fc1.{kind}"] = torch.cat(both).detach()


@torch.no_grad()
def _check_same(model: nn.Module, architecture: Architecture, state: dict[str, Tensor], path: Path) -> None:
    """Raise `ValueError` unless timm's ViT with these weights computes the model's tokens."""
    vit = architecture.build().eval()
    missing, left = vit.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.startswith(("norm.", "fc_norm.", "head"))]
    left = [name for name in left if not name.startswith("norm.")]
    if missing or left:
        raise ValueError(f"{path}: timm's ViT has other weights: {(missing + left)[:4]}")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 3, *usual_image_size(model), generator=generator)
    own, found = walk(model, images).tokens, walk(vit, images).tokens
    difference = ((own - found).abs().max() / own.abs().max()).item()
    if not difference <= TOLERANCE:
        raise ValueError(
            f"{path}: timm's ViT does not compute what this {type(model).__name__} does (they differ by"
            f" {difference:.1e}). As a live model it can teach: AttentionTransfer({type(model).__name__}"
            ".from_pretrained(...), student, plan)"
        )
