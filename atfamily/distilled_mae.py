"""Distilled MAE: a masked auto-encoder whose attention, or whose hidden states, are pulled to a teacher's, on
the patches that both are shown.

Source: Wang, Gao, Li, Zhang, Hu 2023, "A Closer Look at Self-Supervised Lightweight Vision Transformers"
(arXiv 2205.14443), section 5, equation 3. What is said here of "the published code" was read in
github.com/wangsr126/mae-lite (Apache-2.0).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.attention import Walk
from atlib.losses import map_cross_entropy, note
from atlib.mae import MaskedAutoencoder, walk_visible
from atlib.pair import Normalisation, Pair
from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.vit import check_timm

# --- How a layer's attention logits are compared ---

# (the student's, the teacher's), (B, H, N, N) each -> a scalar
Match = Callable[[Tensor, Tensor], Tensor]


class LogitError(NamedTuple):
    """A squared error of attention logits, mean over batch, heads, queries and keys. `whole`: of the logits
    as they are; `visible`: without row means, which is what a map can show of it. Both are scalars."""

    whole: Tensor
    visible: Tensor

    @property
    def invisible_share(self) -> Tensor:
        """The share of the whole error that asks for something no map can show: a scalar, from 0 to 1."""
        return 1 - self.visible / self.whole


def logit_error(z_s: Tensor, z_t: Tensor) -> LogitError:
    """The squared error between the student's and the teacher's attention logits, (B, H, N, N) each, and the
    part of it that maps can show.

    A softmax does not see a constant that is added to a row, a squared error does.
    """
    gap = z_s - z_t.detach()
    return LogitError(gap.square().mean(), (gap - gap.mean(-1, keepdim=True)).square().mean())


def squared_error(z_s: Tensor, z_t: Tensor) -> Tensor:
    """The published match: the mean squared error of attention logits, before the softmax."""
    return logit_error(z_s, z_t).whole


def centred_squared_error(z_s: Tensor, z_t: Tensor) -> Tensor:
    """The same without row means: it asks for nothing but the map. This project's own."""
    return logit_error(z_s, z_t).visible


def cross_entropy_of_maps(z_s: Tensor, z_t: Tensor) -> Tensor:
    """Cross-entropy from the teacher's maps to the student's, in nats, mean over batch, heads and queries:
    what `AttentionTransfer` distills with (arXiv 2411.09702)."""
    return map_cross_entropy(z_s.log_softmax(-1), z_t.softmax(-1))


# --- Pre-training with a teacher ---


class Painted(NamedTuple):
    """What a step computes. `reconstruction`: scalar, the auto-encoder's own loss; `transfer_loss`: scalar,
    of what is compared with the teacher, unweighted."""

    reconstruction: Tensor
    transfer_loss: Tensor


class _TaughtMae(Pair, ABC):
    """A masked auto-encoder with a frozen teacher that is shown the same visible patches."""

    not_walkable = "it is a teacher and a masked auto-encoder: walk its .student.vit or its .teacher"

    def __init__(
        self,
        teacher: VisionTransformer,
        student: MaskedAutoencoder,
        layers: Iterable[int] | Mapping[int, int] | None,
        normalisation: Normalisation | None,
    ):
        check_timm(teacher)
        check_timm(student.vit)
        tokens = [(tuple(vit.patch_embed.grid_size), vit.num_prefix_tokens) for vit in (teacher, student.vit)]
        if tokens[0] != tokens[1]:
            raise ValueError(f"(patch grid, prefix tokens): teacher {tokens[0]}, student {tokens[1]}")
        super().__init__(student, teacher, normalisation=normalisation)
        depths = len(student.vit.blocks), len(teacher.blocks)
        last = {depths[0] - 1: depths[1] - 1}
        self.layers = Plan(layers=last if layers is None else layers).pairs_of(*depths)
        self.last = max(of_teacher for _, of_teacher in self.layers)  # where the teacher's walk ends

    @property
    def needs_teacher(self) -> bool:
        """False: after pre-training, `.student.vit` alone is the result."""
        return False

    def forward(self, images: Tensor, order: Tensor | None = None) -> Painted:
        """Both losses for images (B, 3, height, width). order: (B, P), a permutation of the patches per image
        for teacher and student; None draws one."""
        order = self.student.draw_order(images) if order is None else order
        with self.frozen_teachers():
            targets = self.targets_of(self.for_teacher(images), order[:, : self.student.visible])
        student_walk = walk_visible(self.student.vit, images, order[:, : self.student.visible])
        # clones outlive inference mode, which autograd needs
        transfer_loss = self.transfer_loss(student_walk, [target.clone() for target in targets])
        return Painted(self.student.reconstruction(student_walk.tokens, images, order), transfer_loss)

    @abstractmethod
    def targets_of(self, images: Tensor, places: Tensor) -> list[Tensor]:
        """The teacher's side, a tensor for each layer that is compared, for its own images and their visible
        patches, (B, visible)."""

    @abstractmethod
    def transfer_loss(self, student_walk: Walk, targets: Sequence[Tensor]) -> Tensor:
        """The sum over layers of how far the student's walk is from the targets, a scalar."""


