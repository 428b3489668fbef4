"""Coarse labels, and views that no label of a glyph world depends on."""

import torch

from atbook.worlds import glyph_images, glyphs
from atbook.worlds.coarse import another_view, classes, coarse


def test_two_shapes_share_a_coarse_class():
    images = glyph_images(glyphs.generate("test", 200))
    rough = coarse(images)
    assert torch.equal(rough.pixels, images.pixels) and (rough.mean, rough.std) == (images.mean, images.std)
    for fine, label in zip(images.targets.tolist(), rough.targets.tolist()):
        assert glyphs.SHAPES[fine] in classes()[label].split(" or ")
    assert len(classes()) == 4 and sorted(" or ".join(classes()).split(" or ")) == sorted(glyphs.SHAPES)


def test_a_view_moves_whole_cells_and_orders_channels():
    """Without noise: every cell is one of the image's, in one order of channels for all."""
    torch.manual_seed(0)
    images = torch.rand(12, 3, 32, 32)
    views, seen = another_view(images, noise=0.0), []
    for image, view in zip(images, views):
        found = [
            (down, across, order)
            for down in range(4)
            for across in range(4)
            for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
            if torch.equal(image[list(order)].roll((8 * down, 8 * across), (1, 2)), view)
        ]
        assert len(found) == 1
        seen += found
    assert all(len(set(drawn)) > 1 for drawn in zip(*seen)), "what moves, and how far, is drawn anew"
