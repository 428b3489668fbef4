"""The methods that attention transfer is compared with: features, predictions, and mean maps."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib._util import in_eval_mode
from atlib.attention import Instead, Walk, walk
from atlib.attention_transfer import Transferred
from atlib.pair import Normalisation, Pair, View, stated
from atlib.plan import Plan
from atlib.vit import check_timm


class Distillation(Pair):
    """A student whose teacher speaks in training only: evaluated, the student is alone."""

    @property
    def needs_teacher(self) -> bool:
        """False: after training, `.student` alone is the result."""
        return False

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and, in training, the unweighted transfer loss for images (B, 3,
        height, width)."""
        if not self.training:
            logits = self.student(images)
            return Transferred(logits, logits.new_zeros(()))
        return self.transferred(images)

    @abstractmethod
    def transferred(self, images: Tensor) -> Transferred:
        """What the kind of distillation computes in training."""


class FeatureDistillation(Distillation):
    """The student's residual stream is pulled to the teacher's by squared error, after each of `layers` (None
    for all; a mapping {student's layer: teacher's} where the depths differ); where the widths differ, through
    a linear layer for each pair, no part of `.student`. Source: arXiv 2411.09702, its baseline."""

    def __init__(
        self,
        teacher: VisionTransformer | Eva,
        student: VisionTransformer | Eva,
        layers: Iterable[int] | Mapping[int, int] | None = None,
        *,
        normalisation: Normalisation | None = None,
    ):
        check_timm(teacher)
        check_timm(student)
        tokens = [(vit.num_prefix_tokens, tuple(vit.patch_embed.grid_size)) for vit in (teacher, student)]
        if tokens[0] != tokens[1]:
            raise ValueError(f"(prefix tokens, patch grid) differ: teacher {tokens[0]}, student {tokens[1]}")
        depths = [len(vit.blocks) for vit in (teacher, student)]
        if depths[0] != depths[1] and not isinstance(layers, Mapping):
            raise ValueError(f"depths {depths[0]} and {depths[1]}: give layers={{student's: teacher's}}")
        super().__init__(student, teacher, normalisation=normalisation)
        self.pairs = Plan(layers=layers).pairs_of(depths[1], depths[0])
        self.projectors = None
        if student.embed_dim != teacher.embed_dim:
            weight = next(student.parameters())
            sizes = student.embed_dim, teacher.embed_dim
            self.projectors = nn.ModuleList(
                nn.Linear(*sizes, device=weight.device, dtype=weight.dtype) for _ in self.pairs
            )

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits and the squared error between the residual streams."""
        last = max(of_teacher for _, of_teacher in self.pairs)
        with self.frozen_teachers():
            stop = last + 1 if last + 1 < len(self.teacher.blocks) else None
            teacher_stream = walk(self.teacher, self.for_teacher(images), head=False, stop_after=stop).stream
        seen = walk(self.student, images)
        streams = [seen.stream[layer] for layer, _ in self.pairs]
        if self.projectors is not None:
            streams = [project(stream) for project, stream in zip(self.projectors, streams)]
        targets = [teacher_stream[of_teacher].clone() for _, of_teacher in self.pairs]
        return Transferred(seen.logits, feature_mse(streams, targets))


class LogitDistillation(Distillation):
    """The student's class predictions are pulled to the teacher's, which knows the same classes. Soft: τ² ·
    KL at `temperature` τ, for `Recipe(task_weight=0.9, transfer_weight=0.1)`. Hard: cross-entropy with the
    teacher's top class, for `Recipe(task_weight=0.5, transfer_weight=0.5)`. Source: Touvron et al. 2021
    (arXiv 2012.12877), equations 2 and 3."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        temperature: float = 3.0,
        hard: bool = False,
        *,
        normalisation: Normalisation | None = None,
    ):
        super().__init__(student, teacher, normalisation=normalisation)
        self.temperature, self.hard = temperature, hard

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits and the distillation loss."""
        with self.frozen_teachers():
            teacher_logits = self.teacher(self.for_teacher(images))
        logits, teacher_logits = self.student(images), teacher_logits.clone()
        if self.hard:
            return Transferred(logits, hard_distillation(logits, teacher_logits))
        return Transferred(logits, soft_distillation(logits, teacher_logits, self.temperature))


# images (B, 3, height, width) -> the index of each one's group, int64 (B,)
Groups = Callable[[Tensor], Tensor]


def one_group(images: Tensor) -> Tensor:
    """All images in one group."""
    return torch.zeros(len(images), dtype=torch.long, device=images.device)


class StoredMaps(Pair):
    """A student whose maps are, for every image, those that are stored for its group. maps: a list over
    layers of (groups, H, N, N), which become buffers."""

    not_walkable = "it is a student with stored maps: walk its .student"

    def __init__(
        self,
        student: VisionTransformer | Eva,
        maps: Iterable[Tensor],
        group_of: Groups = one_group,
        *,
        normalisation: Normalisation | None = None,
    ):
        check_timm(student)
        super().__init__(student, normalisation=normalisation)
        self._group_of = group_of
        for layer, of_layer in enumerate(maps := list(maps)):
            # a copy, since a checkpoint is read into it in place
            self.register_buffer(f"maps_{layer}", of_layer.clone())
        tokens = student.num_prefix_tokens + student.patch_embed.num_patches
        of_student = [(block.attn.num_heads, tokens, tokens) for block in student.blocks]
        if (stored := [tuple(of_layer.shape[1:]) for of_layer in maps]) != of_student:
            raise ValueError(
                f"the maps are (heads, tokens, tokens) {stored[0]} in {len(stored)} layers, "
                f"the student's {of_student[0]} in {len(of_student)}"
            )

    @property
    def needs_teacher(self) -> bool:
        """True: the student works only with the maps that came from the teacher."""
        return True

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) for images (B, 3, height, width); no transfer loss."""
        logits = self.walk(images).logits
        return Transferred(logits, logits.new_zeros(()))

    def walk(self, images: Tensor) -> Walk:
        """The walk of the student for images (B, 3, height, width)."""
        groups, layers = self._group_of(images), range(len(self.student.blocks))
        replace = {layer: Instead(map=getattr(self, f"maps_{layer}")[groups]) for layer in layers}
        return walk(self.student, images, replace=replace)


