"""Exercises of how-to H1, Layers, heads, unequal pairs."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from atbook.exercises.inputs import maps, normal, vit
from atbook.exercises.judging import Exercise, told
from atlib import AttentionTransfer, Plan
from atlib.maps import aggregate_heads

Heads = Sequence[int]
Layers = Sequence[int] | Mapping[int, int] | None
Grid = tuple[int, int]

# --- H1.1 ---


def both_maps(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float) -> list[Tensor]:
    """The student's maps of all heads, and the teacher's of those that are copied."""
    return [(scale * q @ k.mT).softmax(-1), (scale_t * q_t @ k_t.mT).softmax(-1)]


def some_heads(
    q: Tensor, k: Tensor, v: Tensor, q_t: Tensor, k_t: Tensor, scale: float, scale_t: float, heads: Heads
) -> Tensor:
    """The teacher's maps in `heads`, the student's in the others, on the student's values."""
    p_s, copied = both_maps(q, k, q_t, k_t, scale, scale_t)
    mixed = p_s.clone()
    mixed[:, heads] = copied
    return mixed @ v


def half_and_half(q, k, v, q_t, k_t, scale, scale_t, heads):
    """The copied heads use the mean of both maps. Copied means the teacher's alone; it is the *layer* that
    uses both, head by head."""
    p_s, copied = both_maps(q, k, q_t, k_t, scale, scale_t)
    mixed = p_s.clone()
    mixed[:, heads] = (copied + p_s[:, heads]) / 2
    return mixed @ v


def the_other_heads(q, k, v, q_t, k_t, scale, scale_t, heads):
    """The heads that were *not* named got the teacher's maps."""
    unnamed = [head for head in range(q.shape[1]) if head not in heads]
    return some_heads(q, k, v, q_t, k_t, scale, scale_t, unnamed)


def two_of(student: int, heads: list[int], seed: int = 0) -> tuple:
    """Queries, keys and values of a student, queries and keys of teacher heads twice as wide."""
    of_student = (normal(2, student, 5, 3, seed=seed + i) for i in range(3))
    of_teacher = (normal(2, len(heads), 5, 6, seed=seed + i) for i in (3, 4))
    return *of_student, *of_teacher, 3**-0.5, 6**-0.5, heads


# --- H1.2 ---


def last_of(layers: Layers, depth: int) -> int:
    """The last of the teacher's layers whose map the student needs."""
    if layers is None:
        return depth - 1
    return max(layers.values() if isinstance(layers, Mapping) else layers)


def teacher_makes(layers: Layers, depth: int) -> dict[str, int]:
    """The number of layers in which the teacher makes q and k, values, and the MLP's output."""
    last = last_of(layers, depth)
    return {"q and k": last + 1, "v": last, "MLP": last}


def counted(layers: Layers, depth: int) -> dict[str, int]:
    """The same, counted while a pair runs."""
    teacher, student = vit(depth=depth), vit(depth=depth)
    pair = AttentionTransfer(teacher, student, Plan(layers=layers))
    ran = {"q and k": 0, "v": 0, "MLP": 0}

    def note(name: str):
        def hook(*_):
            ran[name] += 1

        return hook

    for block in teacher.blocks:
        for name, module in (("q and k", block.norm1), ("v", block.attn.proj), ("MLP", block.mlp)):
            module.register_forward_hook(note(name))
    with torch.no_grad():
        pair(normal(1, 3, 16, 16))
    return ran


def as_many_as_copied(layers, depth):
    """You counted the copied layers. A layer's q and k need all blocks below it: the last two layers of six
    cost five whole blocks."""
    copied = depth if layers is None else len(layers)
    return {"q and k": copied, "v": copied - 1, "MLP": copied - 1}


# --- H1.3 ---


def merged_groups(p: Tensor, groups: int, T: float) -> Tensor:
    """AttnDistill's rule for each group of neighbouring heads."""
    return (p.log().unflatten(1, (groups, -1)).sum(2) / T).softmax(-1)


def by_chunks(p: Tensor, groups: int, T: float) -> Tensor:
    """The same with the library's rule."""
    return torch.cat([aggregate_heads(group, T) for group in p.chunk(groups, 1)], 1)


# --- H1.4 ---


