"""The pre-texts of the generated worlds, which make teachers without shape labels: retrieval, alone and with
the place of what is retrieved, and colour; and how much of such a task a model has not learned."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atbook.worlds import glyphs
from atlib._util import in_eval_mode
from atlib.data import Images
from atlib.evaluate import predict
from atlib.loading import EvaluationData
from atlib.mae import MaskedAutoencoder
from atlib.recipe import Recipe
from atlib.vit import create_vit

RETRIEVAL = Recipe(steps=2000, lr=2e-3, label_smoothing=0.0)  # a regression, so there is nothing to smooth
RETRIEVAL_OUTPUTS = 3 * glyphs.CELL * glyphs.CELL  # the pixels of one cell
# Of the cross-entropy of the place, beside the squared error of the pixels, which is far smaller.
PLACE_WEIGHT = 0.02


def retrieval_images(drawn: glyphs.Glyphs) -> Images:
    """The retrieval pre-text: the target of an image is its marked cell without noise, flattened: (192,),
    levels in [0, 1].

    No shape label is used. To solve it the class token must fetch the content of the marked cell, whatever is
    in it.
    """
    clean = torch.from_numpy(drawn.clean).flatten(1).float() / 255
    return Images(torch.from_numpy(drawn.images), clean)


def retrieval_loss(model: nn.Module, images: Tensor, clean: Tensor, recipe: Recipe) -> Tensor:
    """Mean squared error between the model's 192 outputs and the clean pixels of the marked cell."""
    return nn.functional.mse_loss(model(images), clean)


def placed_images(drawn: glyphs.Glyphs) -> Images:
    """Retrieval and its place: the target of an image is its named cell without noise (192,), followed by
    which of the 16 cells that is, as 0 and 1 (16,).

    Where the mark lies beside its glyph (`glyphs.World(pointer=1)`), a model must find the mark and then look
    elsewhere. From the pixels alone it learned no such thing in 5,000 steps; asked for the place too, it
    does.
    """
    images = retrieval_images(drawn)
    place = nn.functional.one_hot(torch.from_numpy(drawn.cell).long(), glyphs.GRID**2)
    return Images(images.pixels, torch.cat([images.targets, place.float()], 1))


def placed_loss(model: nn.Module, images: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    """The squared error of the pixels, and `PLACE_WEIGHT` times the cross-entropy of the place."""
    pixels, place = model(images).split([RETRIEVAL_OUTPUTS, glyphs.GRID**2], 1)
    clean, named = targets.split([RETRIEVAL_OUTPUTS, glyphs.GRID**2], 1)
    return nn.functional.mse_loss(pixels, clean) + PLACE_WEIGHT * nn.functional.cross_entropy(place, named)


def retrieval_model() -> VisionTransformer:
    """A newly initialised "glyphs" ViT whose head regresses the pixels of one cell; training makes it a
    teacher."""
    return create_vit("glyphs", num_classes=RETRIEVAL_OUTPUTS)


def colour_images(drawn: glyphs.Glyphs) -> Images:
    """The colour pre-text: the target of an image is the hue of its marked glyph, a class index of
    `glyphs.HUES`.

    The class token must fetch from the same place as in retrieval, but what it needs from there says nothing
    about the shape.
    """
    return Images(torch.from_numpy(drawn.images), torch.from_numpy(drawn.hue), glyphs.HUES)


def colour_loss(model: nn.Module, images: Tensor, hues: Tensor, recipe: Recipe) -> Tensor:
    """Cross-entropy of the model's hue logits, with the label smoothing of the recipe."""
    return nn.functional.cross_entropy(model(images), hues, label_smoothing=recipe.label_smoothing)


def unlearned(model: nn.Module, images: EvaluationData) -> float:
    """The share of its pre-text that a model has not learned: the share of wrong answers where targets are
    classes, and else the share of the targets' variance, averaged over pixels, that its outputs do not
    explain."""
    outputs, targets = predict(model, images), images.targets
    if not targets.is_floating_point():
        return (outputs.argmax(1) != targets).double().mean().item()
    return _unexplained(outputs, targets)


def unlearned_pixels(model: nn.Module, images: EvaluationData) -> float:
    """`unlearned` of retrieval with its place, of the pixels alone."""
    return _unexplained(predict(model, images)[:, :RETRIEVAL_OUTPUTS], images.targets[:, :RETRIEVAL_OUTPUTS])


def unpainted(model: MaskedAutoencoder, images: EvaluationData) -> float:
    """The share of the hidden pixels' variance that an auto-encoder has not learned to paint, with the same
    patches hidden at every call."""
    device, total, count = model.mask_token.device, 0.0, 0
    draws, P = torch.Generator().manual_seed(0), model.decoder_positions.shape[1]
    with torch.no_grad(), in_eval_mode(model):
        for batch, _ in images.loader(500):
            order = torch.rand(len(batch), P, generator=draws).argsort(1)
            total += len(batch) * model(batch.to(device), order.to(device)).item()
            count += len(batch)  # not all of `images`, where some cannot be decoded
    return total / count


def _unexplained(outputs: Tensor, targets: Tensor) -> float:
    return ((outputs - targets).square().mean() / targets.var(0, correction=0).mean()).item()
