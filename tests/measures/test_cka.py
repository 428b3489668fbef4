"""CKA: three ways to one number, against centring matrices written out; layers of models."""

from itertools import permutations

import numpy as np
import pytest
import torch

from atfamily.measures.cka import (
    MinibatchCKA,
    StreamingCKA,
    class_token,
    every_token,
    layer_cka,
    linear_cka,
    patch_mean,
)
from atlib import walk


def longhand(x, y):
    """tr(K H L H) / √(tr(K H K H) tr(L H L H)), with every matrix made."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    n = len(x)
    H = np.eye(n) - np.ones((n, n)) / n
    K, L = H @ x @ x.T @ H, H @ y @ y.T @ H
    return np.trace(K @ L) / np.sqrt(np.trace(K @ K) * np.trace(L @ L))


def hsic_1(x, y):
    """HSIC₁ as sums over distinct indices (Song et al. 2012, equation 4)."""
    K, L, n = x @ x.T, y @ y.T, len(x)
    two = np.mean([K[i, j] * L[i, j] for i, j in permutations(range(n), 2)])
    three = np.mean([K[i, j] * L[i, k] for i, j, k in permutations(range(n), 3)])
    four = np.mean([K[i, j] * L[k, m] for i, j, k, m in permutations(range(n), 4)])
    return two - 2 * three + four


def related(n=40, p=6, q=4, mean=3.0):
    """Features that share something and are far from centred."""
    x = torch.randn(n, p, dtype=torch.float64)
    return x + mean, x[:, :q] ** 2 + torch.randn(n, q, dtype=torch.float64) + x[:, :1] - mean


def streamed(x, y, sizes, accumulator):
    for some_x, some_y in zip(x.split(sizes), y.split(sizes)):
        accumulator.update(some_x, some_y)
    return accumulator.value()


@pytest.mark.parametrize("p, q", [(6, 4), (4, 200), (200, 90)])
def test_the_exact_one_equals_centring_matrices(p, q):
    x, y = torch.randn(40, p), torch.randn(40, q)
    y[:, :4] += x[:, :4]
    assert linear_cka(x, y) == pytest.approx(longhand(x, y), rel=1e-12)


@pytest.mark.parametrize("sizes", [[1] * 40, [7, 30, 3]], ids=str)
def test_streaming_is_exact_for_any_batches_and_keeps_its_digits_with_a_large_mean(sizes):
    x, y = related()
    assert streamed(x, y, sizes, StreamingCKA()) == pytest.approx(longhand(x, y), rel=1e-12)
    x, y = related(mean=0)
    assert streamed(x + 1e6, y - 1e6, [7, 30, 3], StreamingCKA()) == pytest.approx(longhand(x, y), rel=1e-8)


def test_a_minibatch_has_the_unbiased_hsic():
    x, y = related(n=7)
    cka = streamed(x, y, [7], MinibatchCKA())
    x, y = x.numpy(), y.numpy()
    assert cka == pytest.approx(hsic_1(x, y) / np.sqrt(hsic_1(x, x) * hsic_1(y, y)), rel=1e-10)


def test_many_layers_are_their_pairs():
    xs, ys = [torch.randn(40, width) for width in (3, 5)], [torch.randn(40, width) for width in (4, 2, 6)]
    for kind in (StreamingCKA, MinibatchCKA):
        together = kind()
        for rows in torch.arange(40).split([11, 29]):
            together.update_layers([x[rows] for x in xs], [y[rows] for y in ys])
        expected = [[streamed(x, y, [11, 29], kind()) for y in ys] for x in xs]
        np.testing.assert_allclose(together.matrix(), expected, rtol=1e-10)


def test_layers_of_two_models(small_vit, glyphs64):
    a, b = small_vit(), small_vit(seed=1, depth=2, embed_dim=36)
    few = glyphs64.select(range(24))
    images = few.take(range(24))[0]
    for read, longhand_read in (
        (class_token, lambda tokens: tokens[:, 0]),
        (patch_mean(1), lambda tokens: tokens[:, 1:].sum(1) / 16),
        (every_token, lambda tokens: tokens.reshape(-1, tokens.shape[-1])),
    ):
        table = layer_cka(a, b, few, read, batch_size=7)
        with torch.no_grad():
            streams = [[longhand_read(tokens) for tokens in walk(model, images).stream] for model in (a, b)]
        expected = [[longhand(x, y) for y in streams[1]] for x in streams[0]]
        np.testing.assert_allclose(table, expected, rtol=1e-4)  # the walks are float32
    assert table.std() > 0.01, "pairs this alike could be in any order"


@pytest.mark.parametrize("images, batches", [(13, [6, 7]), (16, [6, 6, 4])])
def test_a_rest_that_is_too_small_goes_with_the_batch_before(small_vit, glyphs64, images, batches):
    a, b = small_vit(), small_vit()
    pairs, by_hand = MinibatchCKA(), MinibatchCKA()
    some = glyphs64.select(range(images))
    table = layer_cka(a, b, some, class_token, batch_size=6, accumulator=pairs)
    x, y = ([tokens[:, 0] for tokens in walk(vit, some.take(range(images))[0]).stream] for vit in (a, b))
    for part in torch.arange(images).split(batches):
        by_hand.update_layers([features[part] for features in x], [features[part] for features in y])
    assert torch.allclose(table, by_hand.matrix(), rtol=1e-5) and pairs.rows == images


X, Y = related()
CONSTANT = torch.full((40, 3), 0.1)


def test_features_without_variance():
    layers = StreamingCKA()
    layers.update_layers([X, CONSTANT], [Y])
    # constant in every batch, but not in all of them
    steps = torch.arange(2.0).repeat_interleave(20)[:, None]
    for call in (
        lambda: linear_cka(X, CONSTANT),
        lambda: streamed(CONSTANT, Y, [20, 20], StreamingCKA()),
        lambda: streamed(CONSTANT, Y, [20, 20], MinibatchCKA()),
        layers.matrix,
        lambda: streamed(steps, Y, [20, 20], MinibatchCKA()),
    ):
        with pytest.raises(ValueError):
            call()
    assert streamed(steps, Y, [20, 20], StreamingCKA()) == pytest.approx(longhand(steps, Y), rel=1e-12)
