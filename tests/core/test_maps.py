"""Every operation on maps against loops over plain numbers; rows sum to 1, and nothing is lost."""

import numpy as np
import pytest
import torch

from atlib.attention import Seen
from atlib.maps import (
    aggregate_heads,
    average_over,
    join_heads,
    keep_own,
    keep_tokens,
    mean_heads,
    place_tokens,
    pool_heads,
    resample,
    resample_class_attention,
)
from tests.helpers import random_images, random_maps
from tests.longhand import cubic_weights

GRIDS = [((4, 4), (2, 2)), ((3, 4), (5, 2)), ((5, 4), (2, 1)), ((1, 3), (2, 7))]


def sums_to_one(map):
    return (map >= 0).all() and torch.allclose(map.sum(-1), torch.ones_like(map.sum(-1)), rtol=0, atol=1e-12)


def with_sum(values, total):
    values = np.maximum(values, 0)
    return values * total / values.sum() if len(values) and values.sum() > 0 else values


def resampled_row(row, table, n):
    return np.concatenate([row[:n], with_sum(table @ row[n:], row[n:].sum())])


def resampled(map, grid_from, grid_to, n):
    """`resample`, one row at a time."""
    sides = (cubic_weights(*side) for side in zip(grid_from, grid_to))
    table = torch.kron(*sides).numpy()
    B, H, N, _ = map.shape
    M = n + grid_to[0] * grid_to[1]
    out = np.zeros((B, H, M, M))
    for b in range(B):
        for h in range(H):
            rows = [resampled_row(map[b, h, i], table, n) for i in range(N)]
            for i in range(n):
                out[b, h, i] = rows[i]
            for i in range(M - n):
                row = sum(table[i, j] * rows[n + j] for j in range(N - n))
                share = min(max(row[:n].sum(), 0.0), 1.0)
                out[b, h, n + i] = np.concatenate([with_sum(row[:n], share), with_sum(row[n:], 1 - share)])
    return out


# Averages


@pytest.mark.parametrize("what", ["examples", "layers", "heads", "queries"])
def test_averages_equal_loops_and_averaging_again_changes_nothing(what):
    maps = [random_maps(2, 3, 4, 4, seed=seed) for seed in range(3)]
    plain = [map.numpy() for map in maps]
    B, H, N, _ = plain[0].shape
    once = average_over(maps, what)
    again = average_over(once, what)
    for layer, found in enumerate(once):
        assert found.shape == maps[layer].shape and sums_to_one(found)
        torch.testing.assert_close(again[layer], found, rtol=1e-14, atol=0)
        for b in range(B):
            for h in range(H):
                for i in range(N):
                    same = {
                        "examples": [plain[layer][other, h, i] for other in range(B)],
                        "layers": [other[b, h, i] for other in plain],
                        "heads": [plain[layer][b, other, i] for other in range(H)],
                        "queries": [plain[layer][b, h, other] for other in range(N)],
                    }[what]
                    np.testing.assert_allclose(found[b, h, i].numpy(), sum(same) / len(same), rtol=1e-12)


# Heads


def test_mean_and_aggregate_equal_loops():
    map = random_maps(2, 3, 4, 4)
    plain = map.numpy()
    mean, merged = mean_heads(map), aggregate_heads(map, 5.0)
    assert mean.shape == merged.shape == (2, 1, 4, 4) and sums_to_one(mean) and sums_to_one(merged)
    for b in range(2):
        for i in range(4):
            heads = [plain[b, h, i] for h in range(3)]
            np.testing.assert_allclose(mean[b, 0, i].numpy(), sum(heads) / 3, rtol=1e-12)
            product = (heads[0] * heads[1] * heads[2]) ** (1 / 5)
            np.testing.assert_allclose(merged[b, 0, i].numpy(), product / product.sum(), rtol=1e-12)


def test_map_scores_logs_and_joined_heads_agree():
    q, k = random_images(2, 2, 3, 5, 4, dtype=torch.float64)
    seen = Seen(q, k, None, 0.7)
    expected = aggregate_heads(seen.map, 6.0)
    of_scores = aggregate_heads(temperature=6.0, scores=seen.scores)
    for same in (of_scores, Seen(join_heads(q), join_heads(k), None, 0.7 / 6.0).map):
        torch.testing.assert_close(same, expected, rtol=1e-10, atol=1e-14)


