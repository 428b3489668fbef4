"""How loudly a branch speaks: learned factors on the residual branches of timm's ViT, and how loud each is.

LayerScale and its rivals differ in three things only: whether a branch has one factor or one for each
channel, where the factors start, and which weights the branch starts with. timm's `LayerScale` holds both
kinds of factors, D of them or a single one.

All of them keep the norm before the branch, and need warm-up, as Touvron's thesis compares them (section
3.5.2, table 3.11). Fixup's further biases are left out.
"""

from typing import NamedTuple

import torch
from timm.layers import LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.attention import attend, walk
from atlib.pair import student_of
from atlib.vit import check_timm


def layer_scale(vit: VisionTransformer, start: float | None = None) -> VisionTransformer:
    """The freshly built `vit` itself, with LayerScale: a factor for each channel of each branch, all starting
    at `start`. None takes `published_start` of its depth. With a start above 0 it is what timm builds with
    `init_values`. Source: arXiv 2103.17239, section 2."""
    _require_plain(vit)
    return _with_factors(vit, vit.embed_dim, published_start(len(vit.blocks)) if start is None else start)


def uniform_layer_scale(vit: VisionTransformer, mean: float) -> VisionTransformer:
    """The freshly built `vit` itself, with LayerScale whose factors start anywhere from 0 to twice `mean`,
    drawn uniformly. Source: Touvron's thesis, table 3.12."""
    layer_scale(vit, mean)
    for block in vit.blocks:
        for scale in (block.ls1, block.ls2):
            nn.init.uniform_(scale.gamma, 0, 2 * mean)
    return vit


def frozen_factors(vit: VisionTransformer, trained: VisionTransformer) -> VisionTransformer:
    """The freshly built `vit` itself, with the factors of a trained ViT of its sizes, which do not move.
    Source: Touvron's thesis, section 3.5.3, unnumbered table."""
    factors = [[getattr(block, name) for name in ("ls1", "ls2")] for block in trained.blocks]
    shapes = {tuple(getattr(factor, "gamma", torch.empty(0)).shape) for pair in factors for factor in pair}
    if len(factors) != len(vit.blocks) or shapes != {(vit.embed_dim,)}:
        raise ValueError(f"trained has factors {sorted(shapes)} in {len(factors)} layers")
    layer_scale(vit)
    for block, (attention, mlp) in zip(vit.blocks, factors):
        for scale, learned in ((block.ls1, attention), (block.ls2, mlp)):
            scale.gamma.data.copy_(learned.gamma)
            scale.gamma.requires_grad_(False)
    return vit


def one_scalar(vit: VisionTransformer, start: float) -> VisionTransformer:
    """The freshly built `vit` itself, with a single factor for each branch, starting at `start`. Source:
    arXiv 2103.17239, section 2, where it starts as LayerScale does (table 3.11 of Touvron's thesis)."""
    _require_plain(vit)
    return _with_factors(vit, 1, start)


def rezero(vit: VisionTransformer) -> VisionTransformer:
    """`one_scalar` from 0, so that the untrained ViT is its embedding and its head. Source: Bachlechner et
    al. 2020 (arXiv 2003.04887); there one factor serves both branches of a layer."""
    return one_scalar(vit, 0.0)


def skip_init(vit: VisionTransformer) -> VisionTransformer:
    """`one_scalar` from 1/√(number of branches), two a layer. Source: De and Smith 2020 (arXiv 2002.10444),
    where 0, the start of `rezero`, serves as well."""
    _require_plain(vit)
    return _with_factors(vit, 1, (2 * len(vit.blocks)) ** -0.5)


