"""Exercises of page D4, Which rows does anybody read?."""

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, told
from atlib.analysis import jensen_shannon, rollout

# --- D4.1 ---


def entropy(rows: Tensor) -> Tensor:
    """Entropy of distributions over the last axis, in nats; 0 log 0 is 0."""
    return torch.special.entr(rows).sum(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence of every row: (B, H, N)."""
    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


def weighed(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """The divergence with rows weighed by how much they are read."""
    return divergence(p, q).mean((0, 1)) @ weight / weight.sum()


def weighed_by_atlib(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """The same with atlib's divergence, each row as often as it weighs."""
    rows = jensen_shannon(p, q).flatten(0, 1).T  # (N, B·H)
    return (normalize(weight, p=1, dim=0) * rows.mean(1)).sum()


def keys_weighed(p, q, weight):
    """The weights went to keys, the last axis. They belong to queries: a row's divergence is the sum over all
    of its keys, and the row has a weight."""
    middle = (p + q) / 2
    by_key = torch.special.entr(middle) - (torch.special.entr(p) + torch.special.entr(q)) / 2
    return (by_key @ weight).sum(-1).mean() / weight.sum()


def with_nan(p, q, weight):
    """0 · log 0 made a nan where a row gives a token nothing. torch.special.entr knows that it is 0."""
    p_log_p, q_log_q, middle = p * p.log(), q * q.log(), (p + q) / 2
    by_row = (p_log_p + q_log_q).sum(-1) / 2 - (middle * middle.log()).sum(-1)
    return by_row.mean((0, 1)) @ weight / weight.sum()


def some_hard(*shape: int, seed: int = 0) -> Tensor:
    """Maps whose first head listens to a single token in every row."""
    p = maps(*shape, seed=seed)
    p[:, 0] = one_hot(p[:, 0].argmax(-1), shape[-1]).to(p)
    return p


def shares(*numbers: float) -> Tensor:
    """The shares to which the rows are read."""
    return torch.tensor(numbers, dtype=torch.float64)


# --- D4.2 ---


def half_identity(p: Tensor, residual: float) -> Tensor:
    """A layer as rollout sees it: (B, N, N)."""
    return residual * torch.eye(p.shape[-1], dtype=p.dtype) + (1 - residual) * p.mean(1)


def backwards(layers: Sequence[Tensor], residual: float) -> Tensor:
    """The class token's rollout, a row that goes from the last layer to the first."""
    row = half_identity(layers[-1], residual)[:, :1]
    for p in layers[-2::-1]:
        row = row @ half_identity(p, residual)
    return row[:, 0]


def rows_of_two(layers, residual):
    """The identity was added without a share: the row's sum doubles with each layer. Skip connection and
    attention share one whole."""
    row = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype)[:1].expand(len(layers[0]), 1, -1)
    for p in layers[::-1]:
        row = row + row @ p.mean(1)
    return row[:, 0]


# --- D4.3 ---

Weights = list[Tensor]


