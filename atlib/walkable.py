"""Which models can be walked faithfully, and for the others why not."""

from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn


class Unwalkable(TypeError):
    """`walk` would not compute what this model computes; the message names the part and the reason."""


# Reasons by class name, because several of these classes exist only in some of the timm versions that are supported.
REASONS = {
    "ParallelScalingBlock": "it computes attention and MLP side by side from one joint projection",
    "DiffParallelScalingBlock": "it subtracts two attention maps and runs the MLP beside them",
    "ParallelThingsBlock": "it sums several attention branches, so a layer has no single map",
    "ResPostBlock": "it normalises after attention and after the MLP, not before",
    "DiffAttention": "it subtracts two attention maps, so what mixes the values is no softmax",
    "RelPosBlock": "it adds a relative-position bias to the attention logits, so q and k alone do not make the map",
    "RelPosAttention": "it adds a relative-position bias to the attention logits, so q and k alone do not make the map",
    "VisionTransformerRelPos": "it adds a relative-position bias to the attention logits, so q and k alone do not make the map",
    "Beit": "it adds a relative-position bias to the attention logits, so q and k alone do not make the map",
    "Eva": "it rotates q and k by their position (RoPE) inside attention and may project them separately",
    "NaFlexVit": "it packs images of different sizes with padding masks",
    "SwinTransformer": "it attends inside shifted windows: there is no map over all tokens",
    "SwinTransformerV2": "it attends inside shifted windows: there is no map over all tokens",
    "SwinTransformerV2Cr": "it attends inside shifted windows: there is no map over all tokens",
    "Cait": "its talking heads mix the maps of several heads, and class attention comes in separate layers",
    "DistributedDataParallel": "it is a wrapper: pass its .module",
    "FullyShardedDataParallel": "it is a wrapper: pass the module inside",
    "OptimizedModule": "it is a wrapper made by torch.compile: pass the module inside (its ._orig_mod)",
    "AttentionTransfer": "it is a teacher and a student: walk its .student or its .teacher",
}


# Taken at import, so that a method that somebody replaces later for a whole class is noticed too.
STOCK = {Block: Block.forward, Attention: Attention.forward}
STOCK_VIT = {"forward": VisionTransformer.forward, "forward_features": VisionTransformer.forward_features}


def check_walkable(vit: nn.Module) -> None:
    """Raise `Unwalkable`, naming the class and the reason, unless `walk(vit, x)` computes exactly what `vit(x)` computes."""
    if not isinstance(vit, VisionTransformer):
        name = type(vit).__name__
        raise Unwalkable(f"cannot walk a {name}: {REASONS.get(name, 'it is not a timm VisionTransformer (no self-attention blocks of the known form)')}")
    for method, stock in STOCK_VIT.items():  # a subclass may change what is fed to the blocks, as DeiT's does, but not these
        if getattr(type(vit), method) is not stock:
            raise Unwalkable(f"cannot walk a {type(vit).__name__}: it has its own {method}, which walk does not know")
    if getattr(vit, "distilled_training", False) and vit.training:
        raise Unwalkable("cannot walk a ViT in distilled_training mode: it returns two predictions; call set_distilled_training(False)")
    for index, block in enumerate(vit.blocks):
        for part, known in ((block, Block), (getattr(block, "attn", None), Attention)):
            if type(part) is not known:
                name = type(part).__name__
                reason = REASONS.get(name, f"walk knows timm's {known.__name__} and cannot tell what this one computes")
                raise Unwalkable(f"cannot walk layer {index} of this {type(vit).__name__}, a {name}: {reason}")
            if known.forward is not STOCK[known] or "forward" in vars(part):
                raise Unwalkable(f"cannot walk layer {index} of this {type(vit).__name__}: its {known.__name__}.forward was replaced")