class MeanMapCopy(StoredMaps):
    """A student whose maps are, for every image, the teacher's mean map over the reference images of the same
    group, of `number` groups: with one, the average over examples of arXiv 2411.09702, appendix. reference:
    images (n, 3, height, width), or batches of them."""

    def __init__(
        self,
        teacher: VisionTransformer | Eva,
        student: VisionTransformer | Eva,
        reference: Tensor | Iterable[Tensor],
        group_of: Groups = one_group,
        number: int = 1,
        *,
        normalisation: Normalisation | None = None,
    ):
        normalisation = stated(normalisation, [teacher])
        maps = mean_maps(teacher, reference, group_of, number, normalisation=normalisation)
        super().__init__(student, maps, group_of, normalisation=normalisation)


@torch.no_grad()
def mean_maps(
    vit: VisionTransformer | Eva,
    images: Tensor | Iterable[Tensor],
    group_of: Groups = one_group,
    number: int = 1,
    normalisation: Normalisation | None = None,
) -> list[Tensor]:
    """The mean map of every group and layer: a list over layers of (number, H, N, N). images: (n, 3, height,
    width), of which 500 are walked at a time, or batches of them."""
    view = View.of(vit)
    counts = torch.zeros(number, dtype=torch.long)
    sums: list[Tensor] = []
    for part in images.split(500) if isinstance(images, Tensor) else images:
        groups = group_of(part)
        of_part = torch.bincount(groups.cpu(), minlength=number)
        if len(of_part) > number:
            raise ValueError(f"an image is in group {len(of_part) - 1}, and number={number}")
        counts = counts + of_part
        with in_eval_mode(vit):
            maps = [seen.map for seen in walk(vit, view.show(part, normalisation), head=False).layers]
        # a sum in half precision would stop growing after some hundred images
        exact = torch.promote_types(maps[0].dtype, torch.float32)
        sums = sums or [p.new_zeros(number, *p.shape[1:], dtype=exact) for p in maps]
        for total, p in zip(sums, maps):
            total.index_add_(0, groups.to(p.device), p.to(total.dtype))
    if (counts == 0).any():
        raise ValueError(f"every group needs an image; images per group: {counts.tolist()}")
    return [total / counts.to(total.device)[:, None, None, None] for total in sums]


def feature_mse(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Squared error between residual streams (B, N, D): mean over elements, summed over layers."""
    shapes = [[tuple(stream.shape) for stream in streams] for streams in (student, teacher)]
    if not student or shapes[0] != shapes[1]:
        raise ValueError(f"the student's residual streams are {shapes[0]}, the teacher's {shapes[1]}")
    return sum(F.mse_loss(x, target.detach()) for x, target in zip(student, teacher))


def soft_distillation(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """τ² · KL(teacher ‖ student) of predictions (B, classes) softened by the temperature τ: a scalar, in
    nats, mean over the batch (arXiv 2012.12877, equation 2)."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: it must be above 0")
    _check_logits(student_logits, teacher_logits)
    # in float32 at least: rounded shares do not sum to 1, and the divergence would be below 0
    logits = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (student_logits, teacher_logits))
    log_p_s, log_p_t = ((x / temperature).log_softmax(-1) for x in logits)
    log_p_t = log_p_t.detach()
    return temperature**2 * (log_p_t.exp() * (log_p_t - log_p_s)).sum(-1).mean()


def hard_distillation(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Cross-entropy of logits (B, classes) with the teacher's most likely class as the label: a scalar, in
    nats, mean over the batch (arXiv 2012.12877, equation 3)."""
    _check_logits(student_logits, teacher_logits)
    return F.cross_entropy(student_logits, teacher_logits.argmax(-1))


def _check_logits(student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:  # (B, 1) would be broadcast
        raise ValueError(f"logits are {tuple(student.shape)} and {tuple(teacher.shape)}: the same classes")
