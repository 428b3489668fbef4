"""The losses of attention transfer, written to be read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from atlib.attention import Seen
from atlib.map_free import map_free_cross_entropy


def attention_cross_entropy(student: Sequence[Seen], teacher: Sequence[Seen], value: bool = True) -> Tensor:
    """Cross-entropy from the teacher's attention maps to the student's: a scalar, in nats, summed over
    layers. The same number and gradients as `dense_attention_cross_entropy`, and no (N, N) map is stored
    (`atlib.map_free`); `value=False` computes the gradients only and returns 0. Where the student must not
    look (`Seen.mask`), the teacher's share goes, its rows renormalised: else the loss would be infinite.
    Source: Li et al. 2024 (arXiv 2411.09702), with the published code's reductions."""
    total = 0.0
    for of_student, of_teacher in zip(student, teacher, strict=True):
        parts = of_student.given, of_student.attend, of_teacher.given, of_teacher.attend
        if any(part is not None for part in parts):
            raise ValueError("no softmax of q and k: use dense_attention_cross_entropy")
        shapes = tuple(of_student.q.shape[:3]), tuple(of_teacher.q.shape[:3])
        if shapes[0] != shapes[1]:
            raise ValueError(f"(B, H, N) is {shapes[0]}, the teacher's {shapes[1]}")
        total = total + map_free_cross_entropy(of_student, of_teacher, value)
    return total


def dense_attention_cross_entropy(student: Sequence[Seen], teacher: Sequence[Seen]) -> Tensor:
    """The definition of `attention_cross_entropy`, with every map written out: per layer the *mean* over
    batch, heads and queries of -Σ_j p_t(i, j) log p_s(i, j), *summed* over layers. It also takes layers that
    were given a map, and such as attend in another way (`Instead.attend`)."""
    return sum(
        map_cross_entropy(student_layer.scores.log_softmax(-1), teacher_layer.without(student_layer.mask).map)
        for student_layer, teacher_layer in zip(student, teacher, strict=True)
    )


def map_cross_entropy(log_p_s: Tensor, p_t: Tensor) -> Tensor:
    """One layer's cross-entropy from the student's log-map and the teacher's map, (B, H, N, N) each: a
    scalar, in nats."""
    if p_t.shape != log_p_s.shape:
        raise ValueError(f"the student's map is {tuple(log_p_s.shape)}, the teacher's {tuple(p_t.shape)}")
    return -(p_t.detach() * log_p_s).sum(-1).mean()  # sum over keys; mean over batch, heads, queries


def projection_mse(student: Sequence[Seen], teacher: Sequence[Seen], what: str) -> Tensor:
    """Squared error between q, k or v (`what`) of student and teacher: a scalar. Per layer the *mean* over
    all elements of (B, H, N, d), *summed* over layers, as in the published code of arXiv 2411.09702."""
    total = 0.0
    for layers in zip(student, teacher, strict=True):
        of_student, of_teacher = (getattr(seen, what) for seen in layers)
        if of_student.shape != of_teacher.shape:
            raise ValueError(f"{what} is {tuple(of_student.shape)}, the teacher's {tuple(of_teacher.shape)}")
        total = total + F.mse_loss(of_student, of_teacher.detach())
    return total


# --- What a loss is made of ---

# Of the innermost block of `noted`: a part's value arises deep inside a forward, and the loop that logs it
# sees only what the forward returns.
_NOTES: ContextVar[dict[str, Tensor] | None] = ContextVar("what a loss is made of", default=None)


@contextmanager
def noted() -> Iterator[dict[str, Tensor]]:
    """What is noted (`note`) of a loss that is computed within the block: {name: scalar without a graph}."""
    notes: dict[str, Tensor] = {}
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def note(name: str, value: Tensor) -> Tensor:
    """Return `value`, a scalar, and note it where a block of `noted` is open: without its weight, the parts
    of a part under PART/NAME. What is noted twice is added; in compiled code nothing is noted."""
    if torch.compiler.is_compiling():
        return value
    if (notes := _NOTES.get()) is not None:
        notes[name] = notes[name] + value.detach() if name in notes else value.detach()
    return value
