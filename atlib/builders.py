"""What the studies are made of: functions from a seed's `Sources` to the model that is trained.

Functions and partials of functions, not lambdas: they travel to the processes that run them.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from atlib.plan import Plan
from atlib.schooling import Schooling
from atlib.study import AGAIN, Sources
from atlib.transfer import AttentionTransfer


def teacher_of(sources: Sources, schooling: Schooling | None) -> nn.Module:
    """The seed's central teacher, or the one that was made in another way."""
    return sources.teacher() if schooling is None else sources.schooled(schooling)


def with_new_head(vit: nn.Module, sources: Sources) -> nn.Module:
    """A pre-trained ViT, ready to be fine-tuned on the student's classes."""
    torch.manual_seed(sources.seed + AGAIN * sources.again)
    vit.reset_classifier(sources.scale.student.build().num_classes)
    return vit.requires_grad_(True)


def scratch(sources: Sources) -> nn.Module:
    """A student that gets nothing."""
    return sources.student()


def fine_tune(sources: Sources, schooling: Schooling | None = None) -> nn.Module:
    """The teacher's weights, with a new head."""
    return with_new_head(teacher_of(sources, schooling), sources)


def pair(plan: Plan, sources: Sources, schooling: Schooling | None = None) -> nn.Module:
    """A new student beside its teacher."""
    return AttentionTransfer(teacher_of(sources, schooling), sources.student(), plan)


def by(what: str = "map", how: str = "copy", schooling: Schooling | None = None, **options) -> partial:
    """`pair` with the plan that `what`, `how` and the further options of `Plan` make."""
    return partial(pair, Plan(what, how, **options), schooling=schooling)


def untrained_maps(sources: Sources, student: nn.Module | None = None) -> nn.Module:
    """The student with copied maps of a teacher that is only initialised."""
    student = sources.student() if student is None else student
    return AttentionTransfer(sources.scale.student.build(), student, Plan())  # one stream of random numbers: not the student's weights again


def again(build: Callable[[Sources], nn.Module], sources: Sources) -> nn.Module:
    """The same once more with other first weights: what two runs of one method differ by."""
    return build(sources._replace(again=1))
