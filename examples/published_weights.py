"""The weights that the authors of BinaryViT and PatchConvNet published, under the names that atfamily has."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# The names of the published code, by regular expressions that are applied one after the other, and ours.
BINARY_VIT = (
    (r"^vit\.embeddings\.cls_token", "cls_token"),
    (r"^vit\.embeddings\.position_embeddings", "pos_embed"),
    (r"^vit\.embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"^vit\.embeddings\.norm", "patch_embed.norm"),
    (r"^vit\.layernorm", "norm"),
    (r"^classifier", "head"),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.output\.layerscale\.", ".ls1."),
    (r"\.output\.layerscale\.", ".ls2."),
    (r"\.attention\.output\.", ".attn.out."),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.intermediate\.", ".fc1."),
    (r"(\d)\.output\.", r"\1.fc2."),
    (r"\.layerscale_h3\.", ".branches.weigh.0."),
    (r"\.layerscale_w3\.", ".branches.weigh.1."),
    (r"\.layerscale_h5\.", ".branches.weigh.2."),
    (r"\.layerscale_w5\.", ".branches.weigh.3."),
    (r"\.att_prob_clip$", ".share"),
    (r"\.move([qkv])2$", r".\1_shift"),
    (r"\.move([qkv])$", r".\1.shift"),
    (r"\.norm([qkv])\.", r".\1.norm."),
    (r"\.rprelu([qkv])\.", r".\1.act."),
    (r"\.query\.", ".q.linear."),
    (r"\.key\.", ".k.linear."),
    (r"\.value\.", ".v.linear."),
    (r"\.mover$", ".reduce.shift"),
    (r"\.norm_r\.", ".reduce.norm."),
    (r"\.rprelur\.", ".reduce.act."),
    (r"\.reduction\.", ".reduce.linear."),
    (r"\.norm_context\.", ".norm."),
    (r"\.rprelu_context\.", ".act."),
    (r"(\d)\.position_embeddings$", r"\1.pos_embed"),
    (r"(merging\.\d)\.norm\.", r"\1.norm2."),
    (r"(merging\.\d)\.norm0\.", r"\1.norm1."),
    (r"(merging\.\d)\.proj\.", r"\1.conv."),
    (r"\.rprelu\.", ".act."),
    (r"\.dense\.", ".linear."),
    (r"\.prelu\.weight$", ".slope"),
    (r"\.act\.move1$", ".act.shift_in"),
    (r"\.act\.move2$", ".act.shift_out"),
    (r"(ls[12]|weigh\.\d)\.move$", r"\1.beta"),
    (r"\.move$", ".shift"),
)


def binary_vit(state: Mapping[str, Tensor], depths: Sequence[int]) -> dict[str, Tensor]:
    """The weights of the published code's `ViTForImageClassification`, of a pyramid or of one stage, under
    the names that a `BinaryViT` of these `depths` has for them: for `load_state_dict`."""
    places = {
        str(start + block): f"stages.{stage}.{block}"
        for stage, depth in enumerate(depths)
        for start in [sum(depths[:stage])]
        for block in range(depth)
    }

    def renamed(name: str) -> str:
        name = re.sub(r"^vit\.encoder\.layer\.(\d+)", lambda match: places[match[1]], name)
        name = re.sub(r"^vit\.encoder\.patch_embed(\d)", lambda at: f"merging.{int(at[1]) - 1}", name)
        for pattern, instead in BINARY_VIT:
            name = re.sub(pattern, instead, name)
        return name

    def shaped(name: str, value: Tensor) -> Tensor:
        if name.endswith((".alpha", ".beta")):  # of timm's Affine, which has (1, 1, D)
            return value.view(1, 1, -1)
        return value.flatten() if name.endswith(".shift") else value  # of a convolution: (1, D, 1, 1) there

    named = {renamed(name): value for name, value in state.items()}
    return {name: shaped(name, value) for name, value in named.items()}


# Names in the published weights, and here.
PATCH_CONV_NET = (
    ("patch_embed.proj.", "trunk.0."),
    ("blocks_token_only.0.attn.", "pool."),
    ("blocks_token_only.0.", "pool."),
    ("attn.qkv_pos.4.conv_reduce.", "mix.4.fc1."),
    ("attn.qkv_pos.4.conv_expand.", "mix.4.fc2."),
    ("attn.qkv_pos.", "mix."),
    ("cls_token", "pool.queries"),
    ("pool.gamma_", "pool.scale"),
)


def patch_conv_net(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published code's weights of a PatchConvNet under the names of this one: a state dict to load."""
    weights = {}
    for name, value in state.items():
        for old, new in PATCH_CONV_NET:
            name = name.replace(old, new)
        match name.split("."):
            case ["trunk", "0", index, *_]:
                name = f"trunk.0.{index}.weight"  # there, each convolution is in a Sequential of its own
            case ["blocks", index, *rest]:
                name = ".".join(["trunk", str(int(index) + 1), *rest])
                name = name.replace(".norm1.", ".norm.").replace(".gamma_1", ".scale.gamma")
            case ["pool", "scale1" | "scale2"]:
                name += ".gamma"
        weights[name] = value
    for part in ("weight", "bias"):  # one layer for each class
        rows = [weights.pop(f"head.{c}.{part}") for c in range(len(state)) if f"head.{c}.{part}" in weights]
        if rows:
            weights[f"head.{part}"] = torch.cat(rows)
    return weights
