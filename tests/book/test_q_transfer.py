"""What chapter 7 writes out by hand is what atlib computes, on other inputs than its own."""

import random

import pytest
import torch

from atlib import AttentionTransfer, Plan, walk
from atlib.analysis import StreamingDivergence, jensen_shannon
from atlib.attention import Instead
from atlib.losses import projection_mse
from tests.book.test_taught import small_vit as vit
from tests.book.test_taught import taught
from tests.helpers import random_maps

NOTEBOOK, MORE = "07-q-transfer", "../book/more-on-signals"


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
        x = student._pos_embed(student.patch_embed(images))
        for block, seen in zip(student.blocks, walk(teacher, images).layers):
            x = x + taught(NOTEBOOK).attention_with_given_q(block.attn, block.norm1(x), seen.q)[0]
            x = x + block.mlp(block.norm2(x))
        logits = student.forward_head(student.norm(x))
        expected = AttentionTransfer(teacher, student, Plan("q")).eval()(images).logits
        assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_mean_squared_error_is_the_loss(what):
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        student, teacher = walk(vit(5), images).layers, walk(vit(6), images).layers
    pairs = ([getattr(seen, what) for seen in layers] for layers in (student, teacher))
    loss = taught(NOTEBOOK).mean_squared_error_by_hand(*pairs)
    assert loss == pytest.approx(projection_mse(student, teacher, what).item(), rel=1e-5)


def test_divergences_are_atlibs():
    student, teacher = random_maps(3, 4, 6, 6), random_maps(3, 4, 6, 6, seed=1)
    expected, by_heads = jensen_shannon(student, teacher), StreamingDivergence()
    by_heads.update(student, teacher)
    by_hand = taught(MORE)
    assert torch.allclose(by_hand.jensen_shannon(student, teacher), expected, rtol=0, atol=1e-12)
    assert torch.allclose(by_hand.head_divergences(student, teacher), by_heads.matrix(), rtol=0, atol=1e-12)
    for other in torch.eye(2):  # zeros add nothing
        divergence = by_hand.jensen_shannon(torch.eye(2)[0], other).item()
        assert divergence == pytest.approx(jensen_shannon(torch.eye(2)[0], other).item())


def test_matched_finds_the_order_that_was_hidden_and_nothing_smaller_exists():
    order = [2, 0, 3, 1]
    table = torch.rand(4, 4) + 1
    table[range(4), order] = torch.rand(4)
    smallest, matching = taught(MORE).matched(table)
    assert list(matching) == order
    assert smallest == pytest.approx(table[range(4), order].mean().item(), rel=1e-5)
    random.seed(9)
    for _ in range(20):
        other = random.sample(range(4), 4)
        assert table[range(4), other].mean() >= smallest - 1e-6
