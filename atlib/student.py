"""A teacher's native components, and the student that has them all.

Without them, maps of DINOv2, CLIP and BEiTv2 teachers push a *standard* ViT below training from scratch
(arXiv 2605.07191). So a student is the teacher's own architecture unless something else is asked for.
"""

from collections.abc import Mapping
from typing import Any

from timm.layers import GluMlp, Mlp, PatchEmbed, SwiGLU
from torch import nn

from atlib.pair import attach, channels_of, config_of
from atlib.vit import VITS, create_vit, without_weights

SIZES = {"tiny": (192, 3), "small": (384, 6)}  # width and heads of ViT-Ti and ViT-S (DeiT, arXiv 2012.12877)


def built_with(model: nn.Module) -> tuple[str | Mapping[str, Any], dict[str, Any]]:
    """timm's name of a model and the arguments that it was built with: as `create_vit` notes them, else
    depth, image size and channels."""
    config = config_of(model)
    name, arguments = config.get("create_vit") or (config.get("architecture"), None)
    if not name:
        raise ValueError(f"this {type(model).__name__} has no timm name: build its student as you built it")
    if arguments is None:
        size_of_images = getattr(getattr(model, "patch_embed", None), "img_size", None)
        read = {"depth": len(model.blocks), "img_size": size_of_images, "in_chans": channels_of(model)}
        arguments = {key: value for key, value in read.items() if value is not None}
    return name, arguments


def unlike(one: nn.Module, other: nn.Module, besides: tuple[str, ...] = ()) -> list[str]:
    """In what two models of timm differ: weights of other shapes, but for names that begin with `besides`;
    else, of ViTs, heads and components."""
    shapes = [
        {key: value.shape for key, value in model.state_dict().items() if not key.startswith(besides)}
        for model in (one, other)
    ]
    names = sorted(shapes[0].keys() | shapes[1].keys())
    wrong = [name for name in names if shapes[0].get(name) != shapes[1].get(name)]
    if wrong or not isinstance(one, VITS):
        return wrong
    heads, others = ([getattr(p, "num_heads", None) for p in vit.blocks.modules()] for vit in (one, other))
    return [*(["heads"] if heads != others else []), *differences(one, other)]


def create_student(
    teacher: nn.Module,
    num_classes: int,
    size: str | None = None,
    *,
    depth: int | None = None,
    embed_dim: int | None = None,
    drop_path_rate: float = 0.0,
) -> nn.Module:
    """A freshly initialised student of the teacher's own architecture: timm's model of its name, with the
    arguments that it was built with but rates of dropout. size, depth, embed_dim: as `student_sizes` reads
    them; `atrun.derived_plan.derive_plan` pairs it with its teacher. Raises `ValueError` for a model without
    a timm name, and where what is built of it is not like the teacher. Source: arXiv 2605.07191."""
    name, arguments = built_with(teacher)
    kept = {key: value for key, value in arguments.items() if not key.endswith("_rate")}
    kept |= {"num_classes": num_classes, "drop_path_rate": drop_path_rate}
    with without_weights():
        like_teacher = create_vit(name, **kept)
    if wrong := unlike(teacher, like_teacher, besides=("head",)):
        raise ValueError(f"{name!r} differs from this model in {', '.join(wrong[:3])}: build it yourself")
    if (size, depth, embed_dim) != (None, None, None):
        kept |= student_sizes(teacher, size, depth, embed_dim)
    student = create_vit(name, **kept)
    attach(student, None)  # a tag's normalisation is that of its weights
    return student


