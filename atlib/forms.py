"""What of a teacher's attention reaches a student: q, k or v alone; maps as the q and k they are made of; or
maps written out, where they are no longer the attention of some q and k."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from atlib.attention import Instead, Seen, forbid
from atlib.compatibility import Pairing, Sizes
from atlib.losses import attention_cross_entropy, map_cross_entropy, projection_mse
from atlib.plan import Plan

TEMPERATURE = 10.0  # of the aggregation of heads: AttnDistill (arXiv 2210.00944)


class Form:
    """The form in which what the teacher saw reaches the student, chosen once for a pair. given: as maps."""

    def __init__(self, plan: Plan, pairing: Pairing, teacher: Sizes, student: Sizes, given: bool):
        self.plan, self.pairing, self.student_heads = plan, pairing, student.heads
        self.grids = teacher.grid, student.grid
        self.unequal_heads = plan.unequal_heads if teacher.heads != student.heads else None
        # the transferred heads of each transferred layer, None for all
        self.heads = [plan.heads_of(layer, student.heads) for layer, _ in pairing.layers]
        #: What is kept of a teacher's layer.
        self.parts = "qk" if plan.what == "map" else plan.what
        # Heads of another width cannot stand among the student's own as q and k, only as maps; nor can some
        # heads look where others must not, but as maps.
        some_heads = plan.how == "copy" and plan.heads is not None
        #: Whether maps are written out.
        self.dense = plan.what == "map" and (
            given
            or plan.average is not None
            or pairing.queries is not None
            or teacher.grid != student.grid
            or self.unequal_heads in ("average", "learn")
            or (some_heads and (teacher.head_width != student.head_width or teacher.masked))
        )
        #: Of "learn", what is learned beside the student: every head of the teacher as a mixture of the
        #: student's, a matrix for each layer.
        self.head_mapping = None
        if self.unequal_heads == "learn":
            mean = torch.full((teacher.heads, student.heads), 1 / student.heads)
            self.head_mapping = nn.ParameterList(mean.clone() for _ in pairing.layers)
        down, across = student.grid
        self.tokens = pairing.common_prefix + len(pairing.own_keys) + down * across  # of a transferred map
        # the rows that are transferred, None for all, and what of a map stays the student's own
        self.rows = self.kept = None
        if pairing.queries is not None:
            self.rows = list(pairing.queries)
            self.kept = tuple(sorted({*range(self.tokens)} - {*self.rows})), pairing.own_keys

    def instead(self, teacher_layers: Iterable[Seen]) -> list[Instead]:
        """What each of the student's layers uses instead of its own: Copy."""
        if self.dense:
            maps = zip(self.maps(teacher_layers), self.heads)
            return [Instead(map=self._spread(p, heads), heads=heads, kept=self.kept) for p, heads in maps]
        return [self._instead(self._merged(seen), heads) for seen, heads in zip(teacher_layers, self.heads)]

    def _instead(self, seen: Seen, heads: Sequence[int] | None) -> Instead:
        """The teacher's q, k or v for some heads of the student; or q and k with what makes a map of them."""
        parts = {part: self._spread(getattr(seen, part), heads) for part in self.parts}
        if self.parts == "qk":
            parts |= {"scale": seen.scale, "bias": _of_heads(seen.bias, heads), "mask": seen.mask}
        return Instead(**parts, heads=heads)

    def losses(self, student_layers: Sequence[Seen], teacher_layers: Iterable[Seen]) -> Iterator[Tensor]:
        """The unweighted transfer loss between each of the student's layers and the teacher's, whose sum is
        Distill's."""
        if self.dense:
            yield from self._losses_of_maps(student_layers, self.maps(teacher_layers))
            return
        # The teacher's are asked for one at a time: the gradients of a layer, made at once, take the room of
        # its q and k.
        for *layers, heads in zip(student_layers, teacher_layers, self.heads):
            student_layer, teacher_layer = ([_select(self._merged(seen), heads)] for seen in layers)
            if self.plan.what == "map":
                yield attention_cross_entropy(student_layer, teacher_layer)
            else:
                yield projection_mse(student_layer, teacher_layer, self.plan.what)

    def _losses_of_maps(self, student_layers: Sequence[Seen], maps: Sequence[Tensor]) -> Iterator[Tensor]:
        from atlib.maps import keep_own  # here: most pairs need no file of operations on maps

        for index, (seen, p, heads) in enumerate(zip(student_layers, maps, self.heads)):
            seen = _select(self._merged(seen), heads)
            # heads are chosen last, as an average is over all; what the student's layer forbids goes
            p = forbid(p if heads is None else p[:, heads], seen.mask)
            if self.head_mapping is not None:
                mixed = torch.einsum("ts,bsij->btij", self.head_mapping[index], seen.map)
                yield nn.functional.mse_loss(mixed, p)
                continue
            log_p = seen.scores.log_softmax(-1)
            if self.unequal_heads == "average":  # the log of the mean, where a single p may underflow
                log_p = log_p.logsumexp(1, keepdim=True) - math.log(log_p.shape[1])
            if self.kept is not None:
                p = keep_own(p, log_p.detach().exp(), *self.kept)
                log_p, p = log_p[:, :, self.rows], p[:, :, self.rows]
            yield map_cross_entropy(log_p, p)

    def maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        """The teacher's maps as the plan wants them, one (B, H, N, N) per layer: heads merged, on the
        student's patch grid, averaged, with zeros for tokens that only the student has."""
        maps = [self._merged(seen).map for seen in teacher_layers]
        if self.dense:
            from atlib.maps import average_over, mean_heads, place_tokens, resample

            maps = [resample(p, *self.grids, self.pairing.common_prefix) for p in maps]
            if self.plan.average is not None:
                maps = average_over(maps, self.plan.average)
            if self.pairing.own_keys:
                maps = [place_tokens(p, self.pairing.student_tokens, self.tokens) for p in maps]
            if self.unequal_heads == "average":
                maps = [mean_heads(p) for p in maps]
        return maps

    def _merged(self, seen: Seen) -> Seen:
        """A layer with its heads merged into one, where the plan says so (`atlib.maps.aggregate_heads`), as q
        and k: no map is needed. Raises `ValueError` for given maps of several heads."""
        if self.unequal_heads != "aggregate":
            return seen
        if seen.given is not None:
            if seen.given.shape[1] != 1:  # the logarithm of maps that were stored in float16 would be wrong
                raise ValueError("unequal_heads='aggregate' of maps=: give them through aggregate_heads")
            return seen
        bias = seen.bias
        if bias is not None:  # the sum over heads, as of their scores
            bias = (bias.sum(0) if bias.ndim == 3 else seen.q.shape[1] * bias) / TEMPERATURE
        q, k = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (seen.q, seen.k))  # side by side
        return Seen(q, k, None, seen.scale / TEMPERATURE, bias=bias, mask=seen.mask)

    def _spread(self, x: Tensor, heads: Sequence[int] | None) -> Tensor:
        """What goes to the student's heads: a single head to all of them, otherwise the chosen ones (all for
        None)."""
        x = x.expand(-1, self.student_heads, -1, -1) if x.shape[1] == 1 else x
        return x if heads is None else x[:, heads]


def _select(seen: Seen, heads: Sequence[int] | None) -> Seen:
    """What some heads of a layer saw; all for None."""
    if heads is None:
        return seen
    parts = {name: x[:, heads] for name in "qkv" if (x := getattr(seen, name)) is not None}
    return seen._replace(**parts, bias=_of_heads(seen.bias, heads))


def _of_heads(bias: Tensor | None, heads: Sequence[int] | None) -> Tensor | None:
    """The bias of some heads; one (N, N) is that of all."""
    return bias if heads is None or bias is None or bias.ndim == 2 else bias[list(heads)]
