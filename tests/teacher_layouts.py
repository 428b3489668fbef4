"""Writes a timm ViT's weights in the layouts in which others publish theirs, long hand, for the tests of
teachers."""

import numpy as np
import torch


def sine_positions(side, width):
    """MAE's and MoCo-v3's fixed positions: a row of zeros for the class token, then sines and cosines of both
    places."""
    table = np.zeros((1 + side * side, width))
    for row in range(side):
        for column in range(side):
            for i in range(width // 4):
                omega = 10000 ** (-i / (width // 4))
                table[1 + row * side + column, i :: width // 4] = [
                    np.sin(column * omega),
                    np.cos(column * omega),
                    np.sin(row * omega),
                    np.cos(row * omega),
                ]
    return torch.from_numpy(table).float()[None]


def encoder_of(vit):
    """The weights without a class head."""
    return {name: value.clone() for name, value in vit.state_dict().items() if not name.startswith("head")}


def decoder(width=8):
    """The names of MAE's decoder (models_mae.py), one block."""
    names = [
        "mask_token",
        "decoder_pos_embed",
        "decoder_embed.weight",
        "decoder_embed.bias",
        "decoder_norm.weight",
        "decoder_norm.bias",
        "decoder_pred.weight",
        "decoder_pred.bias",
    ]
    names += [
        f"decoder_blocks.0.{part}.{kind}"
        for part in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
        for kind in ("weight", "bias")
    ]
    return {name: torch.randn(width) for name in names}


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
            for name, part in (
                ("query", q),
                ("key", k),
                ("value", v),
                ("out", state[f"{own}attn.proj.{kind}"]),
            ):
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


def clip_of(vit):
    """CLIP's image tower (clip/model.py): another ViT's names, no leading 1 on token and positions."""
    words = {
        "patch_embed.proj": "conv1",
        "norm_pre": "ln_pre",
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attn.proj": "attn.out_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "blocks": "transformer.resblocks",
        "attn.qkv.weight": "attn.in_proj_weight",
        "attn.qkv.bias": "attn.in_proj_bias",
    }
    clip = {}
    for name, value in encoder_of(vit).items():
        name = "ln_post." + name.removeprefix("norm.") if name.startswith("norm.") else name
        for own, theirs in words.items():
            name = name.replace(own, theirs)
        clip[
            "visual." + {"cls_token": "class_embedding", "pos_embed": "positional_embedding"}.get(name, name)
        ] = value
    clip["visual.class_embedding"] = clip["visual.class_embedding"][0, 0]
    clip["visual.positional_embedding"] = clip["visual.positional_embedding"][0]
    return clip | {
        "visual.proj": torch.zeros(4, 4),
        "token_embedding.weight": torch.zeros(5, 4),
        "logit_scale": torch.zeros(()),
        "transformer.resblocks.0.ln_1.weight": torch.zeros(4),
    }
