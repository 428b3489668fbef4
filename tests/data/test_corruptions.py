"""The 15 corruptions: all of them at all severities, their random numbers, and the formulas of some written
out."""

import builtins
import io

import numpy as np
import pytest
import torch
from PIL import Image

from atbook.worlds.glyphs import generate
from atlib.data import Images
from atrun.data.corruptions import CORRUPTIONS, GROUPS, SEVERITIES, corrupt

pytest.importorskip(
    "imagecorruptions", reason="needs the package imagecorruptions-imaug", exc_type=ImportError
)

DETERMINISTIC = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}
# The parameters of ImageNet-C, severity 1 to 5 (hendrycks/robustness, make_imagenet_c.py).
NOISE = [0.08, 0.12, 0.18, 0.26, 0.38]
IMPULSE = [0.03, 0.06, 0.09, 0.17, 0.27]
SHOT = [60, 25, 12, 5, 3]
CONTRAST = [0.4, 0.3, 0.2, 0.1, 0.05]
QUALITY = [25, 18, 15, 10, 7]
PIXELATE = [0.6, 0.5, 0.4, 0.3, 0.25]


def pictures(count=2, height=32, width=32):
    """Smooth colourful pictures with edges: every corruption leaves a trace on them."""
    y, x = np.mgrid[:height, :width]
    waves = [
        127 + 60 * np.sin(x / (2 + k) + c) + 50 * (y % 8 < 4 + k) for k in range(count) for c in range(3)
    ]
    pixels = np.stack(waves).reshape(count, 3, height, width).clip(0, 255).astype(np.uint8)
    return Images(
        torch.from_numpy(pixels), torch.arange(count), [str(i) for i in range(count)], mean=0.4, std=0.3
    )


def grey(level, size=96):
    return Images(torch.full((1, 3, size, size), level, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))


def distance(left, right):
    return (left.pixels.double() - right.pixels.double()).abs().mean().item()


def test_the_fifteen_in_their_groups():
    assert len(CORRUPTIONS) == len(set(CORRUPTIONS)) == 15 and SEVERITIES == (1, 2, 3, 4, 5)
    assert {group: len(names) for group, names in GROUPS.items()} == {
        "noise": 3,
        "blur": 4,
        "weather": 4,
        "digital": 4,
    }
    import imagecorruptions

    assert {group: tuple(imagecorruptions.get_corruption_names(group)) for group in GROUPS} == GROUPS


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_severity_changes_the_picture_and_nothing_else(name):
    images = pictures()
    before, state = images.pixels.clone(), np.random.get_state()
    for severity in SEVERITIES:
        changed = corrupt(images, name, severity)
        assert changed.pixels.dtype == torch.uint8 and changed.pixels.shape == before.shape
        assert all((changed.pixels[i] != before[i]).double().mean() > 0.02 for i in range(2))
        assert torch.equal(changed.targets, images.targets) and changed.classes == images.classes
        assert (changed.mean, changed.std, changed.augment) == (0.4, 0.3, None)
    assert torch.equal(images.pixels, before)
    after = np.random.get_state()
    assert all(np.array_equal(a, b) for a, b in zip(state, after)), "NumPy's global generator was moved"


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_seed_decides_and_the_global_generator_does_not(name):
    images = pictures()
    np.random.seed(1)
    once = corrupt(images, name, 3, seed=7)
    np.random.seed(2)
    assert torch.equal(corrupt(images, name, 3, seed=7).pixels, once.pixels)
    other = corrupt(images, name, 3, seed=8)
    assert torch.equal(other.pixels, once.pixels) == (name in DETERMINISTIC)


@pytest.mark.parametrize("name", ["gaussian_noise", "impulse_noise", "glass_blur", "fog"])
def test_an_image_is_corrupted_alike_whatever_comes_after_it_and_unlike_its_neighbour(name):
    twins = pictures(1).select([0, 0, 0])
    three, one = corrupt(twins, name, 2), corrupt(twins.select([0]), name, 2)
    assert torch.equal(three.pixels[0], one.pixels[0])
    assert not torch.equal(three.pixels[0], three.pixels[1])


