"""What is transferred: which part of attention, how, in which layers and heads."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from atlib._util import as_plain, require_known

HOW = ("copy", "distill")
ROWS = ("class", "patches")
# What a plan does with maps, None for nothing.
OF_MAPS = {
    "average": ("layers", "heads", "queries"),
    "rows": ROWS,
    "unequal_heads": ("aggregate", "average", "learn"),
    "unequal_grid": ("resample",),
    "unequal_prefix": ("drop", "own"),
}


@dataclass(frozen=True)
class Plan:
    """What goes from teacher to student, and how. Where the two differ, a pair is refused unless the plan
    says what to do: `unequal_heads`, `unequal_grid`, `unequal_prefix`, `mismatched`. Raises `ValueError` for
    what is unknown or exclusive. Source: arXiv 2411.09702."""

    #: "map", softmax(q kᵀ/√d), or "q", "k", "v" alone.
    what: str = "map"
    #: "copy" (the student uses the teacher's in place of its own) or "distill" (a loss pulls its own to the
    #: teacher's: cross-entropy for maps, mean squared error for q, k, v).
    how: str = "copy"
    #: Indices from 0, None for all, or a mapping {student's layer: teacher's layer} where the depths differ.
    #: The other layers are the student's own.
    layers: Iterable[int] | Mapping[int, int] | None = None
    #: Indices from 0, the same in all transferred layers, None for all, or {student's layer: indices}, with
    #: all heads where it names none. The other heads are the student's own.
    heads: Iterable[int] | Mapping[int, Iterable[int]] | None = None
    #: Average an image's maps over "layers", "heads" or "queries" before they are transferred (arXiv
    #: 2411.09702, appendix; its average over examples is `atlib.baselines.MeanMapCopy`).
    average: str | None = None
    #: Where the two have different numbers of heads: "aggregate" (softmax of the summed log-maps over T = 10,
    #: AttnDistill, arXiv 2210.00944), "average", or, to distill, "learn" (ours: a matrix M of each layer
    #: under MSE(p_t, M p_s), hundreds of times smaller than a cross-entropy: in Find λ is 10,000, not 10).
    unequal_heads: str | None = None
    #: Where their patch grids differ: "resample" the teacher's maps to the student's patches.
    unequal_grid: str | None = None
    #: Where their prefix tokens differ: "drop" registers and distillation token and renormalise the rows, or
    #: let a student's tokens that the teacher lacks have their "own": a query's map is then (1 - s) · the
    #: teacher's row, with s to the student's own tokens as its own map gives it, and the rows of these tokens
    #: are the student's. To distill, that is "drop" with every row weighted by 1 - s, and a constant.
    unequal_prefix: str | None = None
    mismatched: bool = False  #: Accept other components than the teacher's (`atlib.student.describe`).
    #: In training, teacher and student drop the same samples' branches, as the published implementation does;
    #: with False, with layers paired with others, or in ViTs of different depth, the teacher drops nothing.
    share_drop_path: bool = True
    #: Which rows of the maps: the "class" token's alone, or the "patches" alone; None for all. The other rows
    #: are the student's own, and a distilled loss is the mean over the rows that take part.
    rows: str | None = None

    def __post_init__(self):
        require_known("what", self.what, ("map", "q", "k", "v"))
        require_known("how", self.how, HOW)
        for name, choices in OF_MAPS.items():
            if (choice := getattr(self, name)) is not None:
                require_known(name, choice, choices)
                if self.what != "map":
                    raise ValueError(f"{name}= works on maps: what='map', not {self.what!r}")
        # frozen: the normal forms are set once, here
        layers = _normal("layers", self.layers, lambda of_teacher: _indices("layers", [of_teacher])[0])
        heads = _normal("heads", self.heads, lambda of_layer: _indices("heads", of_layer))
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "heads", heads)
        if self.heads is not None and self.unequal_heads is not None:
            raise ValueError("heads= correspond one to one, with unequal_heads= none does: one of the two")
        parts = self.rows is not None or self.unequal_prefix == "own"  # of maps, head by head
        if parts and (self.average is not None or self.unequal_heads is not None):
            raise ValueError("average= and unequal_heads= mix maps: not with rows= or unequal_prefix='own'")
        if self.unequal_heads == "learn" and self.how == "copy":
            raise ValueError("unequal_heads='learn' is trained against the teacher's maps: how='distill'")

    def layers_of(self, depth: int) -> tuple[int, ...]:
        """The student's layers that take part, for a student of this depth."""
        return tuple(student for student, _ in self.pairs_of(depth, None))

    def pairs_of(self, depth: int, teacher_depth: int | None) -> tuple[tuple[int, int], ...]:
        """(student's layer, teacher's layer) for ViTs of these depths; teacher_depth=None: not checked."""
        layers = tuple(range(depth)) if self.layers is None else self.layers
        pairs = tuple(pair if isinstance(pair, tuple) else (pair, pair) for pair in layers)
        for side, index, of in (("", 0, depth), ("teacher's ", 1, teacher_depth)):
            worst = max(pair[index] for pair in pairs)
            if of is not None and worst >= of:
                raise ValueError(f"the plan transfers {side}layer {worst} of {of}: 0 to {of - 1}")
        return pairs

    def heads_of(self, layer: int, number: int) -> tuple[int, ...] | None:
        """The transferred heads of a student's layer that has `number` of them; None for all."""
        heads = self.heads
        if heads and isinstance(heads[0], tuple):
            heads = dict(heads).get(layer)
        if heads is not None and heads[-1] >= number:
            raise ValueError(f"the plan transfers head {heads[-1]} of layer {layer}: 0 to {number - 1}")
        return heads

    def describe(self) -> dict:
        """The plan as plain JSON values, which `Plan(**description)` reads."""
        return as_plain(self)


def _normal(name: str, choice: Any, value: Callable[[Any], Any]) -> tuple | None:
    """Indices in order, or of a mapping, or of the lists that JSON makes of one, (layer, `value`)."""
    lists = list | tuple
    if isinstance(choice, lists) and choice and all(isinstance(p, lists) and len(p) == 2 for p in choice):
        if len({layer for layer, _ in choice}) < len(choice):
            raise ValueError(f"{choice!r} names a layer twice")
        choice = dict(choice)
    if isinstance(choice, Mapping):
        return tuple((layer, value(choice[layer])) for layer in _indices(name, choice))
    return None if choice is None else _indices(name, choice)


def _indices(name: str, choice: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(choice, Iterable):
        raise ValueError(f"{name}={choice!r}: give several, such as range(9)")
    # NumPy's integers are welcome
    indices = tuple(int(i) if isinstance(i, Integral) and not isinstance(i, bool) else i for i in choice)
    if not indices or any(type(i) is not int or i < 0 for i in indices) or len({*indices}) < len(indices):
        raise ValueError(f"{name} are distinct integers from 0 on, at least one, got {list(indices)}")
    return tuple(sorted(indices))
