"""Exercises of chapter 17, Before there are labels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, Wrong

# --- 17.1 ---


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


def no_class_token(seen: Tensor, kept: Tensor, P: int) -> Tensor:
    """The patches stand one place too early. Token 0 is the class token: patch p is token p + 1."""
    places = F.pad(kept, (1, 0))
    return put(seen, places, places, P)


def keys_alone(seen: Tensor, kept: Tensor, P: int) -> Tensor:
    """The keys are in their places, and the rows are not: a query was shuffled like everything else."""
    return put(seen, torch.arange(seen.shape[-1]).expand(len(seen), -1), token_places(kept), P)


def rows_alone(seen: Tensor, kept: Tensor, P: int) -> Tensor:
    """The rows are in their places, and the keys are not: within a row the columns are still in the order in
    which patches were shown."""
    return put(seen, token_places(kept), torch.arange(seen.shape[-1]).expand(len(seen), -1), P)


def in_reading_order(seen: Tensor, kept: Tensor, P: int) -> Tensor:
    """Each visible place was filled, but in reading order: a mask of zeros and ones does not say which patch
    came first. Token i + 1 belongs to place kept[i]."""
    return at_home(seen, kept.sort(1).values, P)


def one_order_for_all(seen: Tensor, kept: Tensor, P: int) -> Tensor:
    """All images were put back by the first one's order. Each has its own: `kept` has a row for each
    image."""
    return at_home(seen, kept[:1].expand(len(kept), -1), P)


def rows_for_keys(seen: Tensor, kept: Tensor, P: int) -> Tensor:
    """Rows and columns are exchanged. A row is what one token asks; it still has to sum to 1."""
    return at_home(seen.mT, kept, P)


def shown(B: int, H: int, P: int, visible: int, seed: int = 0) -> tuple[Tensor, Tensor, int]:
    """Maps of a class token and visible patches, and their places, in a shuffled order that differs from
    image to image. The first patch is never among them: a class token that is forgotten would fall on its
    place."""
    kept = 1 + normal(B, P - 1, seed=seed + 1).argsort(1)[:, :visible]
    return maps(B, H, visible + 1, visible + 1, seed=seed), kept, P


# --- 17.2 ---


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


def column_means(q: Tensor, k: Tensor, qkv_bias: Tensor) -> dict[str, Tensor]:
    """The means were taken down the columns, over queries. A row is one query with all keys: the last
    axis."""
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return rows_and_keys(q, k, qkv_bias) | {"row means": logits.mean(-2)}


def unscaled(q: Tensor, k: Tensor, qkv_bias: Tensor) -> dict[str, Tensor]:
    """These are means of q·k. A logit is q·k/√d, and so both means are √d times smaller."""
    right, root = rows_and_keys(q, k, qkv_bias), q.shape[-1] ** 0.5
    return right | {name: root * right[name] for name in ("row means", "of the bias")}


def bias_of_q(q: Tensor, k: Tensor, qkv_bias: Tensor) -> dict[str, Tensor]:
    """That is what the bias of *q* would bring: it comes first, then that of k, then that of v."""
    return parts(q, k, third(qkv_bias, q, 0))


def heads_first(q: Tensor, k: Tensor, qkv_bias: Tensor) -> dict[str, Tensor]:
    """The bias was cut by heads first. It holds q of all heads, then k of all heads, then v: (3, H, d)."""
    return parts(q, k, qkv_bias.view(q.shape[1], 3, q.shape[3])[:, 1])


def less_the_bias(q: Tensor, k: Tensor, qkv_bias: Tensor) -> dict[str, Tensor]:
    """Keys without their bias still have an average, and rows a mean. Take the whole average key away."""
    bias = third(qkv_bias, q, 1)
    return parts(q, k, bias) | {"keys": k - bias[:, None]}


def each_key_centred(q: Tensor, k: Tensor, qkv_bias: Tensor) -> dict[str, Tensor]:
    """Each key lost a mean of its own, over channels, which changes maps. The same vector has to be taken
    from all keys of a head."""
    return rows_and_keys(q, k, qkv_bias) | {"keys": k - k.mean(-1, keepdim=True)}


def one_key_for_all_heads(q: Tensor, k: Tensor, qkv_bias: Tensor) -> dict[str, Tensor]:
    """All heads lost the same average key. The queries of a head meet that head's keys alone."""
    return rows_and_keys(q, k, qkv_bias) | {"keys": k - k.mean((1, 2), keepdim=True)}


