"""FLIP's published checkpoint, a T5X folder, as a teacher's file: needs the package zarr.

python examples/flip_to_timm.py FOLDER flip-vit-large.safetensors"""

import re
import sys
from pathlib import Path

import numpy as np
import torch

from atlib.checkpoint import save_vit
from atlib.vit import Architecture

# Flax's GELU is the approximate one, and FLIP averages over all tokens after the last norm.
FLIP = {"num_classes": 0, "act_layer": "gelu_tanh"}
FLIP |= {"global_pool": "avg", "fc_norm": False, "pool_include_prefix": True}
# to timm's names, the attention's q, k and v apart
NAMES = {
    r"^cls$": "cls_token",
    r"^posembed_encoder\.pos_embedding$": "pos_embed",
    r"^embedding\.": "patch_embed.proj.",
    r"^Transformer\.encoder_norm\.": "norm.",
    r"^Transformer\.encoderblock_0*(\d+)\.": r"blocks.\1.",
    r"\.LayerNorm_0\.": ".norm1.",
    r"\.LayerNorm_1\.": ".norm2.",
    r"\.MultiHeadDotProductAttention_0\.out\.": ".attn.proj.",
    r"\.MultiHeadDotProductAttention_0\.": ".attn.",
    r"\.MlpBlock_0\.Dense_0\.": ".mlp.fc1.",
    r"\.MlpBlock_0\.Dense_1\.": ".mlp.fc2.",
    r"\.(kernel|scale)$": ".weight",
}


def to_timm(arrays):
    """The image encoder of {"img_encoder.embedding.kernel": array, ...} as a timm ViT's weights."""
    state = {}
    for name, array in arrays.items():
        if not name.startswith("img_encoder."):
            continue
        name = name.removeprefix("img_encoder.")
        for old, new in NAMES.items():
            name = re.sub(old, new, name)
        value = torch.from_numpy(np.array(array, np.float32))
        if value.ndim == 4:  # (height, width, in, out)
            value = value.permute(3, 2, 0, 1)
        state[name] = value.T if value.ndim == 2 else value
    for query in [name for name in state if ".attn.query." in name]:
        parts = [state.pop(query.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
        state[query.replace(".query.", ".qkv.")] = torch.cat(parts)
    state["pos_embed"][:, 0] = 0  # in the file, and never added to the class token
    return {name: value.contiguous() for name, value in state.items()}


if __name__ == "__main__":
    import zarr

    folder, out = map(Path, sys.argv[1:])
    arrays = {path.name.removeprefix("target."): zarr.open(path)[...] for path in folder.glob("target.*")}
    large = Architecture("vit_large_patch16_224", FLIP)
    vit = large.build()
    vit.load_state_dict(to_timm(arrays))
    save_vit(out, vit, large)