def belonging(grid: Grid, factor: int, prefix: int) -> Tensor:
    """A table that says which large token each small one is a part of: (N, M), zeros and ones."""
    down, across = grid
    row, column = torch.arange(down) // factor, torch.arange(across) // factor
    patch = (row[:, None] * (across // factor) + column).flatten()
    return F.one_hot(torch.cat([torch.arange(prefix), prefix + patch])).double()


def averaging(grid: Grid, factor: int, prefix: int) -> Tensor:
    """The same table, with columns that sum to 1."""
    parts = belonging(grid, factor, prefix)
    return parts / parts.sum(0)


def pooled_map(p: Tensor, grid: Grid, factor: int, prefix: int) -> Tensor:
    """The map of large patches: their shares as keys add up, and their rows as queries are averaged."""
    return averaging(grid, factor, prefix).mT @ p @ belonging(grid, factor, prefix)


def one_part_each(p, grid, factor, prefix):
    """One part of each large patch was kept, the others were thrown away, and the rows rescaled. All parts
    have something to say."""
    first = belonging(grid, factor, prefix).argmax(0)
    kept = p[:, :, first][..., first]
    return kept / kept.sum(-1, keepdim=True)


def neighbours_in_the_row(p, grid, factor, prefix):
    """Patches that follow each other in the list were put together. Tokens go row by row through the grid: a
    square of patches has parts in several rows."""
    patch = torch.arange(grid[0] * grid[1]) // factor**2
    parts = F.one_hot(torch.cat([torch.arange(prefix), prefix + patch])).to(p)
    return (parts / parts.sum(0)).mT @ p @ parts


EXERCISES = (
    Exercise(
        "H1.1",
        subject="maps",
        right=some_heads,
        cases={"heads [2, 0] of 4": lambda: two_of(4, [2, 0]), "head [1] of 3": lambda: two_of(3, [1], 20)},
        wrong={
            "q_t[:, j] belongs to heads[j], in the order given:"
            " with heads=[2, 0] the first map is for head 2."
            " Yours went to the heads in ascending order.": lambda q, k, v, q_t, k_t, scale, scale_t, heads: (
                some_heads(q, k, v, q_t, k_t, scale, scale_t, sorted(heads))
            ),
            "The teacher's scores were multiplied with the student's scale. Its heads"
            " may have a different width: use scale_t.": lambda q, k, v, q_t, k_t, scale, scale_t, heads: (
                some_heads(q, k, v, q_t, k_t, scale, scale, heads)
            ),
            "The values are right, but the student's own heads get"
            " no gradient: their q and k have to learn. Only in"
            " the copied heads is the student not asked.": lambda q, k, v, q_t, k_t, scale, scale_t, heads: (
                some_heads(q.detach(), k.detach(), v, q_t, k_t, scale, scale_t, heads)
            ),
            **told(half_and_half, the_other_heads),
        },
        see="A layer of two minds",
        grads=("q", "k", "v"),
    ),
    Exercise(
        "H1.2",
        subject="counting",
        right=teacher_makes,
        cases={
            "first two of 6": lambda: ([0, 1], 6),
            "last two of 6": lambda: ([4, 5], 6),
            "one in the middle": lambda: ([2], 6),
            "all": lambda: (None, 4),
            "first layers from later ones": lambda: ({0: 1, 1: 3}, 4),
        },
        also_right=(counted,),
        wrong={
            "The last needed block is run whole. Its q and k are enough for its map: no values, no"
            " MLP.": lambda layers, depth: dict.fromkeys(("q and k", "v", "MLP"), last_of(layers, depth) + 1),
            "The teacher is run up to its last map. It stops at"
            " the last one that is *asked for*; that is why first"
            " layers are cheap.": lambda layers, depth: {"q and k": depth, "v": depth - 1, "MLP": depth - 1},
            "In a mapping {student's layer: teacher's layer}"
            " the *values* are the teacher's. You read the keys.": lambda layers, depth: teacher_makes(
                list(layers) if isinstance(layers, Mapping) else layers, depth
            ),
            "Layers are counted from 0: the q and k"
            " of layer i are those of i + 1 layers.": lambda layers, depth: (
                {name: count - 1 for name, count in teacher_makes(layers, depth).items()}
            ),
            **told(as_many_as_copied),
        },
        see="How much of the teacher has to run?",
        rtol=0,
    ),
    Exercise(
        "H1.3",
        subject="maps",
        right=merged_groups,
        cases={
            "6 heads to 3": lambda: (maps(2, 6, 4, 5), 3, 10.0),
            "4 heads to 1, nearly sure": lambda: ((6 * normal(1, 4, 3, 3)).softmax(-1), 1, 2.0),
        },
        also_right=(by_chunks,),
        wrong={
            "That is the mean of each group's maps. AttnDistill multiplies them: it adds the logarithms,"
            " divides by T and takes the softmax.": lambda p, groups, T: p.unflatten(1, (groups, -1)).mean(2),
            "Heads h, h + groups, h + 2 · groups … were merged. A group is of"
            " neighbours: of six heads in three groups, heads 0 and 1, then"
            " 2 and 3.": lambda p, groups, T: (p.log().unflatten(1, (-1, groups)).sum(1) / T).softmax(-1),
            "The temperature is missing. A product of several maps puts nearly all on one token;"
            " the summed logarithms are divided by T.": lambda p, groups, T: merged_groups(p, groups, 1.0),
            "The logarithms were averaged, which is T = heads of a"
            " group. AttnDistill's T is a number of its own, whatever"
            " the number of heads.": lambda p, groups, T: merged_groups(p, groups, p.shape[1] / groups),
            "The rows do not sum to 1: what follows the division by T is a softmax,"
            " not an exp.": lambda p, groups, T: (p.log().unflatten(1, (groups, -1)).sum(2) / T).exp(),
        },
        see="Two heads for four",
    ),
    Exercise(
        "H1.4",
        subject="maps",
        right=pooled_map,
        cases={
            "4 × 4 to 2 × 2": lambda: (maps(2, 2, 17, 17), (4, 4), 2, 1),
            "6 × 3 to 2 × 1, with registers": lambda: (maps(1, 2, 21, 21, seed=4), (6, 3), 3, 3),
        },
        wrong={
            "The sides of the grid are exchanged: it is (patches down,"
            " patches across).": lambda p, grid, factor, prefix: pooled_map(p, grid[::-1], factor, prefix),
            "The shares of a large patch's parts were averaged, and most of the attention is"
            " gone. What is listened to adds up.": lambda p, *how: averaging(*how).mT @ p @ averaging(*how),
            "The rows of a large patch's parts were added up, so they sum to their number."
            " Rows that listen are averaged.": lambda p, *how: belonging(*how).mT @ p @ belonging(*how),
            "Turn it round: keys, the last axis, add up; queries,"
            " the axis before it, average.": lambda p, *how: belonging(*how).mT @ p @ averaging(*how),
            **told(one_part_each, neighbours_in_the_row),
        },
        see="Smaller patches",
    ),
)
