"""Images in memory and their batches; what the `datasets` library reads is in test_hub.py."""

from itertools import product

import numpy as np
import pytest
import torch

from atlib.data import Images, crop_and_flip
from atlib.loading import ShardSpec, my_batches


def numbered(n=20, **options):
    """Images whose every pixel is their index, and so is their target."""
    index = torch.arange(n)
    pixels = index.to(torch.uint8)[:, None, None, None].expand(n, 3, 4, 4).contiguous()
    return Images(pixels, index, **options)


def test_take_is_a_batch_in_the_order_asked_for():
    images, targets = numbered().take([7, 0, 7])
    assert images.shape == (3, 3, 4, 4) and targets.tolist() == [7, 0, 7]
    assert images[0, 0, 0, 0].item() == pytest.approx((7 / 255 - 0.5) / 0.25)
    other = Images(numbered().pixels, numbered().targets, mean=0.0, std=1.0)
    assert other.take([7])[0].unique().item() == pytest.approx(7 / 255)


def test_only_an_epoch_is_augmented():
    data = numbered(20, augment=lambda images, seeds: 255 - images)
    loaded = list(data.loader(8))
    assert [targets.tolist() for _, targets in loaded] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    for images, targets in loaded:
        assert (((images * 0.25 + 0.5) * 255).round() == targets[:, None, None, None]).all(), "its own"
    assert torch.equal(data.take([7])[0], numbered().take([7])[0])
    part = ShardSpec(0, 0, 20)
    epochs = [next(one.epoch(part)).images for one in (data, data.with_augment(None), numbered())]
    assert torch.equal(epochs[1], epochs[2]) and not torch.equal(epochs[0], epochs[2])


def test_crop_and_flip_cuts_from_the_padded_image():
    """Every outcome is one of the 2 x 81 windows of the reflected image, drawn about equally often."""
    image = torch.arange(3 * 16 * 16).reshape(3, 16, 16).to(torch.uint8)
    # four pixels reflected at either end, the edge itself once
    index = [4, 3, 2, 1, *range(16), 14, 13, 12, 11]
    padded = image[:, index][:, :, index]
    cuts = (padded[:, top : top + 16, left : left + 16] for top, left in product(range(9), repeat=2))
    windows = [window for cut in cuts for window in (cut, cut.flip(-1))]
    keys = {window.contiguous().numpy().tobytes(): number for number, window in enumerate(windows)}
    assert len(keys) == 162
    augment, seeds, many = crop_and_flip(4), torch.arange(8100), image.expand(8100, -1, -1, -1)
    cut = augment(many, seeds)
    assert cut.shape == (8100, 3, 16, 16) and cut.dtype == torch.uint8
    drawn = [keys[image.contiguous().numpy().tobytes()] for image in cut]
    counts = np.bincount(drawn, minlength=162)
    # chi-squared with 161 degrees of freedom: mean 161, standard deviation 18
    assert ((counts - 50) ** 2 / 50).sum() < 161 + 4 * 18
    assert torch.equal(image, torch.arange(3 * 16 * 16).reshape(3, 16, 16).to(torch.uint8))
    some = [7, 4000, 12]
    assert torch.equal(augment(many[:3], seeds[some]), cut[some]), "whatever batch an image is in"


def test_images_are_augmented_where_they_are():
    """On a device without data, where nothing may ask for a value: an epoch there has the same shapes."""
    data = Images(torch.zeros(20, 2, 3, 8, 8, dtype=torch.uint8), torch.arange(20), ("a",), 0.1, 0.9)
    moved = data.with_augment(crop_and_flip()).to("meta")
    assert (moved.classes, moved.mean, moved.std, len(moved)) == (("a",), 0.1, 0.9, 20)
    for batch, (indices, _) in zip(moved.epoch(ShardSpec(0, 0, 6)), my_batches(20, ShardSpec(0, 0, 6))):
        assert batch.images.device.type == batch.targets.device.type == "meta"
        assert batch.images.shape == (len(indices), 2, 3, 8, 8) and batch.images.dtype == torch.float32
        assert batch.indices == indices
    assert torch.equal(data.to("cpu").take([3])[0], data.take([3])[0])


def test_a_mask_selects_where_it_is_true():
    images = Images(torch.arange(48, dtype=torch.uint8).reshape(4, 3, 2, 2), torch.tensor([0, 1, 0, 2]))
    of_mask, of_indices = images.select(images.targets == 0), images.select([0, 2])
    assert torch.equal(of_mask.pixels, of_indices.pixels) and of_mask.targets.tolist() == [0, 0]
