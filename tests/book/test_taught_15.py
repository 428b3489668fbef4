"""What notebook 15 writes out, measures of maps and four pairings of heads, is what atlib computes; and its
section on a real ViT runs with weights."""

import math
from itertools import permutations

import jupytext
import matplotlib.pyplot as plt
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

import atlib
from atlib.analysis import (
    PAIRINGS,
    attention_distance,
    attention_entropy,
    class_attention,
    head_divergence,
    rollout,
)
from atlib.record import results_folder
from tests.book.test_taught import NOTEBOOKS, taught
from tests.helpers import randomise

NAME = "15-reading-maps"


def random_maps(*shape, seed=0):
    return (
        2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).softmax(-1)


@pytest.mark.parametrize("grid, prefix", [((4, 4), 1), ((2, 3), 0), ((3, 2), 3), ((1, 6), 2)])
def test_distance_and_entropy(grid, prefix):
    N = prefix + grid[0] * grid[1]
    maps = random_maps(3, 2, N, N)
    maps[1, 0, prefix] = torch.eye(N, dtype=torch.float64)[
        0
    ]  # one patch looks at one token only: a prefix token where there is one
    by_hand = taught(NAME)
    for h, (distance, spread) in enumerate(
        zip(attention_distance(maps, grid, prefix), attention_entropy(maps))
    ):
        rows = [(by_hand.distance_by_hand(maps[b, h], grid, prefix), grid[0] * grid[1]) for b in range(3)]
        if prefix and h == 0:  # the row without a distance does not count
            rows[1] = rows[1][0], rows[1][1] - 1
        assert sum(value * count for value, count in rows) / sum(count for _, count in rows) == pytest.approx(
            distance.item(), rel=1e-10
        )
        entropies = [by_hand.entropy_by_hand(maps[b, h]) for b in range(3)]
        assert sum(entropies) / 3 == pytest.approx(spread.item(), rel=1e-10)
        assert entropies == pytest.approx(
            [entropy(maps[b, h].numpy(), axis=-1).mean() for b in range(3)], rel=1e-10
        )


def test_distance_of_known_maps():
    distance = taught(NAME).distance_by_hand
    assert distance(torch.eye(10), (3, 3), 1) == 0
    right = torch.eye(6).roll(1, 1)  # token i looks at i + 1, the last at the first
    assert distance(right, (1, 6), 0) == pytest.approx((5 * 1 + 5) / 6)
    row_by_row = [
        1,
        1,
        math.hypot(1, 2),
        1,
        1,
        math.hypot(1, 2),
    ]  # from the end of a row to the start of the other
    assert distance(right, (2, 3), 0) == pytest.approx(sum(row_by_row) / 6)


@pytest.mark.parametrize("residual", [0.0, 0.5, 0.9])
def test_rollout(residual):
    maps = [random_maps(2, 3, 7, 7, seed=seed) for seed in range(4)]
    for b in range(2):
        found = taught(NAME).rollout_by_hand([p[b] for p in maps], residual)
        assert torch.allclose(found, rollout(maps, residual)[b], atol=1e-12)
        product = torch.eye(7, dtype=torch.float64)
        for p in maps[::-1]:  # the last layer stands leftmost
            product = product @ (residual * torch.eye(7, dtype=torch.float64) + (1 - residual) * p[b].mean(0))
        assert torch.allclose(found, product, atol=1e-12)


def test_jensen_shannon_and_the_table_of_heads():
    a, b = random_maps(3, 4, 5, 6), random_maps(3, 4, 5, 6, seed=1)
    expected = jensenshannon(a.numpy(), b.numpy(), axis=-1) ** 2
    assert taught(NAME).jensen_shannon_by_hand(a, b).numpy() == pytest.approx(expected, rel=1e-8)
    one, other = torch.eye(2, dtype=torch.float64)
    assert taught(NAME).jensen_shannon_by_hand(one, other).item() == pytest.approx(math.log(2))
    table = taught(NAME).head_table(a, b)
    for h in range(4):
        for g in range(4):
            assert table[h, g].item() == pytest.approx(
                (jensenshannon(a[:, h].numpy(), b[:, g].numpy(), axis=-1) ** 2).mean(), rel=1e-8
            )


@pytest.mark.parametrize("H", [1, 2, 4, 6])
def test_best_order_is_scipys_and_no_order_is_better(H):
    table = torch.rand(H, H, generator=torch.Generator().manual_seed(H), dtype=torch.float64)
    order = taught(NAME).best_order(table)
    assert list(order) == linear_sum_assignment(table)[1].tolist()
    assert all(
        table[range(H), order].sum() <= table[range(H), other].sum() + 1e-12
        for other in permutations(range(H))
    )


def test_four_pairings():
    a, b = random_maps(3, 4, 6, 6), random_maps(3, 4, 6, 6, seed=1)
    for maps_b in (b, a[:, [2, 0, 3, 1]]):
        found = taught(NAME).four_pairings(a, maps_b)
        assert set(found) == set(PAIRINGS)
        for pairing in PAIRINGS:
            assert found[pairing].item() == pytest.approx(
                head_divergence(a, maps_b, pairing), rel=1e-9, abs=1e-12
            )


def last_section() -> list[str]:
    """The code of the cells on a real ViT: from the one that names it to the last figure."""
    codes = [
        cell.source
        for cell in jupytext.read(NOTEBOOKS / f"{NAME}.md", fmt="md:myst").cells
        if cell.cell_type == "code"
    ]
    first = next(index for index, code in enumerate(codes) if "real_name =" in code)
    return codes[first : first + 4]


@pytest.mark.parametrize("present", [True, False], ids=["weights", "no weights"])
def test_a_real_vit_is_read(present, monkeypatch, capsys, tmp_path):
    """With weights that are random here, in place of published ones; and without any."""

    def create(name, pretrained=False):
        assert name == "vit_small_patch16_224.dino"
        vit = atlib.create_vit(
            name, depth=4, embed_dim=96
        )  # a real one's tokens and heads, at a fraction of its cost
        return randomise(vit, seed=1) if pretrained else vit

    monkeypatch.setattr(
        "atlib.vit.weights_file", lambda name: NOTEBOOKS / f"{NAME}.md" if present else tmp_path / "none"
    )
    teacher = randomise(atlib.create_vit("glyphs"))
    results = (
        tmp_path / "a" / "results" if present else results_folder(NOTEBOOKS)
    )  # without and, where ../shared is, with its photographs
    scope = dict(
        torch=torch,
        math=math,
        plt=plt,
        walk=atlib.walk,
        create_vit=create,
        results=results,
        teacher=teacher,
        images=torch.randn(5, 3, 32, 32),
        attention_distance=attention_distance,
        attention_entropy=attention_entropy,
        class_attention=class_attention,
        rollout=rollout,
    )
    for code in last_section():
        exec(compile(code, NAME, "exec"), scope)
    second = "ViT-S, DINO" if present else "the book's teacher"
    assert list(scope["looked"]) == ["ViT-S, untrained", second]
    layers, grid, prefix_tokens = scope["read"][second]
    assert (len(layers), layers[0].shape[1:], grid, prefix_tokens) == (
        (4, (6, 197, 197), (14, 14), 1) if present else (4, (4, 17, 17), (4, 4), 1)
    )
    assert scope["chosen"][second] == [0, 1, 2, 3]
    assert ("no weights of vit_small_patch16_224.dino" in capsys.readouterr().out) == (not present)
    assert len(scope["figure"].axes) == 12
