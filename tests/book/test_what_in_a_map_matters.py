"""What notebook 18 writes out, four averages of maps and the mean map of each cell, is what atlib computes,
on other inputs."""

import pytest
import torch

from atlib import walk
from atlib.data import glyphs
from atlib.maps import AVERAGES, average_over
from atlib.methods.mean_maps import mean_maps
from tests.book.test_taught import small_vit, taught
from tests.helpers import random_maps

NAME = "18-what-in-a-map-matters"


@pytest.mark.parametrize("what", AVERAGES)
def test_average_by_hand(what):
    maps = [random_maps(3, 2, 5, 5, seed=seed) for seed in range(4)]
    for ours, theirs in zip(taught(NAME).average_by_hand(maps, what), average_over(maps, what), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_mean_map_of_each_cell():
    vit = small_vit(0, depth=2)
    images = torch.from_numpy(glyphs.generate("train", 300, seed=1).images).float() / 255
    cells = glyphs.marked_cell(images)
    with torch.no_grad():
        maps = [seen.map for seen in walk(vit, images).layers]
    for p, expected in zip(maps, mean_maps(vit, images, glyphs.marked_cell, 16), strict=True):
        assert torch.allclose(taught(NAME).mean_map_of_each_cell(p, cells), expected, atol=1e-6)
