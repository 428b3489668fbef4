"""Which recipes are tried before a method is reported: the same range for every method, searched in the same
way."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

# Of the accuracy: less is within the standard error of 2,000 validation images, no reason to go on.
STEP = 0.01
# By so much is the best of a dozen trials sometimes above guessing where nothing has learned.
ABOVE_GUESSING = 0.03


def grid(**choices: Sequence) -> tuple[dict, ...]:
    """All combinations of recipe values, as dicts: grid(lr=[1, 2], clip=[3]) is ({lr: 1, clip: 3}, {lr: 2,
    clip: 3})."""
    return tuple(dict(zip(choices, values)) for values in product(*choices.values()))


@dataclass(frozen=True)
class Range(Sequence):
    """Recipes on a grid, of which a compass search tries a few: from the start it goes to the best neighbour
    along an axis, as long as that is better by more than `step`.

    axes: {recipe value: its choices in order}; start: of each axis where it begins; also: what all of them
    change; step: 0 for a search that ends only where both neighbours of the best are no better, so that what
    it chooses lies between others that were tried. As a sequence it is the whole grid, the last axis fastest.
    """

    axes: Mapping[str, tuple]
    start: Mapping[str, float]
    also: Mapping
    step: float = STEP

    def __len__(self) -> int:
        return len(self._recipes)

    def __getitem__(self, index):
        return self._recipes[index]

    def open(self, scores: Mapping[int, float]) -> list[int]:
        """The recipes that are to be tried next, given the scores of those tried; none when it has ended."""
        return self._search(scores)[0]

    def best(self, scores: Mapping[int, float]) -> int:
        """The best of those tried when the search has ended. Ties go to the first; without a step to where
        the search ended, whose neighbours were all tried."""
        if self.step == 0:
            return self._search(scores)[1]
        return max(sorted(scores), key=scores.__getitem__)

    def _search(self, scores: Mapping[int, float]) -> tuple[list[int], int]:
        """What is to be tried next, and where the search is."""
        cells = list(product(*(range(len(choices)) for choices in self.axes.values())))
        at = tuple(choices.index(self.start[name]) for name, choices in self.axes.items())
        tried = {cells[index]: score for index, score in scores.items()}
        while True:
            around = sorted(self._neighbours(at))
            if wanted := {at, *around} - tried.keys():
                return sorted(cells.index(cell) for cell in wanted), cells.index(at)
            best = max(around, key=tried.__getitem__)
            if self.step == 0 and tried[best] <= tried[at]:  # a better one that was tried farther away?
                best = max(sorted(tried), key=tried.__getitem__)
            if tried[best] <= tried[at] + self.step:
                return [], cells.index(at)
            at = best

    @cached_property
    def _recipes(self) -> tuple[dict, ...]:
        return tuple({**self.also, **recipe} for recipe in grid(**self.axes))

    def _neighbours(self, cell: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for axis, choices in enumerate(self.axes.values()):
            for place in (cell[axis] - 1, cell[axis] + 1):
                if 0 <= place < len(choices):
                    yield (*cell[:axis], place, *cell[axis + 1 :])


@dataclass(frozen=True)
class Ladder(Sequence):
    """Values of one recipe setting, all of which are tried; beyond either end the search goes on by `factor`
    as long as the best lies at an end, so that what it chooses lies between others that were tried.

    Where no score is above `learned`, nothing has learned anything, and a best among such scores means
    nothing: the search then goes on beyond both ends, until something learns or no rung is left.

    As a sequence it is the values, then those beyond the low end, then those beyond the high end.
    """

    name: str  # of the setting
    values: tuple[float, ...]  # from the smallest to the largest
    factor: float = 2.0
    beyond: int = 8  # rungs on either side
    learned: float = -math.inf  # the score that guessing can reach

    def __len__(self) -> int:
        return len(self._rungs)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [{self.name: rung} for rung in self._rungs[index]]
        return {self.name: self._rungs[index]}

    def open(self, scores: Mapping[int, float]) -> list[int]:
        """The recipes that are to be tried next, given the scores of those tried; none when it has ended."""
        if waiting := [index for index in range(len(self.values)) if index not in scores]:
            return waiting
        best = max(sorted(scores), key=scores.__getitem__)
        in_order = sorted(range(len(self)), key=self._rungs.__getitem__)
        if scores[best] <= self.learned:
            tried = [place for place, index in enumerate(in_order) if index in scores]
            beyond = (min(tried) - 1, max(tried) + 1)
            return [in_order[place] for place in beyond if 0 <= place < len(self)]
        at = in_order.index(best)
        return [index for index in in_order[max(0, at - 1) : at + 2] if index not in scores]

    @cached_property
    def _rungs(self) -> tuple[float, ...]:
        down = (self.values[0] / self.factor**rung for rung in range(1, self.beyond + 1))
        up = (self.values[-1] * self.factor**rung for rung in range(1, self.beyond + 1))
        return (*self.values, *down, *up)


def to_try(choices: Sequence[Mapping], scores: Mapping[int, float]) -> list[int]:
    """Which of a method's recipes are to be tried next: of a `Range` or a `Ladder` as its search goes, of any
    others all that have no score."""
    if len(choices) == 1:
        return []
    if isinstance(choices, (Range, Ladder)):
        return choices.open(scores)
    return [index for index in range(len(choices)) if index not in scores]


def best_of(choices: Sequence[Mapping], scores: Mapping[int, float]) -> int:
    """The index of the best of a method's recipes, given the scores of those tried; ties go to the first, or
    as `Range.best` says."""
    if isinstance(choices, Range):
        return choices.best(scores)
    return max(sorted(scores), key=scores.__getitem__)
