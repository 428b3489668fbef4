"""SEED: a student learns without labels which images its teacher finds alike, the distillation of what a
contrast has taught.

Source: Fang et al. 2021, "SEED: Self-supervised Distillation for Visual Representation" (arXiv 2101.04731).
What is said here of "the published code" was read in github.com/jacobswan1/SEED at f236cac.
"""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.methods.distillation import Distillation
from atlib.pair import Normalisation
from atlib.train.contrast import features
from atlib.train.distributed import gathered
from atlib.transfer import Transferred, without_history


class SimilarityDistillation(Distillation):
    """A student whose features shall be as near to those of other images as the teacher's are.

    The others are in a queue of the teacher's features, scaled to length 1, of the images that came last; an
    image's own comes before them. The transfer loss is the cross-entropy from the teacher's to the student's
    shares of the queue, softmax(cosines / temperature), the mean over the batch. The student's features pass
    a projector of two layers, which is thrown away, to the teacher's width; both see the same view. Without
    labels, as in the paper: `Recipe(task_weight=0.0, transfer_weight=1.0)`. In eval mode the loss is 0 and
    the teacher is not run. `.student` alone is the result.

    teacher: a ViT, whose features are those that its head would read, such as a teacher by MoCo or DINO
    (`atlib.train.contrast`). queue: how many features; it is filled with random ones at first, drawn from
    torch's global generator, is kept in checkpoints, and gets the images of all processes. normalisation: of
    the images that the pair is given (`atlib.pair.Pair`).

    Source: arXiv 2101.04731, section 3.2; the student's temperature is the published code's, the teacher's is
    this project's choice, where the code's default is 1e-4. A departure: published teachers are compared
    after their projector, which is not kept here. Raises `ValueError` for temperatures not above 0 and for
    an empty queue.
    """

    queue: Tensor
    next_place: Tensor

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
            raise ValueError(
                f"teacher_temperature={teacher_temperature}, student_temperature={student_temperature}: both"
                " must be above 0"
            )
        if queue < 1:
            raise ValueError(f"queue={queue}: it holds the features of at least one image")
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

    def transferred(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and the loss, a scalar; the teacher's features go into the queue."""
        with without_history():
            theirs = nn.functional.normalize(features(self.teacher, self.for_teacher(images)), dim=1)
        theirs = theirs.clone()  # outlives inference mode, which autograd needs
        tokens = self.student.forward_features(images)
        read = self.student.forward_head(tokens, pre_logits=True)
        own = nn.functional.normalize(self.projector(read), dim=1)
        loss = similarity_cross_entropy(
            own, theirs, self.queue, self.student_temperature, self.teacher_temperature
        )
        self._remember(theirs)
        return Transferred(self.student.head(read), loss)

    @torch.no_grad()
    def _remember(self, rows: Tensor) -> None:
        """The newest features take the places of the oldest."""
        rows = gathered(rows)[0][-len(self.queue) :].to(self.queue.dtype)
        places = (self.next_place + torch.arange(len(rows), device=rows.device)) % len(self.queue)
        # not in place: the step's graph has the queue as it was
        self.queue = self.queue.index_copy(0, places, rows)
        self.next_place = (self.next_place + len(rows)) % len(self.queue)


def similarity_cross_entropy(
    own: Tensor, theirs: Tensor, queue: Tensor, student_temperature: float, teacher_temperature: float
) -> Tensor:
    """Cross-entropy between what teacher and student find alike, the mean over the batch: a scalar.

    own, theirs: the student's and the teacher's features of the same images, (B, d), queue: (K, d), all of
    length 1. Compared are an image's cosines with its own feature by the teacher, then with the queue.
    Source: arXiv 2101.04731, section 3.2.
    """

    def alike(x: Tensor, temperature: float) -> Tensor:
        itself = (x * theirs).sum(1, keepdim=True)
        return torch.cat([itself, x @ queue.T], dim=1) / temperature

    p = alike(theirs, teacher_temperature).softmax(1)
    return -(p * alike(own, student_temperature).log_softmax(1)).sum(1).mean()
