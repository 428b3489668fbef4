"""Divergence of maps: against SciPy and loops, all pairings, any batching; equal operations, unlike maps."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr

from atbook.three_models import three_models
from atlib import walk
from atlib.analysis import PAIRINGS, check_maps, compare_layers, head_divergence, jensen_shannon


def random_maps(B=5, H=3, N=6, dtype=torch.float64):
    return (2 * torch.randn(B, H, N, N, dtype=dtype)).softmax(-1)


def longhand_matrix(maps_a, maps_b):
    """Every head of a against every head of b, by loops over images and queries, from relative entropies."""

    def divergence(p, q):
        return (rel_entr(p, (p + q) / 2).sum() + rel_entr(q, (p + q) / 2).sum()) / 2

    heads_a, heads_b = ([p.flatten(0, 1).numpy() for p in maps.unbind(1)] for maps in (maps_a, maps_b))
    return np.array([[np.mean(list(map(divergence, p, q))) for q in heads_b] for p in heads_a])


def longhand_value(maps_a, maps_b, pairing):
    matrix = longhand_matrix(maps_a, maps_b)
    if pairing == "average":
        return longhand_matrix(maps_a.mean(1, keepdim=True), maps_b.mean(1, keepdim=True)).item()
    if pairing == "direct":
        return np.mean([matrix[h, h] for h in range(len(matrix))])
    if pairing == "minimum":
        return np.mean([min(row) for row in matrix])
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    return min(
        np.mean([matrix[h, g] for h, g in enumerate(order)])
        for order in permutations(range(matrix.shape[1]), len(matrix))
    )


def test_jensen_shannon_equals_scipy_and_is_bounded():
    p, q = random_maps(), random_maps()
    divergence = jensen_shannon(p, q)
    np.testing.assert_allclose(divergence, jensenshannon(p, q, axis=-1) ** 2, rtol=1e-9)
    assert torch.equal(divergence, jensen_shannon(q, p))
    assert 0 < divergence.min() and divergence.max() < math.log(2)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("heads", [(3, 3), (2, 4), (4, 2)], ids=str)
def test_pairings_equal_the_longhand(pairing, heads):
    maps_a, maps_b = random_maps(H=heads[0]), random_maps(H=heads[1])
    if pairing == "direct" and heads[0] != heads[1]:
        with pytest.raises(ValueError):
            head_divergence(maps_a, maps_b, pairing)
        return
    expected = longhand_value(maps_a, maps_b, pairing)
    assert head_divergence(maps_a, maps_b, pairing) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("layers", [None, {2: 0, 0: 1}], ids=str)
def test_layers_of_two_models(small_vit, glyphs64, layers):
    """One pass over the images gives every pairing."""
    a, b, few = small_vit(), small_vit(seed=1), glyphs64.select(range(6))
    with torch.no_grad():
        maps_a, maps_b = ([x.map.double() for x in walk(vit, few.take(range(6))[0]).layers] for vit in (a, b))
    pairs = [(0, 0), (1, 1), (2, 2)] if layers is None else [(2, 0), (0, 1)]
    for divergence, (i, j) in zip(compare_layers(a, b, few, layers, batch_size=4), pairs, strict=True):
        assert divergence.images == 6
        for pairing in PAIRINGS:
            longhand = longhand_value(maps_a[i], maps_b[j], pairing)
            assert divergence.value(pairing) == pytest.approx(longhand, rel=1e-4)


def test_three_models_do_the_same_with_other_maps():
    layers = three_models()
    A, B, C = (layers[name] for name in "ABC")
    longhand = sum(A.maps[0, h] @ A.values[0, h] @ A.projection[2 * h : 2 * h + 2] for h in range(3))
    for layer in (A, B, C):
        check_maps(layer.maps)
        assert layer.output.dtype == torch.float64 and (layer.output[0] - longhand).abs().max() <= 1e-12
    assert longhand.std() > 0.1
    assert torch.equal(A.values, C.values) and torch.equal(A.projection, C.projection)
    apart = {
        name: {pairing: head_divergence(A.maps, layer.maps, pairing) for pairing in PAIRINGS}
        for name, layer in (("B", B), ("C", C))
    }
    assert [pairing for pairing in PAIRINGS if apart["B"][pairing] > 0.05] == ["direct"]
    assert all(apart["C"][pairing] > 0.05 for pairing in PAIRINGS)
