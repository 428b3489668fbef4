"""The simple pyramid is ViTDet's, and a backbone's gradients go where its plan lets them."""

import pytest
import torch
from safetensors.torch import load_file

from atfamily.detection.pyramid import SCALES, GridOfTokens, SimplePyramid
from atlib import AttentionTransfer, Plan, create_vit, walk
from tests.helpers import ROOT, random_images, randomise

SCENE_VIT = {"img_size": 64, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 0}


def vit(seed=0, **options):
    torch.manual_seed(seed)
    return create_vit("glyphs", **(SCENE_VIT | options))


def test_it_is_detectron2s():
    """Against outputs of its published code (tests/golden/simple_pyramid.md)."""
    golden = load_file(ROOT / "tests" / "golden" / "simple_pyramid.safetensors")
    pyramid = SimplePyramid(8, 4, SCALES, top_level=True).double()
    names = sorted(name for name in golden if name.startswith("weight."))  # numbered in their order
    for (_, mine), name in zip(pyramid.named_parameters(), names, strict=True):
        assert mine.shape == golden[name].shape, name
        mine.data = golden[name]
    for number, level in enumerate(pyramid(golden["grid"])):
        assert (level - golden[f"out.p{number + 2}"]).abs().max() < 1e-10


@pytest.mark.parametrize("side, patch", [(64, 8), (448, 16)])
def test_levels_have_the_strides_of_vitdet(side, patch):
    backbone = GridOfTokens(vit(img_size=side, patch_size=patch, depth=1))
    grid = backbone(random_images(1, 3, side, side)).grid
    n = side // patch
    assert grid.shape == (1, 16, n, n)
    sides = [level.shape[2:] for level in SimplePyramid(16, 4, top_level=True)(grid)]
    assert sides == [(4 * n, 4 * n), (2 * n, 2 * n), (n, n), (n // 2, n // 2), (n // 4, n // 4)]


def test_the_grid_is_the_tokens_in_their_places():
    student, images = randomise(vit()), random_images(2, 3, 64, 64)
    grid = GridOfTokens(student)(images).grid
    tokens = student.norm(walk(student, images, head=False).tokens)
    for row, column in ((0, 0), (2, 5), (7, 7)):
        assert torch.equal(grid[:, :, row, column], tokens[:, 1 + 8 * row + column])


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_pair_in_evaluation_is_its_walk(how):
    pair = AttentionTransfer(randomise(vit(1)), randomise(vit(2), 1), Plan(how=how)).eval()
    images = random_images(2, 3, 64, 64)
    seen = GridOfTokens(pair).eval()(images)
    tokens = pair.student.norm(pair.walk(images).tokens)[:, 1:]
    assert torch.equal(seen.grid.flatten(2).mT, tokens) and seen.transfer_loss.item() == 0
