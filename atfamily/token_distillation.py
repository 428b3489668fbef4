"""Distillation of a teacher's normalised tokens. Source: Wei et al. 2022 (arXiv 2205.14141)."""

from collections.abc import Callable

import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.attention_transfer import Transferred
from atlib.baselines import Distillation, feature_mse
from atlib.pair import Normalisation


class TokenDistillation(Distillation):
    """The student's tokens after its last norm, through a linear layer of their own, are pulled to those of a
    teacher of any width and depth, scaled to mean 0 and variance 1 each: squared error.

    The linear layer is trained beside the student and is no part of `.student`. The two need equally many
    tokens. tokens: gives the teacher's tokens (B, N, D) of images as the student is given them, for instance
    stored ones; None: the teacher makes them in every step. Source: Wei et al. 2022 (arXiv 2205.14141),
    section 3, whose loss is smooth L1, without labels.
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
            teacher_tokens = self._tokens(images)
        tokens = self.student.forward_features(images)
        target = F.layer_norm(teacher_tokens, teacher_tokens.shape[-1:]).clone()
        return Transferred(self.student.forward_head(tokens), feature_mse([self.projector(tokens)], [target]))
