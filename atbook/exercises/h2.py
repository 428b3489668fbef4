"""Exercises of how-to H2, Never store a map."""

from collections.abc import Callable
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, told
from atlib.attention import Seen
from atlib.map_free import by_fused_attention

# --- H2.1 ---


def image_side(patch: int, d: int, prefix: int) -> int:
    """The smallest side of an image with N > 2d tokens, solved for the patches along a side."""
    return patch * (isqrt(max(2 * d - prefix, 0)) + 1)


def first_side(patch: int, d: int, prefix: int, more: int = 2) -> int:
    """The same by trying one side after the other: N > more · d."""
    along = 1
    while along**2 + prefix <= more * d:
        along += 1
    return patch * along


def where_equal_counts(patch, d, prefix):
    """At N = 2d both are the same number; the task asks from where on maps are *more*."""
    along = 1
    while along**2 + prefix < 2 * d:
        along += 1
    return patch * along


# --- H2.2 ---


def log_maps(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Logarithms of the student's maps and of the teacher's."""
    return (scale * q @ k.mT).log_softmax(-1), (scale * q_t @ k_t.mT).log_softmax(-1)


def onward(grad_z: Tensor, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """From the gradient of one row's loss by its scores to those of the mean loss by q and k."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    return scale / rows * grad_z @ k, scale / rows * grad_z.mT @ q


def taught(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, by_scores: Callable
) -> tuple[Tensor, Tensor]:
    """Gradients by q and k, from a function of both log maps that gives the gradient by the scores."""
    return onward(by_scores(*log_maps(q, k, q_t, k_t, scale)), q, k, scale)


def reverse_gradients(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Gradients of the reverse divergence by q and k."""
    log_p_s, log_p_t = log_maps(q, k, q_t, k_t, scale)
    p_s, ratio = log_p_s.exp(), log_p_s - log_p_t
    divergence = (p_s * ratio).sum(-1, keepdim=True)
    return onward(p_s * (ratio - divergence), q, k, scale)


def by_autograd(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float) -> tuple[Tensor, ...]:
    """The same from the definition."""
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    log_p_s, log_p_t = log_maps(q, k, q_t, k_t, scale)
    loss = F.kl_div(log_p_t, log_p_s, reduction="none", log_target=True).sum(-1).mean()
    return torch.autograd.grad(loss, (q, k))


def not_transposed(q, k, q_t, k_t, scale):
    """The gradient of a key sums over queries, down the *columns*: transpose ∂/∂z before you multiply it with
    q."""
    log_p_s, log_p_t = log_maps(q, k, q_t, k_t, scale)
    p_s, ratio = log_p_s.exp(), log_p_s - log_p_t
    grad_z = p_s * (ratio - (p_s * ratio).sum(-1, keepdim=True))
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    return scale / rows * grad_z @ k, scale / rows * grad_z @ q


# --- H2.3 ---


def padded(x: Tensor, width: int) -> Tensor:
    """Columns of zeros up to that width."""
    return F.pad(x, (0, width - x.shape[-1]))


def two_widths(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float) -> Tensor:
    """The chapter's surrogate for a teacher whose heads have a different width, still without a map."""
    rows, d = q.shape[0] * q.shape[1] * q.shape[2], q.shape[-1]
    width = max(d, q_t.shape[-1])
    expected_key = F.scaled_dot_product_attention(q.detach(), k.detach(), k, scale=scale)
    target = F.scaled_dot_product_attention(
        padded(q_t, width), padded(k_t, width), padded(k, width), scale=scale_t
    )
    return scale / rows * (q * (expected_key - target[..., :d])).sum()


def not_padded(q, k, q_t, k_t, scale, scale_t):
    """The gradients are right, but a whole map was written out: by you, or by scaled_dot_product_attention,
    whose fused kernels want one width for q, k and v. Fill up the narrower ones with columns of zeros and cut
    the result."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    expected_key = F.scaled_dot_product_attention(q.detach(), k.detach(), k, scale=scale)
    target = F.scaled_dot_product_attention(q_t, k_t, k, scale=scale_t)
    return scale / rows * (q * (expected_key - target)).sum()


def map_not_fixed(q, k, q_t, k_t, scale, scale_t):
    """q and k that make the student's own map are not detached, so a gradient goes through the map as well.
    Only the k in the place of the values may carry one."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    fixed = F.scaled_dot_product_attention(q.detach(), k.detach(), k, scale=scale)
    expected_key = F.scaled_dot_product_attention(q, k, k, scale=scale)
    return two_widths(q, k, q_t, k_t, scale, scale_t) + scale / rows * (q * (expected_key - fixed)).sum()


# --- H2.4 ---


def floor(q: Tensor, k: Tensor, scale: float, block: int) -> Tensor:
    """The mean entropy of the rows, `block` queries at a time."""
    total = torch.zeros((), dtype=q.dtype)
    for queries in q.split(block, 2):
        z = scale * queries @ k.mT
        total = total + (z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)).sum()
    return total / (q.shape[0] * q.shape[1] * q.shape[2])


def entropy_of_shares(q: Tensor, k: Tensor, scale: float, block: int) -> Tensor:
    """The same from the shares."""
    rows = [torch.special.entr((scale * queries @ k.mT).softmax(-1)).sum(-1) for queries in q.split(block, 2)]
    return torch.cat(rows, 2).mean()


def short_block_lost(q, k, scale, block):
    """The last, shorter block was left out: N need not be a multiple of `block`."""
    N = q.shape[2]
    whole = N - N % block
    return whole / N * floor(q[:, :, :whole], k, scale, block)


def scores_unscaled(q, k, scale, block):
    """The expected score has lost its factor `scale`; the log-sum-exp has it. Use the same z in both."""
    logits = [scale * queries @ k.mT for queries in q.split(block, 2)]
    rows = [z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1) / scale for z in logits]
    return torch.cat(rows, 2).mean()


