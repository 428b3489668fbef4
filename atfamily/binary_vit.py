"""BinaryViT: a ViT whose layers, activations and attention maps are bits; and how it is walked, so that
`AttentionTransfer` can copy maps into it or distill them.

Source: Le and Li 2023, "BinaryViT: Pushing Binary Vision Transformers Towards Convolutional Models" (arXiv
2306.16678). What is said here of "the published code" was read in github.com/Phuoc-Hoan-Le/BinaryViT.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from timm.layers import DropPath, PatchEmbed
from timm.models.mlp_mixer import Affine
from torch import Tensor, nn

from atfamily.binary import BinaryPatchConv, BinaryUnit, Norm, RPReLU, TokenNorm, resized, rounded_map, sign
from atlib.attention import attention
from atlib.maps import Grid


class BinaryAttention(nn.Module):
    """Self-attention of bits. Queries, keys and values are signs of what a `BinaryUnit` each makes of the
    tokens, so that a head of width d has scores of only d + 1 values; the map is rounded to 0 or one learned
    share. What is mixed goes past another shortcut, the sum of the three units.

    grid: patches down and across. reduction: keys and values are those of patches averaged over squares of
    this side, 1 for none. rounded: whether the map is of one bit too; without, it is a softmax as in any ViT.
    The learned share starts at an even map's; in the published code at 0.005 in all stages.
    """

    def __init__(
        self, width: int, heads: int, grid: Grid, tokens: int, reduction: int, rounded: bool, norm: Norm
    ):
        super().__init__()
        if any(side % reduction for side in grid) or reduction > 1 and tokens != grid[0] * grid[1]:
            raise ValueError(f"reduction={reduction} must divide the grid {grid}, without a class token")
        self.heads, self.grid, self.reduction = heads, grid, reduction
        self.q, self.k, self.v = (BinaryUnit(width, width, norm) for _ in range(3))
        self.q_shift, self.k_shift, self.v_shift = (nn.Parameter(torch.zeros(width)) for _ in range(3))
        self.reduce = BinaryUnit(width, width, norm) if reduction > 1 else None
        self.share = nn.Parameter(torch.tensor(reduction**2 / tokens)) if rounded else None
        self.norm, self.act = norm(width), RPReLU(width)
        self.out = BinaryUnit(width, width, norm)

    def units(self, x: Tensor) -> dict[str, Tensor]:
        """What queries, keys and values are the signs of, by "q", "k" and "v": (B, N, D), with fewer keys and
        values where they are reduced."""
        of_keys = x
        if self.reduce is not None:
            squares = F.avg_pool2d(x.mT.unflatten(2, self.grid), self.reduction)
            of_keys = self.reduce(squares.flatten(2).mT)
        return {"q": self.q(x), "k": self.k(of_keys), "v": self.v(of_keys)}

    def bits(self, name: str, unit: Tensor) -> Tensor:
        """The signs of one of `units`: (B, H, N, d)."""
        shifted = unit + getattr(self, f"{name}_shift")
        return sign(shifted).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def mix(self, p: Tensor, v: Tensor) -> Tensor:
        """Values (B, H, N, d) mixed by maps (B, H, N, N), which are rounded first."""
        return (p if self.share is None else rounded_map(p, self.share)) @ v

    def after(self, mixed: Tensor, units: dict[str, Tensor]) -> Tensor:
        """What becomes of the heads' outputs side by side, (B, N, D)."""
        past = units["q"] + self._spread(units["k"]) + self._spread(units["v"])
        return self.out(self.act(self.norm(mixed) + past))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, D) to tokens."""
        units = self.units(x)
        q, k, v = (self.bits(name, unit) for name, unit in units.items())
        # a map that is put in is rounded too; the shortcuts around q and k, which are no routing, stay
        mixed = attention(q, k, v, q.shape[-1] ** -0.5, mix=self.mix)
        return self.after(mixed.transpose(1, 2).flatten(2), units)

    def _spread(self, unit: Tensor) -> Tensor:
        """One of `units` on all tokens: that of a square for each of its patches."""
        if self.reduction == 1:
            return unit
        squares = unit.mT.unflatten(2, [side // self.reduction for side in self.grid])
        return F.interpolate(squares, self.grid, mode="nearest").flatten(2).mT


class PoolingBranches(nn.Module):
    """Means of each patch and its neighbours down and across, added to the residual stream beside the MLP: a
    path of full precision on which patches of one layer meet, as in a network of convolutions.

    sides: how many patches each mean is over, in a column and in a row. Beyond the border there are zeros,
    which count. A factor and a shift of each channel, which start at 0, weigh each mean. Prefix tokens have
    no neighbours.
    """

    def __init__(self, width: int, grid: Grid, sides: Sequence[int]):
        super().__init__()
        self.grid = grid
        self.kernels = [kernel for side in sides for kernel in ((side, 1), (1, side))]
        self.weigh = nn.ModuleList(affine(width, 0.0) for _ in self.kernels)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, D), patches last, to what is added to them."""
        patches = self.grid[0] * self.grid[1]
        on_grid = x[:, -patches:].mT.unflatten(2, self.grid)
        means = (
            F.avg_pool2d(on_grid, kernel, stride=1, padding=(kernel[0] // 2, kernel[1] // 2))
            for kernel in self.kernels
        )
        added = sum(weigh(mean.flatten(2).mT) for weigh, mean in zip(self.weigh, means))
        return F.pad(added, (0, 0, x.shape[1] - patches, 0))


class BinaryBlock(nn.Module):
    """A pre-norm block of bits: attention, then an MLP of two `BinaryUnit`s, each with a factor and a shift
    of every channel before it is added (`scaled`, what the paper calls the affine transformation)."""

    def __init__(
        self,
        width: int,
        heads: int,
        grid: Grid,
        tokens: int,
        *,
        hidden: int,
        reduction: int = 1,
        branches: Sequence[int] = (),
        scaled: bool = True,
        rounded: bool = True,
        drop_path: float = 0.0,
        norm: Norm = TokenNorm,
    ):
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attn = BinaryAttention(width, heads, grid, tokens, reduction, rounded, norm)
        self.ls1, self.ls2 = (affine(width, 0.1) if scaled else nn.Identity() for _ in range(2))
        self.fc1, self.fc2 = BinaryUnit(width, hidden, norm), BinaryUnit(hidden, width, norm)
        self.branches = PoolingBranches(width, grid, branches) if branches else None
        self.drop_path1, self.drop_path2 = DropPath(drop_path), DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, D) to tokens."""
        return self.after(tokens, self.attn(self.norm1(tokens)))

    def after(self, tokens: Tensor, routed: Tensor) -> Tensor:
        """The residual stream (B, N, D) after the block, given the output of its attention."""
        tokens = tokens + self.drop_path1(self.ls1(routed))
        x = self.norm2(tokens)
        tokens = tokens + self.drop_path2(self.ls2(self.fc2(self.fc1(x))))
        return tokens if self.branches is None else tokens + self.branches(x)


class PatchMerging(nn.Module):
    """From one stage of a pyramid to the next: squares of 2 x 2 patches become one patch of more channels, by
    a convolution of bits, with their mean as its shortcut; new positions are added. Without `binary` it is a
    plain convolution of full precision without a shortcut. Tokens (B, N, in) to (B, N / 4, out)."""

    def __init__(self, width: int, out: int, grid: Grid, binary: bool, norm: Norm):
        super().__init__()
        if any(side % 2 for side in grid):
            raise ValueError(f"squares of 2 x 2 patches do not fill the grid {grid}")
        self.grid, self.pos_embed = grid, positions(grid[0] * grid[1] // 4, out)
        self.norm1, self.norm2 = norm(width), norm(out)
        self.shift = nn.Parameter(torch.zeros(width)) if binary else None
        self.act = RPReLU(out) if binary else nn.Identity()
        plain = nn.Conv2d(width, out, 2, stride=2, bias=False)
        self.conv = BinaryPatchConv(width, out, 2) if binary else plain

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, in) to (B, N / 4, out)."""
        x = self.norm1(tokens)
        shifted = x if self.shift is None else x + self.shift
        merged = self.norm2(self.conv(shifted.mT.unflatten(2, self.grid)).flatten(2).mT)
        if self.shift is not None:
            means = F.avg_pool2d(x.mT.unflatten(2, self.grid), 2).flatten(2).mT
            merged = merged + resized(means, merged.shape[-1])
        return self.act(merged) + self.pos_embed


def affine(width: int, start: float) -> Affine:
    """A factor and a shift of each channel, from `start` and 0."""
    layer = Affine(width)
    nn.init.constant_(layer.alpha, start)
    return layer


def positions(tokens: int, width: int) -> nn.Parameter:
    """Position embeddings (1, N, D), drawn as ViTs draw them."""
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(1, tokens, width), std=0.02))


