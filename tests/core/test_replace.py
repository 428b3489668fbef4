"""Replacing what a layer uses: its own values change nothing, others do exactly what they should, wrong ones
are refused."""

import pytest
import torch

from atlib import walk
from atlib.attention import Instead
from tests import longhand
from tests.helpers import Adapted, random_images, set_fused

EVERY = ("q", "k", "v", "map")


@pytest.fixture(params=[True, False], ids=["fused", "dense"])
def vit(request, small_vit):
    return set_fused(small_vit().double(), request.param)


@pytest.fixture
def images():
    return random_images(2, 3, 32, 32, dtype=torch.float64)


def close(left, right):
    return (left - right).abs().max() <= 1e-11


@pytest.mark.parametrize("part", EVERY)
def test_other_parts_equal_the_longhand(vit, images, part):
    """The whole model with them, and what is seen of them; also where the walk stops at the last one."""
    width = 17 if part == "map" else 8
    given = {layer: torch.rand(2, 3, 17, width, dtype=torch.float64).softmax(-1) for layer in (0, 2)}
    heads = {layer: {(part, h): x[:, h] for h in range(3)} for layer, x in given.items()}
    logits, seen = longhand.layers(vit.state_dict(), images, 3, replace=heads)
    replace = {layer: Instead(**{part: x}) for layer, x in given.items()}
    found, stopped = walk(vit, images, replace=replace), walk(vit, images, replace=replace, stop_after=2)
    assert close(found.logits, logits) and not close(found.logits, walk(vit, images).logits)
    for one, other, expected in zip(found.layers, stopped.layers, seen, strict=True):
        assert close(one.map, expected["map"]) and close(other.map, expected["map"])
        assert close(one.v, expected["v"])
    assert stopped.layers[2].v is None


@pytest.mark.parametrize("width", [4, 20])
def test_queries_and_keys_of_another_head_width_bring_their_scale(vit, images, width):
    q, k = torch.randn(2, 2, 3, 17, width, dtype=torch.float64)
    p = longhand.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * 0.7)
    expected = longhand.vit(vit.state_dict(), images, 3, maps={0: p})[0]
    found = walk(vit, images, replace={0: Instead(q=q, k=k, scale=0.7)})
    assert close(found.logits, expected) and close(found.layers[0].map, p)


@pytest.mark.parametrize("stop_after", [None, 1])
@pytest.mark.parametrize("part", EVERY)
def test_some_heads_are_replaced_and_the_others_kept(vit, images, part, stop_after):
    heads, plain = [2, 0], walk(vit, images).layers[1]
    other = torch.rand(2, 2, 17, 17 if part == "map" else 8, dtype=torch.float64)
    replace = {1: Instead(**{part: other}, heads=heads)}
    seen = walk(vit, images, replace=replace, stop_after=stop_after).layers[1]
    for head in range(3):
        used = {name: getattr(plain, name)[:, head] for name in ("q", "k", "v", "map")}
        used |= {part: other[:, heads.index(head)]} if head in heads else {}
        if part in "qk":
            used["map"] = longhand.softmax(torch.einsum("bid,bjd->bij", used["q"], used["k"]) / 8**0.5)
        assert close(seen.map[:, head], used["map"])
        assert seen.v is None if stop_after else close(seen.v[:, head], used["v"])


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
