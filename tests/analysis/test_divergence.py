"""Divergence of maps: against SciPy and loops, all four pairings, any batching, and equal operations with
unlike maps."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr

from atlib import AttentionTransfer, Plan, walk
from atlib.analysis import (
    PAIRINGS,
    StreamingDivergence,
    compare_layers,
    head_divergence,
    jensen_shannon,
    layer_divergence,
    same_operation,
    three_models,
)
from atlib.analysis.checks import check_maps


def random_maps(B=5, H=3, N=6, dtype=torch.float64):
    return (2 * torch.randn(B, H, N, N, dtype=dtype)).softmax(-1)


def longhand_matrix(maps_a, maps_b):
    """Every head of a against every head of b, by loops over images and queries, from relative entropies."""
    B, _, N, _ = maps_a.shape

    def divergence(p, q):
        return (rel_entr(p, (p + q) / 2).sum() + rel_entr(q, (p + q) / 2).sum()) / 2

    return np.array(
        [
            [
                np.mean(
                    [
                        divergence(maps_a[b, h, i].numpy(), maps_b[b, g, i].numpy())
                        for b in range(B)
                        for i in range(N)
                    ]
                )
                for g in range(maps_b.shape[1])
            ]
            for h in range(maps_a.shape[1])
        ]
    )


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
    found = jensen_shannon(p, q)
    np.testing.assert_allclose(found, jensenshannon(p, q, axis=-1) ** 2, rtol=1e-9)
    assert torch.equal(found, jensen_shannon(q, p)) and found.max() < math.log(2) and found.min() > 0


@pytest.mark.parametrize(
    "p, q, message",
    [
        ([0.5, 0.2], [0.5, 0.5], "p holds no probabilities: row 0 sums to 0.7"),
        ([0.5, 0.5], [1.5, -0.5], "q holds no probabilities.*least entry is -0.5"),
        ([0.5, 0.5], [math.nan, 0.5], "q is NaN"),
        ([0.5, 0.5], [1.0], "same last axis"),
    ],
)
def test_jensen_shannon_of_what_is_no_distribution(p, q, message):
    with pytest.raises(ValueError, match=message):
        jensen_shannon(torch.tensor(p), torch.tensor(q))


def test_jensen_shannon_at_zeros():
    one, other = torch.eye(3)[0], torch.eye(3)[2]
    assert jensen_shannon(one, other).item() == pytest.approx(math.log(2), rel=1e-12)
    assert jensen_shannon(one, one).item() == 0
    half = torch.tensor([0.5, 0.5, 0.0])
    assert jensen_shannon(one, half).item() == pytest.approx(
        0.5 * math.log(4 / 3) + 0.25 * (math.log(2 / 3) + math.log(2)), rel=1e-12
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("heads", [(3, 3), (2, 4), (4, 2)], ids=str)
def test_pairings_equal_the_longhand(pairing, heads):
    maps_a, maps_b = random_maps(H=heads[0]), random_maps(H=heads[1])
    if pairing == "direct" and heads[0] != heads[1]:
        with pytest.raises(
            ValueError, match=rf"a has {heads[0]} heads, b {heads[1]}.*'bipartite', 'minimum', 'average'"
        ):
            head_divergence(maps_a, maps_b, pairing)
        return
    assert head_divergence(maps_a, maps_b, pairing) == pytest.approx(
        longhand_value(maps_a, maps_b, pairing), rel=1e-9
    )


def test_heads_are_averaged_before_they_are_paired():
    """Two heads that swap places from image to image are no pair in either order; pairing image by image
    would find none apart."""
    looks_left, looks_right = torch.eye(4).roll(-1, 1), torch.eye(4).roll(1, 1)
    maps_a = torch.stack([torch.stack([looks_left, looks_right])] * 2)
    maps_b = torch.stack([maps_a[0], maps_a[0].flip(0)])
    for pairing in ("direct", "bipartite", "minimum"):
        assert head_divergence(maps_a, maps_b, pairing) == pytest.approx(math.log(2) / 2)
    assert head_divergence(maps_a, maps_b, "average") == 0


def test_pairings_are_ordered():
    maps_a, maps_b = random_maps(H=5), random_maps(H=5)
    found = {pairing: head_divergence(maps_a, maps_b, pairing) for pairing in PAIRINGS}
    assert found["minimum"] < found["bipartite"] < found["direct"]
    assert found["average"] < found["direct"], "the divergence is convex"
    several = torch.cat([maps_b[:, :1], maps_b], 1)  # two heads of a have the same nearest head
    assert (
        head_divergence(several, maps_b, "minimum") == 0 and head_divergence(maps_b, several, "minimum") == 0
    )


@pytest.mark.parametrize("sizes", [[5], [1] * 5, [3, 2]], ids=str)
def test_streaming_is_the_same_for_any_batches(sizes):
    maps_a, maps_b = random_maps(H=2), random_maps(H=3)
    streaming = StreamingDivergence()
    for some_a, some_b in zip(maps_a.split(sizes), maps_b.split(sizes)):
        streaming.update(some_a, some_b)
    assert streaming.matrix().shape == (2, 3)
    np.testing.assert_allclose(streaming.matrix(), longhand_matrix(maps_a, maps_b), rtol=1e-9)
    for pairing in ("bipartite", "minimum", "average"):
        assert streaming.value(pairing) == pytest.approx(longhand_value(maps_a, maps_b, pairing), rel=1e-9)


def test_low_precision_maps():
    maps_a, maps_b = random_maps(dtype=torch.float32), random_maps(dtype=torch.float32)
    exact = head_divergence(maps_a.double(), maps_b.double(), "bipartite")
    assert head_divergence(maps_a, maps_b, "bipartite") == pytest.approx(exact, rel=1e-6)
    assert head_divergence(maps_a.bfloat16(), maps_b.bfloat16(), "bipartite") == pytest.approx(
        exact, rel=0.05
    )


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_layers_of_two_models(small_vit, glyphs64, pairing):
    a, b, images = small_vit(), small_vit(seed=1), glyphs64.take(range(64))[0][:6]
    few = type(glyphs64)(glyphs64.pixels[:6], glyphs64.targets[:6])
    with torch.no_grad():
        maps_a, maps_b = ([seen.map.double() for seen in walk(vit, images).layers] for vit in (a, b))
    found = layer_divergence(a, b, few, pairing, batch_size=4)
    assert found == pytest.approx([longhand_value(p, q, pairing) for p, q in zip(maps_a, maps_b)], rel=1e-4)
    found = layer_divergence(a, b, few, pairing, layers={2: 0, 0: 1})
    assert found == pytest.approx(
        [longhand_value(maps_a[2], maps_b[0], pairing), longhand_value(maps_a[0], maps_b[1], pairing)],
        rel=1e-4,
    )


def test_copied_layers_have_the_teachers_maps(small_vit, glyphs64):
    teacher = small_vit(seed=1)
    pair = AttentionTransfer(teacher, small_vit(seed=2), Plan(how="copy", layers=[1]))
    found = layer_divergence(pair, teacher, glyphs64, "direct")
    assert found[1] == pytest.approx(0, abs=1e-6) and found[0] > 0.01 and found[2] > 0.01


def test_one_pass_gives_every_pairing(small_vit, glyphs64):
    a, b = small_vit(), small_vit(seed=1)
    for divergence, expected in zip(
        compare_layers(a, b, glyphs64), layer_divergence(a, b, glyphs64, "minimum"), strict=True
    ):
        assert divergence.value("minimum") == expected and divergence.images == 64
        assert len({divergence.value(pairing) for pairing in PAIRINGS}) >= 3


def test_layers_that_cannot_be_paired(small_vit, glyphs64):
    a, b = small_vit(), small_vit(depth=2)
    with pytest.raises(ValueError, match="layers cannot be paired.*a has 3, b 2"):
        layer_divergence(a, b, glyphs64, "direct")
    assert len(layer_divergence(a, b, glyphs64, "direct", layers={0: 0, 2: 1})) == 2
    for layers in ({0: 2}, {3: 0}, {-1: 0}, {}):
        with pytest.raises(ValueError, match="does not pair layers of a, 0 to 2, with layers of b, 0 to 1"):
            layer_divergence(a, b, glyphs64, "direct", layers=layers)
    with pytest.raises(ValueError, match="layers 0 of a and 0 of b: maps of a.*same images and tokens"):
        layer_divergence(a, small_vit(reg_tokens=1), glyphs64, "direct")
    broken = small_vit(seed=1)
    broken.blocks[1].attn.qkv.bias.data[:] = torch.nan
    with pytest.raises(ValueError, match="b: layer 1: head 0.*not finite"):
        layer_divergence(a, broken, glyphs64, "direct", layers={0: 0, 2: 1})


def test_three_models_do_the_same_with_other_maps():
    layers = three_models()
    A, B, C = (layers[name] for name in "ABC")
    longhand = sum(A.maps[0, h] @ A.values[0, h] @ A.projection[2 * h : 2 * h + 2] for h in range(3))
    for layer in (A, B, C):
        check_maps(layer.maps)
        assert layer.output.dtype == torch.float64 and (layer.output[0] - longhand).abs().max() <= 1e-12
    assert (
        longhand.std() > 0.1 and torch.equal(A.values, C.values) and torch.equal(A.projection, C.projection)
    )
    found = same_operation()
    assert found["B"]["direct"] > 0.05
    assert [found["B"][pairing] for pairing in ("bipartite", "minimum", "average")] == pytest.approx(
        [0, 0, 0], abs=1e-12
    )
    assert all(found["C"][pairing] > 0.05 for pairing in PAIRINGS)
    for name, layer in (("B", B), ("C", C)):
        assert found[name] == pytest.approx(
            {pairing: longhand_value(A.maps, layer.maps, pairing) for pairing in PAIRINGS},
            rel=1e-9,
            abs=1e-12,
        )


def spoilt(value, b=1, h=2, i=3):
    maps = random_maps(dtype=torch.float32)
    maps[b, h, i, 0] = value
    return maps


def test_maps_that_are_none():
    check_maps(random_maps())
    check_maps(random_maps(dtype=torch.float32).half(), 3)
    for maps, problem in (
        (spoilt(torch.nan), "sums to nan"),
        (spoilt(torch.inf), "sums to inf"),
        (spoilt(-0.25), r"entry -0\.25"),
        (spoilt(1.5), "not to 1"),
    ):
        with pytest.raises(ValueError, match=f"^layer 7: head 2: the row of query 3 in image 1 .*{problem}"):
            check_maps(maps, 7)
        with pytest.raises(ValueError, match=f"^a: head 2.*{problem}"):
            head_divergence(maps, random_maps(), "direct")
        with pytest.raises(ValueError, match=f"^b: layer 5: head 2.*{problem}"):
            StreamingDivergence().update(random_maps(), maps, (4, 5))
    with pytest.raises(ValueError, match=r"softmax.*attention logits"):
        check_maps(torch.randn(2, 3, 4, 4))
    with pytest.raises(ValueError, match=r"^layer 0: maps are \(B, H, N, N\), got \(2, 3, 4, 5\)"):
        check_maps(torch.full((2, 3, 4, 5), 0.2), 0)
    with pytest.raises(ValueError, match="empty"):
        check_maps(torch.zeros(0, 3, 4, 4))
    with pytest.raises(ValueError, match="torch.int64"):
        check_maps(torch.eye(4, dtype=torch.int64).expand(1, 1, 4, 4))
    dropped = random_maps()[..., 1:, 1:]
    with pytest.raises(ValueError, match="renormalise"):
        check_maps(dropped)


def test_other_bad_input():
    with pytest.raises(ValueError, match="unknown pairing 'bipartit'. Did you mean 'bipartite'"):
        head_divergence(random_maps(), random_maps(), "bipartit")
    with pytest.raises(ValueError, match="same images and tokens"):
        head_divergence(random_maps(), random_maps()[:4], "direct")
    with pytest.raises(ValueError, match="call update first"):
        StreamingDivergence().value("direct")
    streaming = StreamingDivergence()
    streaming.update(random_maps(), random_maps())
    with pytest.raises(ValueError, match=r"had \(3, 3\) heads of a and b, this batch has \(3, 2\)"):
        streaming.update(random_maps(), random_maps(H=2))
