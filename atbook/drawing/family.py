"""What each system of the family changes: the drawing of the method, varied for its card.

Teacher and student stand side by side as in `atbook.drawing.method`, and lines mean the same: solid is the
teacher's, dashed is learned, dotted is not used. A part that a system does not have is not there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atbook.drawing import seen
from atbook.drawing.method import CHIP, FIRST, MAP, PICTURE, STEP, STUDENT, TEACHER, TOWER
from atbook.drawing.svg import GREY, arrow, box, drawing, heat, pixels, text
from atbook.plot import COLOURS

PATCH = 8  # pixels of a patch of the scene
HIDDEN = (1, 2, 4, 7, 9, 10, 12, 15)  # patches that a student of the first card has to paint
MIDDLE = (TEACHER + TOWER + STUDENT) / 2


@dataclass(frozen=True)
class Handed:
    """Something that crosses from the teacher to the student."""

    #: The row of both towers in which its arrow is.
    row: int
    #: What stands below the arrow, a line each.
    words: tuple[str, ...] = ()
    #: Makes the table that is drawn above the arrow.
    shows: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class Card:
    """The drawing of a card. The defaults are those of most."""

    #: What the drawing says, as its alternative text.
    alt: str
    #: The teacher's parts from top to bottom; an empty name leaves a row free.
    teacher: tuple[str, ...]
    #: The student's, each with its line: "solid", "dashed" or "dotted".
    student: tuple[tuple[str, str], ...]
    #: What crosses, from top to bottom.
    handed: tuple[Handed, ...]
    #: Distilled: the student makes it, and a loss pulls it to the teacher's.
    pulled: bool = False
    #: What is written above the two pictures.
    sees: tuple[str, str] = ("sees the image", "sees the image")
    #: Draws over the two pictures, given the left edge of one.
    over: tuple[Callable[[float], list[str]] | None, Callable[[float], list[str]] | None] = (None, None)
    #: The names of the two towers.
    names: tuple[str, str] = ("teacher, frozen", "student")
    #: What stands below the teacher, two lines.
    needed: tuple[str, str] = ("needed for every", "image")
    #: What comes out of the student.
    gives: str = "its answer"
    #: What solid and dashed lines mean.
    legend: tuple[str, str] = ("from the teacher", "learned")

    @property
    def colour(self) -> str:
        """That of Copy or of Distill, as in the book's figures."""
        return COLOURS["distill" if self.pulled else "copy"]


# --- The tables between the towers ---


def whole_map() -> np.ndarray:
    """The map (N, N) of the head in which the class token looks at the key."""
    layer = seen.scene().maps[1]
    return layer[layer[:, 0, 1 + seen.scene().key].argmax()]


def visible_map() -> np.ndarray:
    """The map among the class token and the patches that are not hidden."""
    kept = [0, *(1 + patch for patch in range(16) if patch not in HIDDEN)]
    return _rows_of_one(whole_map()[np.ix_(kept, kept)])


def patch_map() -> np.ndarray:
    """The map among patches, without the class token."""
    return _rows_of_one(whole_map()[1:, 1:])


def class_row() -> np.ndarray:
    """The class token's row of the last layer, mean over heads: (1, N)."""
    return seen.scene().maps[3][:, :1].mean(0)


def without_diagonal() -> np.ndarray:
    """The map when no token may look at itself."""
    p = whole_map()
    return _rows_of_one(p * (1 - np.eye(len(p))))


def mean_map() -> np.ndarray:
    """The mean over images and heads of the last layer's map, among patches."""
    return _rows_of_one(seen.mean_map(3)[1:, 1:])


def _rows_of_one(p: np.ndarray) -> np.ndarray:
    return p / p.sum(-1, keepdims=True)


# --- What is drawn over a picture ---


def hidden_patches(left: float) -> list[str]:
    """Half of the patches, hidden."""
    side = PICTURE / 4
    return [
        f'<rect x="{left + patch % 4 * side:g}" y="{20 + patch // 4 * side:g}" width="{side:g}" '
        f'height="{side:g}" fill="{GREY}"/>'
        for patch in HIDDEN
    ]


