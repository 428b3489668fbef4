"""The pre-texts of the generated worlds, which make teachers without shape labels: retrieval and colour."""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atbook.worlds import glyphs
from atlib.data.images import Images
from atlib.data.sampler import EvaluationData
from atlib.train.evaluate import predict
from atlib.train.recipe import Recipe
from atlib.vit import create_vit

RETRIEVAL = Recipe(steps=2000, lr=2e-3, label_smoothing=0.0)  # a regression, so there is nothing to smooth
RETRIEVAL_OUTPUTS = 3 * glyphs.CELL * glyphs.CELL  # the pixels of one cell


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
    return ((outputs - targets).square().mean() / targets.var(0, correction=0).mean()).item()
