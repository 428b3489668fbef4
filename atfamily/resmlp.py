"""ResMLP: no attention at all. In every block one learned matrix says which patch listens to which, the same
for all images; a teacher's mean map can be put in its place.

Source: Touvron et al. 2021, "ResMLP: Feedforward networks for image classification with data-efficient
training" (arXiv 2105.03404), chapter 4 of Touvron's thesis (HAL tel-03945782). The network is timm's.
"""

from collections.abc import Sequence
from functools import partial

import torch
from timm.layers import Mlp
from timm.models.eva import Eva
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib._util import require_known
from atlib.attention_transfer import Transferred
from atlib.baselines import mean_maps
from atlib.maps import Grid, keep_tokens
from atlib.pair import Pair
from atlib.vit import check_timm

MIXINGS = ("linear", "none", "mlp", "conv", "depthwise", "separable")
POOLINGS = ("average", "class")


def resmlp(
    img_size: int = 224,
    patch_size: int = 16,
    embed_dim: int = 384,
    depth: int = 12,
    num_classes: int = 1000,
    init_values: float = 0.1,
    mixing: str = "linear",
    pooling: str = "average",
    drop_path_rate: float = 0.0,
) -> MlpMixer:
    """A ResMLP: timm's `MlpMixer`, made of `ResBlock` and affine layers; by default the S12 of the paper.

    `mixing`: how patches talk to each other. "linear", the matrix A (N, N) of every block, with a bias for
    each patch; "none", not at all; "mlp", a hidden layer of 4 N units; "conv", "depthwise" and "separable", 3
    x 3 convolutions over the patch grid, dense, channel by channel, or so and then 1 x 1 (the rows of the
    thesis's ablation, tab. 4.3, which gives them 76.6, 56.5, 77.3, 77.3, 76.3 and 77.0 % on ImageNet).

    `pooling`: what the classifier reads. "average", of the patches; "class", a token of a `ClassMlp` (77.5 %
    there).

    `init_values`: of the layer scales; the official code has 0.1 for 12 layers, 1e-5 for 24 and 1e-6 for 36.
    With `mixing="linear"` it is timm's `resmlp_12_224`. Departures from the official code: first weights are
    timm's, Xavier's and a head of 0 (there, all linear layers have a standard deviation of 0.02: A starts
    much smaller), other mixings' are PyTorch's; AdamW decays the affine layers, which are (1, 1, D) here.
    """
    require_known("mixing", mixing, MIXINGS)
    require_known("pooling", pooling, POOLINGS)
    if img_size % patch_size:
        raise ValueError(f"img_size={img_size} is no multiple of patch_size={patch_size}")
    model = MlpMixer(
        num_classes=num_classes,
        img_size=img_size,
        patch_size=patch_size,
        num_blocks=depth,
        embed_dim=embed_dim,
        mlp_ratio=4,
        block_layer=partial(ResBlock, init_values=init_values),
        norm_layer=Affine,
        drop_path_rate=drop_path_rate,
    )
    if mixing != "linear":
        for block in model.blocks:
            block.linear_tokens = _mixer(mixing, embed_dim, model.stem.grid_size)
    if pooling == "class":  # timm averages what leaves the norm: here one token
        model.norm = nn.Sequential(ClassMlp(embed_dim, model.stem.num_patches, init_values), model.norm)
    return model


class ClassMlp(nn.Module):
    """Class attention without attention: a class token that gathers the patches by learned shares, the same
    for all images, twice, each time followed by an MLP; the patches stay as they are.

    Two blocks as in CaiT. What they gather is one share a patch and one for the token itself, with a bias,
    between the affine layers and factors of a ResMLP. The paper (arXiv 2105.03404, sec. 2) says this in
    words: our reading has the 17.7 M parameters of the thesis's tab. 4.3.
    """

    def __init__(self, width: int, patches: int, init_values: float):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        nn.init.trunc_normal_(self.token, std=0.02)
        self.blocks = nn.ModuleList(ClassMlpBlock(width, patches, init_values) for _ in range(2))

    def forward(self, patches: Tensor) -> Tensor:
        """(B, N, D) to the class token, (B, 1, D)."""
        token = self.token.expand(len(patches), -1, -1)
        for block in self.blocks:
            token = block(token, patches)
        return token


