"""FLOPs of a training step: the fewest that it can do (`atfamily.measures.accounting`), and a counter that
sees all that it does."""

from importlib.util import find_spec

import torch
from torch.utils.flop_counter import FlopCounterMode

from atfamily.measures.accounting import (
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
    PyTorch counts only its other form. The loss's kernels say themselves what they do, once imported."""
    if find_spec("triton"):
        import atlib.fused  # noqa: F401
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: _added_in_place})


def _added_in_place(onto, left, right, **_) -> int:
    """The FLOPs of b products of an (m, k) by a (k, n) matrix, from the shapes (b, m, n), (b, m, k) and (b,
    k, n)."""
    return left[0] * product(left[1], left[2], right[2])
