"""`walk(vit, x)` computes what `vit(x)` does, for every family, and hands back what attention really saw."""

import pytest
import torch

from atlib import walk
from atlib.attention import Instead, sample_drop_path
from tests import longhand
from tests.helpers import DROPS, Adapted, assert_same_logits, random_images, same, set_fused, state_of


@pytest.mark.parametrize("fused", [True, False])
def test_equals_the_model_in_training_with_all_kinds_of_dropout(small_vit, fused):
    """Same seed, same result: walk draws its random numbers in the model's order."""
    vit = set_fused(small_vit(**DROPS).train(), fused)
    images = random_images(8, 3, 32, 32)
    assert_same_logits(vit, images)
    assert not torch.equal(walk(vit, images).logits, walk(vit, images).logits)
    assert_same_logits(vit.eval(), images)
    assert torch.equal(walk(vit, images).logits, walk(vit, images).logits)


def insides(vit):
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        name: (set(vars(module)), [len(getattr(module, kind)) for kind in hooks], module.training)
        for name, module in vit.named_modules()
    }


def test_nothing_is_left_on_the_model(small_vit):
    vit, images = small_vit(drop_path_rate=0.2), random_images(2, 3, 32, 32)
    before, weights = insides(vit), state_of(vit)
    layers = walk(vit, images).layers
    replace = {1: Instead(map=layers[0].map), 2: Instead(q=layers[0].q[:, :1], heads=[1])}
    walk(vit, images, replace=replace, drop_path=sample_drop_path(vit, images))
    walk(vit, images, stop_after=1)
    assert insides(vit) == before
    assert same(state_of(vit), weights)


@pytest.mark.parametrize("options", [{}, {"global_pool": "avg", "class_token": False}], ids=str)
def test_seen_logits_and_stream_equal_the_longhand(small_vit, options):
    vit, images = small_vit(**options).double(), random_images(3, 3, 32, 32, dtype=torch.float64)
    logits, layers = longhand.layers(vit.state_dict(), images, 3)
    found = walk(vit, images)
    assert (found.logits - logits).abs().max() <= 1e-12 and found.tokens is found.stream[-1]
    for seen, tokens, expected in zip(found.layers, found.stream, layers, strict=True):
        for name in ("q", "k", "v", "map"):
            assert (getattr(seen, name) - expected[name]).abs().max() <= 1e-12
        assert (tokens - expected["stream"]).abs().max() <= 1e-12
        assert seen.scale == pytest.approx(8**-0.5) and seen.given is None
        assert seen.map.amax() > 0.2, "a flat map (1 / 17) would hide a wrong scale"


def test_sampled_masks_have_the_models_rates(small_vit):
    images = torch.empty(20_000, 1)
    masks = sample_drop_path(small_vit(drop_path_rate=0.5), images)
    for (attention, mlp), rate in zip(masks, (0.0, 0.25, 0.5), strict=True):
        for mask in (attention, mlp):
            assert mask.shape == (20_000, 1, 1)
            assert mask.unique().tolist() == ([1.0] if rate == 0 else [0.0, pytest.approx(1 / (1 - rate))])
            assert (mask == 0).double().mean().item() == pytest.approx(rate, abs=0.02)
        if rate:
            assert ((attention == 0) != (mlp == 0)).any(), "the two branches are dropped independently"


def test_a_block_that_stands_several_times_in_its_list_runs_as_often(small_vit):
    vit = small_vit().eval()
    vit.blocks = torch.nn.Sequential(vit.blocks[0], vit.blocks[1], vit.blocks[1])
    images = random_images(2, 3, 32, 32)
    with torch.no_grad():
        whole, headless = walk(vit, images), walk(vit, images, head=False)
    assert len(whole.layers) == len(headless.layers) == 3
    assert torch.equal(whole.tokens, headless.tokens) and headless.logits is None


# --- with something in the place of what a layer computes; more in `test_modes.py`


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
