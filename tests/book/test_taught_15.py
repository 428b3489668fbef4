"""What notebook 15 writes out, measures of maps and four pairings of heads, is what atlib computes; and its
section on a real ViT runs with weights."""

import math
from itertools import permutations

import jupytext
import matplotlib.pyplot as plt
import pytest
import torch
from scipy.optimize import linear_sum_assignment

import atlib
from atlib.analysis import (
    PAIRINGS,
    StreamingDivergence,
    attention_distance,
    attention_entropy,
    class_attention,
    jensen_shannon,
    rollout,
)
from atlib.record import results_folder
from tests.book.test_taught import NOTEBOOKS, taught
from tests.helpers import random_maps, randomise

NAME = "15-reading-maps"


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
        found = taught(NAME).rollout_by_hand([p[b] for p in maps], residual)
        assert torch.allclose(found, rollout(maps, residual)[b], atol=1e-12)


@pytest.mark.parametrize("H", [1, 2, 4, 6])
def test_best_order_is_scipys_and_no_order_is_better(H):
    table = torch.rand(H, H, generator=torch.Generator().manual_seed(H), dtype=torch.float64)
    order = taught(NAME).best_order(table)
    assert list(order) == linear_sum_assignment(table)[1].tolist()
    totals = [table[range(H), other].sum() for other in permutations(range(H))]
    assert table[range(H), order].sum() <= min(totals) + 1e-12


def test_divergence_the_table_of_heads_and_four_pairings():
    a, b = random_maps(3, 4, 6, 6), random_maps(3, 4, 6, 6, seed=1)
    for maps_b in (b, a[:, [2, 0, 3, 1]], torch.eye(6, dtype=torch.float64).expand(3, 4, -1, -1)):
        expected = StreamingDivergence()
        expected.update(a, maps_b)
        by_hand = taught(NAME)
        assert torch.allclose(
            by_hand.jensen_shannon_by_hand(a, maps_b), jensen_shannon(a, maps_b), rtol=1e-8, atol=1e-12
        )
        assert torch.allclose(by_hand.head_table(a, maps_b), expected.matrix(), rtol=1e-8, atol=1e-12)
        values = {pairing: expected.value(pairing) for pairing in PAIRINGS}
        assert by_hand.four_pairings(a, maps_b) == pytest.approx(values, rel=1e-9, abs=1e-12)


def last_section() -> list[str]:
    """The code of the cells on a real ViT: from the one that names it to the last figure."""
    cells = jupytext.read(NOTEBOOKS / f"{NAME}.md", fmt="md:myst").cells
    codes = [cell.source for cell in cells if cell.cell_type == "code"]
    first = next(index for index, code in enumerate(codes) if "real_name =" in code)
    return codes[first : first + 4]


@pytest.mark.parametrize("present", [True, False], ids=["weights", "no weights"])
def test_a_real_vit_is_read(present, monkeypatch, capsys, tmp_path):
    """With weights that are random here, in place of published ones; and without any."""

    def create(name, pretrained=False):
        assert name == "vit_small_patch16_224.dino"
        # a real one's tokens and heads, at a fraction of its cost
        vit = atlib.create_vit(name, depth=4, embed_dim=96)
        return randomise(vit, seed=1) if pretrained else vit

    file = NOTEBOOKS / f"{NAME}.md" if present else tmp_path / "none"
    monkeypatch.setattr("atlib.vit.weights_file", lambda name: file)
    teacher, images = randomise(atlib.create_vit("glyphs")), torch.randn(5, 3, 32, 32)
    # Without and, where ../shared is, with its photographs.
    results = tmp_path / "a" / "results" if present else results_folder(NOTEBOOKS)
    scope = dict(torch=torch, math=math, plt=plt, walk=atlib.walk, create_vit=create, rollout=rollout)
    scope |= dict(results=results, teacher=teacher, images=images, class_attention=class_attention)
    scope |= dict(attention_distance=attention_distance, attention_entropy=attention_entropy)
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
