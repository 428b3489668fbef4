"""What notebook 07 writes out by hand is what atlib computes, on other inputs than its own."""

import math
import random
from itertools import product

import pytest
import torch

from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.losses import projection_mse
from atlib.walking import Instead
from tests.book.test_taught import taught

NOTEBOOK = "07-q-transfer"


def vit(seed: int, **overrides):
    torch.manual_seed(seed)
    return create_vit(
        {
            "img_size": 32,
            "patch_size": 8,
            "embed_dim": 48,
            "depth": 3,
            "num_heads": 3,
            "num_classes": 5,
            **overrides,
        }
    ).eval()


def test_a_layer_with_given_queries_is_walks():
    teacher, student, images = vit(1), vit(2), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        q_t = walk(teacher, images).layers[0].q * 20  # far from even maps
        walked = walk(student, images, replace={0: Instead(q=q_t)})
        block, x = student.blocks[0], student._pos_embed(student.patch_embed(images))
        output, p = taught(NOTEBOOK).attention_with_given_q(block.attn, block.norm1(x), q_t)
        x = x + output
        x = x + block.mlp(block.norm2(x))
    assert (p - walked.layers[0].map).abs().max() < 1e-6
    assert (x - walked.stream[0]).abs().max() < 1e-5


def test_all_layers_with_given_queries_are_the_plan_that_copies_q():
    teacher, student, images = vit(3, num_classes=2), vit(4), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        queries, x = (
            [seen.q for seen in walk(teacher, images).layers],
            student._pos_embed(student.patch_embed(images)),
        )
        for block, q_t in zip(student.blocks, queries):
            x = x + taught(NOTEBOOK).attention_with_given_q(block.attn, block.norm1(x), q_t)[0]
            x = x + block.mlp(block.norm2(x))
        logits = student.forward_head(student.norm(x))
        assert (
            logits - AttentionTransfer(teacher, student, Plan("q")).eval()(images).logits
        ).abs().max() < 1e-5


@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_mean_squared_error_is_the_loss(what):
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        student, teacher = walk(vit(5), images).layers, walk(vit(6), images).layers
    found = taught(NOTEBOOK).mean_squared_error_by_hand(
        [getattr(s, what) for s in student], [getattr(t, what) for t in teacher]
    )
    assert found == pytest.approx(projection_mse(student, teacher, what).item(), rel=1e-5)


def js_in_loops(p: list[float], r: list[float]) -> float:
    total = 0.0
    for a, b in zip(p, r):
        m = (a + b) / 2
        total += sum(x / 2 * math.log(x / m) for x in (a, b) if x > 0)
    return total


def test_jensen_shannon_and_its_bounds():
    torch.manual_seed(7)
    p, r = torch.randn(2, 6, 9, dtype=torch.float64).mul(3).softmax(-1)
    found = taught(NOTEBOOK).jensen_shannon(p, r)
    assert found.tolist() == pytest.approx(
        [js_in_loops(*rows) for rows in zip(p.tolist(), r.tolist())], abs=1e-12
    )
    assert torch.allclose(found, taught(NOTEBOOK).jensen_shannon(r, p))
    one, other = torch.eye(2)
    assert taught(NOTEBOOK).jensen_shannon(one, other).item() == pytest.approx(math.log(2))
    assert taught(NOTEBOOK).jensen_shannon(one, one).item() == 0


def test_head_divergences_are_means_over_images_and_rows():
    torch.manual_seed(8)
    student, teacher = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64).softmax(-1)  # B 3, H 4, 5 rows, N 6
    table = taught(NOTEBOOK).head_divergences(student, teacher)
    for own, other in product(range(4), range(4)):
        rows = [
            js_in_loops(student[b, own, i].tolist(), teacher[b, other, i].tolist())
            for b in range(3)
            for i in range(5)
        ]
        assert table[own, other].item() == pytest.approx(sum(rows) / len(rows), abs=1e-12)


def test_matched_finds_the_order_that_was_hidden_and_nothing_smaller_exists():
    order = [2, 0, 3, 1]
    table = torch.rand(4, 4) + 1
    table[range(4), order] = torch.rand(4)
    smallest, found = taught(NOTEBOOK).matched(table)
    assert list(found) == order
    assert smallest == pytest.approx(table[range(4), order].mean().item(), rel=1e-5)
    random.seed(9)
    for _ in range(20):
        other = random.sample(range(4), 4)
        assert table[range(4), other].mean() >= smallest - 1e-6
