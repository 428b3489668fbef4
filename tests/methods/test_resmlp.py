"""ResMLP: timm's network by our builder, its static maps, and a teacher's mean map in their place."""

import timm
import torch

from atfamily.resmlp import MIXINGS, StaticMapDistill, copy_static_maps, mean_patch_maps, resmlp, static_maps
from atlib import create_vit, walk
from tests.helpers import SMALL_VIT, random_images, random_maps, randomise, state_of


def small(seed=2, **options):
    """With the patch grid and depth of `SMALL_VIT`."""
    torch.manual_seed(seed)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 3, "num_classes": 5}
    return randomise(resmlp(**sizes | options), seed)


def test_equals_timms_by_its_weights():
    theirs = randomise(timm.create_model("resmlp_12_224"), 1).eval()
    ours = resmlp().eval()
    ours.load_state_dict(theirs.state_dict())
    images = random_images(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


def reached(model, token):
    """The tokens that change after one block when this one does, on a 4 x 4 grid."""
    block, x = model.double().eval().blocks[0], random_images(1, 16, 8, dtype=torch.float64)
    other = x.clone()
    other[:, token] += 1
    with torch.no_grad():
        changed = (block(other) - block(x)).abs().amax(2)[0] > 1e-12
    return set(changed.nonzero()[:, 0].tolist())


def test_who_reaches_whom():
    expected = {"linear": set(range(16)), "none": {0}, "mlp": set(range(16))}
    expected |= {mixing: {0, 1, 4, 5} for mixing in ("conv", "depthwise", "separable")}
    assert {mixing: reached(small(mixing=mixing), 0) for mixing in MIXINGS} == expected


def test_a_class_token_gathers_by_shares():
    """Two blocks, token by token and patch by patch; the patches stay what they are."""
    model = small(pooling="class").double().eval()
    images = random_images(2, 3, 32, 32, dtype=torch.float64)
    patches = model.stem(images)
    for block in model.blocks:
        patches = block(patches)
    gathering, norm = model.norm
    token = gathering.token.expand(2, -1, -1)
    for block in gathering.blocks:
        every = [block.norm1(part) for part in (token, *patches.split(1, dim=1))]
        shares = block.shares.weight[0]
        token = token + block.ls1 * (sum(s * part for s, part in zip(shares, every)) + block.shares.bias)
        token = token + block.ls2 * block.mlp(block.norm2(token))
    torch.testing.assert_close(model(images), model.head(norm(token)[:, 0]), rtol=0, atol=1e-12)
    assert len(gathering.blocks) == 2 and model.forward_features(images).shape == (2, 1, 8)


# --- The static map


def test_a_static_map_is_what_the_block_mixes_with():
    model = small().double()
    block, A = model.blocks[1], static_maps(model)[1]
    x = random_images(2, 16, 8, dtype=torch.float64)
    normed, bias = block.norm1(x), block.linear_tokens.bias
    mixed = torch.stack([sum(A[i, j] * normed[:, j] for j in range(16)) + bias[i] for i in range(16)], 1)
    middle = x + block.ls1 * mixed
    expected = middle + block.ls2 * block.mlp_channels(block.norm2(middle))
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-12)
    assert len(static_maps(model)) == 3 and A.requires_grad


# --- The teacher's mean map


def test_mean_maps_among_patches_by_a_loop(small_vit):
    images = random_images(6, 3, 32, 32)
    vit = randomise(create_vit(SMALL_VIT | {"reg_tokens": 2}), 1).eval()
    found = mean_patch_maps(vit, images)
    for layer, p in enumerate(found):
        maps = [walk(vit, image[None]).layers[layer].map[0, h] for image in images for h in range(3)]
        mean = (sum(maps) / 18)[3:, 3:]
        torch.testing.assert_close(p, mean / mean.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)
    assert [p.shape for p in found] == [(16, 16)] * 3


def test_copied_maps_are_used_and_stay():
    maps, model = list(random_maps(3, 16, 16, dtype=torch.float32)), small()
    bias = state_of(model)["blocks.0.linear_tokens.bias"]
    assert copy_static_maps(model, maps) is model
    assert all(torch.equal(A, p) and not A.requires_grad for A, p in zip(static_maps(model), maps))
    assert torch.equal(model.blocks[0].linear_tokens.bias, bias)


def test_the_loss_by_a_loop():
    model, maps = small().double(), random_maps(3, 16, 16)
    pair, images = StaticMapDistill(model, list(maps)).train(), random_images(2, 3, 32, 32).double()
    expected = 0.0
    for A, p in zip(static_maps(model), maps):
        expected += sum((A[i, j] - p[i, j]) ** 2 for i in range(16) for j in range(16)) / 16
    found = pair(images)
    torch.testing.assert_close(found.transfer_loss, expected, rtol=0, atol=1e-10)
    assert torch.equal(found.logits, model(images))
    found.transfer_loss.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved == {f"blocks.{i}.linear_tokens.weight" for i in range(3)}
    assert pair.eval()(images).transfer_loss == 0
