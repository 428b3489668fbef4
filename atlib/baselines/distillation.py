"""The distillations that attention transfer is compared with: of features and of predictions, in the same
harness."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping

from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.attention import walk
from atlib.attention_transfer import Transferred
from atlib.losses import feature_mse, hard_distillation, soft_distillation
from atlib.pair import Normalisation, Pair
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
    """The student's residual stream is pulled to the teacher's, after each of `layers` (None for all; a
    mapping {student's layer: teacher's} where the depths differ): squared error.

    Where the widths differ, a linear layer for each pair of layers makes the student's stream as wide as the
    teacher's; these are trained beside the student and are no part of `.student`. Narrow students gain little
    from wide teachers this way (arXiv 2511.15572). Both need equal prefix tokens and patch grids.
    normalisation: of the images that the pair is given (`atlib.pair.Pair`). Raises `ValueError` where they
    differ, or the depths without a mapping, `Unwalkable` for models `walk` refuses. Source: the
    feature-distillation baseline of arXiv 2411.09702 (81.3 % with ViT-L).
    """

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
            raise ValueError(
                "features correspond only in ViTs of the same (prefix tokens, patch grid): teacher"
                f" {tokens[0]}, student {tokens[1]}; attention maps can be transferred (atlib.Plan)"
            )
        depths = [len(vit.blocks) for vit in (teacher, student)]
        if depths[0] != depths[1] and not isinstance(layers, Mapping):
            raise ValueError(f"depths {depths[0]} and {depths[1]}: give layers={{student's: teacher's}}")
        super().__init__(student, teacher, normalisation=normalisation)
        self.pairs = Plan(layers=layers).pairs_of(depths[1], depths[0])
        self.layers = tuple(layer for layer, _ in self.pairs)
        self.projectors = None
        if student.embed_dim != teacher.embed_dim:
            weight = next(student.parameters())
            like = {"device": weight.device, "dtype": weight.dtype}
            projectors = (nn.Linear(student.embed_dim, teacher.embed_dim, **like) for _ in self.pairs)
            self.projectors = nn.ModuleList(projectors)

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits and the squared error between the residual streams."""
        last = max(of_teacher for _, of_teacher in self.pairs)
        with self.frozen_teachers():
            shown = self.for_teacher(images)
            if last + 1 < len(self.teacher.blocks):
                theirs = walk(self.teacher, shown, stop_after=last + 1).stream
            else:
                theirs = walk(self.teacher, shown, head=False).stream
        own = walk(self.student, images)
        streams = [own.stream[layer] for layer in self.layers]
        if self.projectors is not None:
            streams = [project(stream) for project, stream in zip(self.projectors, streams)]
        return Transferred(own.logits, feature_mse(streams, [theirs[i].clone() for _, i in self.pairs]))


class TokenDistillation(Distillation):
    """The student's tokens after its last norm, through a linear layer of their own, are pulled to those of a
    teacher of any width and depth, scaled to mean 0 and variance 1 each: squared error.

    The linear layer is trained beside the student and is no part of `.student`. The two need equally many
    tokens. tokens: gives the teacher's tokens (B, N, D) of images as the student is given them, for instance
    stored ones; None: the teacher makes them in every step. normalisation: of the images that the pair is
    given (`atlib.pair.Pair`). Source: Wei et al. 2022 (arXiv 2205.14141), section 3, whose loss is smooth L1
    and whose students see no labels meanwhile; ours has the book's squared error, beside labels. Raises
    `ValueError` where the numbers of tokens differ.
    """

    def __init__(
        self,
        teacher: VisionTransformer,
        student: VisionTransformer,
        tokens: Callable[[Tensor], Tensor] | None = None,
        *,
        normalisation: Normalisation | None = None,
    ):
        super().__init__(student, teacher, normalisation=normalisation)
        self.projector = nn.Linear(student.embed_dim, teacher.embed_dim)
        self._tokens = tokens or (lambda images: teacher.forward_features(self.for_teacher(images)))

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits and the squared error of its projected tokens."""
        with self.frozen_teachers():
            theirs = self._tokens(images)
        own = self.student.forward_features(images)
        if own.shape[1] != theirs.shape[1]:
            raise ValueError(
                f"{own.shape[1]} tokens of the student and {theirs.shape[1]} of the teacher: they must be"
                f" as many"
            )
        target = nn.functional.layer_norm(theirs, theirs.shape[-1:]).clone()
        return Transferred(self.student.forward_head(own), feature_mse([self.projector(own)], [target]))


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
        with self.frozen_teachers():
            theirs = self.teacher(self.for_teacher(images))
        logits, theirs = self.student(images), theirs.clone()
        if self.hard:
            return Transferred(logits, hard_distillation(logits, theirs))
        return Transferred(logits, soft_distillation(logits, theirs, self.temperature))
