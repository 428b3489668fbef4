"""Exercises of page D1, Attention, refreshed."""

import torch
from timm.layers import Attention
from torch import Tensor

from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, told
from atlib import walk

# --- D1.1 ---


def softmax_backward(p: Tensor, grad: Tensor) -> Tensor:
    """The gradient by the scores, from the gradient by the map."""
    return p * (grad - (p * grad).sum(-1, keepdim=True))


def by_autograd(p: Tensor, grad: Tensor) -> Tensor:
    """The same by autograd: log p are scores that have p as their softmax."""
    scores = p.log().requires_grad_()
    return torch.autograd.grad(scores.softmax(-1), scores, grad)[0]


# --- D1.2 ---


def maps_of(x: Tensor, W_qkv: Tensor, b_qkv: Tensor, heads: int) -> Tensor:
    """The maps of all images and heads."""
    return maps_by(x, W_qkv, b_qkv, heads)


def maps_by(
    x: Tensor,
    W_qkv: Tensor,
    b_qkv: Tensor,
    heads: int,
    order: str = "phd",
    width: int | None = None,
    axis: int = -1,
) -> Tensor:
    """Maps, where a token's numbers are in the order of parts (q, k, v), heads and d channels, the scores are
    divided by the root of `width`, and the softmax runs over `axis`."""
    sizes = {"p": 3, "h": heads, "d": x.shape[-1] // heads}
    parts = (x @ W_qkv.T + b_qkv).unflatten(-1, [sizes[name] for name in order])
    q, k, _ = torch.einsum(f"bn{order}->pbhnd", parts)
    return (q @ k.mT / (width or sizes["d"]) ** 0.5).softmax(axis)


@torch.no_grad()
def by_timm(x: Tensor, W_qkv: Tensor, b_qkv: Tensor, heads: int) -> Tensor:
    """The same from timm's module, as `walk` sees it."""
    attn = Attention(dim=x.shape[-1], num_heads=heads, qkv_bias=True).double()
    attn.qkv.weight.copy_(W_qkv)
    attn.qkv.bias.copy_(b_qkv)
    return walk(attn, x).layers[0].map


def not_permuted(x, W_qkv, b_qkv, heads):
    """Heads were cut by reshape(B, heads, N, d), which mixes tokens and channels. Make (B, N, heads, d)
    first, and then exchange axes."""
    B, N, D = x.shape
    q, k, _ = ((x @ W_qkv.T + b_qkv)[..., i * D : (i + 1) * D].reshape(B, heads, N, -1) for i in range(3))
    return (q @ k.mT / (D // heads) ** 0.5).softmax(-1)


def keys_ask(x, W_qkv, b_qkv, heads):
    """Keys ask and queries answer: the scores are k qᵀ. A row belongs to a query, so they are q kᵀ."""
    B, N, D = x.shape
    q, k, _ = (x @ W_qkv.T + b_qkv).reshape(B, N, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
    return (k @ q.mT / (D // heads) ** 0.5).softmax(-1)


EXERCISES = (
    Exercise(
        "D1.1",
        subject="gradients",
        right=softmax_backward,
        cases={
            "one map": lambda: (maps(5, 5), normal(5, 5, seed=1)),
            "images and heads, 4 queries, 6 keys": lambda: (
                maps(2, 3, 4, 6, seed=2),
                normal(2, 3, 4, 6, seed=3),
            ),
        },
        also_right=(by_autograd,),
        wrong={
            "p(1 - p) is how a share answers to its own score. A score moves all shares of its row: ∂p_j/∂z_k"
            " = p_j (1 - p_j) where k = j, and -p_j p_k elsewhere.": lambda p, grad: p * (1 - p) * grad,
            "You summed over queries, down a column. A softmax runs along a row:"
            " sum over keys, the last axis.": lambda p, grad: p * (grad - (p * grad).sum(-2, keepdim=True)),
            "The sum lost its axis, so row i's sum was taken away from column"
            " i. Keep the axis: .sum(-1, keepdim=True).": lambda p, grad: p * (grad - (p * grad).sum(-1)),
            "The factor p in front is missing. A share of nearly 0 hardly moves, so its"
            " score must get nearly no gradient.": lambda p, grad: grad - (p * grad).sum(-1, keepdim=True),
            "You took away the plain mean of the row's gradients. They count"
            " by their shares: Σ_j p_j grad_j.": lambda p, grad: p * (grad - grad.mean(-1, keepdim=True)),
        },
        see="Why divide by √d",
    ),
    Exercise(
        "D1.2",
        subject="attention",
        right=maps_of,
        cases={
            "4 heads of width 4": lambda: (normal(2, 5, 16), normal(48, 16, seed=1), normal(48, seed=2), 4),
            "2 heads of width 3": lambda: (normal(3, 7, 6), normal(18, 6, seed=1), normal(18, seed=2), 2),
        },
        also_right=(by_timm,),
        wrong={
            "The bias is missing: q, k and v are x Wᵀ + b. A bias on q changes"
            " which keys a token likes.": lambda x, W_qkv, b_qkv, heads: maps_of(x, W_qkv, 0 * b_qkv, heads),
            "You split into heads first, and inside of each into q, k and v. timm keeps all of q, then all of"
            " k, then all of v: reshape to (B, N, 3, heads, d).": lambda *layer: maps_by(*layer, order="hpd"),
            "You gave each head every `heads`-th channel. A head's channels"
            " lie side by side: (heads, d), not (d, heads).": lambda *layer: maps_by(*layer, order="pdh"),
            "Scores are divided by √D, the model's width. A head's q · k"
            " has d = D / heads terms, so it is √d.": lambda x, *layer: maps_by(x, *layer, width=x.shape[-1]),
            "Scores are not divided by √d, so maps are too sharp.": lambda *layer: maps_by(*layer, width=1),
            "Columns sum to 1 instead of rows. The softmax runs over keys, the last axis.": lambda *layer: (
                maps_by(*layer, axis=-2)
            ),
            **told(not_permuted, keys_ask),
        },
        see="Tokens that listen to each other",
    ),
)
