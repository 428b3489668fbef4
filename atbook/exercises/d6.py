"""Exercises of page D6, A teacher with other parts."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, normalize, rms_norm

from atbook.exercises.inputs import maps, normal, vit
from atbook.exercises.judging import Exercise, told
from atlib import walk
from atlib.attention import Instead
from atlib.maps import keep_tokens

# --- D6.1 ---


def among(p: Tensor, kept: list[int]) -> Tensor:
    """Rows and columns of some tokens, not rescaled."""
    return p[:, :, kept][..., kept]


def rescaled(p: Tensor) -> Tensor:
    """Rows divided by their sums."""
    return p / p.sum(-1, keepdim=True)


def without_registers(p: Tensor, registers: int) -> Tensor:
    """The map of the tokens that are left."""
    return rescaled(among(p, tokens_left(p, registers)))


def tokens_left(p: Tensor, registers: int) -> list[int]:
    """The class token and the patches."""
    return [0, *range(1 + registers, p.shape[-1])]


def not_rescaled(p, registers):
    """The registers' shares are missing: rows sum to less than 1. Divide each row by its sum."""
    return among(p, tokens_left(p, registers))


def one_factor(p, registers):
    """One factor rescales the whole map. Each row gave a different share to the registers and needs a factor
    of its own."""
    rest = not_rescaled(p, registers)
    return rest * rest.shape[-1] / rest.sum((-2, -1), keepdim=True)


# --- D6.2 ---


def read_rows(depth: int, prefix: int, patches: int, pool: str) -> Tensor:
    """The rows of the maps that a loss reaches; of the last layer, those that the head reads."""
    rows = torch.ones(depth, prefix + patches, dtype=torch.bool)
    rows[-1] = False
    if pool == "token":
        rows[-1, 0] = True
    else:
        rows[-1, prefix:] = True
    return rows


def by_autograd(depth: int, prefix: int, patches: int, pool: str) -> Tensor:
    """The same from gradients of a ViT's logits by its maps."""
    side = 8 * round(patches**0.5)
    model = vit(img_size=side, depth=depth, reg_tokens=prefix - 1, global_pool=pool)
    images = normal(1, 3, side, side)
    leaves = [seen.map.detach().requires_grad_() for seen in walk(model, images).layers]
    logits = walk(model, images, replace={i: Instead(map=p) for i, p in enumerate(leaves)}).logits
    gradients = torch.autograd.grad(logits.square().sum(), leaves)
    return torch.stack([grad.abs().sum((0, 1, 3)) > 0 for grad in gradients])


def all_of_the_last(depth, prefix, patches, pool):
    """Every row of the last map is said to be reached. After that layer only those tokens count that the head
    reads."""
    return torch.ones(depth, prefix + patches, dtype=torch.bool)


def registers_read(depth, prefix, patches, pool):
    """The registers' last rows are said to be reached. Nothing reads a register after the last layer: neither
    a head on the class token nor the mean of the patches."""
    rows = read_rows(depth, prefix, patches, pool)
    rows[-1, 1:prefix] = True
    return rows


# --- D6.3 ---

Gradients = list[Tensor]


def through_one_row(q: Tensor, k: Tensor, v: Tensor, scale: float, grad: Tensor) -> Gradients:
    """The gradients by q and k of a layer when the class token's output alone is read."""
    q0, grad_p = q[:, :, :1], grad.unsqueeze(2) @ v.mT  # (B, H, 1, d), (B, H, 1, N)
    p = (scale * q0 @ k.mT).softmax(-1)
    grad_scores = p * (grad_p - (p * grad_p).sum(-1, keepdim=True))
    grad_q = torch.zeros_like(q)
    grad_q[:, :, :1] = scale * grad_scores @ k
    return [grad_q, scale * grad_scores.mT @ q0]


def one_row_by_autograd(q: Tensor, k: Tensor, v: Tensor, scale: float, grad: Tensor) -> Gradients:
    """The same by autograd, through the whole map."""
    q, k = (x.detach().clone().requires_grad_() for x in (q, k))
    mixed = (scale * q @ k.mT).softmax(-1) @ v
    return list(torch.autograd.grad((mixed[:, :, 0] * grad).sum(), (q, k)))