def layers_of(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float
) -> tuple[Seen, Seen]:
    """A layer of the student and one of the teacher, as atlib's losses take them."""
    return Seen(q, k, None, scale), Seen(q_t, k_t, None, scale_t)


def four(B: int, H: int, N: int, d: int, d_t: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries and keys of a student, then of a teacher."""
    return tuple(normal(B, H, N, width, seed=seed + i) for i, width in enumerate((d, d, d_t, d_t)))


EXERCISES = (
    Exercise(
        "H2.1",
        subject="counting",
        right=image_side,
        cases={
            "ViT-H/14": lambda: (14, 80, 1),
            "ViT-L/16": lambda: (16, 64, 1),
            "four registers, and a tie": lambda: (16, 10, 4),
            "the class token tips it": lambda: (16, 18, 1),
            "no token but patches": lambda: (8, 8, 0),
            "one patch is enough": lambda: (16, 2, 4),
        },
        also_right=(first_side,),
        wrong={
            "Maps were compared with the queries alone. They are made of q and k, 2Nd numbers a head:"
            " the condition is N² > 2Nd.": lambda patch, d, prefix: first_side(patch, d, prefix, more=1),
            "Class token and registers are tokens too:"
            " N is the number of patches plus `prefix`.": lambda patch, d, prefix: first_side(patch, d, 0),
            "Tokens were counted along one side. An image has patches down and across: their"
            " number is the square of that.": lambda patch, d, prefix: patch * max(2 * d - prefix + 1, 1),
            "That is the side in patches. The task asks for the side in pixels:"
            " multiply it by `patch`.": lambda patch, d, prefix: first_side(patch, d, prefix) // patch,
            **told(where_equal_counts),
        },
        see="What a map costs",
        rtol=0,
    ),
    Exercise(
        "H2.2",
        subject="gradients",
        right=reverse_gradients,
        cases={
            "6 tokens": lambda: (*four(2, 3, 6, 4, 4), 0.5),
            "one head of width 3": lambda: (*four(1, 1, 9, 3, 3, seed=4), 3**-0.5),
        },
        also_right=(by_autograd,),
        wrong={
            "From scores to q and k there is one"
            " more factor, `scale`: z = scale · q kᵀ.": lambda q, k, q_t, k_t, scale: tuple(
                gradient / scale for gradient in reverse_gradients(q, k, q_t, k_t, scale)
            ),
            "p_s - p_t belongs to the forward cross-entropy, where the weights"
            " p_t are constants. In Σ p_s log(p_s / p_t) the weights p_s"
            " move as well.": lambda *layer: taught(*layer, lambda log_s, log_t: log_s.exp() - log_t.exp()),
            "p_s log(p_s / p_t) alone does not sum to 0 along a row, as the"
            " gradient of a softmax must. Subtract the row's own divergence from the"
            " logarithm.": lambda *layer: taught(*layer, lambda log_s, log_t: log_s.exp() * (log_s - log_t)),
            "You have log(p_s / p_t) + 1, the derivative by a *share*, times p_s. A score moves all shares"
            " of its row: take away the row's mean of that, weighted by p_s. The 1 cancels.": lambda *layer: (
                taught(*layer, lambda log_s, log_t: log_s.exp() * (log_s - log_t + 1))
            ),
            **told(not_transposed),
        },
        see="Step 2: the gradient is the difference of the maps",
    ),
    Exercise(
        "H2.3",
        subject="fused attention",
        right=two_widths,
        cases={
            "a teacher with wider heads": lambda: (*four(1, 2, 150, 4, 9), 4**-0.5, 9**-0.5),
            "one with narrower heads": lambda: (*four(2, 1, 150, 4, 3, seed=5), 0.6, 0.4),
        },
        also_right=(lambda *inputs: by_fused_attention(*layers_of(*inputs), value=False),),
        wrong={
            "The teacher's map was made with the student's scale. Its"
            " heads have a different width, hence a different 1/√d:"
            " scale_t.": lambda q, k, q_t, k_t, scale, scale_t: two_widths(q, k, q_t, k_t, scale, scale),
            "The scale was taken from the padded width, as"
            " scaled_dot_product_attention does unless it is told."
            " Columns of zeros are no width: give it scale=scale_t.": lambda q, k, q_t, k_t, scale, scale_t: (
                two_widths(q, k, q_t, k_t, scale, max(q.shape[-1], q_t.shape[-1]) ** -0.5)
            ),
            "Keys get no gradient: they are detached in the place of the values, too. There"
            " it is that fused attention finds their column sums.": lambda q, k, q_t, k_t, scale, scale_t: (
                two_widths(q, k.detach(), q_t, k_t, scale, scale_t)
            ),
            "The sum over images, heads and queries"
            " was not divided by their number, B·H·N.": lambda q, k, q_t, k_t, scale, scale_t: (
                q.shape[0] * q.shape[1] * q.shape[2] * two_widths(q, k, q_t, k_t, scale, scale_t)
            ),
            **told(not_padded, map_not_fixed),
        },
        see="Step 3: an expected key is attention",
        grads=("q", "k"),
        gradients_only=True,
        largest=1 * 2 * 64 * 150,
    ),
    Exercise(
        "H2.4",
        subject="memory",
        right=floor,
        cases={
            "150 tokens in blocks of 64": lambda: (*four(1, 2, 150, 4, 4)[:2], 0.5, 64),
            "90 tokens in blocks of 20": lambda: (*four(2, 1, 90, 4, 4, seed=3)[:2], 0.7, 20),
        },
        also_right=(entropy_of_shares,),
        wrong={
            "The number is right, but a whole map was written out on the way. Take `block` queries"
            " at a time and keep only their sums.": lambda q, k, scale, block: floor(q, k, scale, q.shape[2]),
            "Blocks' means were averaged, though the last block"
            " is shorter. Add up, and divide by B·H·N once.": lambda q, k, scale, block: torch.stack(
                [floor(queries, k, scale, block) for queries in q.split(block, 2)]
            ).mean(),
            **told(short_block_lost, scores_unscaled),
        },
        see="Step 4: a block of queries at a time",
        largest=1 * 2 * 64 * 150,
    ),
)
