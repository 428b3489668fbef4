"""The pre-text of retrieval has the right target and the right loss."""

import pytest
import torch

from atbook.worlds import glyphs
from atbook.worlds.pretext import placed_images, placed_loss, retrieval_images
from atlib.recipe import Recipe
from atlib.vit import create_vit


def test_the_retrieval_target_is_the_marked_cell_without_noise():
    world = glyphs.World(noise=0)
    drawn, clean = glyphs.generate("unlabelled", 40), glyphs.generate("unlabelled", 40, world=world)
    images = retrieval_images(drawn)
    assert images.targets.shape == (40, 192) and images.targets.dtype == torch.float32
    for index in range(40):
        row, column = divmod(int(drawn.cell[index]), 4)
        cell = torch.from_numpy(clean.images)[index, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
        assert (images.targets[index].reshape(3, 8, 8) * 255 - cell).abs().max() <= 1
    assert torch.equal(images.pixels, torch.from_numpy(drawn.images)), "the input is the noisy image"


def test_the_place_is_asked_for_beside_the_pixels():
    """The named cell lies one to the right of the mark, and both targets are of it."""
    drawn = glyphs.generate("unlabelled", 6, world=glyphs.World(pointer=1))
    images, model = placed_images(drawn), create_vit("glyphs", num_classes=208)
    assert images.targets.shape == (6, 208)
    assert torch.equal(images.targets[:, :192], retrieval_images(drawn).targets)
    assert images.targets[:, 192:].argmax(1).tolist() == drawn.cell.tolist()
    assert torch.equal(images.targets[:, 192:].sum(1), torch.ones(6))
    pixels = images.take(range(6))[0]
    guess = model(pixels)
    named = -guess[:, 192:].log_softmax(1)[range(6), drawn.cell.tolist()].mean()
    squared = (guess[:, :192] - images.targets[:, :192]).square().mean()
    loss = placed_loss(model, pixels, images.targets, Recipe())
    assert loss.item() == pytest.approx((squared + 0.02 * named).item(), rel=1e-5)
