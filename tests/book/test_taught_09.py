"""What notebook 09 writes out, four averages of maps and the mean map of each cell, is what atlib computes,
on other inputs."""

import pytest
import torch

from atlib import create_vit, walk
from atlib.data import glyphs
from atlib.maps import AVERAGES, average_over
from atlib.methods.mean_maps import mean_maps
from tests.book.test_taught import taught

NAME = "09-what-in-a-map-matters"


@pytest.mark.parametrize("what", AVERAGES)
def test_average_by_hand(what):
    torch.manual_seed(0)
    maps = [torch.randn(3, 2, 5, 5, dtype=torch.float64).softmax(-1) for _ in range(4)]
    for ours, theirs in zip(taught(NAME).average_by_hand(maps, what), average_over(maps, what), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_mean_map_of_each_cell():
    torch.manual_seed(0)
    vit = create_vit(
        {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    ).eval()
    images = torch.from_numpy(glyphs.generate("train", 300, seed=1).images).float() / 255
    cells = glyphs.marked_cell(images)
    with torch.no_grad():
        maps = [seen.map for seen in walk(vit, images).layers]
    for p, expected in zip(maps, mean_maps(vit, images, glyphs.marked_cell, 16), strict=True):
        assert torch.allclose(taught(NAME).mean_map_of_each_cell(p, cells), expected, atol=1e-6)
