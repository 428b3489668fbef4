"""Coarse labels, and views that no label of a glyph world depends on."""

import torch

from atbook.worlds import glyph_images, glyphs
from atbook.worlds.coarse import another_view, classes, coarse


def drawn(task="find", n=200, **options):
    return glyphs.generate("test", n, 0, glyphs.World(task=task, **options))


def test_two_shapes_share_a_coarse_class():
    images = glyph_images(drawn())
    rough = coarse(images)
    assert torch.equal(rough.pixels, images.pixels) and (rough.mean, rough.std) == (images.mean, images.std)
    for fine, label in zip(images.targets.tolist(), rough.targets.tolist()):
        assert glyphs.SHAPES[fine] in classes()[label].split(" or ")
    assert len(classes()) == 4 and sorted(" or ".join(classes()).split(" or ")) == sorted(glyphs.SHAPES)


def test_a_view_moves_whole_cells_and_orders_channels():
    """Without noise: every cell is one of the image's, in one order of channels for all."""
    torch.manual_seed(0)
    images = torch.rand(5, 3, 32, 32)
    views = another_view(images, noise=0.0)
    assert not torch.equal(views, images)
    for image, view in zip(images, views):
        found = [
            (down, across, order)
            for down in range(4)
            for across in range(4)
            for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
            if torch.equal(image[list(order)].roll((8 * down, 8 * across), (1, 2)), view)
        ]
        assert len(found) == 1


def test_the_mark_moves_with_its_glyph():
    """The cell that is marked in the view has the marked glyph of the image, channels apart."""
    made = drawn(noise=0.0, n=100)
    batch, _ = glyph_images(made).take(range(100))
    torch.manual_seed(2)
    views = another_view(batch, noise=0.0)
    at, of_image = glyphs.marked_cell(views), torch.as_tensor(made.cell)
    assert (at != of_image).float().mean() > 0.8

    def cells(images):
        return images.mean(1).unflatten(1, (4, 8)).unflatten(3, (4, 8)).movedim(3, 2).flatten(1, 2)

    named = [cells(images)[torch.arange(100), where] for images, where in ((batch, of_image), (views, at))]
    assert torch.allclose(*named, atol=1e-5)
