"""What of a teacher's attention reaches a student: maps as the q and k they are made of, or q, k or v alone.
The forms for unlike pairs are in `atlib.written_out`."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from atlib.attention import Instead, Seen
from atlib.compatibility import Pairing
from atlib.losses import attention_cross_entropy, projection_mse
from atlib.plan import Plan

TEMPERATURE = 10.0  # of the aggregation of heads: AttnDistill (arXiv 2210.00944)


class MapFree:
    """The form in which what the teacher saw reaches the student, chosen once for a pair: here maps as the q
    and k they are made of, heads merged where the plan says so; none is ever written out."""

    path = "map-free"  # or "dense", where maps are written out
    parts = "qk"  # what is kept of a teacher's layer
    head_mapping: nn.ParameterList | None = None  # what is learned beside the student

    def __init__(self, plan: Plan, pairing: Pairing, teacher_heads: int, student_heads: int):
        self.student_heads = student_heads
        self.merges_heads = pairing.heads_differ and plan.unequal_heads == "aggregate"
        # the transferred heads of each transferred layer, None for all
        self.heads = [plan.heads_of(layer, student_heads) for layer, _ in pairing.layers]

    def instead(self, teacher_layers: Iterable[Seen]) -> list[Instead]:
        """What each of the student's layers uses instead of its own: Copy."""
        return [self._instead(self._merged(seen), heads) for seen, heads in zip(teacher_layers, self.heads)]

    def losses(self, student_layers: Sequence[Seen], teacher_layers: Iterable[Seen]) -> Iterator[Tensor]:
        """The unweighted transfer loss between each of the student's layers and the teacher's, whose sum is
        Distill's."""
        # The teacher's are asked for one at a time: the gradients of a layer, made at once, take the room of
        # its q and k.
        for student_layer, teacher_layer, heads in zip(student_layers, teacher_layers, self.heads):
            student_layer, teacher_layer = self._merged(student_layer), self._merged(teacher_layer)
            yield self._loss(select(student_layer, heads), select(teacher_layer, heads))

    def maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        """The teacher's maps as the plan wants them, one (B, H, N, N) per layer."""
        return [self._merged(seen).map for seen in teacher_layers]

    def _merged(self, seen: Seen) -> Seen:
        return merged(seen) if self.merges_heads else seen

    def _instead(self, seen: Seen, heads: Sequence[int] | None) -> Instead:
        q, k = self._spread(seen.q, heads), self._spread(seen.k, heads)
        bias = _of_heads(seen.bias, heads)
        return Instead(q, k, scale=seen.scale, heads=heads, bias=bias, mask=seen.mask)

    def _loss(self, student_layer: Seen, teacher_layer: Seen) -> Tensor:
        return attention_cross_entropy([student_layer], [teacher_layer])

    def _spread(self, x: Tensor, heads: Sequence[int] | None) -> Tensor:
        """What goes to the student's heads: a single head to all of them, otherwise the chosen ones (all for
        None)."""
        x = x.expand(-1, self.student_heads, -1, -1) if x.shape[1] == 1 else x
        return x if heads is None else x[:, heads]


class OnePart(MapFree):
    """q, k or v alone."""

    def __init__(self, plan: Plan, pairing: Pairing, teacher_heads: int, student_heads: int):
        super().__init__(plan, pairing, teacher_heads, student_heads)
        self.parts = plan.what

    def _instead(self, seen: Seen, heads: Sequence[int] | None) -> Instead:
        return Instead(**{self.parts: self._spread(getattr(seen, self.parts), heads)}, heads=heads)

    def _loss(self, student_layer: Seen, teacher_layer: Seen) -> Tensor:
        return projection_mse([student_layer], [teacher_layer], self.parts)


def merged(seen: Seen) -> Seen:
    """A layer with its heads merged into one (`atlib.maps.aggregate_heads`), as q and k: no map is needed.
    Raises `ValueError` for given maps of several heads."""
    from atlib.maps import join_heads  # here: most pairs need no file of operations on maps

    if seen.given is not None:
        if seen.given.shape[1] != 1:  # the logarithm of maps that were stored in float16 would be wrong
            raise ValueError("unequal_heads='aggregate' of maps=: give them through aggregate_heads")
        return seen
    bias = seen.bias
    if bias is not None:  # the sum over heads, as of their scores
        bias = (bias.sum(0) if bias.ndim == 3 else seen.q.shape[1] * bias) / TEMPERATURE
    scale = seen.scale / TEMPERATURE
    return Seen(join_heads(seen.q), join_heads(seen.k), None, scale, bias=bias, mask=seen.mask)


def select(seen: Seen, heads: Sequence[int] | None) -> Seen:
    """What some heads of a layer saw; all for None."""
    if heads is None:
        return seen
    parts = {name: x[:, heads] for name in "qkv" if (x := getattr(seen, name)) is not None}
    return seen._replace(**parts, bias=_of_heads(seen.bias, heads))


def _of_heads(bias: Tensor | None, heads: Sequence[int] | None) -> Tensor | None:
    """The bias of some heads; one (N, N) is that of all."""
    return bias if heads is None or bias is None or bias.ndim == 2 else bias[list(heads)]
