"""The layer-reserve study: which of a pre-trained ViT's blocks carry what fine-tuning gains from it?"""

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

# What comes before the first block, by the first part of a weight's name.
_EMBEDDING = ("patch_embed", "pos_embed", "cls_token", "dist_token", "reg_token", "norm_pre")


def keep_first(pretrained: VisionTransformer, fresh: VisionTransformer, number: int) -> VisionTransformer:
    """`fresh`, with the embedding and the first `number` blocks of `pretrained`; its other blocks, final norm
    and head stay as they were drawn.

    Source: Wang et al. 2023 (arXiv 2205.14443), figures 2 and 4.
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

    kept = kept_of(pretrained)
    if differ := kept.keys() ^ kept_of(fresh).keys():
        raise ValueError(f"only one of the two has {min(differ)}")
    fresh.load_state_dict(kept, strict=False)
    return fresh
