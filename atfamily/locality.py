"""Two remedies for few labels that need no teacher: tokens that see beyond their patch (SPT), and attention
that is sharper and leaves its own token out (LSA).

Source: Lee, Lee, Song 2021, "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492). What is said
here of "the published code" was read in github.com/aanna0701/SPT_LSA_ViT.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from timm.layers import Attention, PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.attention import FORBIDDEN, attention
from atlib.student import present


class ShiftedPatches(nn.Module):
    """Shifted patch tokenisation: a token is made of its patch and of the four patches that overlap a quarter
    of it.

    The image and its shifts by half a patch to the lower right, lower left, upper right and upper left, with
    zeros moving in, are laid on each other as channels and cut into patches; each is normalised and projected
    to a token. A drop-in for timm's `PatchEmbed` (`embed_layer=ShiftedPatches`): images (B, in_chans, height,
    width) to tokens (B, N, embed_dim). `img_size`, `patch_size`: in pixels, one number or (height, width).

    Source: arXiv 2112.13492, section on SPT, and the published code, which flattens a patch as row, column,
    channel, where this module has channel, row, column.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        bias: bool = True,
        dynamic_img_pad: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.img_size, self.patch_size = (
            (size, size) if isinstance(size, int) else tuple(size) for size in (img_size, patch_size)
        )
        if dynamic_img_pad or any(side % p for side, p in zip(self.img_size, self.patch_size)):
            raise ValueError(f"images {self.img_size} are not whole patches {self.patch_size}, or padded")
        self.strict_img_size = True  # as timm's says that one image size is taken
        self.grid_size = tuple(side // p for side, p in zip(self.img_size, self.patch_size))
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        width = 5 * in_chans * self.patch_size[0] * self.patch_size[1]
        self.norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.proj = nn.Linear(width, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) to tokens (B, N, embed_dim)."""
        if tuple(images.shape[-2:]) != self.img_size:
            raise ValueError(f"images of {tuple(images.shape[-2:])} pixels, built for {self.img_size}")
        patches = F.unfold(with_shifts(images, self.patch_size), self.patch_size, stride=self.patch_size)
        return self.proj(self.norm(patches.mT))


def with_shifts(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Images (B, C, height, width) and their shifts by half a patch to the lower right, lower left, upper
    right and upper left, with zeros moving in: (B, 5 · C, height, width)."""
    height, width = images.shape[-2:]
    down, right = patch_size[0] // 2, patch_size[1] // 2
    padded = F.pad(images, (right, right, down, down))
    shifted = [
        padded[:, :, top : top + height, left : left + width]
        for top in (0, 2 * down)
        for left in (0, 2 * right)
    ]
    return torch.cat([images, *shifted], 1)


class LocalityAttention(Attention):
    """Locality self-attention: timm's, in which no token looks at itself and how sharp a head's map is is
    learned: softmax(sharpness · q kᵀ + `diagonal`).

    Takes over the parts of a timm `Attention`: on equal tokens both have equal q, k and v at first.
    `sharpness`: (H,), learned, starts at the usual 1/√d.

    Source: arXiv 2112.13492, section on LSA. There one divides by a learned temperature τ; the published code
    multiplies, with a number for every head, and so does this module: sharpness = 1 / τ. It puts -987654321
    where this module puts `FORBIDDEN`, also for the class token, and its map is the same bit for bit. The
    published SL-CaiT puts -1e-9 there and forbids nothing.
    """

    def __init__(self, attn: Attention):
        if getattr(attn, "gate", None) is not None:
            raise ValueError(f"{type(attn).__name__} has a gate on its output, which has no place in LSA")
        super().__init__(attn.qkv.in_features, attn.num_heads)
        self.head_dim, self.scale, self.fused_attn = attn.head_dim, attn.scale, attn.fused_attn
        for name, part in attn.named_children():
            setattr(self, name, part)
        self.sharpness = nn.Parameter(attn.qkv.weight.new_full((attn.num_heads,), attn.scale))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens (B, N, D) to tokens (B, N, D)."""
        if attn_mask is not None or is_causal:
            raise ValueError("LSA has a mask of its own: call it without another")
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        q = q * (self.sharpness / self.scale)[:, None, None].to(q.dtype)
        dropout = self.attn_drop.p if self.training else 0.0
        mixed = attention(q, k, v, self.scale, mask=diagonal(x.shape[1], x), dropout=dropout)
        return self.proj_drop(self.proj(self.norm(mixed.transpose(1, 2).flatten(2))))


def forbids_pairs(blocks: Iterable[nn.Module]) -> bool:
    """Whether one of the blocks has `LocalityAttention`, whose maps lack the diagonal."""
    return any(isinstance(getattr(block, "attn", None), LocalityAttention) for block in blocks)


def diagonal(tokens: int, like: Tensor) -> Tensor:
    """What forbids N tokens to look at themselves: (N, N), `FORBIDDEN` on the diagonal and 0 elsewhere, on
    the device of `like`."""
    exact = torch.promote_types(like.dtype, torch.float32)  # fp16 cannot hold it
    return torch.zeros(tokens, tokens, dtype=exact, device=like.device).fill_diagonal_(FORBIDDEN)


def shift_patches(vit: VisionTransformer) -> VisionTransformer:
    """Give a ViT `ShiftedPatches`, freshly initialised, in place of its patch embedding; the ViT is changed
    and handed back. All other weights stay."""
    embed = vit.patch_embed
    if type(embed) is not PatchEmbed or vit.dynamic_img_size or present(embed.norm):
        raise ValueError(f"this ViT's {type(embed).__name__} is not a plain PatchEmbed for one image size")
    vit.patch_embed = ShiftedPatches(
        embed.img_size,
        embed.patch_size,
        embed.proj.in_channels,
        vit.embed_dim,
        embed.proj.bias is not None,
        embed.dynamic_img_pad,
        embed.proj.weight.device,
        embed.proj.weight.dtype,
    )
    return vit


def localise_attention(vit: VisionTransformer) -> VisionTransformer:
    """Give every layer of a ViT `LocalityAttention`, made of the layer's own; the ViT is changed and handed
    back. All weights stay."""
    if kinds := {type(block.attn).__name__ for block in vit.blocks} - {"Attention"}:
        raise ValueError(f"the blocks have {min(kinds)}: LSA is made of timm's Attention")
    for block in vit.blocks:
        block.attn = LocalityAttention(block.attn)
    return vit
