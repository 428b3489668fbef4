"""Exercises of chapter 6, Distill."""

from collections.abc import Callable

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import kl_div, one_hot
from torch.special import entr

from atbook.exercises.inputs import maps, normal, vit
from atbook.exercises.judging import Exercise, told
from atlib import walk
from atlib.losses import map_cross_entropy

# --- 6.1 ---


def map_loss(s0: Tensor, s1: Tensor, t0: Tensor, t1: Tensor) -> Tensor:
    """The attention cross-entropy of two layers."""
    return sum(-(t.detach() * s.log()).sum(-1).mean() for s, t in ((s0, t0), (s1, t1)))


# --- 6.2 ---


def excess(students: list[Tensor], teachers: list[Tensor]) -> Tensor:
    """The loss minus its floor, the teacher's entropy."""
    return sum((-entr(t).sum(-1) - torch.xlogy(t, s).sum(-1)).mean() for s, t in zip(students, teachers))


def by_ratio(students: list[Tensor], teachers: list[Tensor]) -> Tensor:
    """The same as a Kullback-Leibler divergence."""
    return sum(torch.where(t > 0, t * (t / s).log(), 0).sum(-1).mean() for s, t in zip(students, teachers))


def layers(number: int, *shape: int, seed: int = 0) -> list[Tensor]:
    """Maps of some layers."""
    return [maps(*shape, seed=seed + i) for i in range(number)]


def hard(*shape: int, seed: int = 0) -> Tensor:
    """Maps of zeros and ones: every token listens to a single one."""
    return one_hot(maps(*shape, seed=seed).argmax(-1), shape[-1]).double()


# --- 6.3 ---

Draw = Callable[[float, int], Tensor]  # (probability of a one, number) -> zeros and ones
Masks = list[tuple[Tensor, Tensor]]  # of each block: for attention and MLP, (B, 1, 1) each
Streams = tuple[Tensor, Tensor]  # the teacher's and the student's, (B, N, D) each


def drop_both(
    teacher: VisionTransformer, student: VisionTransformer, images: Tensor, rates: list[float], draw: Draw
) -> Streams:
    """The outputs of the last blocks when both models drop the same branches."""
    t, s = (model._pos_embed(model.patch_embed(images)) for model in (teacher, student))
    for block_t, block_s, rate in zip(teacher.blocks, student.blocks, rates):
        keep = 1 - rate
        routed, local = (draw(keep, len(images)).view(-1, 1, 1) / keep for _ in range(2))
        t = t + routed * block_t.attn(block_t.norm1(t))
        t = t + local * block_t.mlp(block_t.norm2(t))
        s = s + routed * block_s.attn(block_s.norm1(s))
        s = s + local * block_s.mlp(block_s.norm2(s))
    return t, s


def draw_one(rate: float, images: Tensor, draw: Draw) -> Tensor:
    """A branch's mask: (B, 1, 1)."""
    return draw(1 - rate, len(images)).view(-1, 1, 1) / (1 - rate)


def draw_all(rates: list[float], images: Tensor, draw: Draw) -> Masks:
    """The masks of all blocks."""
    return [(draw_one(rate, images, draw), draw_one(rate, images, draw)) for rate in rates]


def dropped(model: VisionTransformer, images: Tensor, masks: Masks | None) -> Tensor:
    """The output of the last block with these masks, by atlib: (B, N, D)."""
    return walk(model, images, drop_path=masks, head=False).tokens


def by_walking(
    teacher: VisionTransformer, student: VisionTransformer, images: Tensor, rates: list[float], draw: Draw
) -> Streams:
    """The same by atlib."""
    masks = draw_all(rates, images, draw)
    return dropped(teacher, images, masks), dropped(student, images, masks)


def one_after_the_other(
    teacher: VisionTransformer, student: VisionTransformer, images: Tensor, rates: list[float], draw: Draw
) -> Streams:
    """Wrong: each draws its own, first all of the teacher's."""
    return tuple(dropped(model, images, draw_all(rates, images, draw)) for model in (teacher, student))


