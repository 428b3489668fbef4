"""Operations on maps against the long hand; what a pair makes of them is in `test_modes.py`."""

import pytest
import torch

from atlib import maps
from atlib.attention import Seen
from tests import longhand
from tests.helpers import random_images

GRIDS = [((4, 4), (2, 2)), ((3, 4), (5, 2)), ((5, 4), (2, 1)), ((1, 3), (2, 7))]


def sums_to_one(map):
    return (map >= 0).all() and torch.allclose(map.sum(-1), torch.ones_like(map.sum(-1)), rtol=0, atol=1e-12)


def test_underflow_leaves_values_and_gradients_finite():
    """Probabilities of 1e-87 and below are 0 in float32: exact from the scores, finite from the map."""
    scores = torch.tensor([0.0, -200.0, -400.0, 1.0]).repeat(1, 2, 4, 1).requires_grad_()
    p = scores.detach().softmax(-1).requires_grad_()
    assert (p == 0).any()
    exact, safe = maps.aggregate_heads(scores=scores), maps.aggregate_heads(p)
    expected = (scores.detach().double().log_softmax(-1).sum(1, keepdim=True) / 10).softmax(-1)
    torch.testing.assert_close(exact.double(), expected, rtol=1e-5, atol=1e-30)
    # off only where e^-17 was e^-40
    torch.testing.assert_close(safe.double(), expected, rtol=1e-5, atol=1e-7)
    for result, source in ((exact, scores), (safe, p)):
        (result[..., 0].sum() - result.log().mean()).backward()
        assert source.grad.isfinite().all() and (source.grad != 0).any()


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_another_grid(grids, n):
    N = n + grids[0][0] * grids[0][1]
    for size in (0.5, 6.0):  # 6: rows near one-hot, so that the interpolation overshoots below 0
        map = (size * random_images(2, 2, N, N, dtype=torch.float64)).softmax(-1)
        found = maps.resample(map, *grids, n)
        torch.testing.assert_close(found, longhand.on_grid(map, *grids, n), rtol=0, atol=1e-12)
        assert sums_to_one(found)
        for i in range(n):  # one query's attention: the class token's, or a register's
            of_one = maps.resample_class_attention(map[:, :, i], *grids, n)
            torch.testing.assert_close(of_one, found[:, :, i], rtol=0, atol=1e-12)


def test_kept_tokens_are_the_map_of_kept_queries_and_keys():
    q, k = random_images(2, 2, 3, 6, 4, dtype=torch.float64)
    map = Seen(q, k, None, 0.5).map
    for tokens in ([4, 0, 3], [0, 1, 2, 3, 5, 4], [*range(6)]):
        of_kept = Seen(q[:, :, tokens], k[:, :, tokens], None, 0.5).map
        torch.testing.assert_close(maps.keep_tokens(map, tokens), of_kept, rtol=1e-12, atol=0)
