"""How teachers of the built-in world are made: a pre-text task, the world they see, and what they are built of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from timm.models.vision_transformer import VisionTransformer

from atlib import glyphs, pretrain
from atlib.checkpoint import Architecture
from atlib.data import Images
from atlib.recipes import Recipe
from atlib.train import Loss, train


@dataclass(frozen=True)
class Schooling:
    """One way to make a teacher.

    name: of the teacher, in file names. outputs, images, loss: the pre-text task (how many numbers the model gives, images with their targets, what it
    is trained on). world: the distribution of the images. model: changes to the "glyphs" ViT's constructor arguments. changes: to the recipe.
    """

    name: str
    outputs: int = pretrain.RETRIEVAL_OUTPUTS
    images: Callable[[glyphs.Glyphs], Images] = pretrain.retrieval_images
    loss: Loss = pretrain.retrieval_loss
    world: glyphs.World = glyphs.World()
    model: Mapping = field(default_factory=dict)
    changes: Mapping = field(default_factory=dict)

    def make(self, recipe: Recipe, unlabelled: int, seed: int, progress: str | None = None) -> tuple[VisionTransformer, Architecture, list[dict]]:
        """Pre-train a teacher on `unlabelled` images: the ViT, its architecture, and the history of its training. `seed` decides all."""
        torch.manual_seed(seed)
        architecture = Architecture("glyphs", {**self.model, "num_classes": self.outputs})
        model = architecture.build()
        images = self.images(glyphs.generate("unlabelled", unlabelled, seed, self.world))
        history = train(model, images, replace(recipe, **self.changes), loss=self.loss, seed=seed, progress=progress)
        return model, architecture, history


RETRIEVAL = Schooling("retrieval")


def colour(name: str, **options) -> Schooling:
    """The other pre-text: name the hue of the marked glyph. It needs the same routing; its features say nothing about shapes."""
    return Schooling(name, len(glyphs.HUES), pretrain.colour_images, pretrain.colour_loss, **options)
