"""Exercises of card F1, Distilled MAE and row means."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, told

# --- F1.1 ---


def put(seen: Tensor, rows: Tensor, keys: Tensor, P: int) -> Tensor:
    """Maps (B, H, n, n) put at the places `rows` and `keys`, (B, n) each, of maps (B, H, P + 1, P + 1)."""
    B, H = seen.shape[:2]
    image, head = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    full = seen.new_zeros(B, H, P + 1, P + 1)
    full[image, head, rows[:, None, :, None], keys[:, None, None]] = seen
    return full


def token_places(kept: Tensor) -> Tensor:
    """The class token's place and those of the visible patches, which come one later."""
    return F.pad(kept + 1, (1, 0))


def at_home(seen: Tensor, kept: Tensor, P: int) -> Tensor:
    """Maps of visible tokens, put back to the places of these tokens."""
    return put(seen, token_places(kept), token_places(kept), P)


def by_matrices(seen: Tensor, kept: Tensor, P: int) -> Tensor:
    """The same: rows and keys are carried to their places by zeros and ones."""
    carry = F.one_hot(token_places(kept), P + 1).to(seen.dtype)[:, None]
    return carry.mT @ seen @ carry


def shown(B: int, H: int, P: int, visible: int, seed: int = 0) -> tuple[Tensor, Tensor, int]:
    """Maps of a class token and visible patches, and their places, in a shuffled order that differs from
    image to image. The first patch is never among them: a class token that is forgotten would fall on its
    place."""
    kept = 1 + normal(B, P - 1, seed=seed + 1).argsort(1)[:, :visible]
    return maps(B, H, visible + 1, visible + 1, seed=seed), kept, P


# --- F1.2 ---


def parts(q: Tensor, k: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """The answer from what q meets, and from the bias of k, (H, d)."""
    means, of_bias = ((q * keys).sum(-1) / q.shape[-1] ** 0.5 for keys in (k.mean(-2, True), bias[:, None]))
    return {"row means": means, "of the bias": of_bias, "keys": k - k.mean(-2, keepdim=True)}


def third(qkv_bias: Tensor, q: Tensor, number: int) -> Tensor:
    """The bias of q (0), k (1) or v (2), by head."""
    return qkv_bias.view(3, q.shape[1], q.shape[3])[number]


def rows_and_keys(q: Tensor, k: Tensor, qkv_bias: Tensor) -> dict[str, Tensor]:
    """Row means of logits, the part of them that the bias of k adds, and keys with which they vanish."""
    return parts(q, k, third(qkv_bias, q, 1))


def by_logits(q: Tensor, k: Tensor, qkv_bias: Tensor) -> dict[str, Tensor]:
    """The same from whole logits, with and without the bias."""
    _, H, _, d = q.shape
    bias = qkv_bias.chunk(3)[1].reshape(H, 1, d)
    means, without = ((q @ keys.mT).mean(-1) * d**-0.5 for keys in (k, k - bias))
    return {"row means": means, "of the bias": means - without, "keys": k - k.mean(2, keepdim=True)}


def unscaled(q, k, qkv_bias):
    """These are means of q·k. A logit is q·k/√d, and so both means are √d times smaller."""
    right, root = rows_and_keys(q, k, qkv_bias), q.shape[-1] ** 0.5
    return right | {name: root * right[name] for name in ("row means", "of the bias")}


def with_bias(B: int, H: int, N: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q and k (B, H, N, d), the bias within k, and the bias of q, k and v."""
    bias = 2 * normal(3 * H * d, seed=seed + 2)
    k = normal(B, H, N, d, seed=seed + 1) + bias.view(3, H, 1, d)[1]
    return normal(B, H, N, d, seed=seed), k, bias


EXERCISES = (
    Exercise(
        "F1.1",
        subject="maps",
        right=at_home,
        cases={"3 of 6 visible": lambda: shown(2, 2, 6, 3), "4 of 9": lambda: shown(3, 1, 9, 4, seed=5)},
        also_right=(by_matrices,),
        wrong={
            "The keys are in their places, and the rows are"
            " not: a query was shuffled like everything else.": lambda seen, kept, P: put(
                seen, torch.arange(seen.shape[-1]).expand(len(seen), -1), token_places(kept), P
            ),
            "The rows are in their places, and the keys are not: within a row"
            " the columns are still in the order in which patches were shown.": lambda seen, kept, P: put(
                seen, token_places(kept), torch.arange(seen.shape[-1]).expand(len(seen), -1), P
            ),
            "Each visible place was filled, but in reading order: a mask"
            " of zeros and ones does not say which patch came first. Token"
            " i + 1 belongs to place kept[i].": lambda seen, kept, P: at_home(seen, kept.sort(1).values, P),
            "All images were put back by the first one's order. Each has its own: `kept` has"
            " a row for each image.": lambda seen, kept, P: at_home(seen, kept[:1].expand(len(kept), -1), P),
            "Rows and columns are exchanged. A row is what"
            " one token asks; it still has to sum to 1.": lambda seen, kept, P: at_home(seen.mT, kept, P),
            "The patches stand one place too early. Token 0 is the class token: patch p"
            " is token p + 1.": lambda seen, kept, P: put(seen, F.pad(kept, (1, 0)), F.pad(kept, (1, 0)), P),
        },
    ),
    Exercise(
        "F1.2",
        subject="queries and keys",
        right=rows_and_keys,
        # at least as many queries as channels: only one vector can be taken from the keys
        cases={
            "two heads": lambda: with_bias(2, 2, 5, 3),
            "three heads": lambda: with_bias(1, 3, 6, 4, seed=5),
        },
        also_right=(by_logits,),
        see="What can be handed over",
        wrong={
            "That is what the bias of *q* would bring: it comes first,"
            " then that of k, then that of v.": lambda q, k, qkv_bias: parts(q, k, third(qkv_bias, q, 0)),
            "The bias was cut by heads first. It holds q of all heads, then k of all heads, then v:"
            " (3, H, d).": lambda q, k, qkv_bias: parts(q, k, qkv_bias.view(q.shape[1], 3, q.shape[3])[:, 1]),
            "Each key lost a mean of its own, over channels, which changes"
            " maps. The same vector has to be taken from all keys of a head.": lambda q, k, qkv_bias: (
                rows_and_keys(q, k, qkv_bias) | {"keys": k - k.mean(-1, keepdim=True)}
            ),
            "All heads lost the same average key. The"
            " queries of a head meet that head's keys alone.": lambda q, k, qkv_bias: (
                rows_and_keys(q, k, qkv_bias) | {"keys": k - k.mean((1, 2), keepdim=True)}
            ),
            "The means were taken down the columns, over queries."
            " A row is one query with all keys: the last axis.": lambda q, k, bias: (
                rows_and_keys(q, k, bias) | {"row means": (q @ k.mT / q.shape[-1] ** 0.5).mean(-2)}
            ),
            "Keys without their bias still have an average, and rows a mean. Take the whole average key"
            " away.": lambda q, k, bias: rows_and_keys(q, k, bias) | {"keys": k - third(bias, q, 1)[:, None]},
            **told(unscaled),
        },
    ),
)
