"""What notebook 19 writes out, a layer with factors, class attention and talking heads, is what timm and
atlib compute, on other inputs than the notebook's; and what its sentences say of one step and of the
teacher's patches is so."""

import pytest
import torch
from timm.models.cait import Cait

from atbook.lab.scales import scales
from atbook.records import results_folder
from atbook.worlds import glyphs
from atlib import create_vit, walk
from atlib.checkpoint import load_vit
from atlib.methods.cait import walk_cait
from atlib.methods.depth import branch_ratios, layer_scale, one_scalar
from tests.book.test_taught import small_vit, taught
from tests.helpers import SMALL_VIT, randomise

NAME = "19-deep-and-a-class-that-only-asks"


@pytest.mark.parametrize("factors", [None, layer_scale, one_scalar])
@torch.no_grad()
def test_layer_by_hand_is_timms_and_as_loud(factors):
    vit, images = small_vit(1), torch.randn(3, 3, 32, 32)
    if factors is not None:
        factors(vit, 0.1)
    for block in vit.blocks:
        for scale in (block.ls1, block.ls2) if factors else ():
            torch.nn.init.normal_(scale.gamma)
    expected = branch_ratios(vit, images)
    x = walk(vit, images, stop_after=0).tokens
    for index, (block, after) in enumerate(zip(vit.blocks, walk(vit, images).stream, strict=True)):
        gammas = (block.ls1.gamma, block.ls2.gamma) if factors else ()
        x, attention, mlp = taught(NAME).layer_by_hand(block, x, *gammas)
        assert torch.allclose(x, after, atol=1e-5)
        assert attention.item() == pytest.approx(expected.attention[index].item(), rel=1e-4)
        assert mlp.item() == pytest.approx(expected.mlp[index].item(), rel=1e-4)


def small_cait():
    return randomise(Cait(**SMALL_VIT, depth_token_only=2), 3).eval()


@torch.no_grad()
def test_class_attention_by_hand_is_timms_and_its_row_what_is_walked():
    cait, images = small_cait(), torch.randn(2, 3, 32, 32)
    walked = walk_cait(cait, images)
    patches = cait.patch_embed(images) + cait.pos_embed
    for block in cait.blocks:
        patches = block(patches)
    token = cait.cls_token.expand(2, -1, -1)
    for block, seen in zip(cait.blocks_token_only, walked.class_layers, strict=True):
        x = block.norm1(torch.cat([token, patches], 1))
        added, row = taught(NAME).class_attention_by_hand(block.attn, x[:, :1], x[:, 1:])
        assert torch.allclose(added, block.attn(x), atol=1e-5)
        assert torch.allclose(row, seen.map, atol=1e-5)
        token = block(patches, token)


@torch.no_grad()
def test_talking_heads_by_hand_are_timms_and_their_maps_what_is_walked():
    cait, images = small_cait(), torch.randn(2, 3, 32, 32)
    walked = walk_cait(cait, images)
    patches = cait.patch_embed(images) + cait.pos_embed
    for block, seen in zip(cait.blocks, walked.layers, strict=True):
        x = block.norm1(patches)
        output, p, mixed = taught(NAME).talking_heads_by_hand(block.attn, x)
        assert torch.allclose(output, block.attn(x), atol=1e-4)
        assert torch.allclose(p, seen.map, atol=1e-5)
        assert torch.allclose(p.sum(-1), torch.ones(()), atol=1e-5)
        assert (mixed.sum(-1) - 1).abs().max() > 0.1
        patches = block(patches)


def moved(vit):
    """By what share of its length one step of AdamW moves a token at the end of the stream."""
    find = scales()["find"]
    images, _ = find.held_out("test").take(range(50))
    few, labels = find.labelled(seed=1).take(range(64))
    with torch.no_grad():
        before = walk(vit.eval(), images).tokens
    optimizer = torch.optim.AdamW(vit.blocks.parameters(), lr=2e-3)
    torch.nn.functional.cross_entropy(vit(few), labels).backward()
    optimizer.step()
    with torch.no_grad():
        after = walk(vit, images).tokens
    return ((after - before).norm(dim=-1) / before.norm(dim=-1)).mean().item()


def test_one_step_moves_a_deep_plain_vit_further_and_one_with_layer_scale_hardly():
    """With other first weights and other images than the notebook's."""
    torch.manual_seed(1)
    shallow, deep = (create_vit("glyphs", depth=depth) for depth in (4, 24))
    scaled = layer_scale(create_vit("glyphs", depth=24), 1e-5)
    assert moved(deep) > 1.5 * moved(shallow) > 0.2
    assert moved(scaled) < 0.02


@torch.no_grad()
def test_the_patches_of_the_teacher_look_at_the_mark_in_its_last_layers():
    teacher = load_vit(results_folder() / "transfer" / "find" / "teacher-seed0.safetensors").eval()
    images, _ = scales()["find"].held_out("test").take(range(200))
    cell = glyphs.marked_cell(images)
    others = torch.arange(16) != cell[:, None]
    shares = []
    for seen in walk(teacher, images).layers:
        patches = seen.map[..., 1:, 1:] / seen.map[..., 1:, 1:].sum(-1, keepdim=True)
        shares.append(patches[torch.arange(200), ..., cell].mean(1)[others].mean().item())
        assert seen.map[torch.arange(200), :, 0, cell + 1].mean() > 0.5
    assert max(shares[:2]) < 0.15 and min(shares[2:]) > 0.25
