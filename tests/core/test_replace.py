"""Replacing what a layer uses; that whole layers do with it what they should is in `test_modes.py`."""

import torch

from atlib import walk
from atlib.attention import Instead
from tests.helpers import Adapted, random_images


def close(left, right):
    return (left - right).abs().max() <= 1e-11


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
    for part in ("q", "k", "v", "map"):
        found = walk(vit, images, replace={1: Instead(**{part: getattr(plain.layers[1], part)})})
        torch.testing.assert_close(found.logits, plain.logits)
