"""Under which names state dicts keep a ViT, and which architecture those weights are of: what weights do not
show is what the code that wrote them used, and where several write the same names, it is asked for."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from atlib.maps import Grid
from atlib.pair import IMAGENET, Normalisation
from atlib.vit import Architecture
from atrun.teachers.files import Weights

# Heads by width, the same in DeiT, MAE, DINO, DINOv2, MoCo-v3 and I-JEPA.
HEADS: Mapping[int, int] = {768: 12, 1024: 16, 1280: 16, 1408: 16, 1536: 24}
PATCHES = "patch_embed.proj.weight"
# Names that a teacher needs nothing of: class heads and projections, and what pre-training alone used.
UNNEEDED = re.compile(r"head|fc\.|pre_logits|mlp_head|projector|predictor|decoder|mask_token|masked_|logit_")


class Layout(NamedTuple):
    """Who writes such names. mark: one that nobody else writes; heads: at widths where ViTs differ;
    normalisation: of images in that code, None where it is not known."""

    name: str
    mark: str = ""
    heads: Mapping[int, int] = {}
    normalisation: Normalisation | None = None


SMALL = {192: 3, 384: 6}
TORCHVISION = Layout("torchvision's VisionTransformer", "encoder.pos_embedding", {}, IMAGENET)
# The first whose mark is in the file. Sources: github.com/facebookresearch/{dino, mae, deit, dinov2}.
LAYOUTS = (
    Layout("DINO", "head.last_layer.weight_g", SMALL, IMAGENET),
    Layout("MAE pre-training, the encoder without its decoder", "decoder_embed.weight", {}, IMAGENET),
    Layout("DeiT with a distillation token", "dist_token", SMALL, IMAGENET),
    Layout("DeiT III", "blocks.0.gamma_1", SMALL, IMAGENET),
    Layout("DINOv2", "mask_token", SMALL, IMAGENET),
    TORCHVISION,
)
RENAMES = (  # DeiT III and DINOv2 to timm's names
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # DINOv2 trains its blocks in chunks
    (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),
    (r"^register_tokens$", "reg_token"),
    (r"^(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."),
    (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
)
OF_TORCHVISION = (
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
)
# Meta's DINOv3, by the width of the ViT and whether its MLP is gated.
DINOV3: Mapping[tuple[int, bool], str] = {
    (384, False): "vit_small_patch16_dinov3",
    (384, True): "vit_small_plus_patch16_dinov3",
    (768, False): "vit_base_patch16_dinov3",
    (1024, False): "vit_large_patch16_dinov3",
    (1280, True): "vit_huge_plus_patch16_dinov3",
    (4096, True): "vit_7b_patch16_dinov3",
}


class Encoder(NamedTuple):
    """A ViT's weights found in a file. state: by timm's names; names: what each was called in the file;
    unused: the file's other names."""

    layout: Layout
    state: dict[str, Tensor]
    names: dict[str, str]
    unused: list[str]


def mlp_ratio_of(hidden: int, width: int) -> float:
    """The ratio from which timm computes this hidden width, int(width · ratio)."""
    return hidden / width if int(width * (hidden / width)) == hidden else (hidden + 0.5) / width


def without_register_positions(state: dict[str, Tensor]) -> None:
    """DINOv2 gives its registers no position; timm then keeps the class token's in the token."""
    if "reg_token" in state:
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]


def prefix_of(tensors: Mapping[str, Tensor]) -> str:
    """What stands before timm's names, such as "module.". Raises `ValueError` for no ViT, or several."""
    if PATCHES in tensors:
        return ""
    prefixes = [name.removesuffix(PATCHES) for name in tensors if name.endswith(f".{PATCHES}")]
    if len(prefixes) > 1:
        raise ValueError(f"several ViTs, under {', '.join(map(repr, prefixes))}: save one alone")
    if prefixes:
        return prefixes[0]
    if any("embeddings.patch_embedding" in name for name in tensors):
        raise ValueError("weights of transformers: put their config.json beside them")
    if any("visual.class_embedding" in name for name in tensors):
        raise ValueError(
            "weights of CLIP: name the model, architecture='vit_base_patch16_clip_quickgelu_224.openai'"
        )
    stem = ", but a convolutional stem" if any("patch_embed.proj." in name for name in tensors) else ""
    raise ValueError(f"no ViT: no {PATCHES}{stem} among {', '.join([*tensors][:6])} ...")


def find_encoder(weights: Weights) -> Encoder:
    """The ViT among a file's tensors, by timm's names. Raises `ValueError` for none, for several, and for
    BEiT's or EVA's, whose name must be given."""
    tensors = weights.tensors
    prefix, renames = "", OF_TORCHVISION
    if TORCHVISION.mark not in tensors:
        prefix, renames = prefix_of(tensors), RENAMES
    bare = {name.removeprefix(prefix) for name in tensors}
    if any(name.endswith(("relative_position_bias_table", ".q_bias", ".fc1_g.weight")) for name in bare):
        raise ValueError("weights of a BEiT or an EVA: name it, architecture='beit_base_patch16_224'")
    plain = Layout(f"timm's names{f' after {prefix!r}' if prefix else ''}")
    layout = next((one for one in LAYOUTS if one.mark in bare), plain)
    if "pytorch-lightning_version" in weights.beside:  # anybody's training, which the names do not tell
        layout = plain
    state, names, unused = {}, {}, []
    for name, value in tensors.items():
        ours = name.removeprefix(prefix)
        for theirs, timms in renames:
            ours = re.sub(theirs, timms, ours)
        if name.startswith(prefix) and not UNNEEDED.match(ours):
            state[ours], names[ours] = value, name
        else:
            unused.append(name)
    if f"{prefix}register_tokens" in tensors:
        without_register_positions(state)
    return Encoder(layout, state, names, unused)


