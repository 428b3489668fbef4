"""Distilled MAE: a masked auto-encoder whose attention is pulled to a teacher's, on the patches that both are
shown.

Source: Wang, Gao, Li, Zhang, Hu 2023, "A Closer Look at Self-Supervised Lightweight Vision Transformers"
(arXiv 2205.14443), section 5, equation 3. What is said here of "the published code" was read in
github.com/wangsr126/mae-lite (Apache-2.0).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.losses import map_cross_entropy
from atlib.pair import Normalisation, Pair
from atlib.plan import Plan
from atlib.train.pretrain import MaskedAutoencoder, walk_visible
from atlib.train.recipe import Recipe
from atlib.transfer import without_history
from atlib.walking import check_timm

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

    A softmax does not see a constant that is added to a row, a squared error does: the mean of the
    differences in a row moves no map. Its square is what `whole` has more than `visible`.
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
    of the attention, unweighted."""

    reconstruction: Tensor
    transfer_loss: Tensor


class DistilledMae(Pair):
    """A masked auto-encoder that shall attend to visible patches as its teacher attends to the same ones.

    In the last layer of both (`layers`: indices from 0, or a mapping {student's layer: teacher's layer}; None
    for the last of each), `match` compares attention logits q kᵀ/√d among prefix tokens and visible patches;
    layers are summed. Before that the student's heads are mixed by a matrix that is learned for each layer, a
    1×1 convolution from its heads to the teacher's without bias, and drawn as PyTorch draws one; as in the
    published code it is there also where the numbers of heads are equal. `mix_heads=False` leaves it out:
    head h is compared with head h. With the defaults, and `Recipe(transfer_weight=1.0)`, this is the
    published method.

    Only the student and the mixing are part of the module; `.student.vit` is the result. The teacher, a ViT
    without a decoder, is frozen in place, moves with `.to(...)`, and is run under inference mode, no further
    than the last layer that is compared. normalisation: of the images that the pair is given
    (`atlib.pair.Pair`).

    Raises `ValueError` for a pair that does not fit, naming all that differs, and for layers that do not
    exist; `Unwalkable` for models that cannot be walked from tokens.

    Source: arXiv 2205.14443, equation 3. That it is logits that are compared, the weight 1, layer 12 of 12
    and the mixing were read in the published code. A departure: where depths differ, the code compares layers
    of one number, this module the last of each. The code's second loss, of hidden states, is off in its own
    experiment and left out here.
    """

    not_walkable = "it is a teacher and a masked auto-encoder: walk its .student.vit or its .teacher"

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
        check_timm(teacher)
        check_timm(student.vit)
        _check_pair(teacher, student.vit, mix_heads)
        super().__init__(student, teacher, normalisation=normalisation)
        depths = len(student.vit.blocks), len(teacher.blocks)
        last = {depths[0] - 1: depths[1] - 1}
        self.layers = Plan(layers=last if layers is None else layers).pairs_of(*depths)
        self.match = match
        heads = _heads(student.vit), _heads(teacher)
        self.mixing = nn.ModuleList(
            nn.Conv2d(*heads, 1, bias=False) if mix_heads else nn.Identity() for _ in self.layers
        )

    @property
    def needs_teacher(self) -> bool:
        """False: after pre-training, `.student.vit` alone is the result."""
        return False

    def forward(self, images: Tensor, order: Tensor | None = None) -> Painted:
        """Both losses for images (B, 3, height, width). order: (B, P), a permutation of the patches per image
        for teacher and student; None draws one."""
        order = self.student.draw_order(images) if order is None else order
        own = self.student.encode(images, order)
        mixed = (mix(own.layers[layer].scores) for (layer, _), mix in zip(self.layers, self.mixing))
        errors = map(self.match, mixed, self.teacher_logits(images, order))
        return Painted(self.student.reconstruction(own.tokens, images, order), sum(errors))

    def teacher_logits(self, images: Tensor, order: Tensor) -> list[Tensor]:
        """The teacher's attention logits among prefix tokens and visible patches, as constants: one
        (B, H, N, N) for each layer that is compared."""
        self.teacher.eval()  # other code may have called .train() on it since
        layers = [of_teacher for _, of_teacher in self.layers]
        with without_history():
            places = order[:, : self.student.visible]
            seen = walk_visible(self.teacher, self.for_teacher(images), places, stop_after=max(layers)).layers
            logits = [seen[layer].scores for layer in layers]
        return [z.clone() for z in logits]  # clones outlive inference mode, which autograd needs


def distilled_mae_loss(model: DistilledMae, images: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    """The auto-encoder's loss + transfer_weight · that of the attention, 1 in the paper; labels are not
    used."""
    reconstruction, transfer_loss = model(images)
    return reconstruction + recipe.transfer_weight * transfer_loss


def _heads(vit: VisionTransformer) -> int:
    return vit.blocks[0].attn.num_heads


def _check_pair(teacher: nn.Module, student: nn.Module, mix_heads: bool) -> None:
    if teacher is student:
        raise ValueError("teacher and student are the same object: build a second ViT")
    if not isinstance(teacher, VisionTransformer):
        raise ValueError(
            f"the teacher is a {type(teacher).__name__}, which may rotate q and k by place, and tokens are"
            " walked without: take a VisionTransformer"
        )
    same = {
        "patch grid": [tuple(vit.patch_embed.grid_size) for vit in (teacher, student)],
        "prefix tokens": [vit.num_prefix_tokens for vit in (teacher, student)],
    }
    if not mix_heads:
        same["heads (or mix_heads=True)"] = [_heads(vit) for vit in (teacher, student)]
    problems = [
        f"{name}: teacher {of_teacher}, student {of_student}"
        for name, (of_teacher, of_student) in same.items()
        if of_teacher != of_student
    ]
    if problems:
        raise ValueError(
            "the student cannot be shown the same patches as this teacher, token for token: "
            + "; ".join(problems)
            + ". Build it with the teacher's."
        )
