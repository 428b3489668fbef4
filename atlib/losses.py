"""The losses of attention transfer, written to be read."""

from collections.abc import Sequence

from torch import Tensor

from atlib.walk import Seen


def attention_cross_entropy(student: Sequence[Seen], teacher: Sequence[Seen]) -> Tensor:
    """Cross-entropy from the teacher's attention maps to the student's: a scalar, in nats, summed over layers.

    Per layer, with maps (B, H, N, N) over queries i and keys j, it is the *mean* over batch, heads and queries of
    -Σ_j p_t(i, j) log p_s(i, j). Layers are *summed*, not averaged. The teacher's maps are constants: no gradient reaches it.
    `student` and `teacher` pair up layer by layer. Raises ValueError when their numbers or shapes differ.

    Source: Li et al. 2024, "On the Surprising Effectiveness of Attention Transfer for Vision Transformers"
    (arXiv 2411.09702), section on Attention Distillation; the reductions are those of the published implementation.
    """
    if len(student) != len(teacher) or len(student) == 0:
        raise ValueError(f"layers pair up one to one: got {len(student)} of the student and {len(teacher)} of the teacher")
    total = 0.0
    for index, (own, target) in enumerate(zip(student, teacher)):
        log_p_s = own.scores.log_softmax(-1)  # (B, H, N, N)
        p_t = target.map.detach()
        if p_t.shape != log_p_s.shape:
            raise ValueError(f"pair {index}: the student's map is {tuple(log_p_s.shape)}, the teacher's {tuple(p_t.shape)} (B, H, N, N)")
        total = total - (p_t * log_p_s).sum(-1).mean()  # sum over keys; mean over batch, heads, queries
    return total