class DistilledMae(_TaughtMae):
    """A masked auto-encoder that shall attend to visible patches as its teacher attends to the same ones.

    In the last layer of both (`layers`: indices from 0, or a mapping {student's layer: teacher's layer}; None
    for the last of each), `match` compares attention logits q kᵀ/√d among prefix tokens and visible patches;
    layers are summed. Before that the student's heads are mixed by a matrix that is learned for each layer, a
    1×1 convolution from its heads to the teacher's without bias, and drawn as PyTorch draws one; as in the
    published code it is there also where the numbers of heads are equal. `mix_heads=False` leaves it out:
    head h is compared with head h. With the defaults, and `Recipe(transfer_weight=1.0)`, this is the
    published method.

    `.student.vit` is the result. The teacher is a ViT without a decoder.

    Source: arXiv 2205.14443, equation 3. Logits, the weight 1, layer 12 of 12 and the mixing were read in the
    published code, which compares layers of one number where depths differ.
    """

    def __init__(
        self,
        teacher: VisionTransformer,
        student: MaskedAutoencoder,
        *,
        layers: Iterable[int] | Mapping[int, int] | None = None,
        match: Match = squared_error,
        mix_heads: bool = True,
        normalisation: Normalisation | None = None,
    ):
        heads = [vit.blocks[0].attn.num_heads for vit in (student.vit, teacher)]
        if not mix_heads and heads[0] != heads[1]:
            raise ValueError(f"{heads[1]} heads of the teacher, {heads[0]} of the student: mix_heads=True")
        super().__init__(teacher, student, layers, normalisation)
        self.match = match
        self.mixing = nn.ModuleList(
            nn.Conv2d(*heads, 1, bias=False) if mix_heads else nn.Identity() for _ in self.layers
        )

    def targets_of(self, images: Tensor, places: Tensor) -> list[Tensor]:
        """The teacher's attention logits among prefix tokens and visible patches, (B, H, N, N) each."""
        seen = walk_visible(self.teacher, images, places, stop_after=self.last).layers
        return [seen[of_teacher].scores for _, of_teacher in self.layers]

    def transfer_loss(self, student_walk: Walk, targets: Sequence[Tensor]) -> Tensor:
        """`match` of the mixed heads, summed over layers."""
        mixed = (mix(student_walk.layers[layer].scores) for (layer, _), mix in zip(self.layers, self.mixing))
        return sum(map(self.match, mixed, targets))


class DistilledHiddenMae(_TaughtMae):
    """A masked auto-encoder whose hidden states shall be its teacher's, of the same visible patches: features
    in place of attention, before there are labels.

    A layer's hidden state is the residual stream after it, behind the norm that reads it: the first norm of
    the next block, or the final norm. The student's goes through a linear map without bias to the teacher's
    width, one for each layer, and is compared by a mean squared error over batch, tokens (prefix tokens too)
    and width; layers are summed. `layers` as in `DistilledMae`.

    Source: the second loss of the published code of arXiv 2205.14443, which its experiment leaves off. A
    departure: where depths differ, the code compares layers of one number, this module the last of each.
    """

    def __init__(
        self,
        teacher: VisionTransformer,
        student: MaskedAutoencoder,
        *,
        layers: Iterable[int] | Mapping[int, int] | None = None,
        normalisation: Normalisation | None = None,
    ):
        super().__init__(teacher, student, layers, normalisation)
        widths = student.vit.embed_dim, teacher.embed_dim
        self.widening = nn.ModuleList(nn.Linear(*widths, bias=False) for _ in self.layers)

    def targets_of(self, images: Tensor, places: Tensor) -> list[Tensor]:
        """The teacher's hidden states of prefix tokens and visible patches, (B, N, D) each."""
        beyond = None if self.last + 1 == len(self.teacher.blocks) else self.last + 1
        stream = walk_visible(self.teacher, images, places, stop_after=beyond).stream
        return [_as_read(self.teacher, stream, of_teacher) for _, of_teacher in self.layers]

    def transfer_loss(self, student_walk: Walk, targets: Sequence[Tensor]) -> Tensor:
        """The squared error of the widened hidden states, summed over layers."""
        states = (_as_read(self.student.vit, student_walk.stream, layer) for layer, _ in self.layers)
        return sum(
            nn.functional.mse_loss(widen(state), target)
            for widen, state, target in zip(self.widening, states, targets, strict=True)
        )


def _as_read(vit: VisionTransformer, stream: Sequence[Tensor], layer: int) -> Tensor:
    """The stream after a layer as what comes next reads it: normalised."""
    if layer + 1 < len(vit.blocks):
        return vit.blocks[layer + 1].norm1(stream[layer])
    return vit.fc_norm(vit.norm(stream[layer]))  # one of the two is the identity, by the ViT's pooling


def distilled_mae_loss(
    model: DistilledMae | DistilledHiddenMae, images: Tensor, targets: Tensor, recipe: Recipe
) -> Tensor:
    """The auto-encoder's loss + transfer_weight · that of the attention or of hidden states, 1 in the paper;
    labels are not used. Both are noted, without the weight, as "reconstruction" and "transfer_loss"."""
    reconstruction, transfer_loss = model(images)
    reconstruction = note("reconstruction", reconstruction)
    return reconstruction + recipe.transfer_weight * note("transfer_loss", transfer_loss)
