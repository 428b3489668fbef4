"""Plan what is transferred: which part of attention, how, in which layers and heads, and what to do where the
two ViTs differ."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral

from atlib._util import require_known
from atlib.maps import AVERAGES

WHAT = ("map", "q", "k", "v")
HOW = ("copy", "distill")
UNEQUAL_HEADS = ("aggregate", "average", "learn")
UNEQUAL_PREFIX = ("drop", "own")
ROWS = ("class", "patches")

Layers = tuple[int, ...] | tuple[tuple[int, int], ...] | None
Heads = tuple[int, ...] | tuple[tuple[int, tuple[int, ...]], ...] | None


@dataclass(frozen=True)
class Plan:
    """What goes from teacher to student, and how; checked when it is built.

    `what`: "map", softmax(q kᵀ/√d), or "q", "k", "v" alone. `how`: "copy" (the student uses the teacher's in
    place of its own and computes the rest itself) or "distill" (the student makes its own; a loss pulls it to
    the teacher's: cross-entropy for maps, mean squared error for q, k, v).

    `layers`: indices from 0, None for all, or a mapping {student's layer: teacher's layer} where the depths
    differ. `heads`: indices from 0 for all these layers, None for all, or a mapping {student's layer:
    indices}, with all heads in transferred layers that it does not name; the other layers and heads are the
    student's own. `average`: the teacher's maps are averaged over "examples" (of a batch), "layers", "heads"
    or "queries" before they are transferred (arXiv 2411.09702, appendix). `rows`: only those of the "class"
    token, or only those of the "patches", None for all; the other rows are the student's own, and a
    distilled loss is the mean over the rows that take part.

    What to do where the two differ; each is refused when it is not asked for. `unequal_heads`: "aggregate"
    (softmax of the summed log-maps over T = 10, AttnDistill, arXiv 2210.00944), "average", or, to distill,
    "learn" (a matrix M of each layer under MSE(p_t, M p_s): a variant of this project's own. The
    published one, distilled MAE of arXiv 2205.14443, is a squared error of attention *logits*, before the
    softmax, in the last layer alone, with weight 1 and during pre-training: `atlib.train.distilled_mae`).
    `unequal_grid`: "resample" the teacher's maps to the student's patches. `unequal_prefix`: "drop" registers
    and distillation token and renormalise the rows, or let a student's tokens that the teacher lacks have
    their "own": a query's map is then (1 - s) · the teacher's row, with s to the student's own tokens as its
    own map gives it, and the rows of these tokens are the student's. To distill, that is "drop" with every
    row weighted by 1 - s, and a constant. `mismatched=True`: accept other components than the
    teacher's (see `atlib.student`, and arXiv 2605.07191 for why they matter).

    `share_drop_path`: in training, teacher and student drop the same samples' branches, as the published
    implementation does; with False, with layers paired with others, or in ViTs of different depth, the
    teacher drops nothing. Without stochastic depth in the student the two are the same.

    Raises `ValueError` for an unknown choice, for choices that exclude each other, and for indices that are
    not distinct integers from 0 on. Source: arXiv 2411.09702, sections on Attention Copy and Attention
    Distillation, ablations of Q, K, V, layers and heads.
    """

    what: str = "map"
    how: str = "copy"
    layers: Iterable[int] | Mapping[int, int] | None = None
    heads: Iterable[int] | Mapping[int, Iterable[int]] | None = None
    average: str | None = None
    unequal_heads: str | None = None
    unequal_grid: str | None = None
    unequal_prefix: str | None = None
    mismatched: bool = False
    share_drop_path: bool = True
    rows: str | None = None

    def __post_init__(self):
        require_known("what", self.what, WHAT)
        require_known("how", self.how, HOW)
        for name, known in (
            ("average", AVERAGES),
            ("rows", ROWS),
            ("unequal_heads", UNEQUAL_HEADS),
            ("unequal_grid", ("resample",)),
            ("unequal_prefix", UNEQUAL_PREFIX),
        ):
            if getattr(self, name) is not None:
                require_known(name, getattr(self, name), known)
        # frozen: the normal forms are set once, here
        object.__setattr__(self, "layers", _normal_layers(self.layers))
        object.__setattr__(self, "heads", _normal_heads(self.heads))
        self._check_combinations()

    def _check_combinations(self) -> None:
        reshaping = [
            name
            for name in ("average", "rows", "unequal_heads", "unequal_grid", "unequal_prefix")
            if getattr(self, name) is not None
        ]
        if self.what != "map" and reshaping:
            raise ValueError(
                f"{reshaping[0]}={getattr(self, reshaping[0])!r} works on maps, and this plan transfers"
                f" {self.what!r}: use what='map'"
            )
        if self.heads is not None and self.unequal_heads is not None:
            raise ValueError(
                "heads= names heads that correspond one to one; with unequal_heads= there is no such"
                " correspondence: use one of them"
            )
        partly = f"rows={self.rows!r}" if self.rows is not None else "unequal_prefix='own'"
        if self.rows is not None or self.unequal_prefix == "own":
            for name in ("average", "unequal_heads"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{partly} keeps parts of the student's own maps, head by head, and"
                        f" {name}={getattr(self, name)!r} changes which map belongs to which: use one of them"
                    )
        if self.unequal_heads == "learn" and self.how == "copy":
            raise ValueError(
                "unequal_heads='learn' trains a matrix against the teacher's maps, so it can only distill:"
                " use how='distill', or 'aggregate' or 'average' to copy"
            )

    def layers_of(self, depth: int) -> tuple[int, ...]:
        """The student's layers that take part, for a student of this depth. Raises `ValueError` when one of
        them does not exist."""
        return tuple(student for student, _ in self.pairs_of(depth, None))

    def pairs_of(self, depth: int, teacher_depth: int | None) -> tuple[tuple[int, int], ...]:
        """(student's layer, teacher's layer) for ViTs of these depths; None leaves the teacher's unchecked.

        Raises `ValueError` when a layer does not exist.
        """
        layers = tuple(range(depth)) if self.layers is None else self.layers
        pairs = tuple(pair if isinstance(pair, tuple) else (pair, pair) for pair in layers)
        for side, index, of in (("", 0, depth), ("teacher's ", 1, teacher_depth)):
            worst = max(pair[index] for pair in pairs)
            if of is not None and worst >= of:
                raise ValueError(
                    f"the plan transfers {side}layer {worst}, but the depth is {of}: layers 0 to {of - 1}"
                    " exist"
                )
        return pairs

    def heads_of(self, layer: int, number: int) -> tuple[int, ...] | None:
        """The transferred heads of a student's layer that has `number` of them; None for all. Raises
        `ValueError` for one that does not exist."""
        heads = self.heads
        if heads is not None and heads and isinstance(heads[0], tuple):
            heads = dict(heads).get(layer)
        if heads is not None and heads[-1] >= number:
            raise ValueError(
                f"the plan transfers head {heads[-1]} of layer {layer}, but it has {number} heads: 0 to"
                f" {number - 1} exist"
            )
        return heads

    def describe(self) -> dict:
        """The plan as plain JSON values, for a record or a file's header; `Plan(**description)` reads it,
        also after JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _pairs_as_mapping(given):
    """The normal form of a mapping is a tuple of pairs, which JSON turns into a list of lists: take both back
    to a mapping."""
    if not isinstance(given, list | tuple) or not given:
        return given
    is_pairs = all(
        isinstance(each, list | tuple) and len(each) == 2 and isinstance(each[0], Integral) for each in given
    )
    return dict(given) if is_pairs else given


def _indices(name: str, given: Iterable[int], more: str) -> tuple[int, ...]:
    if not isinstance(given, Iterable):
        raise ValueError(f"{name}={given!r}: give several, such as range(9), or a list of one, [{given!r}]")
    # NumPy's integers are welcome
    indices = tuple(int(i) if isinstance(i, Integral) and not isinstance(i, bool) else i for i in given)
    wrong = [i for i in indices if type(i) is not int or i < 0]
    if wrong:
        raise ValueError(f"{name} are integers from 0 on, got {wrong}; {more}")
    if not indices or len(set(indices)) != len(indices):
        raise ValueError(
            f"{name} must be distinct and at least one, got {list(indices)}; leave {name} out to transfer all"
        )
    return tuple(sorted(indices))


def _normal_layers(given) -> Layers:
    more = "the last n of a depth-12 ViT are range(12 - n, 12)"
    given = _pairs_as_mapping(given)
    if given is None:
        return None
    if isinstance(given, Mapping):
        of_student = _indices("layers", given, more)
        return tuple((student, *_indices("layers", [given[student]], more)) for student in of_student)
    return _indices("layers", given, more)


def _normal_heads(given) -> Heads:
    more = "the first n are range(n)"
    given = _pairs_as_mapping(given)
    if given is None:
        return None
    if isinstance(given, Mapping):
        layers = _indices("heads' layers", given, "heads={0: range(2)} means two heads of the first layer")
        return tuple((layer, _indices(f"heads of layer {layer}", given[layer], more)) for layer in layers)
    return _indices("heads", given, more)
