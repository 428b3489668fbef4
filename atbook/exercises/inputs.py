"""The inputs on which exercises are tried: small, seeded, in double precision."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

# timm's options of the small ViTs.
SMALL = dict(img_size=16, patch_size=8, embed_dim=12, depth=3, num_heads=3, num_classes=5, mlp_ratio=2)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def maps(*shape: int, seed: int = 0) -> Tensor:
    """Attention maps: positive, rows sum to 1."""
    return (1.5 * normal(*shape, seed=seed)).softmax(-1)


def vit(seed: int = 0, **options) -> VisionTransformer:
    """A ViT of three layers in evaluation mode, all of whose weights matter; `options` are timm's."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        made = VisionTransformer(**(SMALL | options)).double().eval()
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return made
