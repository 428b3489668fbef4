"""Exercises of card F2, Layer reserve."""

from torch import Tensor

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, told

# --- F2.1 ---


EMBEDDING = ("cls_token", "pos_embed", "patch_embed.")
Weights = dict[str, Tensor]


def chosen(teacher: Weights, student: Weights, of_teacher: tuple[str, ...]) -> Weights:
    """The student's weights, and the teacher's where a name begins with one of `of_teacher`."""
    return {name: (teacher if name.startswith(of_teacher) else student)[name] for name in student}


def keep_low(teacher: Weights, student: Weights, n: int) -> Weights:
    """The teacher's embedding and first n blocks; all that comes after them is the student's."""
    return chosen(teacher, student, EMBEDDING + tuple(f"blocks.{number}." for number in range(n)))


def high_blocks(teacher, student, n):
    """The *last* n blocks were kept. The task asks for the first, next to the image."""
    depth = 1 + max(int(name.split(".")[1]) for name in student if name.startswith("blocks."))
    return chosen(teacher, student, EMBEDDING + tuple(f"blocks.{depth - 1 - i}." for i in range(n)))


def exchanged(teacher, student, n):
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
        "F2.1",
        subject="weights",
        right=keep_low,
        cases={
            "2 of 12": lambda: two_vits(12, 2),
            "none of 3": lambda: two_vits(3, 0),
            "all of 2": lambda: two_vits(2, 2),
        },
        wrong={
            "Too many blocks were kept: a name that begins with blocks.1"
            " may be that of block 10. Put the dot behind the number.": lambda teacher, student, n: chosen(
                teacher, student, EMBEDDING + tuple(f"blocks.{number}" for number in range(n))
            ),
            "One block too many: they count from 0, so that block n"
            " is the first to be drawn again.": lambda teacher, student, n: keep_low(teacher, student, n + 1),
            "The embedding is the student's. The kept blocks learned to read"
            " the teacher's tokens: its patches, places and class token.": lambda teacher, student, n: chosen(
                teacher, student, tuple(f"blocks.{number}." for number in range(n))
            ),
            "The last norm is the teacher's. It comes"
            " after the blocks that are drawn again.": lambda teacher, student, n: (
                keep_low(teacher, student, n)
                | {name: teacher[name] for name in student if name.startswith("norm.")}
            ),
            **told(high_blocks, exchanged),
        },
    ),
)
