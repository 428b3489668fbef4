"""Feature maps of several strides from the last tokens of one plain ViT: ViTDet's simple feature pyramid."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from timm.layers import LayerNorm2d
from timm.models import VisionTransformer
from torch import Tensor, nn

from atlib.attention import walk
from atlib.attention_transfer import AttentionTransfer
from atlib.pair import student_of
from atlib.vit import check_timm

# Cells of the feature map for each cell of the ViT's grid, along a side.
SCALES = (4.0, 2.0, 1.0, 0.5)


class Seen2d(NamedTuple):
    """What a backbone gives for images (B, 3, height, width). grid: the last tokens of the patches after the
    final norm, in their places, (B, D, rows, columns); transfer_loss: unweighted, a scalar, 0 without a
    teacher that is distilled."""

    grid: Tensor
    transfer_loss: Tensor


class GridOfTokens(nn.Module):
    """A ViT, or an `AttentionTransfer` pair around a student, as what a pyramid stands on: images to the grid
    of its last tokens. A pair that copies runs its teacher with the student, a pair that distills runs it in
    training only. Raises `atlib.attention.Unwalkable` for a ViT that cannot be walked."""

    def __init__(self, vit: VisionTransformer | AttentionTransfer):
        super().__init__()
        self.vit = vit
        check_timm(self.student)

    @property
    def student(self) -> VisionTransformer:
        """The ViT whose tokens are read."""
        return student_of(self.vit)

    @property
    def prefix(self) -> str:
        """What the names of the student's parameters begin with here."""
        return "vit." if self.student is self.vit else "vit.student."

    def no_weight_decay(self) -> set[str]:
        """Positions and tokens, which AdamW leaves undecayed; timm asks a model for them by this name."""
        return {self.prefix + name for name in self.student.no_weight_decay()}

    def forward(self, images: Tensor) -> Seen2d:
        if not isinstance(self.vit, AttentionTransfer):
            seen, transfer_loss = walk(self.vit, images, head=False), images.new_zeros(())
        elif self.training:
            seen, transfer_loss = self.vit.walk_with_loss(images)
        else:
            seen, transfer_loss = self.vit.walk(images), images.new_zeros(())
        tokens = self.student.norm(seen.tokens)[:, self.student.num_prefix_tokens :]
        return Seen2d(tokens.mT.unflatten(2, self.student.patch_embed.grid_size), transfer_loss)


class SimplePyramid(nn.Module):
    """Levels of a pyramid, each made from the same grid of tokens (B, D, rows, columns) alone.

    scales: of `SCALES`, finest first, the side of each level in cells of the grid: 4 by two transposed
    convolutions with a layer norm and GELU between them, 2 by one, 1 as it is, 1/2 by the maximum over 2 x 2.
    Each level then goes through a 1 x 1 and a 3 x 3 convolution to `width` channels, each with a layer norm
    over channels. `top_level` adds the last level once more with every second cell left out.

    Source: Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection" (arXiv
    2203.16527), section 3 and appendix A.2. Its published code reads the tokens before the ViT's final norm,
    `GridOfTokens` after it.
    """

    def __init__(self, D: int, width: int, scales: Sequence[float] = SCALES, top_level: bool = False):
        super().__init__()
        for scale in scales:
            if scale not in SCALES:
                raise ValueError(f"scale {scale!r} is none of {SCALES}")
        self.levels = nn.ModuleList(_level(D, width, scale) for scale in scales)
        self.width, self.scales, self.top_level = width, tuple(scales), top_level

    def forward(self, grid: Tensor) -> list[Tensor]:
        """The levels, finest first: (B, width, scale · rows, scale · columns) each."""
        levels = [level(grid) for level in self.levels]
        return [*levels, levels[-1][:, :, ::2, ::2]] if self.top_level else levels


def _level(D: int, width: int, scale: float) -> nn.Sequential:
    norm, double = partial(LayerNorm2d, eps=1e-6), partial(nn.ConvTranspose2d, kernel_size=2, stride=2)
    if scale == 4:
        to_size, D = [double(D, D // 2), norm(D // 2), nn.GELU(), double(D // 2, D // 4)], D // 4
    elif scale == 2:
        to_size, D = [double(D, D // 2)], D // 2
    else:
        to_size = [nn.MaxPool2d(2)] if scale == 0.5 else []
    one, three = nn.Conv2d(D, width, 1, bias=False), nn.Conv2d(width, width, 3, padding=1, bias=False)
    return nn.Sequential(*to_size, one, norm(width), three, norm(width))
