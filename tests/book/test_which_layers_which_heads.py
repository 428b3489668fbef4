"""What notebook 17 writes out by hand is what atlib computes, on other inputs than its own."""

import pytest
import torch

from atlib import AttentionTransfer, Plan, walk
from atlib.walking import Instead
from tests.book.test_taught import small_vit, taught

NOTEBOOK = "17-which-layers-which-heads"


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
        output, maps = taught(NOTEBOOK).attention_with_some_heads(
            block.attn, block.norm1(x), q_t, k_t, scale_t, heads
        )
        x = x + output
        x = x + block.mlp(block.norm2(x))
    assert (maps - walked.layers[0].map).abs().max() < 1e-5
    assert (x - walked.stream[0]).abs().max() < 1e-5


def test_other_heads_in_each_layer_are_the_plan_that_says_so():
    teacher, student, images = vit(3, num_classes=2), vit(4), torch.randn(2, 3, 32, 32)
    chosen = {0: [1, 4], 1: [0, 2, 5]}
    with torch.no_grad():
        layers, x = walk(teacher, images).layers, student._pos_embed(student.patch_embed(images))
        for block, seen, heads in zip(student.blocks, layers, chosen.values()):
            given = seen.q[:, heads], seen.k[:, heads], seen.scale, heads
            x = x + taught(NOTEBOOK).attention_with_some_heads(block.attn, block.norm1(x), *given)[0]
            x = x + block.mlp(block.norm2(x))
        logits = student.forward_head(student.norm(x))
        pair = AttentionTransfer(teacher, student, Plan(heads=chosen)).eval()
        assert (logits - pair(images).logits).abs().max() < 1e-5