class ClassMlpBlock(nn.Module):
    """One gathering and one MLP of a `ClassMlp`."""

    def __init__(self, width: int, patches: int, init_values: float):
        super().__init__()
        self.norm1, self.norm2 = Affine(width), Affine(width)
        self.shares = nn.Linear(1 + patches, 1)
        self.mlp = Mlp(width, 4 * width)
        self.ls1 = nn.Parameter(torch.full((width,), init_values))
        self.ls2 = nn.Parameter(torch.full((width,), init_values))

    def forward(self, token: Tensor, patches: Tensor) -> Tensor:
        """The class token (B, 1, D) after it has gathered patches (B, N, D)."""
        every = self.norm1(torch.cat([token, patches], dim=1))
        token = token + self.ls1 * self.shares(every.mT).mT
        return token + self.ls2 * self.mlp(self.norm2(token))


class OverGrid(nn.Module):
    """A convolution where a ResMLP has its matrix: tokens (B, D, N) are laid out on the patch grid for it."""

    def __init__(self, convolution: nn.Module, grid: Grid):
        super().__init__()
        self.convolution, self.grid = convolution, grid

    def forward(self, x: Tensor) -> Tensor:
        """(B, D, N) to (B, D, N)."""
        return self.convolution(x.unflatten(2, self.grid)).flatten(2)


def _mixer(mixing: str, width: int, grid: Grid) -> nn.Module:
    """What takes tokens (B, D, N) to (B, D, N)."""
    N = grid[0] * grid[1]
    match mixing:
        case "mlp":
            return Mlp(N, 4 * N)
        case "conv":
            return OverGrid(nn.Conv2d(width, width, 3, padding=1), grid)
        case "depthwise":
            return OverGrid(nn.Conv2d(width, width, 3, padding=1, groups=width), grid)
        case "separable":
            depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
            return OverGrid(nn.Sequential(depthwise, nn.Conv2d(width, width, 1)), grid)
    return nn.Identity()


def static_maps(model: MlpMixer) -> list[Tensor]:
    """The learned A of every block, (N, N) each: row i says how much patch i takes from every patch j. These
    are the model's weights, with gradients; entries can be negative and rows do not sum to one."""
    return [block.linear_tokens.weight for block in model.blocks]


def copy_static_maps(model: MlpMixer, maps: Sequence[Tensor]) -> MlpMixer:
    """Put `maps`, one (N, N) for each block, in the place of the learned A, for good: they are not trained,
    the rest is. Returns the model."""
    for A, p in zip(static_maps(model), maps, strict=True):
        A.requires_grad_(False).copy_(p)
    return model


def mean_patch_maps(vit: VisionTransformer | Eva, images: Tensor) -> list[Tensor]:
    """What of a ViT's maps a ResMLP could hold: of every layer the mean over `images` (n, 3, height, width)
    and heads, among patches only, as (patches, patches).

    A ResMLP has neither class token nor registers: their columns are left out of the mean map, and its rows
    rescaled to sum to 1. Raises `Unwalkable`.
    """
    check_timm(vit)
    patches = range(vit.num_prefix_tokens, vit.num_prefix_tokens + vit.patch_embed.num_patches)
    layers = mean_maps(vit, images)
    return [keep_tokens(p.mean(1, keepdim=True), patches)[0, 0] for p in layers]


class StaticMapDistill(Pair):
    """A ResMLP whose learned A is pulled to `maps`, one (N, N) for each block: Distill, for a map that is the
    same for all images.

    The transfer loss is Σ_l mean_i Σ_j (A_l(i, j) - p_l(i, j))²: squared error summed over keys, mean over
    queries, summed over layers, as the reductions of attention distillation (arXiv 2411.09702) are. A is no
    softmax, so cross-entropy is not defined for it. `.student` alone is the result. Ours.
    """

    not_walkable = "it is a ResMLP with stored maps, which has no attention: see atfamily.resmlp.static_maps"

    def __init__(self, student: MlpMixer, maps: Sequence[Tensor]):
        super().__init__(student)
        self.register_buffer("maps", torch.stack(list(maps)).detach().clone(), persistent=False)

    @property
    def needs_teacher(self) -> bool:
        """False: after training, `.student` alone is the result."""
        return False

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) for images (B, 3, height, width) and, in training, the unweighted
        loss."""
        logits = self.student(images)
        if not self.training:
            return Transferred(logits, logits.new_zeros(()))
        error = torch.stack(static_maps(self.student)) - self.maps
        return Transferred(logits, error.square().sum(-1).mean(-1).sum())
