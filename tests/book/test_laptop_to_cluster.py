"""What *From one laptop to a cluster* writes out: a step's images dealt out to processes, and the
ring in which they add up their gradients."""

import pytest
import torch

from atlib.loading import ShardSpec, epoch_order, my_batches
from tests.book.test_taught import taught

NAME = "laptop-to-cluster"


@pytest.mark.parametrize(
    "count, batch_size, processes", [(1, 4, 3), (50, 16, 1), (71, 16, 2), (100, 25, 8), (10, 3, 5)]
)
def test_dealt_as_the_feed_does(count, batch_size, processes):
    steps = taught(NAME).deal(epoch_order(count, seed=3, epoch=2), batch_size, processes)
    for rank in range(processes):
        theirs = my_batches(
            count, ShardSpec(seed=3, epoch=2, batch_size=batch_size, rank=rank, world=processes)
        )
        assert [shares[rank] for shares in steps] == theirs


@pytest.mark.parametrize("count, batch_size, processes", [(71, 16, 2), (10, 7, 4), (5, 3, 8)])
def test_weights_make_the_mean_over_processes_the_mean_over_the_step(count, batch_size, processes):
    torch.manual_seed(0)
    loss = torch.rand(count, dtype=torch.float64)
    order = list(range(count))
    for first, shares in zip(
        range(0, count, batch_size), taught(NAME).deal(order, batch_size, processes), strict=True
    ):
        mean = sum(weight * loss[mine].mean() for mine, weight in shares) / processes
        assert torch.isclose(mean, loss[first : first + batch_size].mean(), rtol=1e-12)
        seen = [index for mine, weight in shares if weight > 0 for index in mine]
        assert sorted(seen) == order[first : first + batch_size], "each image once, stand-ins not counted"


@pytest.mark.parametrize("n, size", [(2, 10), (3, 9), (4, 20), (5, 5), (8, 64)])
def test_the_ring_gives_everybody_the_sum(n, size):
    torch.manual_seed(n)
    gradients = torch.randn(n, size, dtype=torch.float64)
    before = gradients.clone()
    held, sent = taught(NAME).ring_all_reduce(list(gradients))
    for copy in held:
        assert torch.allclose(copy, before.sum(0), atol=1e-12)
    assert torch.equal(gradients, before), "what was given stays as it was"
    assert sum(sent) == 2 * (n - 1) * size, "in all, every number travels once round the ring and once more"


@pytest.mark.parametrize("n, size", [(2, 10), (4, 20), (8, 64)])
def test_each_process_sends_the_formula(n, size):
    _, sent = taught(NAME).ring_all_reduce([torch.zeros(size)] * n)
    assert sent == [2 * (n - 1) * size // n] * n
