"""Plan what is transferred, and run teacher and student as one module."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.losses import attention_cross_entropy
from atlib.names import require_known
from atlib.walk import Instead, Seen, sample_drop_path, walk
from atlib.walkable import check_walkable


@dataclass(frozen=True)
class Plan:
    """What goes from teacher to student, and how; checked when it is built.

    `what`: "map", softmax(q kᵀ/√d). `how`: "copy" (the student uses the teacher's maps in place of its own) or "distill"
    (the student makes its own maps and a loss pulls them to the teacher's). `layers`: indices from 0, None for all.
    `share_drop_path`: in training, teacher and student drop the same samples' branches, as the published implementation
    does; with False the teacher drops nothing. Without stochastic depth in the student the two are the same.

    Raises `ValueError` for an unknown choice or for layers that are not distinct integers from 0 on.
    Source: arXiv 2411.09702, sections on Attention Copy and Attention Distillation.
    """

    what: str = "map"
    how: str = "copy"
    layers: Iterable[int] | None = None
    share_drop_path: bool = True

    def __post_init__(self):
        require_known("what", self.what, ("map",))
        require_known("how", self.how, ("copy", "distill"))
        if self.layers is None:
            return
        if not isinstance(self.layers, Iterable):
            raise ValueError(f"layers={self.layers!r}: give several, such as range(9), or a list of one, [{self.layers!r}]")
        layers = tuple(self.layers)
        wrong = [i for i in layers if isinstance(i, bool) or not isinstance(i, int) or i < 0]
        if wrong:
            raise ValueError(f"layers are integers from 0 on, got {wrong}; the last n of a depth-12 ViT are range(12 - n, 12)")
        if not layers or len(set(layers)) != len(layers):
            raise ValueError(f"layers must be distinct and at least one, got {list(layers)}; leave layers out to transfer all")
        object.__setattr__(self, "layers", tuple(sorted(layers)))  # frozen: the normal form is set once, here

    def layers_of(self, depth: int) -> tuple[int, ...]:
        """The transferred layers of a ViT of this depth. Raises `ValueError` when one of them does not exist."""
        layers = tuple(range(depth)) if self.layers is None else self.layers
        if layers[-1] >= depth:
            raise ValueError(f"the plan transfers layer {layers[-1]}, but the depth is {depth}: layers 0 to {depth - 1} exist")
        return layers


class Transferred(NamedTuple):
    """What the pair computes. `logits`: (B, classes), the student's; `transfer_loss`: scalar, unweighted, 0 for Copy."""

    logits: Tensor
    transfer_loss: Tensor


class AttentionTransfer(nn.Module):
    """A student that learns everything from scratch except what `plan` takes from the teacher.

    Only the student is part of the module: `parameters()`, `state_dict()`, `train()` and DDP never see the teacher. The
    teacher passed in is frozen in place (eval mode, no gradients), moves with `.to(...)`, and is run no further than the last
    transferred layer's q and k. Copy needs the teacher at inference too; after Distill, `.student` alone is the result.

    Raises `ValueError` when the two cannot be paired, naming all that differs, and `Unwalkable` for models `walk` refuses.
    """

    def __init__(self, teacher: VisionTransformer, student: VisionTransformer, plan: Plan):
        super().__init__()
        check_walkable(teacher)
        check_walkable(student)
        _check_pair(teacher, student, plan)
        self.plan = plan
        self.layers = plan.layers_of(len(student.blocks))
        self.student = student
        # A tuple keeps the teacher out of nn.Module's registration: it is an input of the method, not a part of the student.
        self._teacher = (teacher.eval().requires_grad_(False),)

    @property
    def teacher(self) -> VisionTransformer:
        """The frozen teacher."""
        return self._teacher[0]

    @property
    def needs_teacher(self) -> bool:
        """Whether the student works at inference only together with the teacher: True for Copy, False for Distill."""
        return self.plan.how == "copy"

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) and the unweighted transfer loss for images (B, 3, height, width)."""
        masks = sample_drop_path(self.student, images) if self.training and self.plan.share_drop_path else None
        target = self.teacher_layers(images, masks)
        if self.plan.how == "copy":
            replace = {i: Instead(q=seen.q, k=seen.k, scale=seen.scale) for i, seen in zip(self.layers, target)}
            logits = walk(self.student, images, replace=replace, drop_path=masks).logits
            return Transferred(logits, logits.new_zeros(()))
        own = walk(self.student, images, drop_path=masks)
        loss = attention_cross_entropy([own.layers[i] for i in self.layers], target)
        return Transferred(own.logits, loss)

    @torch.no_grad()
    def teacher_layers(self, images: Tensor, drop_path=None) -> list[Seen]:
        """What the teacher's transferred layers saw on these images, as constants."""
        self.teacher.eval()  # whoever holds the teacher may have called .train() on it since
        seen = walk(self.teacher, images, stop_after=self.layers[-1], drop_path=drop_path).layers
        return [seen[i] for i in self.layers]

    def _apply(self, fn, recurse=True):
        self.teacher._apply(fn, recurse)  # .to(device), .double(), .cuda() reach the teacher although it is not registered
        return super()._apply(fn, recurse)


def _check_pair(teacher: VisionTransformer, student: VisionTransformer, plan: Plan) -> None:
    if teacher is student:
        raise ValueError("teacher and student are the same object; the student learns from scratch: build a second ViT")
    differ = []

    def compare(what: str, of_teacher, of_student, remedy: str) -> None:
        if of_teacher != of_student:
            differ.append(f"{what}: teacher {of_teacher}, student {of_student} ({remedy})")

    compare("depth", len(teacher.blocks), len(student.blocks), "build the student with depth= as the teacher's")
    compare("heads", teacher.blocks[0].attn.num_heads, student.blocks[0].attn.num_heads, "num_heads= as the teacher's")
    compare("patch grid", tuple(teacher.patch_embed.grid_size), tuple(student.patch_embed.grid_size), "same img_size= and patch_size=")
    compare("prefix tokens", teacher.num_prefix_tokens, student.num_prefix_tokens, "same class_token=, reg_tokens=, distillation token")
    if differ:
        raise ValueError("the student cannot use this teacher's maps, layer by layer and token by token. They differ in "
                         + "; ".join(differ) + ".")
    plan.layers_of(len(student.blocks))
