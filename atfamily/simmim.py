"""SimMIM: a ViT that sees a learned token in the place of hidden patches, and tells their pixels by one
linear layer. Source: Xie et al. 2022, "SimMIM: a Simple Framework for Masked Image Modeling" (arXiv
2111.09886)."""

import math

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.mae import patchify, through_blocks
from atlib.recipe import Recipe


class SimMim(nn.Module):
    """Masked image modelling without a decoder: after pre-training `.vit` is the teacher.

    The ViT is given all tokens, hidden ones replaced by `mask_token` before positions are added.
    `forward(images)` returns the loss: the mean absolute error of the hidden patches' pixels, as the images
    come. Hidden are squares of unit × unit patches, ⌈mask_ratio · their number⌉ of them, drawn from torch's
    global generator; published are squares of 32 pixels, 60 % of them.

    Source: arXiv 2111.09886, section 3.
    """

    not_walkable = "it tells hidden patches: walk its .vit"

    def __init__(self, vit: VisionTransformer, mask_ratio: float = 0.6, unit: int = 1):
        super().__init__()
        rows, columns = vit.patch_embed.grid_size
        if unit < 1 or rows % unit or columns % unit:
            raise ValueError(f"unit={unit} does not divide the patch grid of {rows} x {columns}")
        self.squares = rows // unit, columns // unit
        number = math.prod(self.squares)
        self.hidden = math.ceil(number * mask_ratio)
        if not 0 < self.hidden < number:
            raise ValueError(f"mask_ratio={mask_ratio} hides {self.hidden} of {number} squares, not some")
        self.vit, self.unit = vit, unit
        pixels = 3 * math.prod(vit.patch_embed.patch_size)
        self.mask_token = nn.Parameter(torch.empty(1, 1, vit.embed_dim))
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        self.to_pixels = nn.Linear(vit.embed_dim, pixels)

    def no_weight_decay(self) -> set[str]:
        """Positions and tokens; timm asks a model for them by this name."""
        return {"mask_token"} | {f"vit.{name}" for name in self.vit.no_weight_decay()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the ViT's activations a second time instead of keeping them."""
        self.vit.set_grad_checkpointing(enable)

    def draw_mask(self, images: Tensor) -> Tensor:
        """Which patches of each image are hidden, bool (B, P), in reading order."""
        B, (rows, columns) = len(images), self.squares
        order = torch.rand(B, rows * columns, device=images.device).argsort(1).argsort(1)
        squares = (order < self.hidden).unflatten(1, (rows, columns))
        return squares.repeat_interleave(self.unit, 1).repeat_interleave(self.unit, 2).flatten(1)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """The loss, a scalar, for images (B, 3, height, width). mask: bool (B, P), which patches are hidden;
        None draws it."""
        mask = self.draw_mask(images) if mask is None else mask
        tokens = self.vit.patch_embed(images)  # (B, P, D)
        hidden = mask.reshape(*tokens.shape[:-1], 1)  # of any image size: (B, rows, columns, D)
        tokens = torch.where(hidden, self.mask_token.to(tokens.dtype), tokens)
        x = through_blocks(self.vit, self.vit.norm_pre(self.vit._pos_embed(tokens)))
        guess = self.to_pixels(self.vit.norm(x)[:, self.vit.num_prefix_tokens :])  # (B, P, pixels)
        error = (guess - patchify(images, self.vit.patch_embed.patch_size)).abs().mean(-1)
        return (error * mask).sum() / mask.sum()


def simmim_loss(model: SimMim, images: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    """The model's own loss; labels are not used."""
    return model(images)
