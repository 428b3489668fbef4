"""Masked auto-encoding: what is hidden, what is painted, and the loss."""

from itertools import product

import pytest
import torch

from atbook.worlds.pretext import unpainted
from atlib.mae import MaskedAutoencoder, mae_loss, patchify, walk_visible
from atlib.recipe import Recipe
from tests import longhand
from tests.helpers import random_images, randomise


@pytest.fixture
def autoencoder(small_vit):
    """A randomised auto-encoder in float64 (16 patches, 4 visible) and 3 images."""

    def build(**options):
        vit = small_vit(**options.pop("vit", {}))
        model = MaskedAutoencoder(vit, **{"decoder_width": 16, "decoder_heads": 2} | options)
        return randomise(model, 1).double()

    return build


IMAGES = random_images(3, 3, 32, 32, dtype=torch.float64)


def patches_of(image, height, width):
    """The patches of one image (C, H, W) in reading order, each flattened channel by channel, row by row."""
    _, rows, columns = image.shape
    places = product(range(0, rows, height), range(0, columns, width))
    return [image[:, top : top + height, left : left + width].flatten().tolist() for top, left in places]


def test_patchify_equals_loops():
    images = torch.arange(2 * 3 * 6 * 8).reshape(2, 3, 6, 8).double()
    expected = torch.tensor([patches_of(image, 3, 2) for image in images], dtype=torch.float64)
    assert torch.equal(patchify(images, (3, 2)), expected)


def order_of(seed, batch, patches):
    """The permutation of every image that this seed draws; the first ones are visible."""
    torch.manual_seed(seed)
    return torch.rand(batch, patches).argsort(1)


def longhand_loss(model, images, order, visible, heads=3, decoder_heads=2, prefix=1):
    """The paper's steps for one image at a time, the long way, from the model's weights."""
    w = {name.removeprefix("vit."): value for name, value in model.state_dict().items()}
    losses = []
    for image, places in zip(images, order.tolist()):
        tokens = longhand.embed(w, image[None], 8)
        shown = torch.cat([tokens[:, :prefix], *[tokens[:, [prefix + i]] for i in places[:visible]]], 1)
        x = longhand.run_blocks(w, shown, heads)[0]
        if "norm.weight" in w:
            x = longhand.layer_norm(x, w["norm.weight"], w["norm.bias"])
        x = x @ w["to_decoder.weight"].T + w["to_decoder.bias"]
        canvas = [w["mask_token"][0, 0]] * len(places)
        for place, token in zip(places, x[0, prefix:]):
            canvas[place] = token
        x = torch.stack(canvas)[None] + w["decoder_positions"]
        x = longhand.run_blocks(w, x, decoder_heads, prefix="decoder")[0]
        x = longhand.layer_norm(x, w["decoder.2.weight"], w["decoder.2.bias"])
        y = x @ w["decoder.3.weight"].T + w["decoder.3.bias"]
        target = patches_of(image, 8, 8)
        for place in places[visible:]:
            pixels = torch.tensor(target[place], dtype=torch.float64)
            centred = pixels - pixels.mean()
            pixels = centred / ((centred**2).sum() / (len(pixels) - 1) + 1e-6).sqrt()
            losses.append(((y[0, place] - pixels) ** 2).mean())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "options, visible, prefix",
    [
        ({}, 4, 1),
        ({"mask_ratio": 0.5, "decoder_depth": 2}, 8, 1),
        ({"vit": {"class_token": False, "global_pool": "avg"}}, 4, 0),
    ],
    ids=str,
)
def test_loss_equals_the_longhand(autoencoder, options, visible, prefix):
    model = autoencoder(**options)
    assert model.visible == visible
    expected = longhand_loss(model, IMAGES, order_of(3, 3, 16), visible, prefix=prefix)
    torch.manual_seed(3)
    found = model(IMAGES)
    assert found.shape == () and abs(found.item() - expected.item()) <= 1e-10
    torch.manual_seed(3)
    assert mae_loss(model, IMAGES, torch.zeros(3), Recipe()).item() == found.item()


def test_an_order_that_is_given_is_the_one_that_would_be_drawn(autoencoder):
    """Also where the ViT draws before it: positions are dropped first, as they always were."""
    for vit in ({}, {"pos_drop_rate": 0.3}):
        model = autoencoder(vit=vit).train()
        torch.manual_seed(3)
        expected = model(IMAGES)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        model.vit._pos_embed(model.vit.patch_embed(IMAGES))
        order = torch.rand(3, 16).argsort(1)
        assert torch.equal(torch.get_rng_state(), after), "nothing else is drawn"
        torch.manual_seed(3)
        assert torch.equal(model(IMAGES, order), expected)


@pytest.mark.parametrize("prefix, vit", [(1, {}), (3, {"reg_tokens": 2}), (1, {"pre_norm": True})])
def test_encoding_is_walked(autoencoder, prefix, vit):
    """Every layer's map among the visible, and what the ViT's own blocks give for them."""
    model, order = autoencoder(vit=vit), order_of(3, 3, 16)
    given = []
    model.vit.blocks.register_forward_hook(lambda module, inputs, output: given.append((inputs[0], output)))
    loss = model(IMAGES, order)
    found = walk_visible(model.vit, IMAGES, order[:, : model.visible])
    (tokens, expected), _ = given  # a walk runs the blocks, too
    assert found.logits is None and found.tokens.shape == (3, prefix + 4, 24)
    assert (found.tokens - expected).abs().max() <= 1e-12
    assert (model.reconstruction(found.tokens, IMAGES, order) - loss).abs() <= 1e-12
    _, written = longhand.run_blocks(model.vit.state_dict(), tokens, 3)
    for seen, p in zip(found.layers, [layer["map"] for layer in written], strict=True):
        assert (seen.map - p).abs().max() <= 1e-12 and seen.map.shape == (3, 3, prefix + 4, prefix + 4)


class FourCannotBeDecoded:
    def __init__(self, others):
        self.loader = others.loader

    def __len__(self):
        return 64


def test_what_is_left_unpainted(autoencoder, glyphs64):
    """The mean over all images of the loss on places that do not change, whatever else was drawn."""
    model = autoencoder().float().train()
    order = torch.rand(64, 16, generator=torch.Generator().manual_seed(0)).argsort(1)
    images, _ = glyphs64.take(range(64))
    with torch.no_grad():
        losses = [model(images[i : i + 1], order[i : i + 1]).item() for i in range(64)]
    torch.manual_seed(8)
    found = unpainted(model, glyphs64)
    assert found == pytest.approx(sum(losses) / 64, rel=1e-5) and model.training
    torch.manual_seed(9)
    before = torch.get_rng_state()
    assert unpainted(model, glyphs64) == found and torch.equal(torch.get_rng_state(), before)
    some = glyphs64.select(range(60))
    assert unpainted(model, FourCannotBeDecoded(some)) == unpainted(model, some)


def test_checkpointing_changes_no_gradient(small_vit):
    gradients, order = [], None
    for checkpointing in (False, True):
        model = randomise(MaskedAutoencoder(small_vit(num_classes=0)), 1).double()
        model.set_grad_checkpointing(checkpointing)
        order = model.draw_order(IMAGES) if order is None else order
        model(IMAGES, order).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert model.vit.grad_checkpointing and all(map(torch.equal, *gradients))
