"""Augmentation: the same for the same seed, and each operation against a computation of its own."""

import random
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data.auto_augment import rand_augment_transform

from atrun.data.transforms import Augmentation

FULL = Augmentation(32, rand_augment="rand-m9-mstd0.5-inc1", random_erasing=0.25)
PADDED = Augmentation(32, crop="padded", flip=0.0)
# of an image of 32 x 32: nothing is changed but the numbers' scale
STILL = Augmentation(32, crop="centre", flip=0.0)


def picture(height=32, width=32, seed=0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def normalised(pixels: np.ndarray, augmentation: Augmentation = FULL) -> torch.Tensor:
    """uint8 (height, width, 3) to (3, height, width), by the formula."""
    values = (pixels.astype(np.float64) / 255 - np.array(augmentation.mean)) / np.array(augmentation.std)
    return torch.from_numpy(values.transpose(2, 0, 1)).float()


def pixels_of(tensor: torch.Tensor, augmentation: Augmentation = FULL) -> np.ndarray:
    """Back to values in 0..255, (height, width, 3), not rounded."""
    mean, std = np.array(augmentation.mean), np.array(augmentation.std)
    return (tensor.double().numpy().transpose(1, 2, 0) * std + mean) * 255


@pytest.mark.parametrize(
    "height, width, crop_pct, interpolation",
    [(60, 90, 0.875, "bicubic"), (90, 60, 1.0, "bilinear"), (48, 48, 0.875, "bilinear")],
)
def test_evaluation_by_hand(height, width, crop_pct, interpolation):
    """Shorter side to size / crop_pct, the middle square, (x / 255 - mean) / std."""
    augmentation = Augmentation(28, crop_pct=crop_pct, interpolation=interpolation)
    image, filter = picture(height, width), Image.Resampling[interpolation.upper()]
    shorter = int(28 / crop_pct)
    new = (round(width * shorter / min(height, width)), round(height * shorter / min(height, width)))
    left, top = (new[0] - 28) // 2, (new[1] - 28) // 2
    expected = np.asarray(image.resize(new, filter))[top : top + 28, left : left + 28]
    torch.testing.assert_close(augmentation.evaluate(image), normalised(expected), rtol=1e-5, atol=1e-6)


def test_of_an_image_of_the_right_size_the_centre_is_all():
    image = picture()
    mirrored = Augmentation(32, crop="centre", flip=1.0).train(image, 0)
    torch.testing.assert_close(STILL.train(image, 0), normalised(np.asarray(image)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mirrored, normalised(np.asarray(image)[:, ::-1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("least, lowest", [(0.08, (0.07, 0.2)), (0.2, (0.19, 0.3))])
def test_random_resized_crops_have_the_published_area_and_aspect(least, lowest):
    """The image says where each of its pixels was: red grows with x, green with y."""
    ramp = np.zeros((256, 256, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(256)[None], np.arange(256)[:, None]
    plain = Augmentation(32, scale=(least, 1.0), flip=0.0, interpolation="bilinear")
    widths, heights = [], []
    for seed in range(150):
        found = pixels_of(plain.train(Image.fromarray(ramp), seed), plain)
        # between two columns half the square apart
        widths.append((found[:, 24, 0] - found[:, 8, 0]).mean() * 2 / 256)
        heights.append((found[24, :, 1] - found[8, :, 1]).mean() * 2 / 256)
    area, aspect = np.multiply(widths, heights), np.divide(widths, heights)
    # A step of the ramp is 1 / 256, which the tolerances allow for.
    assert lowest[0] < area.min() < lowest[1] and 0.8 < area.max() < 1.01
    assert 0.72 < aspect.min() < 0.85 and 1.2 < aspect.max() < 1.38


def test_a_padded_crop_is_a_window_of_the_reflected_image():
    image = np.asarray(picture())
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    places = list(product(range(9), range(9)))
    windows = {padded[top : top + 32, left : left + 32].tobytes(): (top, left) for top, left in places}
    cut = [pixels_of(PADDED.train(picture(), seed), PADDED) for seed in range(60)]
    found = [windows[np.rint(pixels).astype(np.uint8).tobytes()] for pixels in cut]
    assert {top for top, _ in found} == {left for _, left in found} == set(range(9))
    # the shorter side is brought to size first
    assert Augmentation(32, crop="padded").train(picture(64, 48), 0).shape == (3, 32, 32)


def test_three_augment_is_grey_solarised_or_blurred():
    three, image = Augmentation(32, crop="centre", flip=0.0, three_augment=True), picture()
    solarised, seen = np.asarray(ImageOps.solarize(image, 128)), {"grey": 0, "solarised": 0, "other": 0}
    for seed in range(60):
        found = pixels_of(three.train(image, seed), three)
        grey, inverted = np.ptp(found, axis=2).max() < 1e-3, np.abs(found - solarised).max() < 1e-3
        seen["grey" if grey else "solarised" if inverted else "other"] += 1
        if not grey and not inverted:  # noise has less contrast between neighbours when it is blurred
            contrast = [np.abs(np.diff(each, axis=1)).mean() for each in (found, np.asarray(image) * 1.0)]
            assert contrast[0] <= contrast[1]
    assert min(seen.values()) >= 10


def test_rand_augment_is_timms_of_that_string_between_crop_and_normalising():
    image = picture()
    changed = Augmentation(32, crop="centre", flip=0.0, rand_augment="rand-m9-mstd0.5-inc1")
    settings = dict(translate_const=int(32 * 0.45), img_mean=(124, 116, 104), interpolation=Image.BICUBIC)
    operations = rand_augment_transform("rand-m9-mstd0.5-inc1", settings)
    different = 0
    for seed in range(20):
        for_python, for_numpy, _ = (int(word) for word in np.random.SeedSequence(seed).generate_state(3))
        random.seed(for_python), np.random.seed(for_numpy)
        expected = np.asarray(operations(image))
        torch.testing.assert_close(changed.train(image, seed), normalised(expected), rtol=1e-5, atol=1e-6)
        different += not np.array_equal(expected, np.asarray(image))
    assert different > 10


@pytest.mark.parametrize("string, bits", [("rand-m10-n1-p1-inc1", 0), ("rand-m3-n1-p1-inc1", 3)])
def test_posterising_keeps_so_many_bits(string, bits):
    """timm's grows to 0 bits at magnitude 10, which Pillow refuses since version 13; before, it was black."""
    image, augmentation = picture(), Augmentation(32, crop="centre", flip=0.0, rand_augment=string)
    kept = normalised(np.asarray(image) & (0xFF00 >> bits & 0xFF))
    assert any(torch.allclose(augmentation.train(image, seed), kept, atol=1e-5) for seed in range(60))


def test_a_quarter_of_the_images_lose_a_rectangle_to_noise():
    """With the same seed nothing else differs, because erasing comes last."""
    image, erasing = picture(64, 64), Augmentation(64, crop="centre", flip=0.0, random_erasing=0.25)
    still, noise = normalised(np.asarray(image)), []
    for seed in range(200):
        found = erasing.train(image, seed)
        changed = ((found - still).abs() > 1e-4).any(0)
        if changed.any():
            noise.append(found[:, changed])
    assert 29 <= len(noise) <= 71  # 3.5 standard deviations
    noise = torch.cat(noise, 1)
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
