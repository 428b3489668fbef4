"""Exercises of how-to H2, Never store a map."""

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, Wrong
from atlib.attention import Seen
from atlib.map_free import by_blocks, by_fused_attention

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


def where_equal_counts(patch: int, d: int, prefix: int) -> int:
    """At N = 2d both are the same number; the task asks from where on maps are *more*."""
    along = 1
    while along**2 + prefix < 2 * d:
        along += 1
    return patch * along


def one_row_of_patches(patch: int, d: int, prefix: int) -> int:
    """Tokens were counted along one side. An image has patches down and across: their number is the square of
    that."""
    return patch * max(2 * d - prefix + 1, 1)


# --- H2.2 ---


def log_maps(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Logarithms of the student's maps and of the teacher's."""
    return (scale * q @ k.mT).log_softmax(-1), (scale * q_t @ k_t.mT).log_softmax(-1)


def onward(grad_z: Tensor, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """From the gradient of one row's loss by its scores to those of the mean loss by q and k."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    return scale / rows * grad_z @ k, scale / rows * grad_z.mT @ q


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


def forward_gradients(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """p_s - p_t belongs to the forward cross-entropy, where the weights p_t are constants. In Σ p_s log(p_s /
    p_t) the weights p_s move as well."""
    log_p_s, log_p_t = log_maps(q, k, q_t, k_t, scale)
    return onward(log_p_s.exp() - log_p_t.exp(), q, k, scale)


def weights_held_fast(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """p_s log(p_s / p_t) alone does not sum to 0 along a row, as the gradient of a softmax must. Subtract the
    row's own divergence from the logarithm."""
    log_p_s, log_p_t = log_maps(q, k, q_t, k_t, scale)
    return onward(log_p_s.exp() * (log_p_s - log_p_t), q, k, scale)


def only_by_shares(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """You have log(p_s / p_t) + 1, the derivative by a *share*, times p_s. A score moves all shares of its
    row: take away the row's mean of that, weighted by p_s. The 1 cancels."""
    log_p_s, log_p_t = log_maps(q, k, q_t, k_t, scale)
    return onward(log_p_s.exp() * (log_p_s - log_p_t + 1), q, k, scale)


def without_scale(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float) -> tuple[Tensor, ...]:
    """From scores to q and k there is one more factor, `scale`: z = scale · q kᵀ."""
    return tuple(gradient / scale for gradient in reverse_gradients(q, k, q_t, k_t, scale))


def not_transposed(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float) -> tuple[Tensor, Tensor]:
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


def one_scale(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float) -> Tensor:
    """The teacher's map was made with the student's scale. Its heads have a different width, hence a
    different 1/√d: scale_t."""
    return two_widths(q, k, q_t, k_t, scale, scale)


def scale_of_padding(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float) -> Tensor:
    """The scale was taken from the padded width, as scaled_dot_product_attention does unless it is told.
    Columns of zeros are no width: give it scale=scale_t."""
    return two_widths(q, k, q_t, k_t, scale, max(q.shape[-1], q_t.shape[-1]) ** -0.5)


def not_padded(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float) -> Tensor:
    """The gradients are right, but a whole map was written out: by you, or by scaled_dot_product_attention,
    whose fused kernels want one width for q, k and v. Fill up the narrower ones with columns of zeros and cut
    the result."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    expected_key = F.scaled_dot_product_attention(q.detach(), k.detach(), k, scale=scale)
    target = F.scaled_dot_product_attention(q_t, k_t, k, scale=scale_t)
    return scale / rows * (q * (expected_key - target)).sum()


def map_not_fixed(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float) -> Tensor:
    """q and k that make the student's own map are not detached, so a gradient goes through the map as well.
    Only the k in the place of the values may carry one."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    fixed = F.scaled_dot_product_attention(q.detach(), k.detach(), k, scale=scale)
    expected_key = F.scaled_dot_product_attention(q, k, k, scale=scale)
    return two_widths(q, k, q_t, k_t, scale, scale_t) + scale / rows * (q * (expected_key - fixed)).sum()


def keys_fixed(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float) -> Tensor:
    """Keys get no gradient: they are detached in the place of the values, too. There it is that fused
    attention finds their column sums."""
    return two_widths(q, k.detach(), q_t, k_t, scale, scale_t)


def summed(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float) -> Tensor:
    """The sum over images, heads and queries was not divided by their number, B·H·N."""
    return q.shape[0] * q.shape[1] * q.shape[2] * two_widths(q, k, q_t, k_t, scale, scale_t)


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


def short_block_lost(q: Tensor, k: Tensor, scale: float, block: int) -> Tensor:
    """The last, shorter block was left out: N need not be a multiple of `block`."""
    N = q.shape[2]
    whole = N - N % block
    return whole / N * floor(q[:, :, :whole], k, scale, block)


def mean_of_blocks(q: Tensor, k: Tensor, scale: float, block: int) -> Tensor:
    """Blocks' means were averaged, though the last block is shorter. Add up, and divide by B·H·N once."""
    return torch.stack([floor(queries, k, scale, block) for queries in q.split(block, 2)]).mean()


def scores_unscaled(q: Tensor, k: Tensor, scale: float, block: int) -> Tensor:
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
        "From which image size on does a map hold more numbers than q and k?",
        stars=1,
        minutes=10,
        subject="counting",
        right=image_side,
        cases={
            "ViT-H/14": lambda: (14, 80, 1),
            "ViT-L/16": lambda: (16, 64, 1),
            "four registers, and a tie": lambda: (16, 10, 4),
            "the class token tips it": lambda: (16, 18, 1),
            "no token but patches": lambda: (8, 8, 0),
        },
        also_right=(first_side,),
        wrong={
            "queries alone": Wrong(
                lambda patch, d, prefix: first_side(patch, d, prefix, more=1),
                "Maps were compared with the queries alone. They are made of q and k, 2Nd numbers a head:"
                " the condition is N² > 2Nd.",
            ),
            "prefix": Wrong(
                lambda patch, d, prefix: first_side(patch, d, 0),
                "Class token and registers are tokens too: N is the number of patches plus `prefix`.",
            ),
            "a tie": Wrong(where_equal_counts),
            "patches along one side": Wrong(one_row_of_patches),
            "in patches": Wrong(
                lambda patch, d, prefix: first_side(patch, d, prefix) // patch,
                "That is the side in patches. The task asks for the side in pixels: multiply it by `patch`.",
            ),
        },
        see="What a map costs",
        rtol=0,
    ),
    Exercise(
        "H2.2",
        "The reverse divergence, backwards",
        stars=3,
        minutes=25,
        subject="gradients",
        right=reverse_gradients,
        cases={
            "6 tokens": lambda: (*four(2, 2, 6, 4, 4), 0.5),
            "one head of width 3": lambda: (*four(1, 1, 9, 3, 3, seed=4), 3**-0.5),
        },
        also_right=(by_autograd,),
        wrong={
            "the forward one": Wrong(forward_gradients),
            "no divergence": Wrong(weights_held_fast),
            "by the shares": Wrong(only_by_shares),
            "scale": Wrong(without_scale),
            "not transposed": Wrong(not_transposed),
        },
        see="Step 2: the gradient is the difference of the maps",
    ),
    Exercise(
        "H2.3",
        "A teacher with other heads",
        stars=3,
        minutes=30,
        subject="fused attention",
        right=two_widths,
        cases={
            "a teacher with wider heads": lambda: (*four(1, 2, 150, 4, 9), 4**-0.5, 9**-0.5),
            "one with narrower heads": lambda: (*four(1, 2, 150, 4, 3, seed=5), 0.5, 0.4),
        },
        also_right=(
            lambda *inputs: by_fused_attention(*layers_of(*inputs), value=False),
            lambda *inputs: by_blocks(*layers_of(*inputs)),
        ),
        wrong={
            "a whole map": Wrong(not_padded),
            "one scale": Wrong(one_scale),
            "scale of the padding": Wrong(scale_of_padding),
            "not detached": Wrong(map_not_fixed),
            "no gradient for keys": Wrong(keys_fixed),
            "a sum": Wrong(summed),
        },
        see="Step 3: an expected key is attention",
        grads=("q", "k"),
        gradients_only=True,
        largest=1 * 2 * 64 * 150,
    ),
    Exercise(
        "H2.4",
        "The minimum without a map",
        stars=2,
        minutes=20,
        subject="memory",
        right=floor,
        cases={
            "150 tokens in blocks of 64": lambda: (
                normal(1, 2, 150, 4),
                normal(1, 2, 150, 4, seed=1),
                0.5,
                64,
            ),
            "90 tokens in blocks of 20": lambda: (
                normal(2, 1, 90, 4, seed=3),
                normal(2, 1, 90, 4, seed=4),
                0.7,
                20,
            ),
        },
        also_right=(
            entropy_of_shares,
            lambda q, k, scale, block: by_blocks(*layers_of(q, k, q, k, scale, scale)),
        ),
        wrong={
            "a whole map": Wrong(
                lambda q, k, scale, block: floor(q, k, scale, q.shape[2]),
                "The number is right, but a whole map was written out on the way. Take `block` queries at a"
                " time and keep only their sums.",
            ),
            "the last block": Wrong(short_block_lost),
            "mean of means": Wrong(mean_of_blocks),
            "scale": Wrong(scores_unscaled),
        },
        see="Step 4: a block of queries at a time",
        largest=1 * 2 * 64 * 150,
    ),
)
