"""SEED and CompRess: a student learns without labels which images its teacher finds alike, the distillation
of what a contrast has taught.

Sources: Fang et al. 2021, "SEED: Self-supervised Distillation for Visual Representation" (arXiv 2101.04731);
Abbasi Koohpayegani et al. 2020, "CompRess: Self-Supervised Learning by Compressing Representations" (arXiv
2010.14713). What is said here of "the published code" was read in github.com/jacobswan1/SEED at f236cac and
in github.com/UMBCvision/CompRess at c5e57ed.
"""

from abc import abstractmethod

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atfamily.contrast import features
from atfamily.processes import gathered
from atlib.attention_transfer import Transferred
from atlib.baselines import Distillation
from atlib.pair import Normalisation


class QueueDistillation(Distillation):
    """A student that is compared with its teacher by features of the images that came last."""

    next_place: Tensor  # in the queues

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and the loss, a scalar; the features of both go into the queues."""
        with self.frozen_teachers():
            of_teacher = nn.functional.normalize(features(self.teacher, self.for_teacher(images)), dim=1)
        read = self.student.forward_head(self.student.forward_features(images), pre_logits=True)
        # a clone outlives inference mode, which autograd needs
        return Transferred(self.student.head(read), self.loss(read, of_teacher.clone()))

    @abstractmethod
    def loss(self, read: Tensor, teacher_features: Tensor) -> Tensor:
        """The loss of what the student's head reads (B, D) and the teacher's features (B, d), of length 1."""


class SimilarityDistillation(QueueDistillation):
    """A student whose features shall be as near to those of other images as the teacher's are.

    The others are in a queue of the teacher's features, scaled to length 1, of the images that came last; an
    image's own comes before them. The transfer loss is the cross-entropy from the teacher's to the student's
    shares of the queue, softmax(cosines / temperature), the mean over the batch. The student's features pass
    a projector of two layers, which is thrown away, to the teacher's width; both see the same view. Without
    labels, as in the paper: `Recipe(task_weight=0.0, transfer_weight=1.0)`. `.student` alone is the result.

    Features are those that a head would read. queue: how many features; random ones at first.

    Source: arXiv 2101.04731, section 3.2; the student's temperature is the published code's, whose teacher
    has 1e-4. A departure: published teachers are compared after their projector, which is not kept here.
    """

    queue: Tensor

    def __init__(
        self,
        teacher: VisionTransformer,
        student: VisionTransformer,
        *,
        queue: int = 65536,
        teacher_temperature: float = 0.01,
        student_temperature: float = 0.2,
        normalisation: Normalisation | None = None,
    ):
        if not min(teacher_temperature, student_temperature) > 0:
            raise ValueError(f"temperatures {teacher_temperature} and {student_temperature}: above 0")
        super().__init__(student, teacher, normalisation=normalisation)
        self.teacher_temperature, self.student_temperature = teacher_temperature, student_temperature
        width = student.num_features
        self.projector = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, teacher.num_features)
        )
        self.register_buffer(
            "queue", nn.functional.normalize(torch.randn(queue, teacher.num_features), dim=1)
        )
        self.register_buffer("next_place", torch.zeros((), dtype=torch.long))

    def loss(self, read: Tensor, teacher_features: Tensor) -> Tensor:
        """Cross-entropy over the queue, into which the teacher's features then go."""
        student_features = nn.functional.normalize(self.projector(read), dim=1)
        loss = similarity_cross_entropy(
            student_features, teacher_features, self.queue, self.student_temperature, self.teacher_temperature
        )
        self.queue, self.next_place = _with_newest(self.queue, self.next_place, teacher_features)
        return loss


class CompRess(QueueDistillation):
    """A student to whom the images that came last shall be as near, among its own features, as they are to
    the teacher among the teacher's.

    Each of both has a queue of its own features of the same images, scaled to length 1, so that widths may
    differ and no projector is needed. The transfer loss is the KL divergence from the teacher's shares of its
    queue to the student's of its own, softmax(cosines / temperature), the mean over the batch; an image's own
    features are in neither queue yet. Without labels, as in the paper: `Recipe(task_weight=0.0,
    transfer_weight=1.0)`. The queues are as in `SimilarityDistillation`, which is close to the paper's form
    with one queue.

    Source: arXiv 2010.14713, section 3, the form with two queues; temperature 0.04 and 128,000 places are the
    published code's.
    """

    own_queue: Tensor
    teacher_queue: Tensor

    def __init__(
        self,
        teacher: VisionTransformer,
        student: VisionTransformer,
        *,
        queue: int = 128000,
        temperature: float = 0.04,
        normalisation: Normalisation | None = None,
    ):
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: it must be above 0")
        super().__init__(student, teacher, normalisation=normalisation)
        self.temperature = temperature
        for name, vit in (("own_queue", student), ("teacher_queue", teacher)):
            self.register_buffer(name, nn.functional.normalize(torch.randn(queue, vit.num_features), dim=1))
        self.register_buffer("next_place", torch.zeros((), dtype=torch.long))

    def loss(self, read: Tensor, teacher_features: Tensor) -> Tensor:
        """KL divergence between both shares; then the features of both go into their queues."""
        student_features = nn.functional.normalize(read, dim=1)
        p = teacher_features @ self.teacher_queue.T / self.temperature
        q = student_features @ self.own_queue.T / self.temperature
        loss = nn.functional.kl_div(
            q.log_softmax(1), p.log_softmax(1), reduction="batchmean", log_target=True
        )
        self.own_queue, _ = _with_newest(self.own_queue, self.next_place, student_features)
        self.teacher_queue, self.next_place = _with_newest(
            self.teacher_queue, self.next_place, teacher_features
        )
        return loss


@torch.no_grad()
def _with_newest(queue: Tensor, next_place: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The queue in which the rows of all processes have taken the places of the oldest, from `next_place` on,
    and the place after them. A new tensor: the step's graph has the queue as it was."""
    newest = gathered(rows)[0][-len(queue) :].to(queue.dtype)
    places = (next_place + torch.arange(len(newest), device=rows.device)) % len(queue)
    return queue.index_copy(0, places, newest), (next_place + len(newest)) % len(queue)


def similarity_cross_entropy(
    student: Tensor, teacher: Tensor, queue: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """Cross-entropy between what teacher and student find alike, the mean over the batch: a scalar.

    student, teacher: features of the same images, (B, d), queue: (K, d), all of
    length 1. Compared are an image's cosines with its own feature by the teacher, then with the queue.
    Source: arXiv 2101.04731, section 3.2.
    """

    def alike(x: Tensor, temperature: float) -> Tensor:
        itself = (x * teacher).sum(1, keepdim=True)
        return torch.cat([itself, x @ queue.T], dim=1) / temperature

    p = alike(teacher, teacher_temperature).softmax(1)
    return -(p * alike(student, student_temperature).log_softmax(1)).sum(1).mean()
