"""What there is to know of a teacher before it teaches: in words, and as a picture of its maps."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from atfamily.measures.accounting import transferred_numbers
from atfamily.measures.pictures import coloured, first_middle_last, image_grid, looked_at
from atlib.attention import Unwalkable, walk
from atlib.compatibility import sizes_of
from atlib.student import STANDARD, describe
from atrun.data.decoding import as_rgb, large_pictures
from atrun.teachers.build import Teacher, not_finite


def described(teacher: Teacher) -> dict[str, str]:
    """What a teacher is, what it can transfer and at what size, its native components, and what its file did
    not fit: {heading: text}. Of a model that `walk` refuses, "transfer" says why and is the last."""
    lines = _facts(teacher)
    try:
        sizes_of(teacher.vit)
    except Unwalkable as error:
        return lines | {"transfer": f"none: {error}"}
    return lines | _transfer(teacher.vit) | _leftovers(teacher)


def picture(vit: VisionTransformer | Eva, images: Sequence[str | Path] | Tensor) -> Figure:
    """Where a ViT's class token looks in its first, middle and last layer, mean over heads: one row for each
    image.

    images: as in `atrun.teachers.load.report`. Each map has a colour scale of its own, from 0 to its largest
    share. Raises `ValueError` for other pixels than uint8 or for no image, `OSError` for a file that is none.
    """
    settings = resolve_model_data_config(vit, args={"input_size": (3, *vit.patch_embed.img_size)})
    transform = create_transform(**settings)
    batch = torch.stack([transform(image) for image in _opened(images)])  # (B, 3, height, width), normalised
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("mean", "std"))
    chosen = first_middle_last(len(vit.blocks))
    with torch.no_grad():
        layers = walk(vit, batch, head=False).layers
    panels = [coloured(looked_at(vit, layers[layer].map), batch.shape[2:]) for layer in chosen]
    rows = torch.stack([(batch * std + mean).clamp(0, 1), *panels], 1)  # the image, then its layers
    titles = ["image", *(f"layer {layer}" for layer in chosen)]
    return image_grid(rows.flatten(0, 1), titles, columns=len(titles))


def _facts(teacher: Teacher) -> dict[str, str]:
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
    weights = sum(each.numel() for each in vit.parameters()) / 1e6
    cut = f"{pixels[0]} x {pixels[1]} pixels in patches of {patch[0]} x {patch[1]}"
    resized = f"; {teacher.resized}" if teacher.resized else ""
    return {
        "teacher": teacher.name,
        "source": f"{teacher.source}; {teacher.used} tensors used",
        "size": f"{weights:.1f} million weights without a class head: {shape}",
        "images": f"{cut}: a grid of {down} x {across}{resized}",
        "sees": teacher.view(),
        "tokens": f"{vit.num_prefix_tokens + down * across}: {', '.join(counted)}",
    }


def _transfer(vit: VisionTransformer | Eva) -> dict[str, str]:
    numbers, has = transferred_numbers(vit), describe(vit)
    differs = [name for name in STANDARD if has[name] != STANDARD[name]]
    own = "; ".join(f"{name}: {has[name]} (standard: {STANDARD[name]})" for name in differs)
    advice = (
        "A student without them can be worse than none (arXiv 2605.07191): create_student(teacher, classes)"
        " gives it them"
    )
    width = sizes_of(vit).head_width
    return {
        "transfer": f"all layers, 0 to {len(vit.blocks) - 1}, each with heads of width {width}",
        "per image": (
            f"maps {_amount(numbers.map)}; q and k {_amount(numbers.q + numbers.k)}; v {_amount(numbers.v)}; "
            f"features {_amount(numbers.features)}; all layers together, in float32"
        ),
        "components": f"not those of a standard ViT: {own}. {advice}" if own else "those of a standard ViT",
    }


def _leftovers(teacher: Teacher) -> dict[str, str]:
    bad = ". NaN or infinity in its weights: this checkpoint cannot teach"
    lines = {
        "assumed": (", ".join(teacher.assumed), ": weights do not show it"),
        "unused": (_names(teacher.unused), ""),
        "missing": (_names(teacher.missing), "; no map depends on it"),
        "not finite": (_names(not_finite(teacher.vit)), bad),
    }
    return {name: found + said for name, (found, said) in lines.items() if found}


def _names(names: Sequence[str]) -> str:
    """Names of weights, those of many blocks drawn together: "decoder_blocks.*.attn.proj.bias (8)"."""
    kinds = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    counted = (name + (f" ({number})" if number > 1 else "") for name, number in kinds.items())
    return f"{len(names)}: {', '.join(counted)}" if names else ""


def _amount(numbers: int) -> str:
    size = 4 * numbers  # float32
    return f"{numbers:,} numbers, {f'{size / 2**20:.1f} MiB' if size >= 2**20 else f'{size / 2**10:.1f} KiB'}"


def _opened(images: Sequence[str | Path] | Tensor) -> list[Image.Image]:
    if isinstance(images, Tensor):
        if images.ndim != 4 or images.dtype != torch.uint8 or len(images) == 0:
            raise ValueError(
                f"images are uint8 (n, 3, height, width), got {images.dtype} {tuple(images.shape)}"
            )
        return [to_pil_image(image) for image in images]
    if isinstance(images, str | Path) or not images:
        raise ValueError(f"images={images!r}: give a list of image files, at least one")
    opened = []
    for path in images:
        try:
            with large_pictures():
                opened.append(as_rgb(Image.open(path)))
        except (OSError, Image.DecompressionBombError) as error:
            raise OSError(f"{path} cannot be read as an image ({error})") from error
    return opened