def shifted_squares(left: float) -> list[str]:
    """One patch, and what its token gets of the four shifted images."""
    side, scale = PICTURE / 4, PICTURE / 32
    x, y, half = left + side, 20 + side, PATCH / 2 * scale
    corners = [(x + dx, y + dy) for dx in (-half, half) for dy in (-half, half)]
    return [
        *(box(*corner, side, side, "#56B4E9", "dotted", thick=2, corner=0) for corner in corners),
        box(x, y, side, side, "#ffffff", thick=2.5, corner=0),
    ]


CARDS = {
    "distilled-mae": Card(
        "Distilled MAE. Teacher and student see the same half of the patches. A squared error pulls the "
        "student's attention logits to the frozen teacher's, while it paints the hidden patches. The painter "
        "and the teacher are dropped afterwards.",
        teacher=("queries q", "keys k", "logits z", "values v", "all the rest", ""),
        student=(
            ("queries q", "dashed"),
            ("keys k", "dashed"),
            ("own logits z", "dashed"),
            ("values v", "dashed"),
            ("all the rest", "dashed"),
            ("painter", "dashed"),
        ),
        handed=(Handed(2, ("target of a", "squared error"), visible_map),),
        pulled=True,
        sees=("sees one half", "sees the same half"),
        over=(hidden_patches, hidden_patches),
        needed=("needed before", "there are labels"),
        gives="paints the rest",
    ),
    "layer-reserve": Card(
        "Layer reserve. The weights of the embedding and the first two blocks are the teacher's at first, "
        "the other blocks, norm and head are random. Everything is trained.",
        teacher=("embedding", "block 0", "block 1", "block 2", "block 3", "norm, head"),
        student=(
            ("embedding", "solid"),
            ("block 0", "solid"),
            ("block 1", "solid"),
            ("block 2", "dashed"),
            ("block 3", "dashed"),
            ("norm, head", "dashed"),
        ),
        handed=(Handed(0), Handed(1), Handed(2, ("its weights,", "to start from"))),
        needed=("needed to", "begin with"),
        legend=("starts as the teacher's", "starts at random"),
    ),
    "attndistill": Card(
        "AttnDistill. The class token's row of the last layer, all heads merged, is pulled to the frozen "
        "teacher's; and so is the final class token, behind a projector that is dropped afterwards.",
        teacher=("queries, keys", "4 heads' rows", "merged row", "values, MLPs", "class token", ""),
        student=(
            ("queries, keys", "dashed"),
            ("2 heads' rows", "dashed"),
            ("own merged row", "dashed"),
            ("values, MLPs", "dashed"),
            ("own class token", "dashed"),
            ("projector", "dashed"),
        ),
        handed=(Handed(2, ("target of a KL",), class_row), Handed(4, ("target of a", "squared error"))),
        pulled=True,
        needed=("needed for training", "only"),
    ),
    "distillation-token": Card(
        "The distillation token. The student has a class token whose head learns the labels, and a second "
        "token whose head learns the top class that a frozen second teacher names; that teacher may be any "
        "classifier.",
        teacher=("classifier", "", "", "", "its top class"),
        student=(
            ("all the rest", "dashed"),
            ("class token", "dashed"),
            ("head: labels", "dashed"),
            ("one token more", "dashed"),
            ("head: teacher", "dashed"),
        ),
        handed=(Handed(4, ("target of a", "cross-entropy")),),
        pulled=True,
        names=("second teacher", "student"),
        needed=("needed for training", "only"),
        gives="mean of both heads",
    ),
    "class-attention": Card(
        "CaiT. First patches look at each other; then the class token alone asks. From the frozen teacher's "
        "map either part can be copied: the patches' rows without the class token, or the class token's row.",
        teacher=("queries, keys", "", "patches' rows", "class row", "values v", "all the rest"),
        student=(
            ("queries, keys", "dotted"),
            ("mixing of heads", "dotted"),
            ("patches look", "solid"),
            ("the class asks", "solid"),
            ("values v", "dashed"),
            ("all the rest", "dashed"),
        ),
        handed=(Handed(2, (), patch_map), Handed(3, ("either part", "alone, or both"), class_row)),
        names=("teacher, frozen", "CaiT"),
    ),
    "depth": Card(
        "LayerScale and depth. A student with 24 layers, whose branches have learned factors γ; each of the "
        "four maps of the frozen teacher serves six layers.",
        teacher=("map of layer 0", "map of layer 1", "map of layer 2", "map of layer 3", "all the rest"),
        student=(
            ("maps 0 to 5", "solid"),
            ("maps 6 to 11", "solid"),
            ("maps 12 to 17", "solid"),
            ("maps 18 to 23", "solid"),
            ("γ · all the rest", "dashed"),
        ),
        handed=(Handed(0, (), whole_map), Handed(1), Handed(2), Handed(3, ("each serves", "six layers"))),
        names=("teacher, frozen", "24 layers"),
    ),
    "locality": Card(
        "Shifted patches and locality attention. A student's token is made of its patch and of what lies "
        "there in four shifted images. The frozen teacher's map is copied without its diagonal, because the "
        "student's tokens may not look at themselves; queries, keys and temperature are not used.",
        teacher=("tokens", "queries q", "keys k", "map p", "values v", "all the rest"),
        student=(
            ("wider tokens", "dashed"),
            ("queries q", "dotted"),
            ("keys k, and τ", "dotted"),
            ("p, no diagonal", "solid"),
            ("values v", "dashed"),
            ("all the rest", "dashed"),
        ),
        handed=(Handed(3, ("H × N × N,", "rows rescaled"), without_diagonal),),
        sees=("sees the image", "and four shifts of it"),
        over=(None, shifted_squares),
    ),
    "resmlp": Card(
        "ResMLP. The student has no queries, keys and values: in every layer one matrix A says which patch "
        "takes how much from which, the same for all images. The frozen teacher's mean map can stand in its "
        "place.",
        teacher=("queries q", "keys k", "map p", "mean of all p", "values v", "all the rest"),
        student=(
            ("", "dashed"),
            ("", "dashed"),
            ("", "dashed"),
            ("one A for all", "solid"),
            ("", "dashed"),
            ("all the rest", "dashed"),
        ),
        handed=(Handed(3, ("patches alone,", "for all images"), mean_map),),
        names=("teacher, frozen", "ResMLP"),
        needed=("needed once, for", "its mean map"),
    ),
    "patch-conv-net": Card(
        "PatchConvNet. Convolutions, and one row of attention at the end, which pools the patches. The "
        "frozen teacher's class row, heads merged, replaces the pool's own; its query and keys are not used.",
        teacher=("queries, keys", "", "merged row", "values v", "all the rest"),
        student=(
            ("convolutions", "dashed"),
            ("one query, keys", "dotted"),
            ("the pool's row", "solid"),
            ("values", "dashed"),
            ("all the rest", "dashed"),
        ),
        handed=(Handed(2, ("last layer,", "1 × N"), class_row),),
        names=("teacher, frozen", "PatchConvNet"),
    ),
    "binary-vit": Card(
        "BinaryViT. The student's queries, keys and values are signs, its layers count bits, and its map "
        "says 0 or one learned share. The frozen teacher's map replaces its own, and is rounded like it; "
        "the signs of queries and keys are not used.",
        teacher=("queries q", "keys k", "map p", "values v", "all the rest"),
        student=(
            ("signs of q", "dotted"),
            ("signs of k", "dotted"),
            ("p, rounded", "solid"),
            ("signs of v", "dashed"),
            ("layers of bits", "dashed"),
        ),
        handed=(Handed(2, ("H × N × N",), whole_map),),
        names=("teacher, frozen", "BinaryViT"),
    ),
    "grafit": Card(
        "Grafit, with copied maps. The student learns features whose neighbours have the image's coarse "
        "label, and that are the same for two views of an image. The frozen teacher sees the student's "
        "view, and its map replaces the student's own.",
        teacher=("queries q", "keys k", "map p", "values v", "all the rest"),
        student=(
            ("queries q", "dotted"),
            ("keys k", "dotted"),
            ("map p", "solid"),
            ("values v", "dashed"),
            ("all the rest", "dashed"),
        ),
        handed=(Handed(2, ("H × N × N",), whole_map),),
        sees=("sees the view", "sees a view"),
        gives="its neighbours",
    ),
    "linear-attention": Card(
        "Linear attention. In the student, features of queries and keys take the place of the softmax. Their "
        "product, rows divided by their sums, is pulled to the frozen teacher's map; it is made for this "
        "loss alone.",
        teacher=("queries q", "keys k", "softmax", "map p", "values v", "all the rest"),
        student=(
            ("queries q", "dashed"),
            ("keys k", "dashed"),
            ("φ(q), φ(k)", "dashed"),
            ("their product", "dashed"),
            ("values v", "dashed"),
            ("all the rest", "dashed"),
        ),
        handed=(Handed(3, ("target of a", "cross-entropy"), whole_map),),
        pulled=True,
        needed=("needed for training", "only"),
    ),
}