def dinov3(tensors: Mapping[str, Tensor]) -> str | None:
    """The timm name of the DINOv3 that Meta's own checkpoint holds; None for other files. Raises `ValueError`
    for a DINOv3 of a width that Meta did not publish."""
    if "storage_tokens" not in tensors or "cls_token" not in tensors:
        return None
    key = tensors["cls_token"].shape[-1], "blocks.0.mlp.w1.weight" in tensors
    if key not in DINOV3:
        raise ValueError(f"a DINOv3 of width {key[0]}: name it with architecture=")
    # of the distilled models the biases of q and v are all 0, and timm has a model without them
    biases = [value.chunk(3) for name, value in tensors.items() if name.endswith("attn.qkv.bias")]
    biased = any(of_q.any() or of_v.any() for of_q, _, of_v in biases)
    return DINOV3[key] + ("_qkvb" if biased else "")


def infer_architecture(encoder: Encoder, heads: int | None = None) -> tuple[Architecture, list[str]]:
    """The architecture that an encoder's weights are of, without a class head, and what was taken for granted
    because weights do not show it: first the heads. Raises `ValueError` where something is not known."""
    state = encoder.state
    hidden = _shape(state, "blocks.0.mlp.fc1.weight", 2)[0]
    signs = {
        "a norm before the blocks, as in CLIP": "norm_pre.weight" in state,
        "attention pooling, as in SigLIP": "attn_pool.latent" in state,
        "a gated MLP": hidden != _shape(state, "blocks.0.mlp.fc2.weight", 2)[1],
        "no positional embeddings, as in DINOv3": "pos_embed" not in state,
    }
    if unclear := [what for what, there in signs.items() if there]:
        raise ValueError(f"weights with {' and '.join(unclear)}: name the model with architecture=")
    width, channels, *patch = _shape(state, PATCHES, 4)

    def one_or_two(sides: list[int]) -> int | list[int]:  # one number where they are the same
        return sides[0] if sides[0] == sides[1] else sides

    prefix, grid = prefix_and_grid(state)
    chosen = _heads(encoder, width, prefix) if heads is None else heads
    if chosen < 1 or width % chosen:
        raise ValueError(f"heads={chosen}: it must divide the width, {width}")
    blocks = {int(found[1]) for name in state if (found := re.match(r"blocks\.(\d{1,6})\.", name))}
    if gaps := set(range(len(blocks))) - blocks:
        raise ValueError(f"no whole ViT: of {len(blocks)} blocks there is no block {min(gaps)}")
    config = {
        "img_size": one_or_two([side * pixels for side, pixels in zip(grid, patch)]),
        "patch_size": one_or_two(patch),
        "in_chans": channels,
        "num_classes": 0,
        "embed_dim": width,
        "depth": len(blocks),
        "num_heads": chosen,
        "mlp_ratio": mlp_ratio_of(hidden, width),
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "reg_tokens": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "no_embed_class": prefix == 0,
        "class_token": "cls_token" in state,
        "global_pool": "avg" if "fc_norm.weight" in state or "cls_token" not in state else "token",
        "fc_norm": "fc_norm.weight" in state,
    }
    why = f"usual at width {width}" if heads is None else "as given"
    taken = [f"{chosen} heads, {why}", "LayerNorm with ε 1e-06", "GELU", "a square grid of patches"]
    if "dist_token" in state:
        del config["class_token"], config["reg_tokens"], config["no_embed_class"], config["fc_norm"]
        return Architecture("deit_tiny_distilled_patch16_224", config), taken
    return Architecture(config), taken


def prefix_and_grid(state: Mapping[str, Tensor]) -> tuple[int, Grid]:
    """How many prefix tokens have a positional embedding, all or none, and the square patch grid of the
    others. Raises `ValueError`."""
    tokens = _shape(state, "pos_embed", 3)[1]
    prefix = sum(state[name].shape[1] for name in ("cls_token", "dist_token", "reg_token") if name in state)
    sides = {count: math.isqrt(max(tokens - count, 0)) for count in (prefix, 0)}
    fits = [(count, (side, side)) for count, side in sides.items() if side**2 == tokens - count > 0]
    if len(fits) != 1:
        ways = "two square grids" if fits else "no square grid"
        raise ValueError(f"{tokens} positions are {ways} with {prefix} or 0 for prefix tokens: architecture=")
    return fits[0]


def _heads(encoder: Encoder, width: int, prefix: int) -> int:
    known = encoder.layout.heads.get(width, HEADS.get(width))
    if known is not None:
        return known
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
