"""What *Layers, heads, unequal pairs* writes out, layers with some given heads, averaged maps and the
remedies for unequal pairs, is what atlib computes, on other inputs than the notebook's."""

import pytest
import torch
import torch.nn.functional as F

from atbook.lab.scales import scales
from atbook.records import results_folder
from atbook.worlds import glyphs
from atlib import AttentionTransfer, Plan, walk
from atlib.attention import Instead
from atlib.baselines import mean_maps
from atlib.checkpoint import load_vit
from atlib.maps import AVERAGES, aggregate_heads, average_over, join_heads, resample, resample_class_attention
from tests.book.test_taught import small_vit, taught
from tests.helpers import random_maps

NAME = "layers-heads-unequal-pairs"


def vit(seed: int, **changes):
    return small_vit(seed, **({"depth": 2, "num_heads": 6} | changes))


@pytest.mark.parametrize("heads", [[0], [5, 1], [2, 3, 4], list(range(6))])
def test_a_layer_with_some_given_heads_is_walks(heads):
    teacher, student, images = vit(1), vit(2), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        seen = walk(teacher, images).layers[0]
        # Far from even maps, and another scale than the student's.
        q_t, k_t, scale_t = 20 * seen.q[:, heads], seen.k[:, heads], 1.7 * seen.scale
        walked = walk(student, images, replace={0: Instead(q=q_t, k=k_t, scale=scale_t, heads=heads)})
        block, x = student.blocks[0], student._pos_embed(student.patch_embed(images))
        output, maps = taught(NAME).attention_with_some_heads(
            block.attn, block.norm1(x), q_t, k_t, scale_t, heads
        )
        x = x + output
        x = x + block.mlp(block.norm2(x))
    assert (maps - walked.layers[0].map).abs().max() < 1e-5
    assert (x - walked.stream[0]).abs().max() < 1e-5


@pytest.mark.parametrize("what", AVERAGES)
def test_average_by_hand(what):
    maps = [random_maps(3, 2, 5, 5, seed=seed) for seed in range(4)]
    for ours, theirs in zip(taught(NAME).average_by_hand(maps, what), average_over(maps, what), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_mean_map_of_each_cell():
    images = torch.from_numpy(glyphs.generate("train", 300, seed=1).images).float() / 255
    teacher, cells = vit(0), glyphs.marked_cell(images)
    with torch.no_grad():
        maps = [seen.map for seen in walk(teacher, images).layers]
    for p, expected in zip(maps, mean_maps(teacher, images, glyphs.marked_cell, 16), strict=True):
        assert torch.allclose(taught(NAME).mean_map_of_each_cell(p, cells), expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("heads", [1, 3, 6])
def test_aggregate_and_joined_attention_are_aggregate_heads(heads, temperature):
    torch.manual_seed(heads)
    q, k = torch.randn(2, 2, heads, 9, 5, dtype=torch.float64)
    p = (0.6 * q @ k.mT).softmax(-1)
    expected = aggregate_heads(p, temperature)
    assert torch.allclose(taught(NAME).aggregate(p, temperature), expected, atol=1e-12)
    assert torch.allclose(taught(NAME).joined_attention_map(q, k, 0.6, temperature), expected, atol=1e-12)
    joined = (0.6 / temperature * join_heads(q) @ join_heads(k).mT).softmax(-1)
    assert torch.allclose(joined, expected, atol=1e-12)


def test_learned_mapping_loss_is_the_pairs():
    teacher, student, images = vit(1), vit(2, num_heads=3), torch.randn(3, 3, 32, 32)
    pair = AttentionTransfer(teacher, student, Plan(how="distill", unequal_heads="learn")).eval()
    with torch.no_grad():
        for M in pair.head_mapping:
            M.normal_()
        own, target = walk(student, images).layers, walk(teacher, images).layers
        layers = zip(pair.head_mapping, own, target)
        loss = sum(taught(NAME).learned_mapping_loss(M, s.map, t.map) for M, s, t in layers)
        assert loss == pytest.approx(pair.walk_with_loss(images)[1].item(), rel=1e-5)


@pytest.mark.parametrize("grid_from, grid_to", [((2, 2), (4, 4)), ((3, 4), (6, 5)), ((4, 4), (14, 14))])
def test_resample_class_row_is_both_of_atlibs(grid_from, grid_to):
    tokens = 1 + grid_from[0] * grid_from[1]
    p = random_maps(2, 3, tokens, tokens)
    row = taught(NAME).resample_class_row(p[:, :, 0], grid_from, grid_to)
    assert torch.allclose(row, resample_class_attention(p[:, :, 0], grid_from, grid_to), atol=1e-12)
    assert torch.allclose(row, resample(p, grid_from, grid_to, 1)[:, :, 0], atol=1e-12)


def test_coarse_undoes_an_even_split_and_keeps_rows_whole():
    """Each large token as four small ones: its share in equal parts, its row in all of them."""
    p = random_maps(2, 3, 10, 10)
    parent = 1 + torch.arange(9).reshape(3, 3).repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), parent])
    split = torch.cat([torch.ones(1), torch.full((36,), 0.25)])
    fine = p[:, :, tokens][..., tokens] * split
    assert torch.allclose(taught(NAME).coarse(fine, 3), p, atol=1e-12)
    other = taught(NAME).coarse(random_maps(2, 3, 37, 37), 3)
    assert torch.allclose(other.sum(-1), torch.ones(2, 3, 10, dtype=other.dtype), atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("world", ["find", "match"])
def test_at_twice_the_side_a_teacher_looks_elsewhere_in_more_than_half_of_the_cases(world):
    teacher = load_vit(results_folder() / "transfer" / world / "teacher-seed0.safetensors").eval()
    images, _ = scales()[world].held_out("test").take(range(200))
    small = walk(teacher, images).layers[-1].map[:, :, 0, 1:].argmax(-1)
    teacher.set_input_size(img_size=(64, 64))
    large = walk(teacher, F.interpolate(images, (64, 64), mode="bicubic", antialias=True)).layers[-1]
    # a cell of 4 x 4 is four patches of 8 x 8
    cells = large.map[:, :, 0, 1:].unflatten(-1, (4, 2, 4, 2)).sum((-3, -1)).flatten(-2)
    assert (cells.argmax(-1) != small).float().mean() > 0.5
