"""Exercises of card F7, Shifted patches and locality."""

import torch
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, told

# --- F7.1 ---


def masked(z: Tensor, score: float) -> Tensor:
    """Attention logits with a different score on the diagonal."""
    return z.masked_fill(torch.eye(z.shape[-1], dtype=torch.bool), score)


def cross_entropy(log_p_s: Tensor, p_t: Tensor) -> Tensor:
    """The cross-entropy of maps: a sum over keys, and a mean over batch, heads and queries."""
    return -(p_t * log_p_s).sum(-1).mean()


def loss_without_self(z_s: Tensor, z_t: Tensor) -> Tensor:
    """Cross-entropy of maps in which no token looks at itself."""
    return cross_entropy(masked(z_s, -1e9).log_softmax(-1), masked(z_t, -1e9).softmax(-1))


def nothing_masked(z_s, z_t):
    """Nothing was forbidden. −1e-9 is as good as 0; −1e9 was meant. (The published SL-CaiT has this very
    slip.)"""
    diagonal = -1e-9 * torch.eye(z_s.shape[-1], dtype=z_s.dtype)
    return cross_entropy((z_s + diagonal).log_softmax(-1), (z_t + diagonal).softmax(-1))


def not_renormalised(z_s, z_t):
    """The teacher's rows no longer sum to 1. Mask its *logits*: the softmax then shares the whole row among
    the others."""
    p_t = z_t.softmax(-1).masked_fill(torch.eye(z_t.shape[-1], dtype=torch.bool), 0)
    return cross_entropy(masked(z_s, -1e9).log_softmax(-1), p_t)


def logits(*shape: int, size: float = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Attention logits of a student and of a teacher."""
    return size * normal(*shape, seed=seed), size * normal(*shape, seed=seed + 1)


# --- F7.2 ---


def per_head(tau: Tensor) -> Tensor:
    """(H,) -> (H, 1, 1), beside queries (B, H, N, d)."""
    return tau[:, None, None]


def fold(q: Tensor, tau: Tensor) -> Tensor:
    """Queries for which a scale of 1/√d has the effect that 1/τ had."""
    return q * q.shape[-1] ** 0.5 / per_head(tau)


def head_by_head(q: Tensor, tau: Tensor) -> Tensor:
    """The same, one head after the other."""
    d = q.shape[-1]
    return torch.stack([q[:, h] * (d**0.5 / tau[h]) for h in range(len(tau))], 1)


EXERCISES = (
    Exercise(
        "F7.1",
        subject="losses",
        right=loss_without_self,
        cases={
            "5 tokens": lambda: logits(2, 3, 5, 5),
            "sharp rows": lambda: logits(1, 2, 4, 4, size=6, seed=5),
        },
        wrong={
            "The student may not look at itself, and its target still does,"
            " so that the loss is a billion times the teacher's diagonal."
            " Mask both.": lambda z_s, z_t: cross_entropy(masked(z_s, -1e9).log_softmax(-1), z_t.softmax(-1)),
            "The teacher's diagonal is gone and the student still has one. Mask its logits,"
            " too.": lambda z_s, z_t: cross_entropy(z_s.log_softmax(-1), masked(z_t, -1e9).softmax(-1)),
            "A logit of 0 is not a share of 0: e⁰ is 1."
            " What is forbidden needs a very low score.": lambda z_s, z_t: cross_entropy(
                masked(z_s, 0).log_softmax(-1), masked(z_t, 0).softmax(-1)
            ),
            "The loss is nan: the student's log-share on the diagonal is −∞ and the teacher's share"
            " 0, and 0 · (−∞) is no number. Forbid by a large finite score, such as −1e9.": lambda s, t: (
                cross_entropy(masked(s, -torch.inf).log_softmax(-1), masked(t, -torch.inf).softmax(-1))
            ),
            **told(nothing_masked, not_renormalised),
        },
    ),
    Exercise(
        "F7.2",
        subject="queries and keys",
        right=fold,
        cases={
            "3 heads": lambda: (normal(2, 3, 5, 4), torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)),
            "1 head": lambda: (normal(1, 1, 4, 9, seed=3), torch.tensor([0.7], dtype=torch.float64)),
        },
        also_right=(head_by_head,),
        wrong={
            "You multiplied by τ. Scores are divided by it:"
            " a larger temperature is a flatter row.": lambda q, tau: q * q.shape[-1] ** 0.5 * per_head(tau),
            "The 1/√d that attention still applies comes on"
            " top of your 1/τ. Give q a factor √d to undo it.": lambda q, tau: q / per_head(tau),
            "Now √d divides twice, once in q and once in attention."
            " It has to be undone: multiply.": lambda q, tau: q / (q.shape[-1] ** 0.5 * per_head(tau)),
            "That is the root of the whole width D = H·d. Attention divides by the root of one head's"
            " width, q.shape[-1].": lambda q, tau: q * (q.shape[1] * q.shape[-1]) ** 0.5 / per_head(tau),
            "All heads got the same temperature. Each has"
            " its own: bring tau to the shape (H, 1, 1).": lambda q, tau: q * q.shape[-1] ** 0.5 / tau.mean(),
        },
    ),
)