def student_sizes(
    teacher: nn.Module, size: str | None = None, depth: int | None = None, embed_dim: int | None = None
) -> dict[str, int]:
    """Sizes of a student that are not the teacher's, as timm's arguments: depth, embed_dim, num_heads. size:
    "tiny" or "small", the width and heads of ViT-Ti and ViT-S, or "half" of the teacher's width, heads and
    layers; `depth` and `embed_dim` replace what it says. A width has heads as wide as the teacher's where
    they divide it, else as many as the teacher."""
    width, heads = teacher.embed_dim, teacher.blocks[0].attn.num_heads
    sizes: dict[str, int] = {}
    if size in SIZES:
        sizes = dict(zip(("embed_dim", "num_heads"), SIZES[size]))
    elif size == "half":
        layers = max(1, len(teacher.blocks) // 2)
        sizes = {"embed_dim": width // 2, "num_heads": max(1, heads // 2), "depth": layers}
    elif size is not None:
        raise ValueError(f"size={size!r}: {', '.join(SIZES)} or half")
    if embed_dim is not None:
        number = embed_dim // (width // heads) if embed_dim % (width // heads) == 0 else heads
        if embed_dim % number:
            raise ValueError(f"embed_dim={embed_dim}: give a multiple of {width // heads} or of {heads}")
        sizes |= {"embed_dim": embed_dim, "num_heads": number}
    return sizes | ({} if depth is None else {"depth": depth})


# --- Native components (arXiv 2605.07191) ---

# What `describe` says of a standard ViT: the student of arXiv 2411.09702, most of timm's supervised ViTs.
STANDARD: Mapping[str, Any] = {
    "layer_scale": "none",
    "registers": 0,
    "pre_norm": False,
    "activation": "GELU",
    "pooling": "token",
    "positions": "learned",
    "qk_norm": False,
    "mlp": "plain",
    "norm": "LayerNorm 1e-06",
    "qkv_bias": "q k v",
    "grouped_queries": False,
    "tokeniser": "PatchEmbed",
}


def describe(vit: nn.Module) -> dict[str, Any]:
    """What a ViT of timm has of each component that `STANDARD` names: short strings, numbers or booleans.
    Raises `ValueError` for another model."""
    embed = getattr(vit, "embeds", getattr(vit, "patch_embed", None))
    if embed is None or not hasattr(vit, "blocks") or not hasattr(vit, "global_pool"):
        raise ValueError(f"the components of a {type(vit).__name__} are not known: it is no ViT of timm")
    holder = embed if hasattr(vit, "embeds") else vit  # NaFlexVit embeds all tokens in one module
    block = vit.blocks[0]
    attn, mlp = getattr(block, "attn", block), getattr(block, "mlp", None)
    activation = block.mlp_act if mlp is None else getattr(mlp, "act", mlp)
    cls_token, registers = getattr(holder, "cls_token", None), getattr(holder, "reg_token", None)
    block_norm = getattr(block, "norm1", getattr(block, "in_norm", None))
    after = getattr(block, "attn_out_proj", None) or getattr(block, "out_proj", None)
    branches = [present(getattr(block, f"ls{i}", getattr(block, f"gamma_{i}", None))) for i in (1, 2)]
    branches = [present(block.ls)] * 2 if hasattr(block, "ls") else branches
    pooling = {
        "no class token": cls_token is None,
        "distillation token": hasattr(vit, "dist_token"),
        "norm after it": present(vit.fc_norm),
        "prefix included": getattr(vit, "pool_include_prefix", False),
    }
    norm = {
        "inside attention": present(getattr(attn, "norm", None)),
        "inside the MLP": present(getattr(mlp, "norm", None)),
        "on patches": isinstance(embed, PatchEmbed) and present(embed.norm),
        "none at the end": not present(vit.norm) and not present(vit.fc_norm),
        "after attention and MLP": any(kind in type(block).__name__ for kind in ("PostNorm", "ResPost")),
    }
    tanh = " tanh" if getattr(activation, "approximate", "none") == "tanh" else ""
    scaled = {(True, True): "attention and MLP", (True, False): "attention", (False, False): "none"}
    kind = "beside attention" if mlp is None else type(mlp).__name__
    return {
        "layer_scale": scaled[tuple(branches)],
        "registers": 0 if registers is None else registers.shape[1],
        "pre_norm": present(getattr(vit, "norm_pre", None)),
        "activation": type(activation).__name__ + tanh,
        "pooling": _with(vit.global_pool or "none", pooling),
        "positions": _positions(vit, holder, attn),
        "qk_norm": present(getattr(attn, "q_norm", None)),
        "mlp": "gated" if isinstance(mlp, (GluMlp, SwiGLU)) else "plain" if type(mlp) is Mlp else kind,
        "norm": _with(f"{type(block_norm).__name__} {getattr(block_norm, 'eps', None) or 0.0:g}", norm),
        "qkv_bias": _with(
            " ".join(_biases(attn)) or "none",
            {"none after attention": getattr(getattr(attn, "proj", after), "bias", None) is None},
        ),
        "grouped_queries": any(
            hasattr(part, "num_kv_heads") and part.num_kv_heads != part.num_heads
            for part in vit.blocks.modules()
        ),
        "tokeniser": type(embed).__name__,
    }


def differences(teacher: nn.Module, student: nn.Module) -> dict[str, tuple[Any, Any]]:
    """The components in which two ViTs differ: {name: (teacher's, student's)}."""
    try:
        of_teacher, of_student = describe(teacher), describe(student)
    except ValueError:
        of_teacher, of_student = _shown(teacher), _shown(student)
    names = [name for name in of_teacher if of_teacher[name] != of_student[name]]
    return {name: (of_teacher[name], of_student[name]) for name in names}


def _shown(model: nn.Module) -> dict[str, Any]:
    """What can be told of a model of any library, by the names and shapes of its weights."""
    names = [name.lower() for name, _ in model.named_parameters()]
    scales = ("gamma", "lambda_", "layer_scale", "layerscale", ".ls1", ".ls2", "ls_1", "ls_2")
    registers = [weight for name, weight in model.named_parameters() if "reg" in name.split(".")[-1]]
    kinds = [type(part).__name__.lower() for part in model.modules()]
    rotary = any("rope" in kind or "rotary" in kind for kind in kinds)
    relative = any("relative_position" in name or "rel_pos" in name for name in names)
    return {
        "layer_scale": "some" if any(scale in name for name in names for scale in scales) else "none",
        "registers": sum(weight.shape[-2] for weight in registers if weight.ndim > 1),
        "positions": "rotary" if rotary else "relative" if relative else "learned",
        "qk_norm": any(f"{part}_norm" in name for name in names for part in "qk"),
    }


def present(part: Any) -> bool:
    """Whether an optional part is there: timm leaves `Identity` or None where it is not."""
    return part is not None and not isinstance(part, nn.Identity)


def _positions(vit: nn.Module, holder: nn.Module, attn: nn.Module) -> str:
    learned = present(getattr(holder, "pos_embed", None)) or hasattr(holder, "pos_embed_y")
    without_prefix = holder is not vit or getattr(vit, "no_embed_class", False)
    kinds = ["learned for patches" if without_prefix else "learned"] if learned else []
    if getattr(vit, "rope", None) is not None:
        kinds.append(f"rotary ({type(vit.rope).__name__.removeprefix('RotaryEmbedding')})")
    shared = getattr(vit, "rel_pos_bias", None) or getattr(vit, "shared_rel_pos", None)
    if shared is not None:
        kinds.append(f"relative ({type(shared).__name__} for all layers)")
    elif getattr(attn, "relative_position_bias_table", None) is not None:
        kinds.append("relative (a bias in each layer)")
    elif getattr(attn, "rel_pos", None) is not None:
        kinds.append(f"relative ({type(attn.rel_pos).__name__} in each layer)")
    return " and ".join(kinds) or "none"


def _biases(attn: nn.Module) -> str:
    """Which of the projections to q, k, v have a bias: letters of "qkv"."""
    if not hasattr(attn, "qkv"):  # one joint projection with that of the MLP
        return "qkv" if attn.in_proj.bias is not None else ""
    if attn.qkv is None:
        return "".join(name for name in "qkv" if getattr(attn, f"{name}_proj").bias is not None)
    if getattr(attn, "q_bias", None) is not None:
        return "qv"
    return "" if getattr(attn.qkv, "bias", None) is None else "qkv"


def _with(what: str, remarks: Mapping[str, bool]) -> str:
    return ", ".join([what, *(remark for remark, holds in remarks.items() if holds)])
