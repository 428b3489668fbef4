"""A picture as the model takes it is timm's own; to the reader the same part is shown."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from atlib import create_vit
from atrun.looking.preparation import Preparation, preparation_of, prepare


def picture(height=300, width=500):
    """Smooth, so that finer and coarser resizing agree, and different everywhere."""
    down, across = np.mgrid[:height, :width]
    y, x = down / height, across / width
    channels = (255 * y, 255 * x, 127 + 120 * np.sin(6 * y + 6 * x))
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8))


def test_a_timm_model_is_given_what_timm_gives_it():
    vit = timm.create_model("vit_base_patch16_clip_224.openai", depth=1, embed_dim=48, num_heads=3)
    expected = create_transform(**resolve_model_data_config(vit))(picture())
    own = preparation_of(vit)
    assert torch.equal(prepare(picture(), own).pixels[0], expected)
    assert own.mean == vit.pretrained_cfg["mean"] and "timm" in own.source


def test_a_model_without_a_configuration_takes_imagenets_and_says_so():
    own = preparation_of(create_vit("cifar"))
    assert own.size == (32, 32) and own.mean[0] == pytest.approx(0.485)
    assert "does not say" in own.source
    changed = preparation_of(create_vit("cifar"), mean=(0.5, 0.5, 0.5), crop_pct=1.0)
    assert changed.mean == (0.5, 0.5, 0.5) and "mean, crop_pct" in changed.source


CASES = [
    Preparation((224, 224), (0.0,) * 3, (1.0,) * 3, crop_pct=0.9),
    Preparation((96, 64), (0.0,) * 3, (1.0,) * 3, crop_pct=0.875),
    Preparation((112, 112), (0.0,) * 3, (1.0,) * 3, crop_pct=1.0, crop_mode="squash"),
]


@pytest.mark.parametrize("preparation", CASES, ids=lambda one: f"{one.size} {one.crop_mode}")
def test_the_photograph_is_the_part_that_the_model_sees(preparation):
    pixels, photograph = prepare(picture(1200, 1800), preparation)
    height, width = preparation.size
    assert photograph.height > height and photograph.height / photograph.width == height / width
    coarse = np.asarray(photograph.resize((width, height), Image.Resampling.BOX), float) / 255
    # Half a pixel of the model's, to which timm rounds the crop, at the picture's slope, and the 8 bits.
    np.testing.assert_allclose(coarse, pixels[0].permute(1, 2, 0).numpy(), atol=0.03)


def test_pixels_of_the_models_size_are_taken_as_they_are():
    pixels = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
    taken, photograph = prepare(pixels, Preparation((32, 32), (0.5,) * 3, (0.25,) * 3))
    torch.testing.assert_close(taken[0], (pixels / 255 - 0.5) / 0.25)
    assert np.array_equal(np.asarray(photograph).transpose(2, 0, 1), pixels.numpy())


def test_a_file_is_turned_as_the_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter
    picture(30, 50).save(tmp_path / "turned.png", exif=exif)
    preparation = Preparation((50, 30), (0.0,) * 3, (1.0,) * 3)
    pixels = prepare(tmp_path / "turned.png", preparation).pixels[0]
    upright = torch.from_numpy(np.asarray(picture(30, 50).rotate(-90, expand=True)).copy()).permute(2, 0, 1)
    torch.testing.assert_close(pixels, upright / 255)
