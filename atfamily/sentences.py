"""Sentences with their translations in memory, as numbers of words, in the form that the training loop
takes."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from atlib.loading import Batch, ShardSpec, in_order, my_batches


class Sentences:
    """Pairs of sequences of words: what `atlib.train.train` takes, and what a translator is measured on.
    sources: int64 (n, N), or (n, 2, N) with what stands in the teacher's place second, as in
    `atlib.data.pair`. targets: int64 (n, M + 1), from `BEGIN` to `END` (`atfamily.seq2seq`), then padding."""

    corrupt: Mapping[int, str] = {}  # words in memory are decoded already

    def __init__(self, sources: Tensor, targets: Tensor):
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
        self.sources, self.targets = sources, targets

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The sources and targets at `indices`."""
        index = torch.as_tensor(indices)
        return self.sources[index], self.targets[index]

    def to(self, device: torch.device | str) -> "Sentences":
        """The same on a device, where training then takes them."""
        return Sentences(self.sources.to(device), self.targets.to(device))

    def loader(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All of them in order."""
        return map(self.take, in_order(len(self), batch_size))

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of one epoch. They are in memory: `workers` are not started."""
        for indices, weight in my_batches(len(self), part):
            yield Batch(*self.take(indices), indices, weight)