def with_bias(B: int, H: int, N: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q and k (B, H, N, d), the bias within k, and the bias of q, k and v."""
    bias = 2 * normal(3 * H * d, seed=seed + 2)
    k = normal(B, H, N, d, seed=seed + 1) + bias.view(3, H, 1, d)[1]
    return normal(B, H, N, d, seed=seed), k, bias


# --- 17.3 ---

EMBEDDING = ("cls_token", "pos_embed", "patch_embed.")
Weights = dict[str, Tensor]


def chosen(teacher: Weights, student: Weights, of_teacher: tuple[str, ...]) -> Weights:
    """The student's weights, and the teacher's where a name begins with one of `of_teacher`."""
    return {name: (teacher if name.startswith(of_teacher) else student)[name] for name in student}


def keep_low(teacher: Weights, student: Weights, n: int) -> Weights:
    """The teacher's embedding and first n blocks; all that comes after them is the student's."""
    return chosen(teacher, student, EMBEDDING + tuple(f"blocks.{number}." for number in range(n)))


def by_number(teacher: Weights, student: Weights, n: int) -> Weights:
    """The same, by the number of the block."""
    weights = dict(student)
    for name in student:
        first, second, *_ = (name + ".").split(".")
        if int(second) < n if first == "blocks" else first not in ("norm", "head"):
            weights[name] = teacher[name]
    return weights


def without_a_dot(teacher: Weights, student: Weights, n: int) -> Weights:
    """Too many blocks were kept: a name that begins with blocks.1 may be that of block 10. Put the dot behind
    the number."""
    return chosen(teacher, student, EMBEDDING + tuple(f"blocks.{number}" for number in range(n)))


def one_block_more(teacher: Weights, student: Weights, n: int) -> Weights:
    """One block too many: they count from 0, so that block n is the first to be drawn again."""
    return keep_low(teacher, student, n + 1)


def blocks_alone(teacher: Weights, student: Weights, n: int) -> Weights:
    """The embedding is the student's. The kept blocks learned to read the teacher's tokens: its patches,
    places and class token."""
    return chosen(teacher, student, tuple(f"blocks.{number}." for number in range(n)))


def final_norm_too(teacher: Weights, student: Weights, n: int) -> Weights:
    """The last norm is the teacher's. It comes after the blocks that are drawn again."""
    return keep_low(teacher, student, n) | {
        name: teacher[name] for name in student if name.startswith("norm.")
    }


def high_blocks(teacher: Weights, student: Weights, n: int) -> Weights:
    """The *last* n blocks were kept. The task asks for the first, next to the image."""
    depth = 1 + max(int(name.split(".")[1]) for name in student if name.startswith("blocks."))
    return chosen(teacher, student, EMBEDDING + tuple(f"blocks.{depth - 1 - i}." for i in range(n)))


def exchanged(teacher: Weights, student: Weights, n: int) -> Weights:
    """It is the other way round: the low part shall be the teacher's, and the rest new."""
    kept = keep_low(teacher, student, n)
    return {name: (student if kept[name] is teacher[name] else teacher)[name] for name in student}


def state(depth: int, seed: int) -> Weights:
    """Weights under a ViT's names, two channels wide."""
    shapes = {"cls_token": (1, 1, 2), "pos_embed": (1, 5, 2), "patch_embed.proj.weight": (2, 3)}
    for number in range(depth):
        shapes |= {f"blocks.{number}.norm1.weight": (2,), f"blocks.{number}.attn.qkv.weight": (6, 2)}
    shapes |= {"norm.weight": (2,), "head.weight": (3, 2)}
    return {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def two_vits(depth: int, n: int) -> tuple[Weights, Weights, int]:
    return state(depth, 0), state(depth, 100), n


EXERCISES = (
    Exercise(
        "17.1",
        "Maps back in their places",
        stars=2,
        minutes=20,
        subject="maps",
        right=at_home,
        cases={"3 of 6 visible": lambda: shown(2, 2, 6, 3), "4 of 9": lambda: shown(3, 1, 9, 4, seed=5)},
        also_right=(by_matrices,),
        wrong={
            "no class token": Wrong(no_class_token),
            "keys alone": Wrong(keys_alone),
            "rows alone": Wrong(rows_alone),
            "reading order": Wrong(in_reading_order),
            "one order for all": Wrong(one_order_for_all),
            "transposed": Wrong(rows_for_keys),
        },
    ),
    Exercise(
        "17.2",
        "Keys without row means",
        stars=2,
        minutes=15,
        subject="queries and keys",
        right=rows_and_keys,
        # at least as many queries as channels: only one vector can be taken from the keys
        cases={
            "two heads": lambda: with_bias(2, 2, 5, 3),
            "three heads": lambda: with_bias(1, 3, 6, 4, seed=5),
        },
        also_right=(by_logits,),
        see="What distilled MAE asks for",
        wrong={
            "columns": Wrong(column_means),
            "unscaled": Wrong(unscaled),
            "bias of q": Wrong(bias_of_q),
            "heads first": Wrong(heads_first),
            "less the bias": Wrong(less_the_bias),
            "each key": Wrong(each_key_centred),
            "all heads": Wrong(one_key_for_all_heads),
        },
    ),
    Exercise(
        "17.3",
        "Keep the low blocks",
        stars=1,
        minutes=10,
        subject="weights",
        right=keep_low,
        cases={
            "2 of 12": lambda: two_vits(12, 2),
            "none of 3": lambda: two_vits(3, 0),
            "all of 2": lambda: two_vits(2, 2),
        },
        also_right=(by_number,),
        wrong={
            "blocks.1 and blocks.10": Wrong(without_a_dot),
            "one more": Wrong(one_block_more),
            "no embedding": Wrong(blocks_alone),
            "norm": Wrong(final_norm_too),
            "high blocks": Wrong(high_blocks),
            "exchanged": Wrong(exchanged),
        },
    ),
)
