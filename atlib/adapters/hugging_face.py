"""ViTs of `transformers`: ViT, DeiT, MAE, DINOv2 with and without registers, DINOv3, BEiT, Data2Vec, and the
vision towers of CLIP and SigLIP, by themselves or under a head for classes.

The names of modules are those of transformers 5. What another version computes differently is found when a
pair is built: an adapter's output is compared with the model's own (`atlib.walking.check_exact`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import QuickGELU, SwiGLU
from timm.models.beit import Beit
from timm.models.eva import Eva
from torch import Tensor, nn

from atlib.adapters.adapter import Adapter, Sizes, Unwalkable
from atlib.attention import DropPathMasks, Layer, plus
from atlib.timm_config import Settings, vit_settings


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


class HuggingFaceLayer(Layer):
    """A pre-norm block of transformers."""

    def __init__(
        self, block: nn.Module, rope: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None
    ):
        self.module, self.rope, self.added = block, rope, bias
        self.names = LAYERS[_class_name(block)]
        self.attn = getattr(block, self.names.attention)
        config = _config(block)
        self.heads = config.num_attention_heads
        self.width = _part(self.attn, self.names.projections[0]).out_features // self.heads
        self.scale = self.width**-0.5
        rate = getattr(config, "attention_probs_dropout_prob", getattr(config, "attention_dropout", 0.0))
        self.dropout = rate if block.training else 0.0
        self.fused = config._attn_implementation != "eager"

    def before(self, tokens: Tensor) -> Tensor:
        """See `Layer`."""
        return getattr(self.module, self.names.norm1)(tokens)

    def project(self, x: Tensor, needed: str) -> dict[str, Tensor]:
        """See `Layer`."""
        parts = {}
        for name, projection in zip("qkv", self.names.projections):
            if name in needed:
                flat = _part(self.attn, projection)(x)
                part = flat.unflatten(-1, (self.heads, self.width)).transpose(1, 2)
                parts[name] = _rotated(part, self.rope) if self.rope and name != "v" else part
        return parts

    def bias(self, x: Tensor) -> Tensor | None:
        """BEiT's and Data2Vec's bias by relative position: (H, N, N)."""
        return self.added

    def after(self, tokens: Tensor, x: Tensor, mixed: Tensor, drop_path: DropPathMasks | None) -> Tensor:
        """See `Layer`."""
        block, names = self.module, self.names
        routed = self._dropout(_part(self.attn, names.projections[3])(mixed))
        tokens = tokens + self._branch(routed, names.scale1, drop_path, 0)
        local = getattr(block, names.norm2)(tokens)
        if hasattr(block, "intermediate"):
            local = block.output(block.intermediate(local))
        else:
            local = self._dropout(block.mlp(local))
        return tokens + self._branch(local, names.scale2, drop_path, 1)

    def _dropout(self, branch: Tensor) -> Tensor:
        dropout = getattr(self.module, "dropout", None)
        if dropout is None and hasattr(self.attn, "output"):
            dropout = getattr(self.attn.output, "dropout", None)
        return branch if dropout is None else dropout(branch)

    def _branch(self, branch: Tensor, scale: str, masks: DropPathMasks | None, which: int) -> Tensor:
        """A branch scaled, and dropped by the block's own rate or the mask that was given."""
        factor = getattr(self.module, scale) if scale else None
        if isinstance(factor, nn.Module):
            branch = factor(branch)
        elif factor is not None:
            branch = factor * branch
        if masks is not None:
            return masks[which].to(branch.dtype) * branch
        own = getattr(self.module, "drop_path", None)
        return branch if own is None else own(branch)


