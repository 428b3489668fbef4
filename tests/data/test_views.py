"""Several views of an image: what they hang on, what they show, and how photographs become them."""

import numpy as np
import torch
from PIL import Image

from atrun.data import Augmentation
from atrun.data.views import Look, Views, looks, small_views

STILL = {"flip": 0.0, "jitter": (0.0, 0.0, 0.0, 0.0), "grey": 0.0}
SEEDS = torch.arange(64) * 7919


def test_a_view_of_the_whole_is_the_image():
    """The aspect stretches what it can; where nothing is drawn a view is a crop, sampled between pixels."""
    ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(64, 3, 32, 32).clone()  # grows to the right
    made = small_views([Look((0.25, 0.25), blur=0.0)], **STILL)(ramp, SEEDS)[:, 0].float()
    steps = made[:, 0, 0].diff(dim=1)[:, 4:-4].mean(1) / 8  # pixels of the image for each of the view
    aspect = steps.square() / 0.25
    assert 0.7 < aspect.min() < 0.85 and 1.2 < aspect.max() < 1.4
    assert (made - made[:, :, :1]).abs().max() <= 1, "rows are alike, as in the image"
    left = made[:, 0, 0, 0] / 8
    assert left.min() < 4 and 10 < left.max() < 20 and torch.equal(made[:, 0], made[:, 1])


def test_colours():
    red = torch.zeros(64, 3, 32, 32, dtype=torch.uint8)
    red[:, 0] = 200

    def seen(**options):
        made = small_views([Look((1.0, 1.0), blur=0.0)], **STILL | options)(red, SEEDS)
        return made[:, 0, :, 16, 16].float()

    assert torch.equal(seen(), red[:, :, 0, 0].float()), "nothing is drawn, nothing changes"
    grey = seen(grey=1.0)
    assert (grey - 0.299 * 200).abs().max() <= 1
    bright = seen(jitter=(0.4, 0.0, 0.0, 0.0))
    changed = bright[:, 0] != 200
    assert 40 < changed.sum() < 62 and (bright[:, 1:] == 0).all(), "most are, and stay red"
    assert 118 <= bright[:, 0].min() < 150 and bright[:, 0].max() == 255
    turned = seen(jitter=(0.0, 0.0, 0.0, 0.1))
    assert (turned[:, 1] > 10).any() and (turned[:, 2] > 10).any(), "to yellow or to magenta"
    solarised = small_views([Look((1.0, 1.0), 0.0, solarise=1.0)], **STILL)(red, SEEDS)[:, 0, :, 0, 0]
    assert torch.equal(solarised, torch.tensor([55, 0, 0], dtype=torch.uint8).expand(64, 3))


def test_photographs():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    image, augmentation = Image.fromarray(pixels), Augmentation(24, scale=(0.2, 1.0))
    views = Views(augmentation, looks((0.2, 1.0), local=2))
    before = torch.get_rng_state()
    first, again, other = (views.train(image, seed) for seed in (5, 5, 6))
    assert first.shape == (4, 3, 24, 24) and torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(Views(augmentation, looks((0.2, 1.0), local=1)).train(image, 5), first[:3])
    evaluated = views.evaluate(image)
    assert evaluated.shape == first.shape and torch.equal(evaluated[3], augmentation.evaluate(image))
    assert views.normalisation == augmentation.normalisation
    sharp = Views(augmentation, (Look((1.0, 1.0), 0.0),) * 1).train(image, 1).var()
    blurred = Views(augmentation, (Look((1.0, 1.0), 1.0),) * 1).train(image, 1).var()
    assert blurred < 0.8 * sharp
