"""What there is to know of a teacher before it teaches, in words."""

import re
from collections import Counter
from collections.abc import Sequence

from atfamily.measures.accounting import transferred_numbers
from atlib.attention import Unwalkable
from atlib.compatibility import sizes_of
from atlib.student import STANDARD, describe
from atrun.teachers.build import Teacher, not_finite


def described(teacher: Teacher) -> dict[str, str]:
    """What a teacher is, what it can transfer and at what size, its native components, and what its file did
    not fit: {heading: text}. Of a model that `walk` refuses, "transfer" says why and is the last."""
    vit = teacher.vit
    embed = vit.patch_embed
    (down, across), patch, pixels = embed.grid_size, embed.patch_size, embed.img_size
    registers = 0 if getattr(vit, "reg_token", None) is None else vit.reg_token.shape[1]
    counted = [
        *(["1 class token"] if vit.cls_token is not None else []),
        *(["1 distillation token"] if hasattr(vit, "dist_token") else []),
        *([f"{registers} register{'s' * (registers > 1)}"] if registers else []),
        f"{down * across} patch{'es' * (down * across > 1)}",
    ]
    heads = getattr(vit.blocks[0], "attn", vit.blocks[0]).num_heads
    shape = f"layers: {len(vit.blocks)}, heads: {heads}, width: {vit.embed_dim}"
    weights = sum(weight.numel() for weight in vit.parameters()) / 1e6
    cut = f"{pixels[0]} x {pixels[1]} pixels in patches of {patch[0]} x {patch[1]}"
    resized = f"; {teacher.resized}" if teacher.resized else ""
    lines = {
        "teacher": teacher.name,
        "source": f"{teacher.source}; {teacher.used} tensors used",
        "size": f"{weights:.1f} million weights without a class head: {shape}",
        "images": f"{cut}: a grid of {down} x {across}{resized}",
        "sees": teacher.view(),
        "tokens": f"{vit.num_prefix_tokens + down * across}: {', '.join(counted)}",
    }
    try:
        width = sizes_of(vit).head_width
    except Unwalkable as error:
        return lines | {"transfer": f"none: {error}"}
    numbers, has = transferred_numbers(vit), describe(vit)
    differs = [name for name in STANDARD if has[name] != STANDARD[name]]
    components = ""
    if differs:
        listed = "; ".join(f"{name}: {has[name]} (standard: {STANDARD[name]})" for name in differs)
        advice = "A student without them can be worse than none (arXiv 2605.07191)"
        components = f": {listed}. {advice}: create_student(teacher, classes) gives it them"
    lines |= {
        "transfer": f"all layers, 0 to {len(vit.blocks) - 1}, each with heads of width {width}",
        "per image": (
            f"maps {_amount(numbers.map)}; q and k {_amount(numbers.q + numbers.k)}; v {_amount(numbers.v)}; "
            f"features {_amount(numbers.features)}; all layers together, in float32"
        ),
        "components": f"{'not ' if differs else ''}those of a standard ViT{components}",
    }
    bad = ". NaN or infinity in its weights: this checkpoint cannot teach"
    leftovers = {
        "assumed": (", ".join(teacher.assumed), ": weights do not show it"),
        "unused": (_names(teacher.unused), ""),
        "missing": (_names(teacher.missing), "; no map depends on it"),
        "not finite": (_names(not_finite(vit)), bad),
    }
    return lines | {name: listing + remark for name, (listing, remark) in leftovers.items() if listing}


def _names(names: Sequence[str]) -> str:
    """Names of weights, those of many blocks drawn together: "decoder_blocks.*.attn.proj.bias (8)"."""
    kinds = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    counted = (name + (f" ({number})" if number > 1 else "") for name, number in kinds.items())
    return f"{len(names)}: {', '.join(counted)}" if names else ""


def _amount(numbers: int) -> str:
    size = 4 * numbers  # float32
    return f"{numbers:,} numbers, {f'{size / 2**20:.1f} MiB' if size >= 2**20 else f'{size / 2**10:.1f} KiB'}"
