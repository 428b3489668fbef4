"""The layer-reserve study: which of a pre-trained ViT's blocks carry what fine-tuning gains from it?"""

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

# What comes before the first block, by the first part of a weight's name.
_EMBEDDING = ("patch_embed", "pos_embed", "cls_token", "dist_token", "reg_token", "norm_pre")


def keep_first(pretrained: VisionTransformer, fresh: VisionTransformer, number: int) -> VisionTransformer:
    """`fresh`, with the embedding and the first `number` blocks of `pretrained`; its other blocks, final norm
    and head stay as they were drawn.

    Both are built alike, but for the head. What is kept is copied in place, and can be trained like the rest.

    Source: Wang et al. 2023 (arXiv 2205.14443), figures 2 and 4. Whether the final norm is drawn anew there
    we could not find out; here it belongs to what comes after the blocks.
    """
    depths = len(pretrained.blocks), len(fresh.blocks)
    if depths[0] != depths[1] or not 0 <= number <= depths[0]:
        raise ValueError(f"cannot keep {number} blocks of {depths[0]} in a ViT of {depths[1]}")

    def kept_of(vit: VisionTransformer) -> dict[str, Tensor]:
        return {
            name: weight
            for name, weight in vit.state_dict().items()
            for first, *rest in [name.split(".")]
            if (int(rest[0]) < number if first == "blocks" else first in _EMBEDDING)
        }

    kept, replaced = kept_of(pretrained), kept_of(fresh)
    shapes = [{name: tuple(weight.shape) for name, weight in part.items()} for part in (kept, replaced)]
    for name in sorted(kept.keys() | replaced.keys()):
        if shapes[0].get(name) != shapes[1].get(name):
            raise ValueError(f"{name}: {shapes[0].get(name)} pre-trained, {shapes[1].get(name)} fresh")
    fresh.load_state_dict(kept, strict=False)
    return fresh