class HuggingFaceAdapter(Adapter):
    """A model of transformers: its ViT, by itself or under a head."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        inside, base_at = _base(model)
        self.blocks_at = ".".join(filter(None, (base_at, _blocks_at(inside))))
        self.base_at = base_at

    @property
    def base(self) -> nn.Module:
        """The ViT itself."""
        return self.model.get_submodule(self.base_at) if self.base_at else self.model

    @property
    def checkpointing(self) -> bool:
        """Whether transformers' `gradient_checkpointing_enable` was called, and the model trains."""
        return self.model.training and getattr(self.blocks[0], "gradient_checkpointing", False)

    def check(self) -> None:
        """Look at the classes of the blocks, and at what they are made to do."""
        name = type(self.model).__name__
        for index, block in enumerate(self.blocks):
            if _class_name(block) not in LAYERS:
                known = ", ".join(LAYERS)
                raise Unwalkable(
                    f"cannot walk layer {index} of this {name}, a {type(block).__name__}: the adapter knows"
                    f" {known}"
                )
            if "forward" in vars(block):
                raise Unwalkable(f"cannot walk layer {index} of this {name}: its forward was replaced")
        if _class_name(self.base) == "ViTMAEModel" and self.base.config.mask_ratio != 0:
            raise Unwalkable(
                f"cannot walk a {name} that masks patches at random: set .config.mask_ratio = 0 to let it see"
                f" whole images, in place of {self.base.config.mask_ratio}"
            )

    def embed(self, images: Tensor) -> tuple[Tensor, Sequence[Layer]]:
        """See `Adapter`."""
        base, config = self.base, self.base.config
        weight = next(base.embeddings.parameters())
        images = images.to(weight.dtype)
        ropes = None
        if _class_name(base) == "ViTMAEModel":
            count = self.sizes().grid[0] * self.sizes().grid[1]
            order = torch.arange(count, device=images.device, dtype=torch.float32).expand(len(images), -1)
            tokens, _, _ = base.embeddings(images, noise=order)  # patches stay in their order
        else:
            tokens = base.embeddings(images)
            tokens = tokens[0] if isinstance(tokens, tuple) else tokens
        if hasattr(base, "pre_layrnorm"):
            tokens = base.pre_layrnorm(tokens)
        if hasattr(base, "rope_embeddings"):
            ropes = base.rope_embeddings(images)
        shared = _relative_bias(self.shared_bias(), images, config.patch_size, tokens.shape[1])
        layers = []
        for block in self.blocks:
            own = _relative_bias(own_bias(block), images, config.patch_size, tokens.shape[1])
            layers.append(HuggingFaceLayer(block, ropes, plus(own, shared)))
        return tokens, layers

    def head(self, tokens: Tensor) -> Tensor:
        """The logits of a model with classes; else the last hidden state, (B, N, D), or what a projection
        makes of it."""
        model, base = self.model, self.base
        hidden = self._last_hidden(tokens)
        kind = _class_name(model)
        if not self.base_at:
            return hidden
        if hasattr(model, "visual_projection"):
            return model.visual_projection(base.post_layernorm(hidden[:, 0]))
        if kind == "DeiTForImageClassificationWithTeacher":
            both = model.cls_classifier(hidden[:, 0]), model.distillation_classifier(hidden[:, 1])
            return (both[0] + both[1]) / 2
        return model.classifier(self._pooled(hidden))

    def output(self, images: Tensor) -> Tensor:
        """Logits, image embeddings or the last hidden state, by the model's own forward."""
        if _class_name(self.base) == "ViTMAEModel":
            count = self.sizes().grid[0] * self.sizes().grid[1]
            order = torch.arange(count, device=images.device, dtype=torch.float32).expand(len(images), -1)
            return self.model(images, noise=order).last_hidden_state
        found = self.model(images)
        for name in ("logits", "image_embeds", "last_hidden_state"):
            if getattr(found, name, None) is not None:
                return getattr(found, name)
        raise Unwalkable(f"cannot walk a {type(self.model).__name__}: it returns neither logits nor tokens")

    def sizes(self) -> Sizes:
        """See `Adapter`."""
        base, config = self.base, self.base.config
        image, patch = _pair(config.image_size), _pair(config.patch_size)
        grid = image[0] // patch[0], image[1] // patch[1]
        registers = getattr(base.embeddings, "register_tokens", None)
        has_class = any(hasattr(base.embeddings, name) for name in ("cls_token", "class_embedding"))
        kinds = (
            int(has_class),
            int(hasattr(base.embeddings, "distillation_token")),
            0 if registers is None else registers.shape[1],
        )
        heads = config.num_attention_heads
        return Sizes(len(self.blocks), heads, config.hidden_size // heads, grid, image, kinds)

    def drop_paths(self) -> Sequence[tuple[Any, Any]]:
        """See `Adapter`; both branches have one rate."""
        own = [getattr(block, "drop_path", None) for block in self.blocks]
        return [(module, module) for module in own]

    def settings(self, layer_scale_init: float | None = None) -> Settings:
        """See `Adapter`."""
        base, config, block = self.base, self.base.config, self.blocks[0]
        names, sizes = LAYERS[_class_name(block)], self.sizes()
        attention = getattr(block, names.attention)
        query, key, value, after = (_part(attention, name) for name in names.projections)
        biases = "".join(name for name, part in zip("qkv", (query, key, value)) if part.bias is not None)
        mlp, hidden, activation = _mlp(block)
        scale = getattr(block, names.scale1) if names.scale1 else None
        noted = getattr(config, "layerscale_value", getattr(config, "layer_scale_init_value", None))
        has_scale = isinstance(scale, (nn.Module, nn.Parameter))
        has_class = sizes.prefix_kinds[0] == 1
        position = getattr(base.embeddings, "position_embeddings", None)
        position = getattr(base.embeddings, "position_embedding", None) if position is None else position
        common = {
            "img_size": sizes.image,
            "patch_size": _pair(config.patch_size),
            "in_chans": config.num_channels,
            "embed_dim": config.hidden_size,
            "depth": sizes.depth,
            "num_heads": sizes.heads,
            "hidden": hidden,
            "init_values": (layer_scale_init or noted) if has_scale else None,
            "reg_tokens": sizes.prefix_kinds[2],
            "class_token": has_class,
            "distilled": bool(sizes.prefix_kinds[1]),
            "global_pool": "token" if has_class else "avg",
            "pre_norm": hasattr(base, "pre_layrnorm"),
            "act_layer": activation,
            "mlp": mlp,
            "norm_layer": partial(nn.LayerNorm, eps=getattr(config, "layer_norm_eps", 1e-5)),
            "biases": biases,
            "proj_bias": after.bias is not None,
            "pos_embed": "none" if position is None else "learn",
            # registers have no position of their own
            "no_embed_class": position is not None and has_class and sizes.prefix_kinds[2] > 0,
        }
        if hasattr(base, "rope_embeddings"):
            rope = {"rope_type": "dinov3", "rope_temperature": config.rope_theta, "rope_rotate_half": True}
            return vit_settings(Eva, **common, rope=rope, attn_type="eva", qkv_fused=True)
        if _class_name(block) in ("BeitLayer", "Data2VecVisionLayer"):
            pools = config.use_mean_pooling
            relative = "shared" if self.shared_bias() is not None else None
            relative = "each" if own_bias(block) is not None else relative
            more = {"global_pool": "avg" if pools else "token", "fc_norm": pools, "relative": relative}
            return vit_settings(Beit, **(common | more), head_init_scale=0.001)
        return vit_settings(**common)

    def shared_bias(self) -> nn.Module | None:
        """The module for a bias by relative position that all layers share."""
        if hasattr(self.base, "encoder"):  # Data2Vec's
            return getattr(self.base.encoder, "relative_position_bias", None)
        return getattr(self.base, "shared_position_bias", None)

    def _last_hidden(self, tokens: Tensor) -> Tensor:
        """The final norm, where the class has it before pooling."""
        base = self.base
        for name in ("layernorm", "norm"):
            if hasattr(base, name):
                return getattr(base, name)(tokens)
        is_clip = hasattr(base, "pre_layrnorm")  # its norm comes after pooling
        return tokens if is_clip else base.post_layernorm(tokens)

    def _pooled(self, hidden: Tensor) -> Tensor:
        """What the class head of a model reads: each family has its own way."""
        base, kind = self.base, _class_name(self.blocks[0])
        if kind in ("BeitLayer", "Data2VecVisionLayer"):
            return base.pooler(hidden)
        if kind == "CLIPEncoderLayer":
            return hidden[:, 1:].mean(1)
        if kind == "SiglipEncoderLayer":
            return hidden.mean(1)
        if kind in ("Dinov2Layer", "Dinov2WithRegistersLayer"):
            registers = self.sizes().prefix_kinds[2]
            return torch.cat([hidden[:, 0], hidden[:, 1 + registers :].mean(1)], 1)
        return hidden[:, 0]


# Heads whose forward is written out above; the ViT is in their attribute of that name.
HEADS: Mapping[str, str] = {
    "ViTForImageClassification": "vit",
    "DeiTForImageClassification": "deit",
    "DeiTForImageClassificationWithTeacher": "deit",
    "BeitForImageClassification": "beit",
    "Data2VecVisionForImageClassification": "data2vec_vision",
    "Dinov2ForImageClassification": "dinov2",
    "Dinov2WithRegistersForImageClassification": "dinov2_with_registers",
    "CLIPVisionModelWithProjection": "vision_model",
    "CLIPForImageClassification": "vision_model",
    "SiglipForImageClassification": "vision_model",
}
MODELS = (
    "ViTModel",
    "DeiTModel",
    "ViTMAEModel",
    "BeitModel",
    "Data2VecVisionModel",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "DINOv3ViTModel",
    "CLIPVisionModel",
    "SiglipVisionModel",
)


def adapter_for(model: nn.Module) -> HuggingFaceAdapter:
    """The adapter of a model of transformers. Raises `Unwalkable` for one that is none of the above."""
    if _class_name(model) not in (*HEADS, *MODELS):
        inside = [name for name in ("vit", "vision_model", "vision_tower") if hasattr(model, name)]
        hint = f"; its .{inside[0]} may be one of them" if inside else ""
        raise Unwalkable(
            f"cannot walk a {type(model).__name__}: of transformers, {', '.join((*MODELS, *HEADS))} are"
            f" walked{hint}. For another class write an atlib.adapters.Adapter, as examples/own_vit.py does"
        )
    return HuggingFaceAdapter(model)


def _class_name(module: nn.Module) -> str:
    """The name of a module's class in transformers, also where FSDP2 or the user derived one from it."""
    home = "transformers.models."
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith(home)]
    return names[0] if names else type(module).__name__


