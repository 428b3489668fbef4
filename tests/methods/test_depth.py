"""Factors on residual branches: where they start, and how loud branches are, block by block."""

import pytest
import torch

from atfamily import depth
from atfamily.depth import branch_ratios
from atlib import AttentionTransfer, Plan, create_vit, walk
from tests.helpers import SMALL_VIT, random_images, state_of

IMAGES = random_images(3, 3, 32, 32)


def fresh(seed=0, **changes):
    torch.manual_seed(seed)
    return create_vit(SMALL_VIT | changes)


def factors(vit):
    return [getattr(block, name).gamma for block in vit.blocks for name in ("ls1", "ls2")]


# --- Where they start


def test_uniform_factors_have_the_mean_and_the_rest_is_layer_scale():
    torch.manual_seed(0)
    vit, plain = depth.uniform_layer_scale(fresh(depth=20), 1e-5), depth.layer_scale(fresh(depth=20), 1e-5)
    drawn = torch.cat([gamma.detach() for gamma in factors(vit)])
    assert drawn.min() >= 0 and drawn.max() <= 2e-5 and len(drawn.unique()) > 0.9 * len(drawn)
    assert drawn.mean().item() == pytest.approx(1e-5, rel=0.05)
    assert drawn.std().item() == pytest.approx(2e-5 / 12**0.5, rel=0.05)
    rest = {name: value for name, value in vit.state_dict().items() if not name.endswith("gamma")}
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in rest.items())
    assert vit.state_dict().keys() == plain.state_dict().keys()


def test_fixup_by_its_formula():
    """Six branches of two weights each: the first are multiplied by 6^(-1/2), the last and the head are 0."""
    plain, vit = state_of(fresh()), depth.fixup(fresh()).state_dict()
    for name, before in plain.items():
        expected = before.clone()
        if name.endswith("qkv.weight"):
            expected[48:] *= 6**-0.5  # values only
        elif name.endswith("fc1.weight"):
            expected *= 6**-0.5
        elif name.endswith(("attn.proj.weight", "fc2.weight")) or name.startswith("head"):
            expected *= 0
        torch.testing.assert_close(vit[name], expected, rtol=1e-6, atol=0, msg=name)


def test_t_fixup_by_its_formula():
    """Up to √(6 / (fan in + fan out)); values, proj, fc1 and fc2 times 0.67 · depth^(-1/4)."""
    wide = {"embed_dim": 96, "depth": 5}
    plain, vit = fresh(**wide).state_dict(), depth.t_fixup(fresh(**wide))
    assert all(isinstance(block.ls1, torch.nn.Identity) for block in vit.blocks)
    factor = 0.67 / 5**0.25
    for block in vit.blocks:
        q, k, v = block.attn.qkv.weight.chunk(3)
        for weight, scale in (
            *((q, 1.0), (k, 1.0), (v, factor), (block.attn.proj.weight, factor)),
            *((block.mlp.fc1.weight, factor), (block.mlp.fc2.weight, factor)),
        ):
            bound = scale * (6 / sum(weight.shape)) ** 0.5
            assert 0.99 * bound < weight.abs().max() <= bound * (1 + 1e-6)
            assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    for name, value in vit.state_dict().items():
        weights = ("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight")
        untouched = not name.endswith(weights) or "embed" in name
        assert torch.equal(value, plain[name]) == untouched, name


# --- How loud


def test_ratios_of_a_copying_student_are_those_with_the_teachers_maps(small_vit):
    teacher, student = small_vit(seed=1).double(), small_vit(seed=2, init_values=0.1, qk_norm=True).double()
    pair = AttentionTransfer(teacher, student, Plan(mismatched=True)).eval()
    found, alone = branch_ratios(pair, IMAGES.double()), branch_ratios(student, IMAGES.double())
    assert not torch.allclose(found.attention, alone.attention)
    x = walk(student, IMAGES.double(), stop_after=0).tokens
    maps = [seen.map for seen in walk(teacher, IMAGES.double()).layers]
    for layer, (block, p) in enumerate(zip(student.blocks, maps)):
        v = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 3, 8))[:, :, 2].transpose(1, 2)
        branch = block.ls1(block.attn.proj((p @ v).transpose(1, 2).flatten(2)))
        expected = (branch.norm(dim=-1) / x.norm(dim=-1)).mean()
        assert found.attention[layer].item() == pytest.approx(expected.item(), rel=1e-10)
        x = x + branch
        branch = block.ls2(block.mlp(block.norm2(x)))
        expected = (branch.norm(dim=-1) / x.norm(dim=-1)).mean()
        assert found.mlp[layer].item() == pytest.approx(expected.item(), rel=1e-10)
        x = x + branch