def card(of: Card) -> str:
    """The drawing of a card, an SVG file."""
    end = 140 + 38 + len(of.student) * STEP
    parts = []
    for left, words, name, over in zip((TEACHER, STUDENT), of.sees, of.names, of.over, strict=True):
        middle, picture = left + TOWER / 2, left + (TOWER - PICTURE) / 2
        parts += [
            text(middle, 13, words),
            pixels(picture, 20, PICTURE, seen.scene().image),
            *(over(picture) if over else ()),
            arrow(middle, 20 + PICTURE + 3, middle, 138),
            box(left, 140, TOWER, end - 140, tint=0.06, corner=8),
            text(middle, 159, name, bold=True),
        ]
    handed = {crossing.row for crossing in of.handed}
    for row, name in enumerate(of.teacher):
        if name:
            colour, tint = (of.colour, 0.3) if row in handed else (GREY, 0.12)
            parts += _part(TEACHER, row, name, row in handed, colour=colour, tint=tint)
    for row, (name, line) in enumerate(of.student):
        if name:
            parts += _students_part(of, row, name, line, row in handed)
    for crossing in of.handed:
        parts += _crossing(of, crossing)
    middle = STUDENT + TOWER / 2
    parts += [
        arrow(middle, end, middle, end + 18),
        text(middle, end + 33, of.gives),
        *(text(TEACHER + TOWER / 2, end + 17 + 16 * n, line) for n, line in enumerate(of.needed)),
    ]
    return drawing(end + 66, of.alt, parts + _legend(of, end + 58))