def _base(model: nn.Module) -> tuple[nn.Module, str]:
    """The ViT in a model, and its name there: "" for the model itself."""
    name = HEADS.get(_class_name(model), "")
    return (getattr(model, name), name) if name else (model, "")


def _blocks_at(base: nn.Module) -> str:
    if hasattr(base, "encoder"):
        return "encoder.layers" if hasattr(base.encoder, "layers") else "encoder.layer"
    return "model.layer" if hasattr(base, "rope_embeddings") else "layers"


def _part(module: nn.Module, path: str) -> nn.Module:
    return module.get_submodule(path)


def _config(block: nn.Module) -> Any:
    """The configuration that a block's attention keeps."""
    attention = getattr(block, LAYERS[_class_name(block)].attention)
    return attention.attention.config if hasattr(attention, "attention") else attention.config


def _pair(side: Any) -> tuple[int, int]:
    return (side, side) if isinstance(side, int) else tuple(side)


def own_bias(block: nn.Module) -> nn.Module | None:
    """A block's own module for a bias by relative position."""
    own = getattr(block, "relative_position_bias", None)
    inside = getattr(getattr(block, "attention", None), "attention", None)
    return getattr(inside, "relative_position_bias", None) if own is None else own


def _relative_bias(module: nn.Module | None, images: Tensor, patch: Any, tokens: int) -> Tensor | None:
    """The bias (H, N, N) on the patches of these images."""
    if module is None:
        return None
    height, width = images.shape[2:]
    down, across = _pair(patch)
    return module((height // down, width // across), dim_size=tokens).squeeze(0)


def _rotated(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Queries or keys (B, H, N, d) with those of patches rotated: half against half."""
    cos, sin = rope
    prefix, patches = x.tensor_split([x.shape[2] - cos.shape[-2]], 2)
    first, second = patches.chunk(2, -1)
    return torch.cat([prefix, patches * cos + torch.cat([-second, first], -1) * sin], 2)


def _mlp(block: nn.Module) -> tuple[Any, int, Any]:
    """In a block: the kind of MLP as timm has it, its hidden units, and its activation."""
    config = _config(block)
    activation = ACTIVATIONS.get(config.hidden_act)
    if activation is None:
        raise ValueError(f"timm's ViTs are not built with the activation {config.hidden_act!r} here")
    if hasattr(block, "intermediate"):
        return "plain", block.intermediate.dense.out_features, activation
    mlp = block.mlp
    if hasattr(mlp, "gate_proj"):
        return partial(SwiGLU), mlp.up_proj.out_features, nn.SiLU
    first = mlp.fc1 if hasattr(mlp, "fc1") else mlp.up_proj
    return "plain", first.out_features, activation


ACTIVATIONS = {
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "gelu_new": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}