@pytest.mark.parametrize(
    "name",
    [
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "defocus_blur",
        "zoom_blur",
        "brightness",
        "contrast",
        "jpeg_compression",
    ],
)
def test_a_higher_severity_is_further_away(name):
    images = pictures(3)
    distances = [distance(corrupt(images, name, severity), images) for severity in SEVERITIES]
    assert distances == sorted(distances) and distances[0] < distances[4]


@pytest.mark.parametrize("severity", [1, 2, 3])  # above, grey ± 3 s.d. leaves the range
def test_gaussian_noise_has_the_published_deviation(severity):
    noise = corrupt(grey(128), "gaussian_noise", severity).pixels.double() / 255
    # 27,648 draws: the s.d. is known to 0.4 %; cutting at 2.8 s.d. takes 1 % off at severity 3
    assert noise.std().item() == pytest.approx(NOISE[severity - 1], rel=0.02)
    assert noise.mean().item() == pytest.approx(127.5 / 255, abs=0.005)  # bytes are rounded down


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_hits_the_published_share(severity):
    hit = corrupt(grey(128), "impulse_noise", severity).pixels
    changed = hit != hit.flatten().mode().values
    assert changed.double().mean().item() == pytest.approx(IMPULSE[severity - 1], abs=0.01)
    assert set(hit[changed].tolist()) == {0, 255}


@pytest.mark.parametrize("severity", SEVERITIES[:3])
def test_shot_noise_is_poisson(severity):
    """Variance over mean is 1 / count."""
    noise = corrupt(grey(64), "shot_noise", severity).pixels.double() / 255
    assert (noise.var() / noise.mean()).item() == pytest.approx(1 / SHOT[severity - 1], rel=0.05)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_is_a_step_towards_the_mean_colour(severity):
    images = pictures()
    changed = corrupt(images, "contrast", severity).pixels.double()
    for picture, result in zip(images.pixels.double(), changed):
        for channel in range(3):
            mean = picture[channel].sum() / picture[channel].numel()
            wanted = mean + CONTRAST[severity - 1] * (picture[channel] - mean)
            # rounded down
            assert ((wanted - result[channel]) >= -1e-6).all() and (
                (wanted - result[channel]) < 1 + 1e-6
            ).all()


@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_is_a_jpeg_of_the_published_quality(severity):
    images = pictures()
    for picture, result in zip(images.pixels, corrupt(images, "jpeg_compression", severity).pixels):
        file = io.BytesIO()
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=QUALITY[severity - 1])
        assert np.array_equal(np.array(Image.open(file)), result.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_leaves_the_published_number_of_blocks(severity):
    noisy = Images(torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8), torch.zeros(1))
    changed = corrupt(noisy, "pixelate", severity).pixels[0]
    blocks = int(64 * PIXELATE[severity - 1])
    assert (
        sum((changed[:, 1:] != changed[:, :-1]).any(0).any(-1))
        == sum((changed[..., 1:] != changed[..., :-1]).any(0).any(0))
        == blocks - 1
    )


def test_other_shapes_and_the_built_in_world():
    for images in (pictures(1, 40, 33), Images(torch.from_numpy(generate("test", 1).images), torch.zeros(1))):
        for name in CORRUPTIONS:
            assert corrupt(images, name, 5).pixels.shape == images.pixels.shape


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("gausian_noise", 1), "'gausian_noise'.*'gaussian_noise'"),
        (("speckle_noise", 1), "'speckle_noise'"),
        (("fog", 0), "severity .*1, 2, 3, 4, 5, got 0"),
        (("fog", 6), "got 6"),
        (("fog", 2.5), "got 2.5"),
        (("fog", True), "got True"),
    ],
)
def test_wrong_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        corrupt(pictures(), *arguments)


def test_small_images_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"\(3, 31, 40\): .*image_size=32"):
        corrupt(pictures(1, 31, 40), "fog", 1)


def test_without_the_package_the_way_out_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments):
        if name == "imagecorruptions":
            raise ModuleNotFoundError("No module named 'imagecorruptions'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install imagecorruptions-imaug"):
        corrupt(pictures(), "fog", 1)
