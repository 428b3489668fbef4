"""`look` takes every model that `walk` takes: dinov2#90, dinov2#294, timm#292."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torchvision.models import VisionTransformer

from atlib import look, walk
from atrun.looking.preparation import preparation_of, prepare
from tests.helpers import randomise

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 140, 3), dtype=np.uint8))


def deit():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.DeiTModel(transformers.DeiTConfig(**sizes, image_size=48, patch_size=16))


MODELS = {
    "DeiT, live": (deit, ("class token", "distillation token"), (3, 3)),
    "torchvision": (lambda: VisionTransformer(32, 8, 2, 2, 32, 64), ("class token",), (4, 4)),
    "registers": (
        lambda: timm.create_model("vit_small_patch14_reg4_dinov2", depth=1, img_size=(28, 56), num_classes=0),
        ("class token", "register 0", "register 1", "register 2", "register 3"),
        (2, 4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_walks_can_be_looked_at(name):
    build, prefix, grid = MODELS[name]
    model = randomise(build()).eval()
    shown = look(model, PICTURE)
    (rows, _), *_ = shown.models.values()
    assert rows.tokens == (prefix, grid)
    pixels = prepare(PICTURE, preparation_of(model)).pixels
    with torch.no_grad():
        layers = walk(model, pixels).layers
    first = rows.levels[: layers[0].map.shape[-1]].double() / 255
    found = first.square() * rows.largest[: len(first), None]
    assert (found - layers[0].map[0, 0]).abs().max() <= rows.largest.max() / 200


def test_naflex_has_a_page():
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1, num_classes=0).eval()
    (rows, prepared), *_ = look(model, PICTURE).models.values()
    down, across = rows.tokens.grid
    assert prepared.pixels.shape[-2:] == (16 * down, 16 * across)
    assert rows.levels.shape[1] == down * across + len(rows.tokens.prefix)