def fixup(vit: VisionTransformer) -> VisionTransformer:
    """`one_scalar` from 1; the head and the last weights of each branch become 0, the first are multiplied by
    L^(-1 / (2m - 2)), L the number of branches and m = 2 the weights in one.

    In the attention branch these two are the projections of the values and of the output; q and k stay as
    they are. This reading of the formula is ours. Source: Zhang et al. 2019 (arXiv 1901.09321), its three
    rules.
    """
    one_scalar(vit, 1.0)
    m, branches = 2, 2 * len(vit.blocks)
    with torch.no_grad():
        for block in vit.blocks:
            _, _, values = block.attn.qkv.weight.chunk(3)
            for first, last in ((values, block.attn.proj), (block.mlp.fc1.weight, block.mlp.fc2)):
                first.mul_(branches ** (-1 / (2 * m - 2)))
                last.weight.zero_()
        for parameter in vit.head.parameters():
            parameter.zero_()
    return vit


def t_fixup(vit: VisionTransformer) -> VisionTransformer:
    """The freshly built `vit` itself, with other weights in its blocks and no factors: Xavier's, those of
    values, attention output and MLP multiplied by 0.67 · depth^(-1/4).

    They are drawn anew from torch's global generator. Embedding and head keep timm's weights (there,
    embeddings have a start of their own). Source: Huang et al. 2020, "Improving Transformer Optimization
    Through Better Initialization" (ICML 2020), the encoder's rule.
    """
    _require_plain(vit)
    with torch.no_grad():
        for block in vit.blocks:
            q, k, values = block.attn.qkv.weight.chunk(3)
            scaled = values, block.attn.proj.weight, block.mlp.fc1.weight, block.mlp.fc2.weight
            for weight in (q, k, *scaled):
                nn.init.xavier_uniform_(weight)
            for weight in scaled:
                weight.mul_(0.67 * len(vit.blocks) ** -0.25)
    return vit


def published_start(depth: int) -> float:
    """Where LayerScale starts in a ViT of this depth: 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 beyond.
    Source: arXiv 2103.17239, section 2; it names 18, 24 and deeper."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


# --- How loud they are ---


class BranchRatios(NamedTuple):
    """How loud each branch is beside the residual stream that it is added to, ‖branch‖ / ‖stream‖ of a token,
    the mean over images and tokens: one (L,) for the attention branches, one for the MLPs."""

    attention: Tensor
    mlp: Tensor


@torch.no_grad()
def branch_ratios(model: nn.Module, images: Tensor) -> BranchRatios:
    """The ratios of a ViT in eval mode, or of the student of a pair such as `AttentionTransfer` with the maps
    that it is given, on images (B, 3, height, width). Source: figure 3.6 of Touvron's thesis; over what to
    average is our choice."""
    if model.training:
        raise ValueError("training=True: branches are dropped; call .eval() first")
    vit = student_of(model)
    start = walk(vit, images, stop_after=0).tokens
    walked = model.walk(images) if hasattr(model, "walk") else walk(vit, images, head=False)
    ratios = []
    for block, seen, stream in zip(vit.blocks, walked.layers, (start, *walked.stream)):
        mixed = block.attn.norm(attend(seen).transpose(1, 2).flatten(2))
        attention = block.ls1(block.attn.proj(mixed))
        between = stream + attention
        mlp = block.ls2(block.mlp(block.norm2(between)))
        ratios.append((_loudness(attention, stream), _loudness(mlp, between)))
    return BranchRatios(*(torch.stack(of_branch) for of_branch in zip(*ratios)))


def _loudness(branch: Tensor, stream: Tensor) -> Tensor:
    return (branch.norm(dim=-1) / stream.norm(dim=-1)).mean()


def _with_factors(vit: VisionTransformer, number: int, start: float) -> VisionTransformer:
    for block in vit.blocks:
        for branch in ("ls1", "ls2"):
            setattr(block, branch, LayerScale(number, start).to(block.norm1.weight))
    return vit


def _require_plain(vit: VisionTransformer) -> None:
    """Eva's blocks have factors of other names, which would stay beside these."""
    check_timm(vit)
    if not all(isinstance(getattr(block, "ls1", None), nn.Identity) for block in vit.blocks):
        raise ValueError(
            f"a {type(vit).__name__} without factors on its branches is needed (init_values=None)"
        )
