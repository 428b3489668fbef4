"""PatchConvNet: convolutions until the very end, and there one softmax, which says where the class was read.

Source: Touvron et al. 2021, "Augmenting Convolutional networks with attention-based aggregation" (arXiv
2112.13692), chapter 5 of Touvron's thesis (HAL tel-03945782). What is said of "the published code" was read
in github.com/facebookresearch/deit at 7e160fe, patchconvnet_models.py.
"""

import copy
from itertools import pairwise
from typing import NamedTuple

import torch
from timm.layers import DropPath, LayerNorm2d, LayerScale, LayerScale2d, Mlp, SqueezeExcite, trunc_normal_
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atfamily.locality import forbids_pairs
from atlib._util import in_eval_mode, require_known
from atlib.attention import walk
from atlib.attention_transfer import Transferred
from atlib.baselines import Distillation
from atlib.maps import Grid, aggregate_heads, resample_class_attention
from atlib.pair import Normalisation
from atlib.vit import check_timm

EPS = 1e-6  # of all norms
POOLS = ("attention", "per class", "average")


class Look(NamedTuple):
    """What a pooled network computes. `logits`: (B, classes); `map`: the pool's softmax (B, 1, queries,
    keys), rows sum to 1. Keys are the query itself and then the patches, row by row, where there is one
    query; the patches alone, where there are several, and for `AveragePool`. `grid`: patches down and
    across."""

    logits: Tensor
    map: Tensor
    grid: Grid


# --- From an image to a patch grid, by convolutions ---


class ConvStem(nn.Sequential):
    """Images (B, 3, height, width) to patches (B, width, height / patch_size, width / patch_size): 3 x 3
    convolutions of stride 2, GELU between them; each has half the channels of the next.

    The published stem has four convolutions whatever its `patch_size` says.
    """

    def __init__(self, width: int, patch_size: int = 16):
        halvings = patch_size.bit_length() - 1
        if halvings < 1 or patch_size != 2**halvings:
            raise ValueError(f"patch_size={patch_size}: 2, 4, 8, 16, ... pixels")
        channels = [3, *(width // 2**i for i in reversed(range(halvings)))]
        layers = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.GELU()]
        super().__init__(*layers[:-1])


class ConvBlock(nn.Module):
    """x + scale · convolutions(norm(x)) for patches (B, D, h, w): 1 x 1, GELU, 3 x 3 depthwise, GELU,
    squeeze-excite (a quarter of the width), 1 x 1."""

    def __init__(self, width: int, init_values: float = 1e-4, drop_path: float = 0.0):
        super().__init__()
        self.norm = LayerNorm2d(width, eps=EPS)
        self.mix = nn.Sequential(
            nn.Conv2d(width, width, 1),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.GELU(),
            SqueezeExcite(width, rd_channels=round(width / 4)),
            nn.Conv2d(width, width, 1),
        )
        self.scale = LayerScale2d(width, init_values)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D, h, w) to (B, D, h, w)."""
        return x + self.drop_path(self.scale(self.mix(self.norm(x))))


# --- From a patch grid to one vector for the image ---


class AttentionPool(nn.Module):
    """Learned queries gather the patches: a transformer block in which patches are only looked at.

    q + scale · proj(map · v), then that + scale · MLP(norm(that)), with `queries` learned vectors q; one for
    the image, or one for each class. A single query is among its own keys, several are not, as in the
    published code. It has one head, so that there is one picture.
    """

    def __init__(self, width: int, queries: int = 1, mlp_ratio: float = 3.0, init_values: float = 1e-4):
        super().__init__()
        self.queries = nn.Parameter(torch.zeros(1, queries, width))
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.mlp = Mlp(width, int(mlp_ratio * width))
        self.scale1, self.scale2 = LayerScale(width, init_values), LayerScale(width, init_values)

    def forward(self, patches: Tensor, map: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """From patches (B, N, D): the gathered (B, queries, D), and the map (B, 1, queries, keys) that
        gathered them. `map`: use this one, (B, 1, 1 or queries, keys), in place of the pool's own."""
        queries = self.queries.expand(len(patches), -1, -1)
        queried = self.norm1(queries)
        keys = self.norm1(patches)
        if queries.shape[1] == 1:
            keys = torch.cat([queried, keys], 1)
        if map is None:
            q, k = self.q(queried), self.k(keys)
            map = (q.shape[-1] ** -0.5 * q @ k.mT).softmax(-1)[:, None]
        else:
            map = map.expand(-1, -1, queries.shape[1], -1)
        gathered = queries + self.scale1(self.proj(map[:, 0] @ self.v(keys)))
        return gathered + self.scale2(self.mlp(self.norm2(gathered))), map


