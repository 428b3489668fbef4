"""Under which names published checkpoints keep a ViT, and which architecture those weights are of.

Layouts are recognised by one name each and brought to timm's names, which most of them have already. What
weights do not show (the number of heads, the activation, the ε of a norm) is what the code that wrote them
used; where several codes could have written the same names and differ in that, it is asked for.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from timm.data.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from torch import Tensor

from atlib.maps import Grid
from atlib.pair import IMAGENET, Normalisation
from atlib.vit import Architecture

# Heads by width, the same in DeiT, MAE, DINO, DINOv2, MoCo-v3 and I-JEPA.
HEADS: Mapping[int, int] = {768: 12, 1024: 16, 1280: 16, 1408: 16, 1536: 24}
# Widths at which published ViTs differ, and how (github.com/wangsr126/MAE-Lite, OliverRensu/TinyMIM).
DIFFER: Mapping[int, str] = {
    192: "DeiT's has 3, MAE-Lite's and TinyMIM's 12",
    384: "those of DeiT and DINO have 6, MoCo-v3's and some of MAE's family 12 heads",
}
PATCHES = "patch_embed.proj.weight"
# Names that a teacher needs nothing of: class heads and projections, and what pre-training alone used.
UNNEEDED = re.compile(r"head|fc\.|pre_logits|mlp_head|projector|predictor|decoder|mask_token|masked_|logit_")


class Layout(NamedTuple):
    """A published layout. mark: a name that only it has; prefix: before timm's names; heads: its own numbers
    of heads at widths where ViTs differ; normalisation: of images in its code, None where several codes write
    these names, or it was not read."""

    name: str
    mark: str
    prefix: str = ""
    heads: Mapping[int, int] = {}
    normalisation: Normalisation | None = None


CLIP = Normalisation(OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
SMALL: Mapping[int, int] = {192: 3, 384: 6}
_MOCO = "module.base_encoder."
# The first whose mark is in the file. Sources: github.com/facebookresearch/{moco-v3, dino, mae, deit, dinov2}
# and openai/CLIP.
LAYOUTS = (
    Layout("MoCo-v3 pre-training, base encoder", f"{_MOCO}{PATCHES}", _MOCO, {384: 12}, IMAGENET),
    Layout(
        "DINO, the student's backbone", "module.head.last_layer.weight_g", "module.backbone.", SMALL, IMAGENET
    ),
    Layout("DINO, a backbone", "head.last_layer.weight_g", "backbone.", SMALL, IMAGENET),
    Layout("DINOv2, a backbone", "backbone.mask_token", "backbone.", SMALL, IMAGENET),
    Layout("a ViT in a DataParallel wrapper, such as MoCo-v3's classifier", f"module.{PATCHES}", "module."),
    Layout(
        "MAE pre-training, the encoder without its decoder", "decoder_embed.weight", normalisation=IMAGENET
    ),
    Layout("DeiT with a distillation token", "dist_token", "", SMALL, IMAGENET),
    Layout("DeiT III", "blocks.0.gamma_1", "", SMALL, IMAGENET),
    Layout("DINOv2", "mask_token", "", SMALL, IMAGENET),
    Layout("a ViT that averages over patches, such as fine-tuned MAE", "fc_norm.weight"),
    Layout("a ViT under timm's names, such as MAE's encoder, DINO or DeiT", PATCHES),
    Layout(
        "a CLIP image tower, OpenAI's or OpenCLIP's", "visual.class_embedding", "visual.", normalisation=CLIP
    ),
    Layout("torchvision's VisionTransformer", "encoder.pos_embedding", normalisation=IMAGENET),
)
EVA = Layout("timm's Eva, under its own names", PATCHES)

RENAMES = (  # DeiT III and DINOv2 to timm's names
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # DINOv2 trains its blocks in chunks
    (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),
    (r"^register_tokens$", "reg_token"),
    (r"^(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."),
    (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
)
CLIP_RENAMES = (
    (r"^conv1\.", "patch_embed.proj."),
    (r"^class_embedding$", "cls_token"),
    (r"^positional_embedding$", "pos_embed"),
    (r"^ln_pre\.", "norm_pre."),
    (r"^ln_post\.", "norm."),
    (r"^proj$", "head.proj"),
    (r"^transformer\.resblocks\.", "blocks."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.attn\.in_proj_", ".attn.qkv."),
    (r"\.attn\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
TORCHVISION_RENAMES = (
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
    names: dict[str, tuple[str, ...]]
    unused: list[str]


def mlp_ratio_of(hidden: int, width: int) -> float:
    """The ratio from which timm computes this hidden width, int(width · ratio)."""
    return hidden / width if int(width * (hidden / width)) == hidden else (hidden + 0.5) / width


def find_encoder(tensors: Mapping[str, Tensor], eva: bool = False) -> Encoder:
    """The ViT among a file's tensors, by timm's names; `eva`: by those of timm's `Eva`, which keep another
    ViT's older names.

    Raises `ValueError`, saying what was looked for, when there is none or more than one.
    """
    if any(name.endswith("relative_position_bias_table") for name in tensors):
        raise ValueError(
            "these weights have relative positions, as BEiT's: name the model with architecture=, such as"
            " 'beit_base_patch16_224'"
        )
    layout = next((layout for layout in ((EVA,) if eva else LAYOUTS) if layout.mark in tensors), None)
    if layout is None:
        prefixes = [name.removesuffix(PATCHES) for name in tensors if name.endswith(f".{PATCHES}")]
        if len(prefixes) > 1:
            under = ", ".join(map(repr, prefixes))
            raise ValueError(f"this file holds several ViTs, under {under}: save the one that teaches alone")
        if not prefixes:
            stem, has = "", ", ".join(list(tensors)[:6])
            if any("patch_embed.proj." in name for name in tensors):
                stem = ": its patches go through a convolutional stem, which timm's ViT does not have"
            raise ValueError(
                f"no ViT was found among these weights{stem}. Looked for {PATCHES}, with or without a prefix,"
                f" and CLIP's names; the file has {has}{' ...' if len(tensors) > 6 else ''}"
            )
        layout = Layout(f"a ViT under {prefixes[0]!r}", "", prefixes[0])
    of_torchvision = {layout.mark: TORCHVISION_RENAMES for layout in LAYOUTS if "torchvision" in layout.name}
    renames = () if eva else CLIP_RENAMES if layout.prefix == "visual." else RENAMES
    renames = of_torchvision.get(layout.mark, renames)
    state, names, unused = {}, {}, []
    for name, value in tensors.items():
        ours = _renamed(name.removeprefix(layout.prefix), renames)
        if name.startswith(layout.prefix) and not UNNEEDED.match(ours):
            state[ours], names[ours] = value, (name,)
        else:
            unused.append(name)
    if layout.prefix == "visual.":
        for name in {"cls_token", "pos_embed"} & state.keys():
            state[name] = state[name].reshape(1, -1, state[name].shape[-1])
    if f"{layout.prefix}register_tokens" in tensors:
        # DINOv2 gives registers no position; timm then keeps the class token's in the token.
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]
    return Encoder(layout, state, names, unused)


def dinov3(tensors: Mapping[str, Tensor]) -> str | None:
    """The timm name of the DINOv3 that Meta's own checkpoint holds; None for other files.

    Raises `ValueError` for a DINOv3 of a width that Meta did not publish.
    """
    if "storage_tokens" not in tensors or "cls_token" not in tensors:
        return None
    key = tensors["cls_token"].shape[-1], "blocks.0.mlp.w1.weight" in tensors
    if key not in DINOV3:
        raise ValueError(f"a DINOv3 of width {key[0]} is not known: name it with architecture=")
    # of the distilled models the biases of q and v are all 0, and timm has a model without them
    biases = [value.chunk(3) for name, value in tensors.items() if name.endswith("attn.qkv.bias")]
    biased = any(of_q.any() or of_v.any() for of_q, _, of_v in biases)
    return DINOV3[key] + ("_qkvb" if biased else "")


def infer_architecture(encoder: Encoder, heads: int | None = None) -> tuple[Architecture, list[str]]:
    """The architecture that an encoder's weights are of, without a class head, and what was taken for granted
    because weights do not show it: first the heads.

    `heads`: the number of heads. Raises `ValueError` where something needed is neither in the weights nor
    known of the layout.
    """
    state = encoder.state
    hidden = _sides(state, "blocks.0.mlp.fc1.weight")[0]
    signs = {
        "a norm before the blocks, as in CLIP, of which there are several": "norm_pre.weight" in state,
        "attention pooling, as in SigLIP": "attn_pool.latent" in state,
        "a gated MLP": hidden != _sides(state, "blocks.0.mlp.fc2.weight")[1],
        "no positional embeddings, as in DINOv3": "pos_embed" not in state,
    }
    unclear = [what for what, there in signs.items() if there]
    if unclear:
        raise ValueError(
            f"these weights have {' and '.join(unclear)}: name the architecture, such as architecture="
            "'vit_base_patch16_clip_quickgelu_224.openai' or 'eva02_tiny_patch14_224' (timm.list_models()"
            " lists names; --architecture, or --teacher_architecture in a run)"
        )
    width, channels, *patch = _sides(state, PATCHES, 4)
    prefix, grid = prefix_and_grid(state)
    chosen = _heads(encoder, width, prefix) if heads is None else heads
    if chosen < 1 or width % chosen:
        raise ValueError(f"heads={chosen}: the width of this ViT, {width}, cannot be divided among so many")
    averages = "fc_norm.weight" in state or "cls_token" not in state
    config = {
        "img_size": _one_or_two(side * pixels for side, pixels in zip(grid, patch)),
        "patch_size": _one_or_two(patch),
        "in_chans": channels,
        "num_classes": 0,
        "embed_dim": width,
        "depth": _depth(state),
        "num_heads": chosen,
        "mlp_ratio": mlp_ratio_of(hidden, width),
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "init_values": 1e-5 if "blocks.0.ls1.gamma" in state else None,
        "reg_tokens": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "no_embed_class": prefix == 0,
        "class_token": "cls_token" in state,
        "global_pool": "avg" if averages else "token",
        "fc_norm": "fc_norm.weight" in state,
    }
    taken = [
        f"{chosen} heads" + (f", usual at width {width}" if heads is None else ", as given"),
        "LayerNorm with ε 1e-06",
        "GELU",
        "a square grid of patches",
    ]
    if "dist_token" in state:
        del config["class_token"], config["reg_tokens"], config["no_embed_class"], config["fc_norm"]
        return Architecture("deit_tiny_distilled_patch16_224", config), taken
    return Architecture(config), taken


def prefix_and_grid(state: Mapping[str, Tensor]) -> tuple[int, Grid]:
    """How many prefix tokens have a positional embedding, all or none, and the square patch grid of the
    others. Raises `ValueError`."""
    tokens = _sides(state, "pos_embed", 3)[1]
    prefix = sum(state[name].shape[1] for name in ("cls_token", "dist_token", "reg_token") if name in state)
    sides = {count: math.isqrt(max(tokens - count, 0)) for count in (prefix, 0)}
    fits = [(count, (side, side)) for count, side in sides.items() if side**2 == tokens - count > 0]
    if not fits:
        raise ValueError(
            f"positions for {tokens - prefix} patches are no square grid: name the model with architecture=,"
            " or write the file with atlib.checkpoint.save_vit, which keeps img_size"
        )
    if len(fits) > 1:
        raise ValueError(
            f"{tokens} positional embeddings are a square grid both with and without {prefix} for the prefix"
            " tokens: name the model with architecture="
        )
    return fits[0]


def _heads(encoder: Encoder, width: int, prefix: int) -> int:
    known = encoder.layout.heads.get(width, HEADS.get(width))
    if known is not None:
        return known
    # DeiT's and DINO's ViT-S under timm's names: positions are learned, so that the class token has one, too
    learned = prefix > 0 and encoder.state["pos_embed"][:, 0].any()
    if width == 384 and learned and not any("decoder" in name for name in encoder.unused):
        return 6
    differ = f"; {DIFFER[width]}" if width in DIFFER else ""
    raise ValueError(f"the heads of this ViT of width {width} are not in its weights{differ}: give heads=")


def _depth(state: Mapping[str, Tensor]) -> int:
    blocks = {int(found[1]) for name in state if (found := re.match(r"blocks\.(\d{1,6})\.", name))}
    if gaps := set(range(len(blocks))) - blocks:
        raise ValueError(f"these weights are not a whole ViT: of {len(blocks)} there is no block {min(gaps)}")
    return len(blocks)


def _one_or_two(sides: Iterable[int]) -> int | list[int]:
    """One number where a height and a width are the same."""
    height, width = sides
    return height if height == width else [height, width]


def _renamed(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for old, new in renames:
        name = re.sub(old, new, name)
    return name


def _sides(state: Mapping[str, Tensor], name: str, number: int = 2) -> tuple[int, ...]:
    """The shape of a weight, which must have `number` sides."""
    if name not in state:
        raise ValueError(f"these weights are not a whole ViT: {name} is missing")
    if state[name].ndim != number:
        raise ValueError(f"{name} has the shape {tuple(state[name].shape)}, and a ViT's has {number} sides")
    return tuple(state[name].shape)
