"""The studies of a published teacher on one GPU: all labels of CIFAR-10, and students as large as the
teacher, as in the paper. What is left of Copy's and Distill's gain when labels are plenty, and what of it
does a student have that sees nothing?"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atbook.lab.real import FINE_RATES, STUDENTS, Reader, fine_tuned, published, searched, untrained
from atbook.lab.scales import AXES, WEIGHTS, place_of_training
from atbook.lab.study import Sources, Variant, scratch, study
from atbook.lab.tuning import Range
from atlib.attention_transfer import AttentionTransfer
from atlib.plan import Plan


def _beside(
    plan: Plan, sources: Sources, teaches: Callable[[Sources], VisionTransformer] = published
) -> nn.Module:
    """A student without LayerScale and its teacher, which looks at each image anew."""
    return AttentionTransfer(teaches(sources), sources.student(), plan)


def _reader(sources: Sources) -> nn.Module:
    """A linear reader of labels from the teacher's class token behind its last layer."""
    teacher = published(sources).to(place_of_training())
    images = sources.scale.labelled(sources.seed).to(place_of_training())

    @torch.no_grad()
    def read(some: Tensor) -> Tensor:
        return teacher(some)

    return Reader(read, images, sources.scale.student.build().num_classes)


# Wider models are best at smaller rates, and a reader of features of a few passes at larger ones.
_RATES = {"lr": (6.25e-5, 1.25e-4, *AXES["lr"])}
_READING_RATES = {"lr": (*FINE_RATES["lr"], 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)}
# Near what is best for narrower ones with less to learn from, "no LayerScale" at "real-cifar10".
_STARTS = {"scratch": 1e-3, "copy": 2e-3, "copy, blank image": 2e-3, "distill": 4e-3}


def _student(name: str, **options) -> Variant:
    """One of those that are compared at the smaller scale, too."""
    how, twin = STUDENTS[name]
    build = scratch if how is None else partial(_beside, Plan(how=how, mismatched=True))
    return searched(name, build, rates=_RATES, start=_STARTS[name], twin=twin, **options)


_FINE_TUNED = searched("fine-tune", fine_tuned, rates=FINE_RATES, start=1.25e-4)

REAL_FULL = study(
    "real-full",
    *map(_student, STUDENTS),
    searched(
        "copy, untrained teacher",
        partial(_beside, Plan(mismatched=True), teaches=untrained),
        rates=_RATES,
        start=1e-3,
    ),
    _FINE_TUNED,
    searched("linear reader of features", _reader, rates=_READING_RATES, start=1e-3),
)

# A search in a tenth of the passes; of Distill for the weight of its loss too.
_SHORT = {"in_trials": {"steps": 450}}
_WEIGHED = Range(_RATES | WEIGHTS, {"lr": _STARTS["distill"], "transfer_weight": 3.0}, {}, step=0.0)

REAL_LONG = study(
    "real-long",
    *(_student(name, **_SHORT) for name in STUDENTS if name != "distill"),
    replace(_student("distill", **_SHORT), trials=_WEIGHED),
    replace(_FINE_TUNED, **_SHORT),
)
