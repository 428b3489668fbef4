"""A teacher's native components, and students that have all, some or none of them.

arXiv 2605.07191 ("Attention Transfer Is Not Universally Effective for Vision Transformers") finds that the
maps of DINOv2, CLIP and BEiTv2 teachers push a *standard* ViT below training from scratch, and that giving
the student the teacher's native components, freshly initialised, reverses it. In the first paper, arXiv
2411.09702, teacher and student had the same blocks, though in its code they pooled differently. So a student
is the teacher's own architecture unless it is said, component by component, what is to differ.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from timm.layers import Mlp, PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atlib._util import require_known
from atlib.adapters.adapter import Adapter
from atlib.adapters.choose import adapter_of
from atlib.adapters.timm import TimmAdapter
from atlib.timm_config import (
    STANDARD_SETTINGS,
    Settings,
    biases_of,
    build,
    build_by_name,
    can_be_read,
    eps_of,
    is_gated,
    parts_of,
    present,
)

# What `describe` says of a standard ViT: the student of arXiv 2411.09702 and of most of timm's supervised
# ViTs.
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
COMPONENTS: tuple[str, ...] = tuple(STANDARD)

# Weights are initialised as the teacher's constructor would (only where the student is the teacher's
# architecture).
STANDARD_INITIALISATION: Settings = {"fix_init": False, "weight_init": "", "head_init_scale": None}


def describe(vit: nn.Module | Adapter) -> dict[str, Any]:
    """What a ViT has in place of each of the `COMPONENTS`, read off its modules: short strings, numbers or
    booleans. Of a model that is not timm's, it is what the timm ViT with the same components has.

    Raises `Unwalkable` for a model whose attention cannot be walked, and `ValueError` for one whose
    components are not known.
    """
    adapter = adapter_of(vit)
    adapter.check()
    vit = adapter.model if isinstance(adapter, TimmAdapter) else _twin(adapter)
    parts = parts_of(vit)
    block, embed, attn, mlp = parts.block, parts.embed, parts.attn, parts.mlp
    branches = [present(getattr(block, f"ls{i}", getattr(block, f"gamma_{i}", None))) for i in (1, 2)]
    branches = [present(block.ls)] * 2 if hasattr(block, "ls") else branches
    pooling = {
        "no class token": parts.cls_token is None,
        "distillation token": hasattr(vit, "dist_token"),
        "norm after it": present(vit.fc_norm),
        "prefix included": getattr(vit, "pool_include_prefix", False),
    }
    rope, activation = getattr(vit, "rope", None), parts.activation
    learned = (
        ["learned for patches" if parts.no_embed_class else "learned"] if parts.pos_embed is not None else []
    )
    rotary = [f"rotary ({type(rope).__name__.removeprefix('RotaryEmbedding')})"] if rope is not None else []
    norm = {
        "inside attention": present(getattr(attn, "norm", None)),
        "inside the MLP": present(getattr(mlp, "norm", None)),
        "on patches": isinstance(embed, PatchEmbed) and present(embed.norm),
        "none at the end": not present(vit.norm) and not present(vit.fc_norm),
        "after attention and MLP": parts.post_norm,
    }
    tanh = " tanh" if getattr(activation, "approximate", "none") == "tanh" else ""
    scaled = {(True, True): "attention and MLP", (True, False): "attention", (False, False): "none"}
    kind = "beside attention" if mlp is None else type(mlp).__name__
    return {
        "layer_scale": scaled[tuple(branches)],
        "registers": 0 if parts.reg_token is None else parts.reg_token.shape[1],
        "pre_norm": present(getattr(vit, "norm_pre", None)),
        "activation": type(activation).__name__ + tanh,
        "pooling": _with(vit.global_pool or "none", pooling),
        "positions": " and ".join(learned + rotary + parts.relative) or "none",
        "qk_norm": present(getattr(attn, "q_norm", None)),
        "mlp": "gated" if is_gated(mlp) else "plain" if type(mlp) is Mlp else kind,
        "norm": _with(f"{type(parts.norm).__name__} {eps_of(parts.norm):g}", norm),
        "qkv_bias": _with(
            " ".join(biases_of(attn)) or "none",
            {"none after attention": getattr(parts.proj, "bias", None) is None},
        ),
        "grouped_queries": any(
            getattr(one.attn, "num_kv_heads", one.attn.num_heads) != one.attn.num_heads
            for one in vit.blocks
            if hasattr(one, "attn")
        ),
        "tokeniser": type(embed).__name__,
    }


def _twin(adapter: Adapter) -> nn.Module:
    """The timm ViT with the components of another library's model, without weights.

    Raises `ValueError` unless its blocks have as many weights as the model's: then they were read wrongly.
    """
    with torch.device("meta"):
        twin = build(adapter.settings(), num_classes=0, drop_path_rate=0.0)
    counts = [
        sum(weight.numel() for weight in block.parameters()) for block in (adapter.blocks[0], twin.blocks[0])
    ]
    if counts[0] != counts[1]:
        raise ValueError(
            f"the components of this {type(adapter.model).__name__} cannot be read off it: a block of it has"
            f" {counts[0]} weights, and one of the timm ViT that should be like it {counts[1]}"
        )
    return twin


def differences(teacher: nn.Module | Adapter, student: nn.Module | Adapter) -> dict[str, tuple[Any, Any]]:
    """The components in which two ViTs differ: {name: (teacher's, student's)}. Sizes, such as width or depth,
    are no components."""
    of_teacher, of_student = describe(teacher), describe(student)
    both = {name: (of_teacher[name], of_student[name]) for name in COMPONENTS}
    return {name: (left, right) for name, (left, right) in both.items() if left != right}


def create_student(
    teacher: nn.Module | Adapter,
    num_classes: int,
    *,
    native: bool = True,
    drop: Iterable[str] = (),
    add: Iterable[str] = (),
    drop_path_rate: float = 0.0,
    layer_scale_init: float | None = None,
) -> nn.Module:
    """A freshly initialised student for `teacher`, of its size: none of the teacher's weights are taken.

    The student is always a ViT of timm: for a teacher of another library it is the timm ViT of the same
    sizes and components, and pools as timm's does, by class token or mean.

    `native=True`: the teacher's own architecture, from the arguments that timm's constructor must have had;
    it is checked that the student's weights have the teacher's names and shapes, apart from the class head.
    `drop` names `COMPONENTS` in place of which it gets those of a standard ViT. `native=False`: a standard
    ViT (`STANDARD`), and `add` names components that it gets from the teacher after all. Rates of dropout are
    a matter of the recipe and are not taken over.

    `layer_scale_init`: where layer scale starts. A trained teacher's weights no longer say; None takes what
    timm has noted on the module (later versions do), else timm's usual 1e-5.

    In an `Eva` the activation comes with the kind of MLP: dropping "mlp" there drops a gated MLP's activation
    with it.

    Raises `ValueError` for an unknown or contradictory choice, for a component that is standard anyway, and
    for an architecture that cannot be read off the model or cannot have a component; `Unwalkable` for a model
    that `walk` refuses. Source: arXiv 2605.07191; the matched student also arXiv 2411.09702.
    """
    drop, add = _names("drop", drop), _names("add", add)
    if drop and not native:
        raise ValueError("drop takes the teacher's components away, and with native=False there are none")
    if add and native:
        raise ValueError("add puts components into a standard ViT, and with native=True they are all there")
    described = describe(teacher)
    own = {name: described[name] for name in COMPONENTS if described[name] != STANDARD[name]}
    for name in (*drop, *add):
        if name not in own:
            raise ValueError(
                f"{name} of this teacher is that of a standard ViT anyway ({described[name]}); "
                f"it has of its own: {', '.join(own) or 'nothing'}"
            )

    adapter = adapter_of(teacher)
    if layer_scale_init is not None and not layer_scale_init > 0:
        raise ValueError(
            f"layer_scale_init={layer_scale_init}: timm builds no layer scale that starts there; give a"
            " number above 0, or drop=['layer_scale']"
        )
    if isinstance(adapter, TimmAdapter) and not can_be_read(adapter.model) and native and not drop:
        if layer_scale_init is not None:
            raise ValueError(
                f"layer_scale_init={layer_scale_init}: this {type(adapter.model).__name__} is built by its"
                " name in timm, which has its own start, or none: leave it out"
            )
        student = build_by_name(adapter.model, num_classes, drop_path_rate)
        _check_twin(adapter.model, student)
        return student
    settings = adapter.settings(layer_scale_init)
    if native:
        student = build(settings, num_classes, drop_path_rate)
        if isinstance(adapter, TimmAdapter):
            _check_twin(adapter.model, student)
        dropped = _standard(drop)
    else:
        dropped = _standard(set(COMPONENTS) - set(add)) | STANDARD_INITIALISATION
        dropped["model"] = VisionTransformer
    if settings["model"] is Eva and native and "activation" in drop and "mlp" not in drop:
        raise ValueError(
            "the activation of an Eva's gated MLP cannot be chosen: drop mlp, which takes it along"
        )
    if dropped:
        settings |= dropped
        student = build(settings, num_classes, drop_path_rate)
    if layer_scale_init is not None and settings["init_values"] is None:
        raise ValueError(
            f"layer_scale_init={layer_scale_init}, but this student has no layer scale: leave it out"
        )
    if not student.global_pool:
        raise ValueError(
            "the teacher does not pool its tokens, so a student made like it would predict a class for every"
            " token: drop=('pooling',) gives it class-token pooling"
        )
    return student


def _names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise ValueError(f"{argument}={names!r}: give several components, or a tuple of one, ({names!r},)")
    names = tuple(names)
    for name in names:
        require_known(argument, name, COMPONENTS)
    return names


def _standard(names: Iterable[str]) -> dict[str, Any]:
    return {setting: value for name in names for setting, value in STANDARD_SETTINGS[name].items()}


def _with(what: str, remarks: Mapping[str, bool]) -> str:
    return ", ".join([what, *(remark for remark, holds in remarks.items() if holds)])


def _check_twin(teacher: nn.Module, student: nn.Module) -> None:
    """Raise `ValueError`, naming what differs, unless both have the same weights by shape and modules."""

    def weights(vit: nn.Module) -> dict[str, Any]:
        state = vit.state_dict()
        return {name: tuple(state[name].shape) for name in state if not name.startswith("head")}

    def modules(vit: nn.Module) -> dict[str, Any]:
        # activations and eps are no weights; dropout and the head may differ
        return {
            name: f"{type(module).__name__}({module.extra_repr()})"
            for name, module in vit.named_modules()
            if name and "drop" not in name.split(".")[-1] and not name.startswith("head")
        }

    for what, of in (("weights", weights), ("modules", modules)):
        left, right = of(teacher), of(student)
        wrong = [
            f"{name}: teacher {left.get(name, 'none')}, student {right.get(name, 'none')}"
            for name in [*left, *(set(right) - set(left))]
            if left.get(name) != right.get(name)
        ]
        if wrong:
            more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise ValueError(
                f"the architecture of this {type(teacher).__name__} cannot be read off its modules; "
                f"the student built from them has other {what}: {'; '.join(wrong[:4])}{more}"
            )
