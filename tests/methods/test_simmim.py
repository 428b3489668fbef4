"""SimMIM: what is hidden, and the loss pixel by pixel."""

from itertools import product

import pytest
import torch

from atfamily.simmim import SimMim
from tests import longhand
from tests.helpers import random_images, randomise

IMAGES = random_images(2, 3, 32, 32, dtype=torch.float64)


def build(small_vit, **options):
    return randomise(SimMim(small_vit(num_classes=0), **options), 1).double()


@pytest.mark.parametrize("unit, hidden", [(1, 10), (2, 12)])
def test_squares_are_hidden(small_vit, unit, hidden):
    model = build(small_vit, unit=unit)  # 60 % of 16 patches, of 4 squares 3
    mask = model.draw_mask(torch.zeros(200, 3, 32, 32))
    assert mask.shape == (200, 16) and (mask.sum(1) == hidden).all()
    assert len(mask.unique(dim=0)) > (3 if unit == 2 else 100)
    blocks = mask.unflatten(1, (4 // unit, unit, 4 // unit, unit))
    assert (blocks == blocks[:, :, :1, :, :1]).all()
    assert 0.4 < mask.double().mean(0).min(), "every place is hidden often"


def test_the_loss_pixel_by_pixel(small_vit):
    model = build(small_vit)
    w = {name.removeprefix("vit."): value for name, value in model.state_dict().items()}
    kernel, mask, errors = w["patch_embed.proj.weight"].flatten(1), model.draw_mask(IMAGES), []
    for image, hidden in zip(IMAGES, mask):
        places = product(range(0, 32, 8), repeat=2)
        patches = [image[:, down : down + 8, right : right + 8].flatten() for down, right in places]
        embedded = [kernel @ patch + w["patch_embed.proj.bias"] for patch in patches]
        embedded = [w["mask_token"][0, 0] if gone else token for token, gone in zip(embedded, hidden)]
        tokens = torch.stack([w["cls_token"][0, 0], *embedded])[None] + w["pos_embed"]
        x = longhand.run_blocks(w, tokens, 3)[0]
        x = longhand.layer_norm(x, w["norm.weight"], w["norm.bias"]) @ w["to_pixels.weight"].T
        told = (x + w["to_pixels.bias"])[0, 1:]
        errors += [abs(a - b) for t, x, gone in zip(told, patches, hidden) if gone for a, b in zip(t, x)]
    found = model(IMAGES, mask)
    assert len(errors) == 2 * 10 * 192 and abs(found - sum(errors) / len(errors)) <= 1e-10
    changed = IMAGES.clone()
    changed[:, :, :8, :8] += 1
    first = mask[:, 0]
    assert (model(changed, mask) != found) or not first.any()