def block_by_block(
    teacher: VisionTransformer, student: VisionTransformer, images: Tensor, rates: list[float], draw: Draw
) -> Streams:
    """Wrong: each draws its own, in every block first the teacher."""
    masks = draw_all([rate for rate in rates for _ in range(2)], images, draw)
    return dropped(teacher, images, masks[::2]), dropped(student, images, masks[1::2])


def branch_by_branch(
    teacher: VisionTransformer, student: VisionTransformer, images: Tensor, rates: list[float], draw: Draw
) -> Streams:
    """Wrong: each draws its own, in every branch first the teacher."""
    masks = draw_all([rate for rate in rates for _ in range(2)], images, draw)
    of_branches = list(zip(masks[::2], masks[1::2]))
    return tuple(
        dropped(model, images, [(attention[i], mlp[i]) for attention, mlp in of_branches])
        for i, model in enumerate((teacher, student))
    )


def both_branches(teacher, student, images, rates, draw):
    """Attention and MLP of a block are dropped together. Each is a branch with a draw of its own."""
    masks = [2 * (draw_one(rate, images, draw),) for rate in rates]
    return dropped(teacher, images, masks), dropped(student, images, masks)


def coins(seed: int) -> Draw:
    """A function that draws zeros and ones."""
    rng = torch.Generator().manual_seed(seed)

    def draw(probability: float, number: int) -> Tensor:
        return (torch.rand(number, generator=rng, dtype=torch.float64) < probability).double()

    return draw


EACH_ITS_OWN = (
    "Teacher and student drop different branches. The teacher's maps then belong to another network than the"
    " one that learns from them: draw once for each branch, and use it in both."
)


