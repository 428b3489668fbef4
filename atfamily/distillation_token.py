"""DeiT's distillation token: beside the class token, which learns the labels, a second one with a head of its
own learns what a teacher predicts.

Source: Touvron et al. 2021, "Training data-efficient image transformers & distillation through attention"
(arXiv 2012.12877), section 4; what is said here of "the published code" was read in
github.com/facebookresearch/deit.
"""

from typing import NamedTuple

import torch
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from atlib._util import in_eval_mode
from atlib.attention import walk
from atlib.attention_transfer import AttentionTransfer, Transferred
from atlib.baselines import Distillation, hard_distillation, soft_distillation
from atlib.losses import note
from atlib.objectives import task_loss
from atlib.pair import Normalisation
from atlib.recipe import Recipe


class Heads(NamedTuple):
    """What the two heads of a student say, logits (B, classes) each: that of the class token, and that of the
    distillation token."""

    of_class: Tensor
    of_token: Tensor


def both_heads(student: VisionTransformerDistilled, tokens: Tensor) -> Heads:
    """What the heads make of the tokens (B, N, D) after the final norm, of which the first is the class token
    and the second the distillation token."""
    return Heads(
        student.head(student.head_drop(tokens[:, 0])), student.head_dist(student.head_drop(tokens[:, 1]))
    )


class DistillationToken(Distillation):
    """A student whose class token learns the labels and whose distillation token learns the predictions of
    any classifier that knows the same classes.

    In training the logits are those of the class head, and the transfer loss is that of the other head. Hard:
    cross-entropy with the teacher's top class, for `Recipe(task_weight=0.5, transfer_weight=0.5)`. Soft
    (`hard=False`): τ² · KL at `temperature` τ, the mean over the batch, for `Recipe(task_weight=0.9,
    transfer_weight=0.1)`. The published code divides by batch · classes: its soft loss is this one with
    transfer_weight=0.1 / classes. Labels may be missing (`atlib.data.with_unlabelled`): the teacher answers
    for every image. In eval mode the student averages the logits of both heads as timm does.

    `maps`: a transfer of attention to the same student, which goes on beside it; maps_weight times its loss
    is added to the transfer loss. With copied maps the student works only together with their teacher.
    normalisation: of the images that the pair is given (`atlib.pair.Pair`); None: as `maps` was told.

    Source: arXiv 2012.12877, equations 2 and 3, section 4; maps beside it are this project's.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: VisionTransformerDistilled,
        *,
        hard: bool = True,
        temperature: float = 3.0,
        maps: AttentionTransfer | None = None,
        maps_weight: float = 1.0,
        normalisation: Normalisation | None = None,
    ):
        if maps is not None and maps.student is not student:
            raise ValueError("maps= has another student than this")
        of_maps = None if maps is None else maps.normalisation
        if normalisation is not None and of_maps not in (None, normalisation):
            raise ValueError(f"maps= was built for images of {of_maps}, this for {normalisation}")
        beside = () if maps is None else maps.teachers
        super().__init__(student, teacher, *beside, normalisation=normalisation or of_maps)
        self.hard, self.temperature, self.maps_weight = hard, temperature, maps_weight
        # As the teacher: what it holds besides the student and this mapping is an input, not a part.
        self._maps = (maps,)
        self.head_mapping = None if maps is None else maps.head_mapping

    @property
    def maps(self) -> AttentionTransfer | None:
        """The transfer of attention beside it."""
        return self._maps[0]

    @property
    def needs_teacher(self) -> bool:
        """Whether the student works at inference only together with a teacher: that of copied maps."""
        return self.maps is not None and self.maps.needs_teacher

    def forward(self, images: Tensor) -> Transferred:
        """Logits (B, classes) of the class head in training, of both in eval mode, and, in training, the
        unweighted transfer loss, for images (B, 3, height, width)."""
        if self.needs_teacher and not self.training:
            return self.maps(images)
        return super().forward(images)

    def transferred(self, images: Tensor) -> Transferred:
        """Logits of the class head and the loss of the other."""
        with self.frozen_teachers():
            teacher_logits = self.teacher(self.for_teacher(images))
        teacher_logits = teacher_logits.clone()  # outlives inference mode, which autograd needs
        if self.maps is None:
            tokens, beside = self.student.forward_features(images), 0.0
        else:
            seen, beside = self.maps.walk_with_loss(images)
            tokens, beside = self.student.norm(seen.tokens), self.maps_weight * beside
        heads = both_heads(self.student, tokens)
        if self.hard:
            loss = hard_distillation(heads.of_token, teacher_logits)
        else:
            loss = soft_distillation(heads.of_token, teacher_logits, self.temperature)
        return Transferred(heads.of_class, loss + beside)

    def train(self, mode: bool = True) -> "DistillationToken":
        """Set the mode, of the maps too."""
        if self.maps is not None:
            self.maps.train(mode)
        return super().train(mode)


# --- What became of the two tokens ---


class TokenReport(NamedTuple):
    """How alike a student's two tokens are, and with whom its heads agree.

    cosine: (depth + 1,), the mean over images of the cosine between class and distillation token after every
    block, and at last after the final norm. Shares of images for which two name the same class: heads, of the
    two heads; of_class, of_token and together, of each head and of the student as it answers, with the
    teacher.
    """

    cosine: Tensor
    heads: float
    of_class: float
    of_token: float
    together: float


@torch.inference_mode()
def token_report(
    student: VisionTransformerDistilled, teacher: nn.Module, images: Tensor, batch: int = 500
) -> TokenReport:
    """What became of a student's two tokens, measured on images (n, 3, height, width), `batch` at a time.
    Both run in eval mode and are left in the mode they were in.

    """
    cosines, sums = 0.0, torch.zeros(4)
    with in_eval_mode(student, teacher):
        for some in images.split(batch):
            seen = walk(student, some)
            final = student.norm(seen.tokens)
            heads, teacher_class = both_heads(student, final), teacher(some).argmax(-1)
            cosines = cosines + torch.stack(
                [nn.functional.cosine_similarity(x[:, 0], x[:, 1]).sum() for x in (*seen.stream, final)]
            )
            of_class, of_token = heads.of_class.argmax(-1), heads.of_token.argmax(-1)
            both = of_token, teacher_class, teacher_class, teacher_class
            pairs = zip((of_class, of_class, of_token, seen.logits.argmax(-1)), both)
            sums += torch.stack([(left == right).sum() for left, right in pairs]).cpu()
    return TokenReport(cosines.cpu() / len(images), *(sums / len(images)).tolist())


def small_convnet(num_classes: int, widths: tuple[int, ...] = (24, 48, 96, 96)) -> nn.Sequential:
    """A plain convolutional classifier of images (B, 3, height, width), as a teacher without attention: 3 x 3
    convolutions with batch norm, halved in size after all but the last, and the maximum over places. Ours."""
    layers: list[nn.Module] = []
    for before, after in zip((3, *widths), widths):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers[:-1], nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes)
    )


def two_class_tokens_loss(model: nn.Module, images: Tensor, labels: Tensor, recipe: Recipe) -> Tensor:
    """The mean of the task losses of both heads of a ViT with a distillation token and no teacher: a control,
    whose second token is a second class token (arXiv 2012.12877, section 4). timm's ViT must be in its
    `distilled_training` mode, in which it returns both predictions."""
    of_class, of_token = (task_loss(logits, labels, recipe) for logits in model(images))
    return recipe.task_weight * note("task_loss", (of_class + of_token) / 2)
