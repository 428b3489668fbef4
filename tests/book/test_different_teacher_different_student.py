"""What notebook 19 writes out, the remedies for pairs that differ, is what atlib computes, on other inputs
than the notebook's."""

import pytest
import torch

from atlib import AttentionTransfer, Plan, walk
from atlib.maps import aggregate_heads, join_heads, resample, resample_class_attention
from tests.book.test_taught import small_vit, taught
from tests.helpers import random_maps

NOTEBOOK = "19-different-teacher-different-student"


@pytest.mark.parametrize("temperature", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("heads", [1, 3, 6])
def test_aggregate_and_joined_attention_are_aggregate_heads(heads, temperature):
    torch.manual_seed(heads)
    q, k = torch.randn(2, 2, heads, 9, 5, dtype=torch.float64)
    p = (0.6 * q @ k.mT).softmax(-1)
    expected = aggregate_heads(p, temperature)
    assert torch.allclose(taught(NOTEBOOK).aggregate(p, temperature), expected, atol=1e-12)
    assert torch.allclose(taught(NOTEBOOK).joined_attention_map(q, k, 0.6, temperature), expected, atol=1e-12)
    joined = (0.6 / temperature * join_heads(q) @ join_heads(k).mT).softmax(-1)
    assert torch.allclose(joined, expected, atol=1e-12)


def test_learned_mapping_loss_is_the_pairs():
    teacher, student, images = (
        small_vit(1, depth=2, num_heads=6),
        small_vit(2, depth=2),
        torch.randn(3, 3, 32, 32),
    )
    pair = AttentionTransfer(teacher, student, Plan(how="distill", unequal_heads="learn")).eval()
    with torch.no_grad():
        for M in pair.head_mapping:
            M.normal_()
        own, target = walk(student, images).layers, walk(teacher, images).layers
        layers = zip(pair.head_mapping, own, target)
        found = sum(taught(NOTEBOOK).learned_mapping_loss(M, s.map, t.map) for M, s, t in layers)
        assert found == pytest.approx(pair(images).transfer_loss.item(), rel=1e-5)


@pytest.mark.parametrize("grid_from, grid_to", [((2, 2), (4, 4)), ((3, 4), (6, 5)), ((4, 4), (14, 14))])
def test_resample_class_row_is_both_of_atlibs(grid_from, grid_to):
    tokens = 1 + grid_from[0] * grid_from[1]
    p = random_maps(2, 3, tokens, tokens)
    found = taught(NOTEBOOK).resample_class_row(p[:, :, 0], grid_from, grid_to)
    assert torch.allclose(found, resample_class_attention(p[:, :, 0], grid_from, grid_to), atol=1e-12)
    assert torch.allclose(found, resample(p, grid_from, grid_to, 1)[:, :, 0], atol=1e-12)