EXERCISES = (
    Exercise(
        "6.1",
        subject="losses",
        right=map_loss,
        cases={
            "5 tokens": lambda: tuple(maps(2, 3, 5, 5, seed=seed) for seed in range(4)),
            "layers with one head and three": lambda: tuple(
                maps(2, heads, 4, 4, seed=seed) for seed, heads in enumerate((1, 3, 1, 3))
            ),
            "4 queries, 6 keys": lambda: tuple(maps(2, 3, 4, 6, seed=seed) for seed in range(4)),
        },
        also_right=(
            lambda s0, s1, t0, t1: map_cross_entropy(s0.log(), t0) + map_cross_entropy(s1.log(), t1),
        ),
        wrong={
            "You averaged over layers. The paper sums them: with more layers the loss"
            " pulls harder, and λ has to know it.": lambda *maps_of_layers: map_loss(*maps_of_layers) / 2,
            "You averaged over keys too, which divides by N."
            " Keys belong to one distribution: they are summed.": lambda s0, s1, t0, t1: sum(
                -(t.detach() * s.log()).mean() for s, t in ((s0, t0), (s1, t1))
            ),
            "Teacher and student are exchanged: the teacher's share"
            " weighs the student's logarithm, not the reverse.": lambda s0, s1, t0, t1: sum(
                -(s * t.detach().log()).sum(-1).mean() for s, t in ((s0, t0), (s1, t1))
            ),
            "The value is right, but a gradient reaches the"
            " teacher's maps. They are constants: .detach().": lambda s0, s1, t0, t1: sum(
                -(t * s.log()).sum(-1).mean() for s, t in ((s0, t0), (s1, t1))
            ),
            "Heads are summed. They are averaged, so"
            " that λ does not depend on their number.": lambda s0, s1, t0, t1: sum(
                -(t.detach() * s.log()).sum(-1).mean((0, 2)).sum() for s, t in ((s0, t0), (s1, t1))
            ),
            "You summed over queries and averaged over keys. A distribution is"
            " a row: sum over keys, the last axis, and average over queries.": lambda s0, s1, t0, t1: sum(
                (-(t.detach() * s.log()).sum(-2).mean() for s, t in ((s0, t0), (s1, t1)))
            ),
            "You divided by the number of images alone, as"
            " reduction='batchmean' does. Heads and queries are averaged, too.": lambda s0, s1, t0, t1: sum(
                (-(t.detach() * s.log()).sum() / len(s) for s, t in ((s0, t0), (s1, t1)))
            ),
            "The gradients are right, the value is the Kullback-Leibler divergence:"
            " the teacher's entropy is taken away. The cross-entropy keeps it.": lambda s0, s1, t0, t1: sum(
                ((t.detach() * (t.detach() / s).log()).sum(-1).mean() for s, t in ((s0, t0), (s1, t1)))
            ),
            "kl_div with reduction='batchmean' divides by the number of images alone, and takes the teacher's"
            " entropy away. Average over heads and queries, and keep the entropy.": lambda s0, s1, t0, t1: (
                sum((kl_div(s.log(), t.detach(), reduction="batchmean") for s, t in ((s0, t0), (s1, t1))))
            ),
        },
        see="The idea",
        grads=("s0", "s1", "t0", "t1"),
        by_scores=True,
    ),
    Exercise(
        "6.2",
        subject="losses",
        right=excess,
        cases={
            "soft maps": lambda: (layers(2, 2, 2, 4, 4), layers(2, 2, 2, 4, 4, seed=7)),
            "a teacher with zeros": lambda: (layers(1, 2, 2, 4, 4), [hard(2, 2, 4, 4, seed=3)]),
        },
        also_right=(by_ratio,),
        wrong={
            "0 · log 0 made a nan where the teacher gives a token"
            " nothing. torch.special.entr and xlogy know that it is 0.": lambda students, teachers: sum(
                (t * t.log() - t * s.log()).sum(-1).mean() for s, t in zip(students, teachers)
            ),
            "reduction='batchmean' divides by the number of"
            " images alone. Heads and queries are averaged, too.": lambda students, teachers: sum(
                (kl_div(s.log(), t, reduction="batchmean") for s, t in zip(students, teachers))
            ),
            "That is the cross-entropy: the teacher's"
            " entropy, its minimum, is still in it.": lambda students, teachers: sum(
                (-torch.xlogy(t, s).sum(-1).mean() for s, t in zip(students, teachers))
            ),
            "The student's entropy was taken away. The minimum is the teacher's:"
            " it is reached when the maps are equal, whatever the student.": lambda students, teachers: sum(
                (-entr(s).sum(-1) - torch.xlogy(t, s).sum(-1)).mean() for s, t in zip(students, teachers)
            ),
            "The teacher's entropy was added instead"
            " of taken away (Σ p log p is negative).": lambda students, teachers: sum(
                (entr(t).sum(-1) - torch.xlogy(t, s).sum(-1)).mean() for s, t in zip(students, teachers)
            ),
        },
    ),
    Exercise(
        "6.3",
        subject="training",
        right=drop_both,
        cases={
            "rates up to 0.5": lambda: (vit(0), vit(1), normal(6, 3, 16, 16), [0.1, 0.3, 0.5], coins(4)),
            "a rate of 0": lambda: (
                *(vit(2, depth=2), vit(3, depth=2), normal(4, 3, 16, 16, seed=1)),
                *([0.0, 0.4], coins(5)),
            ),
        },
        also_right=(by_walking,),
        wrong={
            EACH_ITS_OWN + " You drew all of the teacher's first.": one_after_the_other,
            EACH_ITS_OWN + " You drew in every block, first for the teacher.": block_by_block,
            EACH_ITS_OWN + " You drew in every branch, first for the teacher.": branch_by_branch,
            "One draw serves the whole batch. Every image"
            " draws for itself: draw(keep, len(images)).": lambda teacher, student, images, rates, draw: (
                drop_both(teacher, student, images, rates, lambda keep, number: draw(keep, 1).repeat(number))
            ),
            "Kept branches were not divided by 1 - rate. On average they then add less in training"
            " than in evaluation, where none is dropped.": lambda teacher, student, images, rates, draw: (
                drop_both(teacher, student, images, rates, lambda keep, number: keep * draw(keep, number))
            ),
            "You drew with the rate, so branches are kept as often as they should be dropped."
            " A branch is kept with probability 1 - rate.": lambda teacher, student, images, rates, draw: (
                drop_both(teacher, student, images, rates, lambda keep, number: draw(1 - keep, number))
            ),
            "The teacher drops nothing, so its maps are those of a deeper network than the one"
            " that learns from them. It drops what the student drops.": lambda t, s, images, rates, draw: (
                (dropped(t, images, None), drop_both(t, s, images, rates, draw)[1])
            ),
            **told(both_branches),
        },
    ),
)
