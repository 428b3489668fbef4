"""Writes a timm ViT's weights in the layouts in which others publish theirs, long hand."""

import numpy as np
import torch


def encoder_of(vit):
    """The weights without a class head."""
    return {name: value.clone() for name, value in vit.state_dict().items() if not name.startswith("head")}


def decoder():
    """Some names of MAE's decoder (models_mae.py)."""
    parts = ("norm1", "attn.qkv", "mlp.fc1")
    names = [f"decoder_blocks.0.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    names += ["mask_token", "decoder_pos_embed", "decoder_embed.weight", "decoder_pred.bias"]
    return {name: torch.randn(8) for name in names}


def flax_of(vit):
    """FLIP's parameters (models_flip.py and t5x/layers.py): {name with slashes: array}."""
    state = {name: value.numpy() for name, value in encoder_of(vit).items()}
    flax = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "cls": state["cls_token"],
        "posembed_encoder/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
    }
    for block in range(len(vit.blocks)):
        own, theirs = f"blocks.{block}.", f"Transformer/encoderblock_{block:02d}/"
        for norm in (1, 2):
            flax[f"{theirs}LayerNorm_{norm - 1}/scale"] = state[f"{own}norm{norm}.weight"]
            flax[f"{theirs}LayerNorm_{norm - 1}/bias"] = state[f"{own}norm{norm}.bias"]
        attention = f"{theirs}MultiHeadDotProductAttention_0/"
        for kind, flat in (("weight", False), ("bias", True)):
            q, k, v = np.split(state[f"{own}attn.qkv.{kind}"], 3)
            parts = {"query": q, "key": k, "value": v, "out": state[f"{own}attn.proj.{kind}"]}
            for name, part in parts.items():
                flax[f"{attention}{name}/{'bias' if flat else 'kernel'}"] = part if flat else part.T
        for layer in (0, 1):
            flax[f"{theirs}MlpBlock_0/Dense_{layer}/kernel"] = state[f"{own}mlp.fc{layer + 1}.weight"].T
            flax[f"{theirs}MlpBlock_0/Dense_{layer}/bias"] = state[f"{own}mlp.fc{layer + 1}.bias"]
    flax = {f"img_encoder/{name}": value for name, value in flax.items()}
    return flax | {
        "txt_encoder/token_embedding/embedding": np.zeros((5, 4), np.float32),
        "img_mlp1/kernel": np.zeros((4, 4), np.float32),
        "logit_scale": np.zeros(1, np.float32),
    }
