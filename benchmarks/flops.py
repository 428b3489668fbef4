"""FLOPs of a training step: the fewest it can do, see `atlib.analysis.accounting`, and what PyTorch's counter
needs to see all that it does."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from atlib.analysis.accounting import (
    Shape,
    copy,
    distill,
    feature_distillation,
    fine_tuning,
    product,
    query_copy,
    shape_of,
    teacher,
)

__all__ = [
    "Shape",
    "copy",
    "counter",
    "distill",
    "feature_distillation",
    "fine_tuning",
    "query_copy",
    "shape_of",
    "teacher",
]


def counter() -> FlopCounterMode:
    """A counter that also sees the batched product which is added in place: the map-free loss uses it, and
    PyTorch counts only its other form."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: _added_in_place})


def _added_in_place(onto, left, right, **_) -> int:
    """Shapes (b, m, n), (b, m, k) and (b, k, n): b products of an (m, k) by a (k, n) matrix."""
    return left[0] * product(left[1], left[2], right[2])
