"""The distillations that attention transfer is compared with: of features and of predictions, in the same
harness."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping

from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.losses import feature_mse, hard_distillation, soft_distillation
from atlib.pair import Normalisation, Pair
from atlib.plan import Plan
from atlib.transfer import Transferred, without_history
from atlib.walking import check_timm, walk


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
        self.teacher.eval()
        return self.transferred(images)

    @abstractmethod
    def transferred(self, images: Tensor) -> Transferred:
        """What the kind of distillation computes in training."""


class FeatureDistillation(Distillation):
    """The student's residual stream is pulled to the teacher's, after each of `layers` (None for all):
    squared error.

    Teacher and student need equal width, depth and tokens. normalisation: of the images that the pair is
    given (`atlib.pair.Pair`). Raises `ValueError` where they differ,
    `Unwalkable` for models `walk` refuses. Source: the feature-distillation baseline of arXiv 2411.09702
    (81.3 % with ViT-L).
    """

    def __init__(
        self,
        teacher: VisionTransformer | Eva,
        student: VisionTransformer | Eva,
        layers: Iterable[int] | None = None,
        *,
        normalisation: Normalisation | None = None,
    ):
        check_timm(teacher)
        check_timm(student)
        sizes = [
            (len(vit.blocks), vit.embed_dim, vit.num_prefix_tokens, tuple(vit.patch_embed.grid_size))
            for vit in (teacher, student)
        ]
        if sizes[0] != sizes[1]:
            raise ValueError(
                "features correspond only in ViTs of the same (depth, width, prefix tokens, patch grid):"
                f" teacher {sizes[0]}, student {sizes[1]}; attention maps can be transferred between more"
                " kinds (atlib.Plan)"
            )
        if isinstance(layers, Mapping):
            raise ValueError(
                f"layers={layers!r}: features are distilled between the same layer of both, so give a list of"
                " layers"
            )
        super().__init__(student, teacher, normalisation=normalisation)
        self.layers = Plan(layers=layers).layers_of(len(student.blocks))

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits and the squared error between the residual streams."""
        last = max(self.layers)
        with without_history():
            shown = self.for_teacher(images)
            if last + 1 < len(self.teacher.blocks):
                theirs = walk(self.teacher, shown, stop_after=last + 1, checked=True).stream
            else:
                theirs = walk(self.teacher, shown, head=False, checked=True).stream
        own = walk(self.student, images, checked=True)
        both = [own.stream[i] for i in self.layers], [theirs[i].clone() for i in self.layers]
        return Transferred(own.logits, feature_mse(*both))


class LogitDistillation(Distillation):
    """The student's class predictions are pulled to the teacher's, which knows the same classes; any two
    classifiers will do.

    Soft (`hard=False`): τ² · KL at `temperature` τ, for `Recipe(task_weight=0.9, transfer_weight=0.1)`. Hard:
    cross-entropy with the teacher's top class, for `Recipe(task_weight=0.5, transfer_weight=0.5)`: with these
    weights they are DeiT's two formulas. normalisation: of the images that the pair is given
    (`atlib.pair.Pair`). Source: Touvron et al. 2021 (arXiv 2012.12877), equations 2 and 3; τ = 3. Raises
    `ValueError` for a temperature not above 0.
    """

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
        if not temperature > 0:
            raise ValueError(f"the temperature must be above 0, got {temperature}")
        self.temperature, self.hard = temperature, hard

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits and the distillation loss. Raises `ValueError` when the teacher predicts other
        classes."""
        with without_history():
            theirs = self.teacher(self.for_teacher(images))
        logits, theirs = self.student(images), theirs.clone()
        if self.hard:
            return Transferred(logits, hard_distillation(logits, theirs))
        return Transferred(logits, soft_distillation(logits, theirs, self.temperature))