def reorder(qkv: Tensor, bias: Tensor, proj: Tensor, order: list[int]) -> Weights:
    """New head h is old head order[h]; the layer computes what it did."""
    H, D = len(order), proj.shape[1]
    rows = qkv.view(3, H, D // H, -1)[:, order].reshape(qkv.shape)
    numbers = bias.view(3, H, D // H)[:, order].flatten()
    columns = proj.reshape(-1, H, D // H)[:, order].reshape(proj.shape)
    return [rows, numbers, columns]


def by_index(qkv: Tensor, bias: Tensor, proj: Tensor, order: list[int]) -> Weights:
    """The same with one list of channels."""
    D = proj.shape[1]
    d = D // len(order)
    channels = torch.tensor([h * d + i for h in order for i in range(d)])
    rows = torch.cat([channels, D + channels, 2 * D + channels])
    return [qkv[rows], bias[rows], proj[:, channels]]


def back(order: list[int]) -> list[int]:
    """The order that undoes an order."""
    return torch.tensor(order).argsort().tolist()


def heads_outside(qkv, bias, proj, order):
    """qkv was read as (heads, 3, d). timm's order is (3, heads, d): all queries, all keys, all values."""
    H, d = len(order), proj.shape[1] // len(order)
    rows = qkv.view(H, 3, d, -1)[order].reshape(qkv.shape)
    return [rows, bias.view(H, 3, d)[order].flatten(), reorder(qkv, bias, proj, order)[2]]


def layer(D: int, order: list[int], seed: int) -> tuple:
    """Weight and bias of a layer's qkv, weight of its proj, and an order of heads."""
    weights = normal(3 * D, D, seed=seed), normal(3 * D, seed=seed + 1), normal(D, D, seed=seed + 2)
    return *weights, order


EXERCISES = (
    Exercise(
        "D4.1",
        subject="comparing maps",
        right=weighed,
        cases={
            "the class token's row alone": lambda: (
                maps(3, 2, 5, 5),
                maps(3, 2, 5, 5, seed=1),
                shares(1, 0, 0, 0, 0),
            ),
            "weights that sum to 4, a head with zeros": lambda: (
                some_hard(2, 3, 4, 4, seed=2),
                some_hard(2, 3, 4, 4, seed=3),
                shares(2.5, 1, 0.5, 0),
            ),
        },
        also_right=(weighed_by_atlib,),
        wrong={
            "You divided by the number of rows. A weighted mean is divided"
            " by the sum of its weights, or rows that are not read make every"
            " model look close.": lambda p, q, weight: divergence(p, q).mean((0, 1)) @ weight / len(weight),
            "Maps were averaged over heads, and then compared. Two heads that look"
            " at different patches would pass as two that look at both: compare"
            " first.": lambda p, q, weight: divergence(p.mean(1), q.mean(1)).mean(0) @ weight / weight.sum(),
            "That is in bits, with logarithms to base 2. The"
            " chapter counts in nats: natural logarithms.": lambda *inputs: weighed(*inputs) / log(2),
            "You took how far p is from q and q from p. Jensen-Shannon takes how"
            " far each is from their mean: it stays finite where one of them is 0.": lambda p, q, weight: (
                ((p - q) * (p.log() - q.log())).sum(-1).mean((0, 1)) / 2 @ weight / weight.sum()
            ),
            **told(keys_weighed, with_nan),
        },
        see="How far are two maps apart?",
    ),
    Exercise(
        "D4.2",
        subject="rollout",
        right=backwards,
        cases={
            "3 layers, residual 0.3": lambda: ([maps(2, 2, 5, 5, seed=seed) for seed in range(3)], 0.3),
            "2 layers, residual 0.6": lambda: ([maps(1, 3, 4, 4, seed=seed) for seed in range(2)], 0.6),
        },
        also_right=(lambda layers, residual: rollout(layers, residual)[:, 0],),
        wrong={
            "The layers come in the wrong order. The row starts at the output: it meets the last layer"
            " first, and the first layer last.": lambda layers, residual: backwards(layers[::-1], residual),
            "That is a column: how much of the class token's *input*"
            " each token ends up with. The task asks for its row:"
            " where its own output comes from.": lambda layers, residual: rollout(layers, residual)[:, :, 0],
            "`residual` is the share of the skip connection, the"
            " identity; you gave it to attention.": lambda layers, residual: backwards(layers, 1 - residual),
            "The largest of the heads was taken, and rows then sum to more than 1. Take their"
            " mean.": lambda layers, residual: backwards([p.amax(1, keepdim=True) for p in layers], residual),
            "The skip connection is missing: a token also"
            " keeps what it has, with the share `residual`.": lambda layers, residual: backwards(layers, 0.0),
            **told(rows_of_two),
        },
        see="One picture of all layers?",
    ),
    Exercise(
        "D4.3",
        subject="heads",
        right=reorder,
        cases={
            "4 heads": lambda: layer(8, [2, 0, 3, 1], seed=0),
            "3 heads of width 2": lambda: layer(6, [1, 2, 0], seed=3),
        },
        also_right=(by_index,),
        wrong={
            "proj was left as it was, and reads the old order. The"
            " heads' outputs are its *columns*: they move too, or the"
            " logits change.": lambda qkv, bias, proj, order: [*reorder(qkv, bias, proj, order)[:2], proj],
            "The rows of proj were moved. Its rows write into"
            " the stream's channels; its columns read the heads.": lambda qkv, bias, proj, order: (
                [*reorder(qkv, bias, proj, order)[:2], reorder(qkv, bias, proj.T, order)[2].T]
            ),
            "proj's columns are in the inverse order. New head"
            " h is old head order[h], in qkv and proj alike.": lambda qkv, bias, proj, order: (
                [*reorder(qkv, bias, proj, order)[:2], reorder(qkv, bias, proj, back(order))[2]]
            ),
            "The layer computes the same, but in the inverse order: you"
            " moved old head h to place order[h]. In the task, new head"
            " h is old head order[h].": lambda qkv, bias, proj, order: reorder(qkv, bias, proj, back(order)),
            "qkv's bias was left where it was. It has a number for"
            " each row of the weight, which moves with the row.": lambda qkv, bias, proj, order: (
                [reorder(qkv, bias, proj, order)[0], bias, reorder(qkv, bias, proj, order)[2]]
            ),
            **told(heads_outside),
        },
        see="Same operation, other maps",
        view=list,
    ),
)
