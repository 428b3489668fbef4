"""Which models can be walked faithfully, and for the others why not."""

from typing import NamedTuple

from timm.layers import Attention
from timm.models import eva
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
    "EvaBlockPostNorm": "it normalises after attention and after the MLP, not before",
    "NaFlexVit": "it packs images of different sizes with padding masks",
    "SwinTransformer": "it attends inside shifted windows: there is no map over all tokens",
    "SwinTransformerV2": "it attends inside shifted windows: there is no map over all tokens",
    "SwinTransformerV2Cr": "it attends inside shifted windows: there is no map over all tokens",
    "Cait": "its talking heads mix the maps of several heads, and class attention comes in separate layers",
    "DistributedDataParallel": "it is a wrapper: pass its .module",
    "FullyShardedDataParallel": "it is a wrapper: pass the module inside",
    "OptimizedModule": "it is a wrapper made by torch.compile: pass the module inside (its ._orig_mod)",
    "AttentionTransfer": "it is a teacher and a student: walk its .student or its .teacher",
    "AttnDistill": "it is a teacher and a student: walk its .student or its .teacher",
    "FeatureDistillation": "it is a teacher and a student: walk its .student or its .teacher",
    "LogitDistillation": "it is a teacher and a student: walk its .student or its .teacher",
    "MeanMapCopy": "it is a student with stored maps: walk its .student",
}


class Family(NamedTuple):
    """A class of ViTs that `walk` knows, with its blocks and attentions. Subclasses may differ in what is fed to the blocks."""

    vit: type[nn.Module]
    block: type[nn.Module]
    attentions: tuple[type[nn.Module], ...]


FAMILIES = (
    Family(VisionTransformer, Block, (Attention,)),
    # Which attention classes timm's EVA family has depends on the timm version.
    Family(eva.Eva, eva.EvaBlock, tuple(getattr(eva, name) for name in ("EvaAttention", "AttentionRope") if hasattr(eva, name))),
)

# Taken at import, so that a method that somebody replaces later for a whole class is noticed too.
STOCK = {part: part.forward for family in FAMILIES for part in (family.block, *family.attentions)}
STOCK_VIT = {family.vit: {method: getattr(family.vit, method) for method in ("forward", "forward_features")} for family in FAMILIES}


def check_walkable(vit: nn.Module) -> None:
    """Raise `Unwalkable`, naming the class and the reason, unless `walk(vit, x)` computes exactly what `vit(x)` computes."""
    name = type(vit).__name__
    family = next((family for family in FAMILIES if isinstance(vit, family.vit)), None)
    if family is None:
        raise Unwalkable(f"cannot walk a {name}: "
                         + REASONS.get(name, "it is not a timm VisionTransformer or Eva (no self-attention blocks of the known form)"))
    for method, stock in STOCK_VIT[family.vit].items():  # a subclass may change what is fed to the blocks, as DeiT's does, but not these
        if getattr(type(vit), method) is not stock:
            raise Unwalkable(f"cannot walk a {name}: it has its own {method}, which walk does not know")
    if getattr(vit, "distilled_training", False) and vit.training:
        raise Unwalkable("cannot walk a ViT in distilled_training mode: it returns two predictions; call set_distilled_training(False)")
    for index, block in enumerate(vit.blocks):
        for part, known in ((block, (family.block,)), (getattr(block, "attn", None), family.attentions)):
            _check_part(part, known, f"layer {index} of this {name}")


def _check_part(part: nn.Module | None, known: tuple[type[nn.Module], ...], where: str) -> None:
    kind = type(part)
    if kind not in known:
        names = " and ".join(one.__name__ for one in known)
        reason = REASONS.get(kind.__name__, f"walk knows timm's {names} and cannot tell what this one computes")
        raise Unwalkable(f"cannot walk {where}, a {kind.__name__}: {reason}")
    if kind.forward is not STOCK[kind] or "forward" in vars(part):
        raise Unwalkable(f"cannot walk {where}: its {kind.__name__}.forward was replaced")
