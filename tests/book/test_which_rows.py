"""What page D4 writes out, measures of maps and the pairing of heads, is what atlib computes."""

from itertools import permutations

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from atlib.analysis import StreamingDivergence, attention_distance, attention_entropy, jensen_shannon, rollout
from tests.book.test_taught import taught
from tests.helpers import random_maps

NAME = "which-rows"


@pytest.mark.parametrize("grid, prefix", [((4, 4), 1), ((2, 3), 0), ((3, 2), 3), ((1, 6), 2)])
def test_distance_and_entropy(grid, prefix):
    N = prefix + grid[0] * grid[1]
    maps = random_maps(3, 2, N, N)
    # One patch looks at one token only: a prefix token where there is one.
    maps[1, 0, prefix] = torch.eye(N, dtype=torch.float64)[0]
    for b in range(3):
        for h in range(2):
            one, alone = maps[b, h], maps[b : b + 1, h : h + 1]
            distance, entropy = (
                attention_distance(alone, grid, prefix).item(),
                attention_entropy(alone).item(),
            )
            assert taught(NAME).distance_by_hand(one, grid, prefix) == pytest.approx(distance, rel=1e-10)
            assert taught(NAME).entropy_by_hand(one) == pytest.approx(entropy, rel=1e-10)


@pytest.mark.parametrize("residual", [0.0, 0.5, 0.9])
def test_rollout(residual):
    maps = [random_maps(2, 3, 7, 7, seed=seed) for seed in range(4)]
    for b in range(2):
        rolled = taught(NAME).rollout_by_hand([p[b] for p in maps], residual)
        assert torch.allclose(rolled, rollout(maps, residual)[b], atol=1e-12)


@pytest.mark.parametrize("H", [1, 2, 4, 6])
def test_best_order_is_scipys_and_no_order_is_better(H):
    table = torch.rand(H, H, generator=torch.Generator().manual_seed(H), dtype=torch.float64)
    order = taught(NAME).best_order(table)
    assert list(order) == linear_sum_assignment(table)[1].tolist()
    totals = [table[range(H), other].sum() for other in permutations(range(H))]
    assert table[range(H), order].sum() <= min(totals) + 1e-12


def test_divergence_the_table_of_heads_and_the_best_pairing():
    a, b = random_maps(3, 4, 6, 6), random_maps(3, 4, 6, 6, seed=1)
    for maps_b in (b, a[:, [2, 0, 3, 1]], torch.eye(6, dtype=torch.float64).expand(3, 4, -1, -1)):
        expected = StreamingDivergence()
        expected.update(a, maps_b)
        by_hand = taught(NAME)
        assert torch.allclose(
            by_hand.jensen_shannon_by_hand(a, maps_b), jensen_shannon(a, maps_b), rtol=1e-8, atol=1e-12
        )
        assert torch.allclose(by_hand.head_table(a, maps_b), expected.matrix(), rtol=1e-8, atol=1e-12)
        value = expected.value("bipartite")
        assert by_hand.divergence_by_hand(a, maps_b).item() == pytest.approx(value, rel=1e-9, abs=1e-12)
