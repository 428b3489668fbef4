"""The 15 corruptions at the least and the largest severity, their random numbers, and JPEG written out."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from atlib.data import Images
from atrun.data.corruptions import CORRUPTIONS, corrupt

pytest.importorskip("imagecorruptions", reason="needs imagecorruptions-imaug", exc_type=ImportError)

DETERMINISTIC = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}
# The parameters of ImageNet-C, severity 1 to 5 (hendrycks/robustness, make_imagenet_c.py).
QUALITY = [25, 18, 15, 10, 7]


def pictures(count=2, height=32, width=32):
    """Smooth colourful pictures with edges: every corruption leaves a trace on them."""
    y, x = np.mgrid[:height, :width]
    waves = [
        127 + 60 * np.sin(x / (2 + k) + c) + 50 * (y % 8 < 4 + k) for k in range(count) for c in range(3)
    ]
    pixels = np.stack(waves).reshape(count, 3, height, width).clip(0, 255).astype(np.uint8)
    names = [str(i) for i in range(count)]
    return Images(torch.from_numpy(pixels), torch.arange(count), names, mean=0.4, std=0.3)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_it_changes_the_picture_and_nothing_else_and_the_seed_decides(name):
    images = pictures()
    before, state = images.pixels.clone(), np.random.get_state()
    for severity in (1, 5):
        changed = corrupt(images, name, severity)
        assert changed.pixels.dtype == torch.uint8 and changed.pixels.shape == before.shape
        assert all((changed.pixels[i] != before[i]).double().mean() > 0.02 for i in range(2))
        assert torch.equal(changed.targets, images.targets) and changed.classes == images.classes
        assert (changed.mean, changed.std, changed.augment) == (0.4, 0.3, None)
    assert torch.equal(images.pixels, before)
    after = np.random.get_state()
    assert all(np.array_equal(a, b) for a, b in zip(state, after)), "NumPy's global generator was moved"

    np.random.seed(1)
    once = corrupt(images, name, 3, seed=7)
    np.random.seed(2)
    assert torch.equal(corrupt(images, name, 3, seed=7).pixels, once.pixels)
    other = corrupt(images, name, 3, seed=8)
    assert torch.equal(other.pixels, once.pixels) == (name in DETERMINISTIC)


@pytest.mark.parametrize("name", ["gaussian_noise", "impulse_noise"])
def test_an_image_is_corrupted_alike_whatever_comes_after_it_and_unlike_its_neighbour(name):
    twins = pictures(1).select([0, 0, 0])
    three, one = corrupt(twins, name, 2), corrupt(twins.select([0]), name, 2)
    assert torch.equal(three.pixels[0], one.pixels[0])
    assert not torch.equal(three.pixels[0], three.pixels[1])


@pytest.mark.parametrize("severity", [1, 5])
def test_jpeg_is_a_jpeg_of_the_published_quality(severity):
    images = pictures()
    for picture, result in zip(images.pixels, corrupt(images, "jpeg_compression", severity).pixels):
        file = io.BytesIO()
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=QUALITY[severity - 1])
        assert np.array_equal(np.array(Image.open(file)), result.permute(1, 2, 0).numpy())