def test_underflow_leaves_values_and_gradients_finite():
    """Probabilities of 1e-87 and below are 0 in float32: exact from the scores, finite from the map."""
    scores = torch.tensor([0.0, -200.0, -400.0, 1.0]).repeat(1, 2, 4, 1).requires_grad_()
    p = scores.detach().softmax(-1).requires_grad_()
    assert (p == 0).any()
    exact, safe = aggregate_heads(scores=scores), aggregate_heads(p)
    expected = (scores.detach().double().log_softmax(-1).sum(1, keepdim=True) / 10).softmax(-1)
    torch.testing.assert_close(exact.double(), expected, rtol=1e-5, atol=1e-30)
    # off only where e^-17 was e^-40
    torch.testing.assert_close(safe.double(), expected, rtol=1e-5, atol=1e-7)
    for result, source in ((exact, scores), (safe, p)):
        (result[..., 0].sum() - result.log().mean()).backward()
        assert source.grad.isfinite().all() and (source.grad != 0).any()


# Grids


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_resampling_equals_loops(grids, n):
    N = n + grids[0][0] * grids[0][1]
    for size in (0.5, 6.0):  # 6: rows near one-hot, so that the interpolation overshoots below 0
        map = (size * random_images(2, 2, N, N, dtype=torch.float64)).softmax(-1)
        found = resample(map, *grids, n)
        np.testing.assert_allclose(found.numpy(), resampled(map.numpy(), *grids, n), rtol=0, atol=1e-12)
        assert sums_to_one(found)
        for i in range(n):  # one query's attention: the class token's, or a register's
            of_one = resample_class_attention(map[:, :, i], *grids, n)
            torch.testing.assert_close(of_one, found[:, :, i], rtol=0, atol=1e-12)


# Tokens


def test_kept_tokens_equal_loops_and_the_map_of_kept_queries_and_keys():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    map, tokens = Seen(q, k, None, 0.5).map, [4, 0, 3]
    found = keep_tokens(map, tokens)
    assert found.shape == (2, 3, 3, 3) and sums_to_one(found)
    for b in range(2):
        for h in range(3):
            for i, query in enumerate(tokens):
                row = [map[b, h, query, key].item() for key in tokens]
                np.testing.assert_allclose(found[b, h, i].numpy(), np.array(row) / sum(row), rtol=1e-12)
    of_kept = Seen(q[:, :, tokens], k[:, :, tokens], None, 0.5).map
    torch.testing.assert_close(found, of_kept, rtol=1e-12, atol=0)
    assert torch.equal(keep_tokens(map, range(6)), map)
    turned = keep_tokens(map, [0, 1, 2, 3, 5, 4])
    torch.testing.assert_close(turned[:, :, 4, 5], map[:, :, 5, 4], rtol=1e-12, atol=0)


def test_placed_tokens_equal_loops():
    map, tokens = random_maps(2, 3, 3, 3), [3, 0, 4]
    found = place_tokens(map, tokens, 5)
    for i in range(5):
        for j in range(5):
            among = i in tokens and j in tokens
            expected = map[:, :, tokens.index(i), tokens.index(j)] if among else torch.zeros(2, 3)
            assert torch.equal(found[:, :, i, j], expected.double())
    torch.testing.assert_close(keep_tokens(found, tokens), map, rtol=1e-12, atol=0)
    assert torch.equal(place_tokens(map, range(3), 3), map)


@pytest.mark.parametrize(
    "queries, keys", [([1, 4], [1, 4]), ([0], []), ([], [2]), ([1, 2, 3], [2]), ([], [])]
)
def test_what_is_kept_of_its_own_equals_loops(queries, keys):
    """Row by row; and where a row is its own, nothing of the map put in is looked at."""
    others = [token for token in range(5) if token not in keys]
    map = place_tokens(random_maps(2, 3, len(others), len(others)), others, 5)
    own = random_maps(2, 3, 5, 5, seed=1)
    map[:, :, queries] = torch.nan
    found = keep_own(map, own, queries, keys)
    asked = [i for i in range(5) if i in queries or i in others]  # a key whose row is not its own has none
    assert sums_to_one(found[:, :, asked])
    for i in asked:
        left = 1 - own[:, :, i, keys].sum(-1)
        for j in range(5):
            expected = own[:, :, i, j] if i in queries or j in keys else left * map[:, :, i, j]
            torch.testing.assert_close(found[:, :, i, j], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("how, pick", [("max", max), ("min", min), ("mean", lambda x: sum(x) / len(x))])
@pytest.mark.parametrize("queries", [5, 1])
def test_pooled_heads_equal_loops(how, pick, queries):
    map = random_maps(2, 3, queries, 5)
    found = pool_heads(map, how)
    assert found.shape == (2, 1, queries, 5) and sums_to_one(found)
    for b in range(2):
        for i in range(queries):
            row = [pick([map[b, h, i, j].item() for h in range(3)]) for j in range(5)]
            np.testing.assert_allclose(found[b, 0, i].numpy(), np.array(row) / sum(row), rtol=1e-12)