def scores_and_map(q: Tensor, k: Tensor, v: Tensor, scale: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The class token's row of the map, and the gradient by its scores: (B, H, 1, N) each."""
    p = (scale * q[:, :, :1] @ k.mT).softmax(-1)
    grad_p = grad.unsqueeze(2) @ v.mT
    return p, p * (grad_p - (p * grad_p).sum(-1, keepdim=True))


def all_rows_read(q, k, v, scale, grad):
    """You sent the gradient into every row. The class token's output alone is read, so q has a gradient in
    row 0 only, and only this row's scores teach the keys."""
    p, grad_p = (scale * q @ k.mT).softmax(-1), grad.unsqueeze(2) @ v.mT
    grad_scores = p * (grad_p - (p * grad_p).sum(-1, keepdim=True))
    return [scale * grad_scores @ k, scale * grad_scores.mT @ q]


def own_key_alone(q, k, v, scale, grad):
    """The keys of the patches got no gradient. Row 0 of the map has a score with *every* key, so every key is
    taught, though only one query is."""
    grad_q, grad_k = through_one_row(q, k, v, scale, grad)
    grad_k[:, :, 1:] = 0
    return [grad_q, grad_k]


def not_centred(q, k, v, scale, grad):
    """The softmax's derivative is p times the gradient *minus its mean under p*: entries of a row compete,
    and a gradient that is the same for all of them moves nothing."""
    grad_scores = scores_and_map(q, k, v, scale, grad)[0] * (grad.unsqueeze(2) @ v.mT)
    grad_q = torch.zeros_like(q)
    grad_q[:, :, :1] = scale * grad_scores @ k
    return [grad_q, scale * grad_scores.mT @ q[:, :, :1]]


def row_of_a_layer(B: int, H: int, N: int, d: int, seed: int) -> tuple:
    """q, k, v of a layer, its scale, and the gradient by the class token's output."""
    q, k, v = (normal(B, H, N, d, seed=seed + i) for i in range(3))
    return q, k, v, d**-0.5, normal(B, H, d, seed=seed + 3)


# --- D6.4 ---


def normed_map(q: Tensor, k: Tensor, gain_q: Tensor, gain_k: Tensor) -> Tensor:
    """The map with RMS norms and gains on q and k."""
    d = q.shape[-1]
    return scaled(rms_norm(q, (d,)) * gain_q, rms_norm(k, (d,)) * gain_k)


def scaled(q: Tensor, k: Tensor) -> Tensor:
    """An ordinary map."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def by_cosines(q: Tensor, k: Tensor, gain_q: Tensor, gain_k: Tensor) -> Tensor:
    """The same: vectors of length √d have √d · cosine for a score."""
    q, k = (normalize(x, dim=-1, eps=0) for x in (q, k))
    return (q.shape[-1] ** 0.5 * torch.einsum("bhid,bhjd,d->bhij", q, k, gain_q * gain_k)).softmax(-1)


def across_heads(q, k, gain_q, gain_k):
    """One norm runs over all heads of a token. Each head has its own: over the d numbers of a query or
    key."""
    q, k = (x / x.square().mean((1, 3), keepdim=True).sqrt() for x in (q, k))
    return scaled(q * gain_q, k * gain_k)


def without_gains(q, k, gain_q, gain_k):
    """The gains are missing. Without them scores lie between -√d and √d, and no head can make its map as
    sharp as it needs."""
    return scaled(*(rms_norm(x, x.shape[-1:]) for x in (q, k)))


def without_scale(q, k, gain_q, gain_k):
    """1/√d is missing. Normed vectors have length √d, so their product grows with d as ever."""
    q, k = (rms_norm(x, x.shape[-1:]) for x in (q, k))
    return ((q * gain_q) @ (k * gain_k).mT).softmax(-1)


def normed(B: int, H: int, N: int, d: int, seed: int) -> tuple:
    """Queries and keys of unequal lengths, and gains around 1."""
    longer = 0.3 + normal(B, H, N, 1, seed=seed).abs()
    q, k = (0.4 + normal(B, H, N, d, seed=seed + i) for i in (1, 2))
    return q * longer, 2 * k * longer, *(1 + 0.3 * normal(d, seed=seed + i) for i in (3, 4))


EXERCISES = (
    Exercise(
        "D6.1",
        subject="maps",
        right=without_registers,
        cases={
            "2 registers of 8 tokens": lambda: (maps(2, 2, 8, 8), 2),
            "1 register of 6 tokens": lambda: (maps(1, 3, 6, 6, seed=2), 1),
            "no registers": lambda: (maps(1, 1, 5, 5, seed=3), 0),
        },
        also_right=(lambda p, registers: keep_tokens(p, tokens_left(p, registers)),),
        wrong={
            "A softmax of shares flattens the map. Divide each"
            " row by its sum: that is the softmax of the scores"
            " among the tokens that are left.": lambda p, registers: not_rescaled(p, registers).softmax(-1),
            "You dropped the first tokens, the class token among them. It is token 0; the"
            " registers come after it.": lambda p, registers: keep_tokens(p, range(registers, p.shape[-1])),
            "The registers are gone as keys, and still there as queries: a map loses their rows"
            " as well as their columns.": lambda p, registers: rescaled(p[..., tokens_left(p, registers)]),
            **told(not_rescaled, one_factor),
        },
        see="Which parts are these?",
    ),
    Exercise(
        "D6.2",
        subject="gradients",
        right=read_rows,
        cases={
            "4 registers, the class token read": lambda: (3, 5, 4, "token"),
            "4 registers, the patches read": lambda: (3, 5, 4, "avg"),
            "no registers": lambda: (2, 1, 9, "token"),
            "one layer": lambda: (1, 1, 4, "avg"),
        },
        also_right=(by_autograd,),
        wrong={
            "Only the last layer is like that. What an earlier layer adds to any token is a key and a value"
            " for the next layer, so all of its rows are reached.": lambda depth, prefix, patches, pool: (
                read_rows(depth, prefix, patches, pool)[-1:].expand(depth, -1)
            ),
            "The layers are in the other order: line 0 of the answer is"
            " layer 0.": lambda depth, prefix, patches, pool: read_rows(depth, prefix, patches, pool).flip(0),
            "You let the average run over all tokens. It is the"
            " mean of the patches: class token and registers"
            " are not in it.": lambda *vit: (all_of_the_last if vit[3] == "avg" else read_rows)(*vit),
            **told(all_of_the_last, registers_read),
        },
        see="Is it the pooling?",
    ),
    Exercise(
        "D6.3",
        subject="gradients",
        right=through_one_row,
        cases={
            "5 tokens, 2 heads": lambda: row_of_a_layer(2, 2, 5, 4, seed=0),
            "7 tokens, 1 head": lambda: row_of_a_layer(1, 1, 7, 3, seed=10),
        },
        also_right=(one_row_by_autograd,),
        wrong={
            "A factor `scale` is missing on the way from the scores to q and"
            " k.": lambda q, k, v, scale, grad: [x / scale for x in through_one_row(q, k, v, scale, grad)],
            "The two gradients are exchanged: first that by"
            " q, then that by k.": lambda q, k, v, scale, grad: through_one_row(q, k, v, scale, grad)[::-1],
            "Each key moved along its own token's query. The score is that of the class token's"
            " query with the key, so all keys move along q of token 0.": lambda q, k, v, scale, grad: (
                [
                    through_one_row(q, k, v, scale, grad)[0],
                    scale * scores_and_map(q, k, v, scale, grad)[1].mT * q,
                ]
            ),
            **told(all_rows_read, own_key_alone, not_centred),
        },
        see="Is it the pooling?",
        view=list,
    ),
    Exercise(
        "D6.4",
        subject="attention",
        right=normed_map,
        cases={
            "3 heads of width 4": lambda: normed(2, 3, 5, 4, seed=0),
            "2 heads of width 6": lambda: normed(1, 2, 4, 6, seed=10),
        },
        also_right=(by_cosines,),
        wrong={
            "Keys were left as long as they are, and a long key still wins every"
            " query.": lambda q, k, gain_q, gain_k: scaled(rms_norm(q, q.shape[-1:]) * gain_q, k * gain_k),
            "The gains were multiplied in before the norm, which"
            " takes most of their effect away again. They come"
            " after it.": lambda q, k, gain_q, gain_k: without_gains(q * gain_q, k * gain_k, gain_q, gain_k),
            "You brought vectors to length 1. An RMS norm brings them"
            " to length √d, so these scores are d times too small.": lambda q, k, gain_q, gain_k: scaled(
                normalize(q, dim=-1) * gain_q, normalize(k, dim=-1) * gain_k
            ),
            "The mean was subtracted, too: that is a layer norm. An RMS"
            " norm divides by the root of the mean square, and that is all.": lambda q, k, gain_q, gain_k: (
                scaled(layer_norm(q, q.shape[-1:]) * gain_q, layer_norm(k, k.shape[-1:]) * gain_k)
            ),
            **told(across_heads, without_gains, without_scale),
        },
        see="Which parts are these?",
    ),
)