def _part(left: float, row: int, name: str, bold: bool, **look) -> list[str]:
    return [
        box(left + 7, _top(row), TOWER - 14, CHIP, **look),
        text(left + TOWER / 2, _top(row) + 16.5, name, bold=bold),
    ]


def _students_part(of: Card, row: int, name: str, line: str, handed: bool) -> list[str]:
    colour = of.colour if handed else GREY
    if line == "solid":
        return _part(STUDENT, row, name, True, colour=colour, tint=0.3, thick=2.5)
    if line == "dashed":
        return _part(STUDENT, row, name, False, colour=colour, line=line, thick=1.75)
    around, words = _part(STUDENT, row, name, False, line=line)
    return [around, f'<g opacity="0.6">{words}</g>']


def _crossing(of: Card, crossing: Handed) -> list[str]:
    y = _top(crossing.row) + CHIP / 2
    line = "dashed" if of.pulled else "solid"
    parts = [arrow(TEACHER + TOWER - 5, y, STUDENT + 4, y, of.colour, line)]
    if crossing.shows is not None:
        shares = crossing.shows()
        side = MAP / shares.shape[1]
        parts.append(
            heat(MIDDLE - MAP / 2, y - 14 + (7 if len(shares) == 1 else 0) - side * len(shares), side, shares)
        )
    return parts + [text(MIDDLE, y + 18 + 15 * n, words) for n, words in enumerate(crossing.words)]


def _legend(of: Card, y: float) -> list[str]:
    """What the lines of the boxes mean."""
    lines = {line for name, line in of.student if name}
    shown = [(line, GREY, words) for line, words in (("dashed", of.legend[1]), ("dotted", "not used"))]
    if of.pulled:
        shown.append(("dashed", of.colour, "learned, pulled to the teacher's"))
    else:
        shown.insert(0, ("solid", of.colour, of.legend[0]))
    x, parts = 9.0, []
    for line, colour, words in shown:
        if line in lines:
            tint = 0.3 if line == "solid" else 0
            parts.append(box(x, y - 10, 24, 12, colour, line, tint=tint, thick=1.75, corner=3))
            parts.append(text(x + 30, y, words, "start"))
            x += 46 + 6.6 * len(words)
    return parts


def _top(row: int) -> float:
    return FIRST + row * STEP
