"""Sentences in memory are trained on in the order of all data of this project."""

import torch

from atfamily.sentences import Sentences
from atlib.loading import ShardSpec, my_batches

SOURCES = torch.arange(28).view(7, 4)
TARGETS = torch.arange(35).view(7, 5)


def test_batches_are_those_of_the_order():
    part = ShardSpec(seed=3, epoch=1, batch_size=3)
    data = Sentences(SOURCES, TARGETS)
    batches = list(data.epoch(part))
    assert [(batch.indices, batch.weight) for batch in batches] == my_batches(7, part)
    for batch in batches:
        assert torch.equal(batch.images, SOURCES[batch.indices])
        assert torch.equal(batch.targets, TARGETS[batch.indices])
    assert torch.equal(torch.cat([source for source, _ in data.loader(3)]), SOURCES) and len(data) == 7
