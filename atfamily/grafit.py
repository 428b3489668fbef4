"""Grafit: features that are finer than the labels they were learned from, by neighbours of the same label and
by two views of the same image.

Source: Touvron et al. 2021, "Grafit: Learning fine-grained image representations with coarse labels" (arXiv
2011.12982), chapter 2 of Touvron's thesis (HAL tel-03945782). We know of no published code. The loss of
neighbours is that of SNCA (Wu, Efros, Yu 2018, arXiv 1808.04560), that of views is BYOL's (Grill et al. 2020,
arXiv 2006.07733).
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atlib.attention import walk
from atlib.attention_transfer import AttentionTransfer
from atlib.data import Images
from atlib.losses import note
from atlib.pair import student_of
from atlib.processes import require_undivided
from atlib.recipe import Recipe

NOT_SEEN = -1  # the label, in a memory, of an image that was not seen yet


def knn_loss(
    x: Tensor, labels: Tensor, numbers: Tensor, memory: Tensor, of_memory: Tensor, temperature: float = 0.05
) -> Tensor:
    """-log of the share of neighbours that have an image's own label, each weighed by exp(cosine /
    temperature): a scalar, in nats; the mean over images.

    x: projected images (B, d), of unit length, with their labels (B,) and their numbers (B,) in the memory.
    memory: all projected images (n, d), of unit length, with their labels (n,), `NOT_SEEN` for those that are
    not in it yet; those without a label are no neighbours. No image is its own neighbour. Images without any
    neighbour of their label are left out; 0 where none has one. Source: arXiv 1808.04560, equations 2 to 4;
    0.05 is arXiv 2011.12982's.
    """
    itself = numbers[:, None] == torch.arange(len(memory), device=x.device)
    usable = (of_memory >= 0) & ~itself  # (B, n)
    scores = (x @ memory.mT / temperature).masked_fill(~usable, -torch.inf)
    same = usable & (of_memory == labels[:, None])
    counted = same.any(1)
    if not counted.any():
        return x.sum() * 0.0
    scores, same = scores[counted], same[counted]
    return (scores.logsumexp(1) - scores.masked_fill(~same, -torch.inf).logsumexp(1)).mean()


def instance_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """1 - cosine between what is predicted of one view and what the slow copy makes of the other, both (B,
    d): a scalar from 0 to 2, the mean over images. The target is a constant."""
    return 1 - F.cosine_similarity(predicted, target.detach(), dim=1).mean()


ONE_CALL = "Grafit writes its memory, and its slow copy follows, at each call"


class Grafit(nn.Module):
    """A ViT, alone or in a pair that copies, that learns from labels which may be coarser than what it is to
    tell apart. `.trunk` is the result.

    `knn_loss` asks that an image's neighbours among the projections of all training images, kept in a memory,
    have its label; `instance_loss`, that the projection of one view of it foretells that of another view, by
    a copy of the network that follows slowly. Without the second it is SNCA+, the paper's baseline.

    view: (images (B, 3, height, width)) -> another view of each, which draws from torch's global generator.
    images: how many there are to learn from, each with a number (`numbered`). projected: the width d of
    projections; hidden: of the projector's one hidden layer, None for a linear projector (the paper's Grafit
    FC). momentum: how much of the copy stays in a step. temperature: of `knn_loss`.

    In training mode `forward` writes the projections into the memory, and the copy follows at the next call,
    so that a step has one call (`accumulate=1`, one process).
    """

    not_walkable = "it is a ViT with a projector, a memory and a slow copy: walk its .trunk"

    def __init__(
        self,
        trunk: nn.Module,
        view: Callable[[Tensor], Tensor],
        images: int,
        *,
        projected: int = 64,
        hidden: int | None = 128,
        momentum: float = 0.99,
        temperature: float = 0.05,
    ):
        super().__init__()
        if isinstance(trunk, AttentionTransfer) and not trunk.needs_teacher:
            raise ValueError(f"{trunk.plan} distills, and its loss has no place in Grafit: take how='copy'")
        width = student_of(trunk).num_features
        self.trunk, self.view, self.momentum, self.temperature = trunk, view, momentum, temperature
        self.projector = _perceptron(width, hidden, projected)
        self.predictor = _perceptron(projected, hidden, projected)
        self.slow_trunk = copy.deepcopy(trunk).requires_grad_(False).eval()
        self.slow_projector = copy.deepcopy(self.projector).requires_grad_(False)
        self.register_buffer("memory", torch.zeros(images, projected))
        self.register_buffer("labels", torch.full((images,), NOT_SEEN))

    def no_weight_decay(self) -> set[str]:
        """Positions and tokens, which AdamW leaves undecayed."""
        inner = "trunk." if student_of(self.trunk) is self.trunk else "trunk.student."
        return {f"{inner}{name}" for name in student_of(self.trunk).no_weight_decay()}

    def train(self, mode: bool = True) -> "Grafit":
        """As of any module, but the slow trunk stays in eval mode; its projector normalises by the batch."""
        super().train(mode)
        self.slow_trunk.eval()
        return self

    def forward(self, images: Tensor, labels: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """`knn_loss` and `instance_loss` of images (B, 3, height, width) with labels and numbers (B,)."""
        if self.training:  # copy ← momentum · copy + (1 - momentum) · what it follows
            for slow, fast in ((self.slow_trunk, self.trunk), (self.slow_projector, self.projector)):
                with torch.no_grad():
                    torch._foreach_lerp_(list(slow.parameters()), list(fast.parameters()), 1 - self.momentum)
        x = self.projector(embed(self.trunk, self.view(images)))
        unit = F.normalize(x, dim=1)
        of_neighbours = knn_loss(unit, labels, numbers, self.memory, self.labels, self.temperature)
        with torch.no_grad():
            target = self.slow_projector(embed(self.slow_trunk, self.view(images)))
        of_views = instance_loss(self.predictor(x), target)
        if self.training:
            # a new tensor: the old one may still be needed for a gradient
            self.memory = self.memory.index_copy(0, numbers, unit.detach().to(self.memory.dtype))
            self.labels = self.labels.index_copy(0, numbers, labels)
        return of_neighbours, of_views


def embed(model: nn.Module, images: Tensor) -> Tensor:
    """What the head of a ViT, or of a pair's student, would read of images (B, 3, height, width): (B, D)."""
    vit = student_of(model)
    walked = model.walk(images) if isinstance(model, AttentionTransfer) else walk(vit, images)
    return vit.forward_head(vit.norm(walked.tokens), pre_logits=True)


def numbered(images: Images) -> Images:
    """The same images whose targets (n, 2) are label and number: what `grafit_loss` is given."""
    targets = torch.stack([images.targets, torch.arange(len(images))], 1)
    return replace(images, targets=targets)


def grafit_loss(model: Grafit, images: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    """task_weight · `knn_loss` + transfer_weight · `instance_loss`, of `numbered` images; the paper's weights
    are 1 and 1. Both are noted without their weights."""
    require_undivided(recipe, ONE_CALL)
    of_neighbours, of_views = model(images, *targets.unbind(1))
    note("knn_loss", of_neighbours)
    note("instance_loss", of_views)
    return recipe.task_weight * of_neighbours + recipe.transfer_weight * of_views


def snca_loss(model: Grafit, images: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    """The paper's baseline SNCA+: task_weight · `knn_loss` alone."""
    require_undivided(recipe, ONE_CALL)
    return recipe.task_weight * note("knn_loss", model(images, *targets.unbind(1))[0])


def _perceptron(width: int, hidden: int | None, out: int) -> nn.Module:
    if hidden is None:
        return nn.Linear(width, out)
    return nn.Sequential(nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, out))
