"""BinaryViT against the published code (tests/golden/binary_vit.md); maps copied and distilled into it."""

import json
import zlib
from math import prod

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from atfamily.binary import TokenNorm, rounded_map
from atfamily.binary_vit import BinaryViT, PatchMerging, binary_deit
from atlib import AttentionTransfer, Plan, walk
from examples import published_weights
from tests.helpers import ROOT, random_images, random_maps, randomise
from tests.helpers import small_vit as vit

GOLDEN = load_file(ROOT / "tests" / "golden" / "binary_vit.safetensors")
PYRAMID = dict(depths=(1, 1, 2, 1), heads=(1, 2, 2, 2), mlp_ratios=(2, 2, 2, 4), reductions=(4, 2, 1, 1))
SHAPES = {"baseline": (4, 3, 32, 32), "pyramid": (3, 3, 64, 64)}


def published(name):
    """A published model's tensors, {its name: tensor}, from the one long vector in which they are kept."""
    sizes = json.loads(zlib.decompress(bytes(GOLDEN[f"{name}.names"].tolist())))
    parts = GOLDEN[name].double().split([prod(size) for size in sizes.values()])
    return {key: part.view(size) for (key, size), part in zip(sizes.items(), parts, strict=True)}


def reference(name):
    """Our model with the published one's weights, and the images."""
    if name == "baseline":
        model = binary_deit(32, 8, 5, 16, 2, 2, class_token=True, branches=(), scaled=False)
    else:
        model = BinaryViT(64, 4, 5, (8, 8, 16, 16), **PYRAMID)
    depths = [len(stage) for stage in model.stages]
    state = published_weights.binary_vit(published(f"{name}.weights"), depths)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(key.endswith("num_batches_tracked") for key in missing)
    count = torch.arange(prod(SHAPES[name]), dtype=torch.float64)
    return model.double().eval(), (count.square() / 7).cos().view(SHAPES[name])


def small(**options):
    """On the grid of `SMALL_VIT`, with its class token, depth and heads."""
    torch.manual_seed(3)
    sizes = {"img_size": 32, "patch_size": 8, "num_classes": 5, "width": 24, "depth": 3, "heads": 3}
    model = randomise(binary_deit(**{"class_token": True} | sizes | options), 3)
    for block in model.stages[0]:
        if block.attn.share is not None:
            nn.init.constant_(block.attn.share, 0.1)  # some entries are above half of it, some are not
    return model


@pytest.fixture
def images():
    return random_images(3, 3, 32, 32)


# --- Against the published code


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_equals_the_published_network_layer_by_layer(name):
    model, images = reference(name)
    tokens, index = model.embed(images), 0
    for stage, blocks in enumerate(model.stages):
        tokens = model.merging[stage - 1](tokens) if stage else tokens
        for block in blocks:
            torch.testing.assert_close(tokens[:1, ::9], GOLDEN[f"{name}.tokens.{index}"], rtol=0, atol=1e-10)
            units = block.attn.units(block.norm1(tokens))
            q, k = (block.attn.bits(part, units[part]) for part in "qk")
            p = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
            used = block.attn.mix(p, torch.eye(p.shape[-1], dtype=p.dtype))
            assert torch.equal(used[:1] != 0, GOLDEN[f"{name}.map.{index}"])
            tokens, index = block(tokens), index + 1
    torch.testing.assert_close(tokens[:1, ::9], GOLDEN[f"{name}.tokens.{index}"], rtol=0, atol=1e-10)
    torch.testing.assert_close(model(images), GOLDEN[f"{name}.logits"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_of_training_has_the_published_gradients(name):
    model, images = reference(name)
    logits = model.train()(images)
    torch.testing.assert_close(logits, GOLDEN[f"{name}.train_logits"], rtol=0, atol=1e-10)
    nn.functional.cross_entropy(logits, torch.arange(len(images))).backward()
    depths = [len(stage) for stage in model.stages]
    gradients = {key: x.reshape(()) for key, x in published(f"{name}.grad").items()}
    expected = published_weights.binary_vit(gradients, depths)
    own = dict(model.named_parameters())
    assert own.keys() == expected.keys()
    for key, parameter in own.items():
        turned = (parameter.grad.flatten() * torch.arange(parameter.numel(), dtype=torch.float64).cos()).sum()
        torch.testing.assert_close(turned, expected[key].reshape(()), rtol=1e-9, atol=1e-10, msg=key)


def test_merging_of_full_precision_equals_the_published_one():

    layer = PatchMerging(8, 16, (4, 4), binary=False, norm=TokenNorm).double().eval()
    theirs = published("merging.weights")
    state = {f"vit.encoder.patch_embed1.{key}": value for key, value in theirs.items()}
    ours = {key.removeprefix("merging.0."): x for key, x in published_weights.binary_vit(state, ()).items()}
    layer.load_state_dict(ours, strict=False)
    torch.testing.assert_close(layer(GOLDEN["merging.x"].double()), GOLDEN["merging.y"], rtol=0, atol=1e-10)


# --- Its walk, and a teacher's maps


@pytest.mark.parametrize("options", [{}, {"binary_maps": False, "class_token": False}])
def test_the_walk_is_exact(images, options):
    model = small(**options).eval()
    with torch.no_grad():
        assert torch.equal(walk(model, images).logits, model(images))


def test_a_copied_map_is_what_the_values_are_mixed_with(images):
    """By hand: the block with the teacher's map, rounded as the student rounds."""
    teacher, student = vit(), small().eval()
    pair = AttentionTransfer(teacher, student, Plan(mismatched=True)).eval()
    with torch.no_grad():
        copied, maps = pair.walk(images), [seen.map for seen in walk(teacher, images).layers]
        tokens = student.embed(images)
        for block, p in zip(student.stages[0], maps, strict=True):
            units = block.attn.units(block.norm1(tokens))
            v = (units["v"] + block.attn.v_shift >= 0).float() * 2 - 1
            p = (p > block.attn.share / 2).float() * block.attn.share
            heads = [p[:, head] @ v[:, :, 8 * head : 8 * head + 8] for head in range(3)]
            tokens = block.after(tokens, block.attn.after(torch.cat(heads, -1), units))
    assert torch.allclose(copied.logits, student.forward_head(tokens), atol=1e-4)
    assert not torch.allclose(copied.logits, student(images), atol=1e-2)
    assert pair.needs_teacher and torch.equal(pair(images).logits, copied.logits)


def test_a_distilled_map_is_the_softmax_before_it_is_rounded(images):
    teacher, student = vit(), small()
    pair = AttentionTransfer(teacher, student, Plan(how="distill", mismatched=True))
    pair.train()
    loss = pair(images).transfer_loss
    own, theirs = walk(student, images).layers, walk(teacher, images).layers
    expected = sum(-(t.map * s.map.log()).sum(-1).mean() for s, t in zip(own, theirs, strict=True))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    weight = student.stages[0][0].attn.q.linear.weight  # through two signs
    assert weight.grad.abs().max() > 0
    assert student.stages[0][-1].attn.share.grad is None


@pytest.mark.parametrize("value", [0.0, -0.1])
def test_a_share_that_training_has_driven_to_zero_is_a_map_of_zeros_and_no_nan(value):
    p, share = random_maps(1, 2, 3, 3).requires_grad_(), torch.tensor(value).double().requires_grad_()
    y = rounded_map(p, share)
    y.sum().backward()
    assert (y == 0).all() and torch.isfinite(p.grad).all() and torch.isfinite(share.grad)
