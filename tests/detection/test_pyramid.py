"""The simple pyramid is ViTDet's, and a backbone's gradients go where its plan lets them."""

import torch
from safetensors.torch import load_file

from atfamily.detection.pyramid import SCALES, GridOfTokens, SimplePyramid
from atlib import walk
from tests.detection.knows import scene_vit
from tests.helpers import ROOT, random_images, randomise


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


def test_the_grid_is_the_tokens_in_their_places():
    student, images = randomise(scene_vit()), random_images(2, 3, 64, 64)
    grid = GridOfTokens(student)(images).grid
    tokens = student.norm(walk(student, images, head=False).tokens)
    for row, column in ((0, 0), (2, 5), (7, 7)):
        assert torch.equal(grid[:, :, row, column], tokens[:, 1 + 8 * row + column])
