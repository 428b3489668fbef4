"""Mean intersection over union is what a loop counts, and a linear head on tokens names pixels."""

import numpy as np
import pytest
import torch
from torch import nn

from atfamily.detection.segment import Segmenter, mean_iou, segmentation_loss
from atlib import AttentionTransfer, Plan
from atlib.attention_transfer import Transferred
from atlib.data import Images
from atlib.recipe import Recipe
from tests.detection.knows import scene_vit
from tests.helpers import random_images, randomise


def vit(seed=0):
    return randomise(scene_vit(seed), seed)


class Says(nn.Module):
    """A model that says what it reads in an image's red channel: the class of each pixel, in levels."""

    def __init__(self, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))  # the device is a parameter's
        self.classes = classes

    def forward(self, images):
        assert not self.training, "evaluation is in evaluation mode"
        said = (images[:, 0] * 0.25 * 255 + 0.5 * 255).round().long()
        return Transferred(nn.functional.one_hot(said, self.classes).movedim(-1, 1).float(), said.sum())


def painted(said, true):
    """Images whose red channel holds what `Says` says, with the true classes, (n, height, width) each."""
    pixels = torch.zeros(len(said), 3, *said.shape[1:], dtype=torch.uint8)
    pixels[:, 0] = said
    return Images(pixels, true)


def by_loops(said, true, classes):
    by_class = []
    for name in range(classes):
        both = either = 0
        for mine, theirs in zip(said.flatten().tolist(), true.flatten().tolist()):
            both += mine == name and theirs == name
            either += mine == name or theirs == name
        if either:
            by_class.append(both / either)
    return sum(by_class) / len(by_class)


def test_it_is_what_a_loop_counts_over_all_images():
    """Over all pixels at once, whatever the batches; of forty classes some are missing."""
    rng, classes = np.random.default_rng(2), 40
    true = torch.from_numpy(rng.integers(classes, size=(5, 3, 4)))
    other = torch.from_numpy(rng.integers(classes, size=(5, 3, 4)))
    said = torch.where(torch.from_numpy(rng.random((5, 3, 4)) < 0.5), true, other)
    expected = by_loops(said, true, classes)
    for batch_size in (2, 100):
        iou = mean_iou(Says(classes), painted(said, true), classes, batch_size)
        assert iou == pytest.approx(expected, rel=1e-6)


def test_the_head_is_linear_on_tokens_and_drawn_up():
    """A pixel's logits are those of the four patches whose middles are around it, the nearer the more."""
    segmenter = Segmenter(vit(2), 5).eval()
    images = random_images(1, 3, 64, 64)
    logits, grid = segmenter(images).logits[0], segmenter.backbone(images).grid[0]
    for row, column in ((27, 20), (32, 40), (6, 57)):
        (y, down), (x, across) = (divmod((place + 0.5) / 8 - 0.5, 1) for place in (row, column))
        expected = 0
        for below, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            share = (down if below else 1 - down) * (across if right else 1 - across)
            token = grid[:, int(y) + below, int(x) + right]
            expected += share * (segmenter.head.weight[:, :, 0, 0] @ token + segmenter.head.bias)
        assert (logits[:, row, column] - expected).abs().max() < 1e-5


def test_with_convolutions_places_hear_of_their_neighbours_and_no_others():
    """Two of 3 x 3 reach two places in every direction; without any, or of 1 x 1, it hears only itself."""
    for convolutions, size, reach in ((0, 3, 0), (2, 3, 2), (2, 1, 0)):
        segmenter = randomise(Segmenter(vit(2), 5, convolutions, size), 3)
        grid = torch.randn(1, 16, 8, 8)
        other = grid.clone()
        other[:, :, 3, 4] += 1
        with torch.no_grad():
            heard = [segmenter.head(segmenter.neighbours(patches)) for patches in (grid, other)]
        expected = torch.zeros(8, 8, dtype=torch.bool)
        expected[3 - reach : 4 + reach, 4 - reach : 5 + reach] = True
        assert torch.equal((heard[0] != heard[1]).any(1)[0], expected)


def test_the_loss_is_that_of_all_pixels_and_the_transfer_loss():
    segmenter = Segmenter(AttentionTransfer(vit(1), vit(2), Plan(how="distill")), 5)
    images, classes = random_images(2, 3, 64, 64), torch.randint(5, (2, 64, 64))
    logits, transfer_loss = segmenter(images)
    of_pixels = -logits.log_softmax(1).gather(1, classes[:, None]).mean()
    loss = segmentation_loss(segmenter, images, classes, Recipe(transfer_weight=2.0, label_smoothing=0.0))
    assert loss.item() == pytest.approx((of_pixels + 2 * transfer_loss).item(), rel=1e-5)