class BinaryViT(nn.Module):
    """A ViT of bits: all but its first patch embedding, its last layer, its norms, shifts and shortcuts.
    Images (B, 3, height, width) to logits (B, classes).

    By default it is the paper's, a pyramid of four stages, with 67.7 % on ImageNet; `binary_deit` has one.

    img_size, patch_size: in pixels. widths, depths, heads, mlp_ratios, reductions: one number a stage (see
    `BinaryAttention`, `BinaryBlock`). class_token: read the class from a token, in place of the mean of the
    patches; in one stage only. branches: sides of the means of `PoolingBranches`, none for none. scaled:
    affine layers on the branches. binary_maps: maps of one bit. binary_merging: `PatchMerging` of bits (70.6
    % without). norm: the class of its norms; `nn.LayerNorm` will do, too.

    Weights start as PyTorch's own layers do, as they do in the published code.
    """

    def __init__(
        self,
        img_size: int = 224,
        patch_size: int = 4,
        num_classes: int = 1000,
        widths: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (3, 4, 8, 4),
        heads: Sequence[int] = (1, 2, 4, 8),
        mlp_ratios: Sequence[int] = (8, 8, 4, 4),
        reductions: Sequence[int] = (8, 4, 1, 1),
        *,
        class_token: bool = False,
        branches: Iterable[int] = (3, 5),
        scaled: bool = True,
        binary_maps: bool = True,
        binary_merging: bool = True,
        drop_path_rate: float = 0.0,
        norm: Norm = TokenNorm,
    ):
        super().__init__()
        stages = len(widths)
        if img_size % patch_size:
            raise ValueError(f"img_size={img_size} is no multiple of patch_size={patch_size}")
        if stages > 1:
            self.not_walkable = "it is a pyramid, with a patch grid and fewer keys than queries in each stage"
        self.num_classes, self.num_prefix_tokens = num_classes, int(class_token)
        # a norm after the patches stands in the published pyramid alone
        first_norm = norm if stages > 1 else None
        self.patch_embed = PatchEmbed(img_size, patch_size, embed_dim=widths[0], norm_layer=first_norm)
        grid = self.patch_embed.grid_size
        self.cls_token = nn.Parameter(1e-6 * torch.randn(1, 1, widths[0])) if class_token else None
        self.pos_embed = positions(grid[0] * grid[1] + class_token, widths[0])
        rates = iter(torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist())
        self.stages, self.merging = nn.ModuleList(), nn.ModuleList()
        for stage, width in enumerate(widths):
            if stage:
                self.merging.append(PatchMerging(widths[stage - 1], width, grid, binary_merging, norm))
                grid = (grid[0] // 2, grid[1] // 2)
            sizes = width, heads[stage], grid, grid[0] * grid[1] + class_token
            options = {
                "hidden": mlp_ratios[stage] * width,
                "reduction": reductions[stage],
                "branches": tuple(branches),
                "scaled": scaled,
                "rounded": binary_maps,
                "norm": norm,
            }
            blocks = (BinaryBlock(*sizes, drop_path=next(rates), **options) for _ in range(depths[stage]))
            self.stages.append(nn.ModuleList(blocks))
        self.norm = norm(widths[-1])
        self.head = nn.Linear(widths[-1], num_classes) if num_classes else nn.Identity()

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, 3, height, width) to the tokens of the first stage, (B, N, D)."""
        tokens = self.patch_embed(images)
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1)
        return tokens + self.pos_embed

    def forward_head(self, tokens: Tensor) -> Tensor:
        """The last tokens (B, N, D) to logits (B, classes)."""
        tokens = self.norm(tokens)
        return self.head(tokens.mean(1) if self.cls_token is None else tokens[:, 0])

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, height, width) to logits (B, classes)."""
        tokens = self.embed(images)
        for stage, blocks in enumerate(self.stages):
            if stage:
                tokens = self.merging[stage - 1](tokens)
            for block in blocks:
                tokens = block(tokens)
        return self.forward_head(tokens)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The parameters that timm's optimisers do not decay beside those of one dimension; affine layers,
        (1, 1, D), are decayed. (The published runs decay nothing.)"""
        of_merging = {f"merging.{index}.pos_embed" for index in range(len(self.merging))}
        return {"pos_embed", "cls_token", *of_merging}


def binary_deit(
    img_size: int = 224,
    patch_size: int = 16,
    num_classes: int = 1000,
    width: int = 384,
    depth: int = 12,
    heads: int = 6,
    **options,
) -> BinaryViT:
    """A `BinaryViT` of one stage, by default of DeiT-S's sizes, whose maps a ViT can be the teacher of.

    `options`: the further arguments of `BinaryViT`. `class_token=True, branches=(), scaled=False` is the
    paper's baseline (48.5 % on ImageNet); the mean of all patches in place of the token has 56.4, pooling
    branches 60.2 and affine layers 61.8.
    """
    return BinaryViT(img_size, patch_size, num_classes, (width,), (depth,), (heads,), (4,), (1,), **options)
