"""Replacing what a layer uses: its own values change nothing, others do exactly what they should."""

import pytest
import torch

from atlib import walk
from atlib.attention import Instead
from tests import longhand
from tests.helpers import Adapted, random_images

EVERY = ("q", "k", "v", "map")


def close(left, right):
    return (left - right).abs().max() <= 1e-11


@pytest.mark.parametrize("heads", [[0, 1, 2], [2, 0]], ids=["all heads", "some"])
@pytest.mark.parametrize("part", EVERY)
def test_other_parts_equal_the_longhand(small_vit, part, heads):
    """The whole model with them, and what is seen of them; also where the walk stops at the last one."""
    vit, images = small_vit().double(), random_images(2, 3, 32, 32, dtype=torch.float64)
    width = 17 if part == "map" else 8
    given = {layer: torch.rand(2, len(heads), 17, width, dtype=torch.float64).softmax(-1) for layer in (0, 2)}
    by_hand = {layer: {(part, h): x[:, n] for n, h in enumerate(heads)} for layer, x in given.items()}
    logits, seen = longhand.layers(vit.state_dict(), images, 3, replace=by_hand)
    chosen = None if len(heads) == 3 else heads
    replace = {layer: Instead(**{part: x}, heads=chosen) for layer, x in given.items()}
    found, stopped = walk(vit, images, replace=replace), walk(vit, images, replace=replace, stop_after=2)
    assert close(found.logits, logits) and not close(found.logits, walk(vit, images).logits)
    for one, other, expected in zip(found.layers, stopped.layers, seen, strict=True):
        assert close(one.map, expected["map"]) and close(other.map, expected["map"])
        assert close(one.v, expected["v"])
    assert stopped.layers[2].v is None


def test_some_heads_take_queries_and_keys_of_another_scale(small_vit):
    vit, images = small_vit().double(), random_images(2, 3, 32, 32, dtype=torch.float64)
    q, k = torch.randn(2, 2, 2, 17, 8, dtype=torch.float64)
    found = walk(vit, images, replace={1: Instead(q=q, k=k, scale=0.2, heads=[2, 0])}).layers[1].map
    assert close(found[:, [2, 0]], (0.2 * q @ k.mT).softmax(-1))
    assert close(found[:, 1], walk(vit, images).layers[1].map[:, 1])


def test_a_projection_that_is_more_than_linear_is_called_and_not_read(small_vit):
    """An adapter keeps the base weight under the name weight; reading it would leave the adapter out."""
    vit, images = small_vit(), random_images(2, 3, 32, 32)
    adapted = Adapted(24, 72)
    adapted.load_state_dict(vit.blocks[1].attn.qkv.state_dict())
    vit.blocks[1].attn.qkv = adapted
    plain = walk(vit, images)
    torch.testing.assert_close(plain.logits, vit(images))
    for part in EVERY:
        found = walk(vit, images, replace={1: Instead(**{part: getattr(plain.layers[1], part)})})
        torch.testing.assert_close(found.logits, plain.logits)
