"""A teacher's native components, and the student that has them all.

arXiv 2605.07191 ("Attention Transfer Is Not Universally Effective for Vision Transformers") finds that the
maps of DINOv2, CLIP and BEiTv2 teachers push a *standard* ViT below training from scratch, and that giving
the student the teacher's native components, freshly initialised, reverses it. In the first paper, arXiv
2411.09702, teacher and student had the same blocks, though in its code they pooled differently. So a student
is the teacher's own architecture unless something else is asked for.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from atlib.compatibility import Sizes, differences, sizes_of
from atlib.pair import channels_of, config_of
from atlib.plan import Plan
from atlib.vit import VITS, create_vit

SIZES = {"tiny": (192, 3), "small": (384, 6)}  # width and heads of ViT-Ti and ViT-S (DeiT, arXiv 2012.12877)


def built_with(model: nn.Module) -> tuple[str | Mapping[str, Any], dict[str, Any]]:
    """timm's name of a model (of `create_vit`, what that was given) and the arguments that it was built with:
    as `create_vit` notes them, else depth, image size and channels, read off it. Raises `ValueError` for a
    model without a name."""
    config = config_of(model)
    name, arguments = config.get("create_vit") or (config.get("architecture"), None)
    if not name:
        ways = "build its student as you built it, or save it and take load_teacher(FILE).vit"
        raise ValueError(f"this {type(model).__name__} has no timm name: {ways}")
    if arguments is None:
        size_of_images = getattr(getattr(model, "patch_embed", None), "img_size", None)
        read = {"depth": len(model.blocks), "img_size": size_of_images, "in_chans": channels_of(model)}
        arguments = {key: value for key, value in read.items() if value is not None}
    return name, arguments


def unlike(one: nn.Module, other: nn.Module, besides: tuple[str, ...] = ()) -> list[str]:
    """In what two models of timm differ: names of weights of other shapes, `besides` those that begin so;
    else, of ViTs, heads and components, which make another function of the same weights."""
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
    arguments that it was built with. None of its weights are taken.

    size, depth, embed_dim: of a smaller (or larger) student, as `student_sizes` reads them;
    `derive_plan` pairs it with its teacher. `create_vit` notes name and arguments on the
    model, timm the name alone; for such a teacher depth, image size and channels are read off it. Rates of
    dropout are not taken over. Raises `ValueError` for a model without a timm name, where what is built of it
    is not like the teacher, and as `student_sizes` does. Source: arXiv 2605.07191; the matched student also
    arXiv 2411.09702.
    """
    kind = type(teacher).__name__
    name, arguments = built_with(teacher)
    kept = {key: value for key, value in arguments.items() if not key.endswith("_rate")}
    kept |= {"num_classes": num_classes, "drop_path_rate": drop_path_rate}
    with torch.device("meta"):
        like_teacher = create_vit(name, **kept)
    if wrong := unlike(teacher, like_teacher, besides=("head",)):
        raise ValueError(
            f"{name!r} is not this {kind}, they differ in {', '.join(wrong[:3])}: build it yourself"
        )
    sizes = {}
    if (size, depth, embed_dim) != (None, None, None):
        sizes = student_sizes(teacher, size, depth, embed_dim)
    return create_vit(name, **(kept | sizes))


def student_sizes(
    teacher: nn.Module, size: str | None = None, depth: int | None = None, embed_dim: int | None = None
) -> dict[str, int]:
    """Sizes of a student as arguments of timm's constructors, those alone that are not the teacher's by
    default: depth, embed_dim, num_heads.

    size: "tiny" or "small", the width and heads of ViT-Ti and ViT-S; "half", half of the teacher's width,
    heads and layers; None: as the teacher. `depth` and `embed_dim` replace what it says. A width without a
    size has heads as wide as the teacher's where they divide it, else as many as the teacher. Raises
    `ValueError` for another size, and a width that neither divides.
    """
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


def derive_plan(teacher: nn.Module, student: nn.Module, how: str = "distill") -> Plan:
    """The plan that `python -m atlib train` derives for a teacher and a student of any depths, heads and
    patches. Raises `Unwalkable` as `examine` does."""
    return plan_of_sizes(sizes_of(teacher), sizes_of(student), how)[0]


def plan_of_sizes(teacher: Sizes, student: Sizes, how: str) -> tuple[Plan, dict[str, str]]:
    """The plan for a teacher and a student of these sizes, and for each choice that was derived its rule.

    To copy, all layers take part, and to distill, the first three quarters, as 18 of 24 in arXiv 2411.09702.
    With other depths the student's last layer has the teacher's last, and the others lie evenly below. Heads
    of another number are aggregated (AttnDistill, arXiv 2210.00944), patches resampled.
    """
    count = student.depth if how == "copy" else max(1, round(0.75 * student.depth))
    why = "all layers" if how == "copy" else "the first three quarters, as the paper's 18 of 24"
    layers: dict[int, int] | range | None = range(count) if count < student.depth else None
    printed = "null" if layers is None else [*layers]
    if teacher.depth != student.depth:
        printed = layers = {i: -(-(i + 1) * teacher.depth // student.depth) - 1 for i in range(count)}
        why += f"; the teacher's {teacher.depth} layers lie evenly on the student's {student.depth}"
    rules, unequal = {"layers": f"{printed}: {why}"}, {}
    if teacher.heads != student.heads:
        unequal["unequal_heads"] = "aggregate"
        heads = f"{teacher.heads} heads for {student.heads}"
        rules["unequal_heads"] = f"aggregate: {heads} (AttnDistill, 2210.00944)"
    if teacher.grid != student.grid:
        unequal["unequal_grid"] = "resample"
        rules["unequal_grid"] = f"resample: {teacher.grid} patches for {student.grid}"
    return Plan(how=how, layers=layers, **unequal), rules
