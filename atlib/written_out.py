"""The forms of a transfer in which maps are written out, because they are no longer the attention of some q
and k."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from atlib.attention import Instead, Kept, Seen, forbid
from atlib.compatibility import Pairing
from atlib.forms import MapFree, select
from atlib.losses import map_cross_entropy
from atlib.maps import average_over, keep_own, mean_heads, place_tokens, resample
from atlib.plan import Plan


class WrittenOut(MapFree):
    """Maps that are no longer the attention of some q and k: averaged or resampled ones, and those of which
    parts are the student's own."""

    path = "dense"

    def __init__(self, plan: Plan, pairing: Pairing, teacher_heads: int, student_heads: int):
        super().__init__(plan, pairing, teacher_heads, student_heads)
        self.average = plan.average
        self.grids = pairing.teacher_grid, pairing.student_grid
        self.common_prefix = pairing.common_prefix
        down, across = pairing.student_grid
        # how many tokens the transferred maps have, and which of them the teacher's map is about
        self.tokens = pairing.common_prefix + len(pairing.own_keys) + down * across
        self.placed = pairing.student_tokens if pairing.own_keys else None
        # which rows are transferred, None for all; and what of a transferred map is the student's own
        self.rows = None if pairing.queries is None else list(pairing.queries)
        self.kept = None
        if self.rows is not None:
            self.kept = Kept(tuple(sorted({*range(self.tokens)} - {*self.rows})), pairing.own_keys)

    def instead(self, teacher_layers: Iterable[Seen]) -> list[Instead]:
        return [
            Instead(map=self._spread(p, heads), heads=heads, kept=self.kept)
            for p, heads in zip(self.maps(teacher_layers), self.heads)
        ]

    def losses(self, student_layers: Sequence[Seen], teacher_layers: Iterable[Seen]) -> Iterator[Tensor]:
        chosen = [select(self._merged(seen), heads) for seen, heads in zip(student_layers, self.heads)]
        # heads of the teacher are chosen last: an average is over all; what the student's layers forbid goes
        maps = zip(self.maps(teacher_layers), self.heads, chosen)
        maps = [forbid(p if heads is None else p[:, heads], seen.mask) for p, heads, seen in maps]
        return self._differences(chosen, maps)

    def _differences(self, student_layers: Sequence[Seen], maps: Sequence[Tensor]) -> Iterator[Tensor]:
        """The loss between each of the student's layers and the map that it should have."""
        log_maps = self._log_maps(student_layers)
        if self.kept is not None:
            maps = [keep_own(p, log_p.detach().exp(), *self.kept) for p, log_p in zip(maps, log_maps)]
            log_maps, maps = ([p[:, :, self.rows] for p in both] for both in (log_maps, maps))
        return (map_cross_entropy(log_p, p) for log_p, p in zip(log_maps, maps))

    def _log_maps(self, student_layers: Sequence[Seen]) -> list[Tensor]:
        return [seen.scores.log_softmax(-1) for seen in student_layers]

    def maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        maps = [resample(self._merged(seen).map, *self.grids, self.common_prefix) for seen in teacher_layers]
        if self.average is not None:
            maps = average_over(maps, self.average)
        if self.placed is not None:
            maps = [place_tokens(p, self.placed, self.tokens) for p in maps]
        return maps


class MeanOfHeads(WrittenOut):
    """The mean over the heads of maps, for unequal numbers of them."""

    def maps(self, teacher_layers: Iterable[Seen]) -> list[Tensor]:
        return [mean_heads(p) for p in super().maps(teacher_layers)]

    def _log_maps(self, student_layers: Sequence[Seen]) -> list[Tensor]:
        # the log of the mean, where a single p may underflow
        log_maps = super()._log_maps(student_layers)
        return [log_p.logsumexp(1, keepdim=True) - math.log(log_p.shape[1]) for log_p in log_maps]


class LearnedHeads(WrittenOut):
    """Every head of the teacher as a learned mixture of the student's, M of each layer: Distill alone."""

    def __init__(self, plan: Plan, pairing: Pairing, teacher_heads: int, student_heads: int):
        super().__init__(plan, pairing, teacher_heads, student_heads)
        mean = torch.full((teacher_heads, student_heads), 1 / student_heads)  # over heads: where M starts
        self.head_mapping = nn.ParameterList(mean.clone() for _ in pairing.layers)

    def _differences(self, student_layers: Sequence[Seen], maps: Sequence[Tensor]) -> Iterator[Tensor]:
        pairs = zip(self.head_mapping, student_layers)
        mixed = (torch.einsum("ts,bsij->btij", M, seen.map) for M, seen in pairs)
        return (nn.functional.mse_loss(guess, p) for guess, p in zip(mixed, maps))