class AveragePool(nn.Module):
    """The mean over patches, as a pool: its map gives 1/N to each."""

    def forward(self, patches: Tensor, map: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """From patches (B, N, D): their mean (B, 1, D), and the map (B, 1, 1, N) that it is made with."""
        if map is None:
            map = patches.new_full((len(patches), 1, 1, patches.shape[1]), 1 / patches.shape[1])
        return map[:, 0] @ patches, map


class ClassHead(nn.Module):
    """Logit c from token c alone: tokens (B, classes, D) to (B, classes)."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(classes, width)), nn.Parameter(torch.zeros(classes))
        trunc_normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """One product for each class."""
        return (tokens * self.weight).sum(-1) + self.bias


class Pooled(nn.Module):
    """A convolutional network, a pool over its patch grid, a norm, and a classifier.

    trunk: images (B, 3, height, width) to (B, `width`, h, w). `pool`: "attention", with one query for the
    image; "per class", with one query and one weight vector for each class; "average". `init_values`: of the
    pool's layer scales.
    """

    not_walkable = "it is convolutional, with one row of attention at its end: its look(images) shows it"

    def __init__(self, trunk: nn.Module, width: int, num_classes: int, pool: str, init_values: float):
        super().__init__()
        require_known("pool", pool, POOLS)
        per_class = pool == "per class"
        self.trunk, self.num_classes = trunk, num_classes
        queries = num_classes if per_class else 1
        attention = None if pool == "average" else AttentionPool(width, queries, init_values=init_values)
        self.pool = attention or AveragePool()
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.head = ClassHead(width, num_classes) if per_class else nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) for images (B, 3, height, width)."""
        return self.look(images).logits

    def look(self, images: Tensor, map: Tensor | None = None) -> Look:
        """What `forward` computes, with the pool's map. `map`: one to use in its place, see
        `AttentionPool.forward`."""
        patches = self.trunk(images)
        gathered, map = self.pool(patches.flatten(2).mT, map)
        tokens = self.norm(gathered)
        logits = self.head(tokens if isinstance(self.head, ClassHead) else tokens[:, 0])
        return Look(logits, map, tuple(patches.shape[2:]))


class PatchConvNet(Pooled):
    """A PatchConvNet: a stem, `depth` equal blocks on one patch grid, and a pool (see `Pooled`).

    Defaults are the paper's S60. The published variant with a query for each class works with 1,000 classes
    only, because their number never reaches its pool; here it does. Weights of linear layers and queries
    start normal with standard deviation 0.02, convolutions as PyTorch's do, as in the published code. There
    weight decay leaves out the queries, here it does not.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        width: int = 384,
        depth: int = 60,
        patch_size: int = 16,
        pool: str = "attention",
        init_values: float = 1e-4,
        drop_path_rate: float = 0.0,
    ):
        blocks = (ConvBlock(width, init_values, drop_path_rate) for _ in range(depth))
        trunk = nn.Sequential(ConvStem(width, patch_size), *blocks)
        super().__init__(trunk, width, num_classes, pool, init_values)
        _start(self)


def with_attention_pool(
    network: nn.Module, num_classes: int, pool: str = "attention", init_values: float = 1e-4
) -> Pooled:
    """A copy of any timm convolutional network with an attention pool in the place of its average pool and
    classifier; all other weights stay. `pool` as in `Pooled`. Source: arXiv 2112.13692, on other
    architectures (ResNet-50 +0.3)."""
    trunk = copy.deepcopy(network)
    trunk.reset_classifier(0, "")
    with torch.no_grad(), in_eval_mode(trunk):
        grid = trunk(next(trunk.parameters()).new_zeros(1, 3, 64, 64))
    pooled = Pooled(trunk, grid.shape[1], num_classes, pool, init_values)
    for part in (pooled.pool, pooled.norm, pooled.head):
        _start(part)
    return pooled


def _start(module: nn.Module) -> None:
    """The first weights of the published code."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            trunc_normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
        elif isinstance(part, AttentionPool):
            trunc_normal_(part.queries, std=0.02)


# --- What a ViT can tell a convolutional network: where to read the class ---


class PoolTransfer(Distillation):
    """A convolutional network whose pool looks where the class token of a ViT looks: one row of attention,
    the only one that both have.

    The teacher's row is its class token's in `layer` (-1: the last), all heads merged by softmax(Σ_h log p_h
    / temperature), which is the target of AttnDistill (arXiv 2210.00944). With `copy` it takes the place of
    the pool's own map, in evaluation too, so that the teacher is needed at inference. Otherwise the transfer
    loss pulls the pool's map to it: KL(p_t ‖ p_s), summed over keys, mean over batch, heads and queries, in
    nats (a probability below the smallest normal number counts as that). `.student` alone is the result.

    Keys: a pool of one query has itself among them, as the class token has; other prefix tokens, and the
    class token where the pool has only patches, are left out and the row is rescaled. `resample`: a network
    with another patch grid than the teacher's is let in, the row is resampled to it.

    An extension of ours: in the papers the student is a ViT.
    """

    not_walkable = "it is a teacher and a convolutional student: its look(images) shows the pool"

    def __init__(
        self,
        teacher: VisionTransformer | Eva,
        student: Pooled,
        *,
        copy: bool = False,
        temperature: float = 10.0,
        layer: int = -1,
        resample: bool = False,
        normalisation: Normalisation | None = None,
    ):
        check_timm(teacher)
        layer = range(len(teacher.blocks))[layer]
        if forbids_pairs([teacher.blocks[layer]]):
            raise ValueError(f"the teacher's layer {layer} forbids pairs of tokens: another layer=")
        if teacher.cls_token is None:
            raise ValueError("the teacher has no class token")
        if not copy and isinstance(student.pool, AveragePool):
            raise ValueError("the student's pool is the average: pool='attention', or copy=True")
        example = next(student.parameters()).new_zeros(1, 3, *teacher.patch_embed.img_size)
        with torch.no_grad(), in_eval_mode(student):
            grids = tuple(teacher.patch_embed.grid_size), student.look(example).grid
        if grids[0] != grids[1] and not resample:
            raise ValueError(f"patch grids {grids[0]} and {grids[1]} differ: resample=True?")
        super().__init__(student, teacher, normalisation=normalisation)
        self.copy, self.temperature, self.layer, self.grids = copy, temperature, layer, grids
        pool = student.pool
        self.keeps_class = isinstance(pool, AttentionPool) and pool.queries.shape[1] == 1

    @property
    def needs_teacher(self) -> bool:
        """Whether the student works at inference only together with the teacher: True for Copy."""
        return self.copy

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and the unweighted transfer loss for images (B, 3, height, width)."""
        if not self.copy:
            return super().forward(images)
        logits = self.look(images).logits
        return Transferred(logits, logits.new_zeros(()))

    def look(self, images: Tensor) -> Look:
        """What happens inside the student for images (B, 3, height, width), with the teacher's row in its
        pool where it is copied."""
        return self.student.look(images, self.teacher_row(images) if self.copy else None)

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits and the divergence of its pool from the teacher's row."""
        p_t = self.teacher_row(images)
        seen = self.student.look(images)
        tiny = torch.finfo(seen.map.dtype).tiny
        log_p_s, log_p_t = (p.clamp(min=tiny).log() for p in (seen.map, p_t.to(seen.map.dtype)))
        return Transferred(seen.logits, (log_p_t.exp() * (log_p_t - log_p_s)).sum(-1).mean())

    def teacher_row(self, images: Tensor) -> Tensor:
        """Where the teacher's class token looks, for the keys that the student's pool has: (B, 1, 1, keys),
        rows sum to 1, as a constant."""
        prefix = self.teacher.num_prefix_tokens
        with self.frozen_teachers():
            shown = self.for_teacher(images)
            seen = walk(self.teacher, shown, stop_after=self.layer).layers[-1]
            scores = seen.scale * seen.q[:, :, :1] @ seen.k.mT  # no other row is made
            kept = [scores[..., :1]] if self.keeps_class else []
            p = aggregate_heads(
                scores=torch.cat([*kept, scores[..., prefix:]], -1), temperature=self.temperature
            )[:, :, 0]
            row = resample_class_attention(p, *self.grids, prefix_tokens=len(kept)).unsqueeze(2)
        return row.clone()  # outlives inference mode, which autograd needs
