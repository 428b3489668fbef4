"""Exercises of chapter 3, Copy."""

import re
from collections.abc import Sequence
from statistics import mean

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor

from atbook.exercises.inputs import normal, vit
from atbook.exercises.judging import Exercise, told
from atlib import walk
from atlib.attention import Instead, Seen

# --- 3.1 ---


def place_on_ruler(scratch: list[float], method: list[float], full: list[float]) -> float:
    """The place of a method between scratch, 0, and fine-tuning, 1."""
    return (mean(method) - mean(scratch)) / (mean(full) - mean(scratch))


def by_sums(scratch: list[float], method: list[float], full: list[float]) -> float:
    """The same from the seeds' gains, because the number of seeds cancels."""
    return sum(m - s for m, s in zip(method, scratch)) / sum(f - s for f, s in zip(full, scratch))


# --- 3.2 ---


def queries_keys_values(attn: Attention, x: Tensor) -> Tensor:
    """Queries, keys and values of the normalised input (B, N, D) of attention: (3, B, H, N, d)."""
    B, N, _ = x.shape
    return attn.qkv(x).reshape(B, N, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)


def map_and_values(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """The map (B, H, N, N) and the values (B, H, N, d) of a block for its input (B, N, D)."""
    q, k, v = queries_keys_values(block.attn, block.norm1(x))
    return (q @ k.mT * block.attn.scale).softmax(-1), v


def first_tokens(vit: VisionTransformer, images: Tensor) -> Tensor:
    """The input of block 0: (B, N, D)."""
    return vit._pos_embed(vit.patch_embed(images))


def through(block: Block, x: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """The output of a block that mixes the values v with the map p."""
    x = x + block.attn.proj((p @ v).transpose(1, 2).flatten(2))
    return x + block.mlp(block.norm2(x))


def copy_some(
    teacher: VisionTransformer, student: VisionTransformer, images: Tensor, layers: Sequence[int]
) -> Tensor:
    """Logits of a student with its teacher's maps in some layers."""
    t, s = first_tokens(teacher, images), first_tokens(student, images)
    for i, (block_t, block_s) in enumerate(zip(teacher.blocks, student.blocks)):
        p, v = map_and_values(block_s, s)
        with torch.no_grad():
            p = map_and_values(block_t, t)[0] if i in layers else p
            t = block_t(t)
        s = through(block_s, s, p, v)
    return student.head(student.norm(s)[:, 0])


@torch.no_grad()
def seen_by(teacher: VisionTransformer, images: Tensor) -> tuple[Seen, ...]:
    """What the teacher's layers saw, as constants."""
    return walk(teacher, images).layers


def copied_by_walking(
    teacher: VisionTransformer, student: VisionTransformer, images: Tensor, layers: Sequence[int]
) -> Tensor:
    """The same by atlib."""
    seen = seen_by(teacher, images)
    return walk(student, images, replace={i: Instead(map=seen[i].map) for i in layers}).logits


def of_the_students_tokens(teacher, student, images, layers):
    """The teacher's layers were given the student's tokens. The teacher has to be run on its own, from the
    image on, and whole block by whole block."""
    s = first_tokens(student, images)
    for i, (block_t, block_s) in enumerate(zip(teacher.blocks, student.blocks)):
        p, v = map_and_values(block_s, s)
        with torch.no_grad():
            p = map_and_values(block_t, s)[0] if i in layers else p
        s = through(block_s, s, p, v)
    return student.head(student.norm(s)[:, 0])


def values_too(teacher, student, images, layers):
    """In the copied layers the values are the teacher's, too, so its content reaches the student. Copy
    replaces the map and nothing else."""
    s, seen = first_tokens(student, images), seen_by(teacher, images)
    for i, block in enumerate(student.blocks):
        s = through(block, s, *((seen[i].map, seen[i].v) if i in layers else map_and_values(block, s)))
    return student.head(student.norm(s)[:, 0])


def from_the_first_on(teacher, student, images, layers):
    """After the first copied layer all later ones are copied, too. A layer that is not in `layers` uses the
    student's own map."""
    later = range(min(layers, default=len(student.blocks)), len(student.blocks))
    return copied_by_walking(teacher, student, images, later)


def at_the_students_scale(teacher, student, images, layers):
    """The teacher's scores were divided by the student's √d. The wider teacher has wider heads: take the
    scale of its own attention."""
    seen = seen_by(teacher, images)
    return walk(student, images, replace={i: Instead(q=seen[i].q, k=seen[i].k) for i in layers}).logits


def pictures(number: int, seed: int) -> Tensor:
    """Noise of the size that `vit` takes."""
    return normal(number, 3, 16, 16, seed=seed)


# --- 3.3 ---


def rate_factors(names: list[str], depth: int, decay: float) -> dict[str, float]:
    """The factor on each parameter's learning rate."""
    factors = {}
    for name in names:
        part, *rest = name.split(".")
        if part == "blocks":
            layer = int(rest[0]) + 1
        elif part == "norm":
            layer = depth
        elif part in ("fc_norm", "head"):
            layer = depth + 1
        else:
            layer = 0
        factors[name] = decay ** (depth + 1 - layer)
    return factors


def by_patterns(
    names: list[str], depth: int, decay: float, block: str = r"blocks\.(\d+)\.", last: str = r"norm\."
) -> dict[str, float]:
    """The same by regular expressions."""
    factors = dict.fromkeys(names, decay ** (depth + 1))
    for name in names:
        if numbered := re.match(block, name):
            factors[name] = decay ** (depth - int(numbered[1]))
        elif re.match(r"(head|fc_norm)\.", name):
            factors[name] = 1.0
        elif re.match(last, name):
            factors[name] = decay
    return factors


TWELVE_BLOCKS = [
    *("cls_token", "reg_token", "pos_embed", "patch_embed.proj.weight", "norm_pre.weight"),
    *("blocks.0.norm1.bias", "blocks.1.attn.qkv.weight", "blocks.10.mlp.fc1.weight", "blocks.11.ls1.gamma"),
    *("fc_norm.weight", "head.weight"),
]
FOUR_BLOCKS = ["pos_embed", "blocks.0.attn.proj.bias", "blocks.3.norm2.weight", "norm.bias", "head.bias"]


EXERCISES = (
    Exercise(
        "3.1",
        subject="statistics",
        right=place_on_ruler,
        cases={
            "five seeds": lambda: (
                [60.1, 61.0, 59.5, 62.0, 60.4],
                [70.2, 71.1, 69.0, 73.0, 70.0],
                [80.0, 81.2, 79.0, 80.5, 81.1],
            ),
            "a seed with hardly a gap": lambda: ([60.0, 69.9], [65.0, 72.0], [70.0, 70.0]),
            "beyond the end": lambda: ([50.0, 51.0], [72.0, 71.0], [70.0, 69.0]),
        },
        also_right=(by_sums,),
        wrong={
            "You averaged a ratio for each seed. Where one seed's gap is small, its ratio"
            " is huge and decides all: divide the mean gain by the mean gap.": lambda scratch, method, full: (
                mean((m - s) / (f - s) for s, m, f in zip(scratch, method, full))
            ),
            "0 and 1 are exchanged: scratch is 0, fine-tuning is 1.": lambda scratch, method, full: (
                1 - place_on_ruler(scratch, method, full)
            ),
            "The place is cut off at 0 and 1. A method may lie beyond"
            " fine-tuning or below scratch, and the ruler has to be able to say"
            " so.": lambda scratch, method, full: min(1.0, max(0.0, place_on_ruler(scratch, method, full))),
            "That is the method's accuracy as a share of fine-tuning's."
            " Scratch, which got nothing, would then not be at"
            " 0: take its accuracy away from both.": lambda scratch, method, full: mean(method) / mean(full),
            "You took the best seed of each. The best of several"
            " says how lucky one run was: average over seeds.": lambda scratch, method, full: place_on_ruler(
                [max(scratch)], [max(method)], [max(full)]
            ),
        },
        see="The ruler: scratch and fine-tuning",
    ),
    Exercise(
        "3.2",
        subject="copy",
        right=copy_some,
        cases={
            "layers 0 and 2 of 3": lambda: (vit(0), vit(1), pictures(2, seed=2), [0, 2]),
            "layer 1, a wider teacher": lambda: (vit(3, embed_dim=24), vit(4), pictures(2, seed=5), [1]),
            "no layer": lambda: (vit(6), vit(7), pictures(1, seed=8), []),
        },
        also_right=(copied_by_walking,),
        wrong={
            "You copied the layers that are not in `layers`,"
            " and left those that are to the student.": lambda t, s, images, layers: copied_by_walking(
                t, s, images, [i for i in range(len(s.blocks)) if i not in layers]
            ),
            "The logits are right, but a gradient reaches the teacher through"
            " its maps. They are constants: torch.no_grad() or .detach().": lambda t, s, images, layers: (
                walk(
                    s, images, replace={i: Instead(map=walk(t, images).layers[i].map) for i in layers}
                ).logits
            ),
            **told(of_the_students_tokens, values_too, from_the_first_on, at_the_students_scale),
        },
        see="Copy, in the library's own lines",
        grads=("teacher", "student"),
    ),
    Exercise(
        "3.3",
        subject="training",
        right=rate_factors,
        cases={
            "12 blocks, registers, fc_norm": lambda: (TWELVE_BLOCKS, 12, 0.75),
            "4 blocks": lambda: (FOUR_BLOCKS, 4, 0.5),
        },
        also_right=(by_patterns,),
        wrong={
            "blocks.10 and blocks.11 have the rate of blocks.1: only one digit of the number"
            " was read.": lambda names, depth, decay: by_patterns(names, depth, decay, block=r"blocks\.(\d)"),
            "norm_pre has the last block's rate, because its name begins with 'norm'. It"
            " stands before the first block and belongs to the embedding. (timm 1.0.20"
            " did so, too.)": lambda names, depth, decay: by_patterns(names, depth, decay, last="norm"),
            "The last block has the head's full rate, and all below it one factor"
            " too many. The last block has γ, the embedding γ^(depth + 1).": lambda names, depth, decay: (
                {name: min(1.0, factor / decay) for name, factor in rate_factors(names, depth, decay).items()}
            ),
            "The embedding learns fastest and the head slowest. It is the"
            " reverse: what is general, at the bottom, is to change least.": lambda names, depth, decay: (
                {
                    name: decay ** (depth + 1) / factor
                    for name, factor in rate_factors(names, depth, decay).items()
                }
            ),
            "fc_norm has the embedding's rate. It normalises the average of"
            " the last tokens, right below the head, and goes with the head.": lambda names, depth, decay: (
                rate_factors(names, depth, decay)
                | {name: decay ** (depth + 1) for name in names if name.startswith("fc_norm")}
            ),
        },
        see="The ruler: scratch and fine-tuning",
    ),
)
