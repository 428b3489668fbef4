"""The layer-reserve study: which of a pre-trained ViT's blocks carry what fine-tuning gains from it?"""

from timm.models.vision_transformer import VisionTransformer

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
        raise ValueError(
            f"cannot keep the first {number} blocks: the pre-trained ViT has {depths[0]}, the fresh one"
            f" {depths[1]}; give two of one depth, and a number from 0 to that"
        )
    kept, replaced = (
        {name: weight for name, weight in vit.state_dict().items() if _before_block(name, number)}
        for vit in (pretrained, fresh)
    )
    shapes = [{name: tuple(weight.shape) for name, weight in part.items()} for part in (kept, replaced)]
    for name in sorted(kept.keys() | replaced.keys()):
        if shapes[0].get(name) != shapes[1].get(name):
            raise ValueError(
                f"the two ViTs are not built alike: {name} is {shapes[0].get(name)} in the pre-trained one,"
                f" {shapes[1].get(name)} in the fresh one; build it with the same arguments"
            )
    fresh.load_state_dict(kept, strict=False)
    return fresh


def _before_block(name: str, number: int) -> bool:
    """Whether a weight belongs to the embedding or to one of the first `number` blocks."""
    first, *rest = name.split(".")
    return int(rest[0]) < number if first == "blocks" else first in _EMBEDDING
