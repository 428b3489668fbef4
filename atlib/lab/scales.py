"""Where the central experiment is run: the built-in world on a laptop, CIFAR-10 and PACS on a patient CPU,
CIFAR-10 on a GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer

from atlib.data import glyphs
from atlib.data.catalogue import DOMAINS, load_pacs
from atlib.data.images import Images, crop_and_flip, draw, glyph_images, load
from atlib.train import pretrain
from atlib.train import recipe as recipes
from atlib.train.loop import train
from atlib.train.objectives import Loss
from atlib.train.recipe import Recipe
from atlib.vit import Architecture

# A teacher, its architecture, and the history of its training.
Made = tuple[VisionTransformer, Architecture, list[dict]]


@dataclass(frozen=True)
class Schooling:
    """One way to make a teacher.

    name: of the teacher, in file names. outputs, images, loss: the pre-text task (how many numbers the model
    gives, images with their targets, what it is trained on). world: the distribution of the images. model:
    changes to the "glyphs" ViT's constructor arguments. changes: to the recipe.
    """

    name: str
    outputs: int = pretrain.RETRIEVAL_OUTPUTS
    images: Callable[[glyphs.Glyphs], Images] = pretrain.retrieval_images
    loss: Loss = pretrain.retrieval_loss
    world: glyphs.World = glyphs.World()
    model: Mapping = field(default_factory=dict)
    changes: Mapping = field(default_factory=dict)

    def make(self, recipe: Recipe, unlabelled: int, seed: int, progress: str | None = None) -> Made:
        """Pre-train a teacher on `unlabelled` images. `seed` decides all."""
        torch.manual_seed(seed)
        architecture = Architecture("glyphs", {**self.model, "num_classes": self.outputs})
        model = architecture.build()
        images = self.images(glyphs.generate("unlabelled", unlabelled, seed, self.world))
        history = train(
            model, images, replace(recipe, **self.changes), loss=self.loss, seed=seed, progress=progress
        )
        return model, architecture, history


RETRIEVAL = Schooling("retrieval")


def colour(name: str, **options) -> Schooling:
    """The other pre-text: name the hue of the marked glyph. It needs the same routing; its features say
    nothing about shapes."""
    return Schooling(name, len(glyphs.HUES), pretrain.colour_images, pretrain.colour_loss, **options)


METHODS = ("scratch", "fine-tune", "copy", "copy-q", "copy-untrained", "copy-fine-tuned", "distill")
TUNING_SEED = 100  # its teacher, labels and initialisation appear in no reported figure


def grid(**choices: Sequence) -> tuple[dict, ...]:
    """All combinations of recipe values, as dicts: grid(lr=[1, 2], clip=[3]) is ({lr: 1, clip: 3}, {lr: 2,
    clip: 3})."""
    return tuple(dict(zip(choices, values)) for values in product(*choices.values()))


@dataclass(frozen=True)
class Scale:
    """One scale: model, budget, and for every method the same number of recipes to choose from on the
    validation split.

    Everything random follows from one seed: the teacher's and student's initialisation, the unlabelled and
    labelled images, the order. Validation and test images are the same for all seeds, and no image is in
    both.
    """

    name: str
    student: Architecture
    methods: tuple[str, ...]
    pretraining: Recipe
    training: Recipe
    tuning: Mapping[str, Sequence[dict]]
    labels: int | None
    # of the central experiment's steps, for the runs of a study: it has many, and all share one budget
    study_share: float = 0.4

    def elsewhere(self, split: str) -> dict[str, Images]:
        """Further sets that a run is evaluated on, by name: none unless a scale has them."""
        return {}

    def recipe(self, changes: Mapping) -> Recipe:
        """The training recipe with a trial's changes."""
        return replace(self.training, **changes)


@dataclass(frozen=True)
class GlyphScale(Scale):
    """The built-in world: the teacher learns retrieval on unlabelled images, students learn shapes from few
    labels."""

    unlabelled: int = 40_000

    def make_teacher(self, seed: int, progress: str | None = None) -> Made:
        """Pre-train a teacher."""
        return RETRIEVAL.make(self.pretraining, self.unlabelled, seed, progress)

    def labelled(self, seed: int, number: int | None = None) -> Images:
        """The students' training images, or another number of them."""
        return glyph_images(glyphs.generate("train", number or self.labels, seed))

    def unlabelled_images(self, seed: int) -> Images:
        """The first 8,000 of the teacher's images, for what is estimated from its maps; their labels are not
        for use."""
        return glyph_images(glyphs.generate("unlabelled", min(8000, self.unlabelled), seed))

    def held_out(self, split: str) -> Images:
        """ "validation" (2,000 images) or "test" (4,000)."""
        return glyph_images(glyphs.generate(split, 2000 if split == "validation" else 4000))


@dataclass(frozen=True)
class CifarScale(Scale):
    """CIFAR-10: the teacher is a masked auto-encoder of the training images, students learn from all or some
    labels."""

    path: Path | None = None
    unlabelled: int | None = None
    test_size: int | None = None

    def make_teacher(self, seed: int, progress: str | None = None) -> Made:
        """Pre-train a teacher."""
        torch.manual_seed(seed)
        model = pretrain.MaskedAutoencoder(self.student.build(), decoder_width=96)
        images = load("cifar10", self.path, split="train", size=self.unlabelled, seed=seed).with_augment(
            crop_and_flip()
        )
        history = train(model, images, self.pretraining, loss=pretrain.mae_loss, seed=seed, progress=progress)
        return model.vit, self.student, history

    def unlabelled_images(self, seed: int) -> Images:
        """8,000 of the teacher's images as they are, for what is estimated from its maps; their labels are
        not for use."""
        return load("cifar10", self.path, split="train", size=8000, seed=seed)

    def labelled(self, seed: int, number: int | None = None) -> Images:
        """The students' training images, or another number of them, cropped and flipped at random."""
        return load("cifar10", self.path, split="train", size=number or self.labels, seed=seed).with_augment(
            crop_and_flip()
        )

    def held_out(self, split: str) -> Images:
        """ "validation" (a tenth of the published training split) or "test"."""
        return load("cifar10", self.path, split=split, size=self.test_size if split == "test" else None)


@dataclass(frozen=True)
class PacsScale(Scale):
    """PACS: students learn seven classes from photographs and are tested on photographs, paintings, cartoons
    and sketches.

    The teacher has learned CIFAR-10 with its labels: PACS has too few photographs to pre-train on, and a
    masked auto-encoder that two CPU cores can train has maps that are nearly uniform. `path` is a folder that
    holds `cifar10` and `pacs` (None: both from the hub).
    """

    path: Path | None = None
    unlabelled: int | None = None
    image_size: int = 32

    def make_teacher(self, seed: int, progress: str | None = None) -> Made:
        """Pre-train a teacher."""
        torch.manual_seed(seed)
        architecture = self.student._replace(overrides={**self.student.overrides, "num_classes": 10})
        model = architecture.build()
        images = load(
            "cifar10",
            self._folder("cifar10"),
            split="train",
            size=self.unlabelled,
            seed=seed,
            image_size=self.image_size,
        )
        history = train(
            model, images.with_augment(crop_and_flip()), self.pretraining, seed=seed, progress=progress
        )
        return model, architecture, history

    def labelled(self, seed: int, number: int | None = None) -> Images:
        """The students' training images: all photographs for every seed (or a number of them that the seed
        draws), cropped and flipped at random."""
        photographs = self._photographs("train")
        return photographs.select(draw(len(photographs), number, seed, "PACS")).with_augment(
            crop_and_flip(self.image_size // 8)
        )

    def unlabelled_images(self, seed: int) -> Images:
        """The photographs as they are, for what is estimated from the teacher's maps; their labels are not
        for use."""
        return self._photographs("train")

    def held_out(self, split: str) -> Images:
        """Photographs: "validation" or "test"."""
        return self._photographs(split)

    def elsewhere(self, split: str) -> dict[str, Images]:
        """With "test", everything in the other three domains: nothing of them is trained or tuned on."""
        if split != "test":
            return {}
        return {
            domain: load_pacs([domain], self._folder("pacs"), split="all", image_size=self.image_size)
            for domain in DOMAINS[1:]
        }

    def _photographs(self, split: str) -> Images:
        return load_pacs(["photo"], self._folder("pacs"), split=split, image_size=self.image_size)

    def _folder(self, name: str) -> Path | None:
        return None if self.path is None else self.path / name


SCALES = ("built-in", "cifar10-cpu", "pacs", "cifar10")  # the names, without what they stand for
_LR = (1e-3, 2e-3, 4e-3)
_DECAY = (0.05, 0.3)


@lru_cache
def scales(data: Path | None = None) -> dict[str, GlyphScale | CifarScale | PacsScale]:
    """All scales by name; `data` is a folder with CIFAR-10's parquet files, for "pacs" one that holds
    `cifar10` and `pacs` (None: from the hub)."""
    free = grid(lr=_LR, weight_decay=_DECAY)
    tuning = {
        **dict.fromkeys(("scratch", "copy", "copy-q", "copy-untrained", "copy-fine-tuned"), free),
        "fine-tune": grid(lr=(5e-4, 1e-3, 2e-3), layer_decay=(None, 0.75)),
        "distill": grid(lr=(1e-3, 2e-3), transfer_weight=(1.0, 3.0, 10.0)),
    }
    # 16 patches + class token, at the resolution of CIFAR-10: what a CPU can train.
    small, photographs = (Architecture("glyphs", {"num_classes": classes}) for classes in (10, 7))
    # Its copy Q is in the study "family", with the other parts.
    built_in = tuple(method for method in METHODS if method != "copy-q")
    return {
        "built-in": GlyphScale(
            "built-in",
            Architecture("glyphs"),
            built_in,
            recipes.RETRIEVAL,
            recipes.STUDENT,
            tuning,
            labels=1000,
        ),
        # For 2 CPU cores: about 11 passes of masked auto-encoding over CIFAR-10, 15 over 5,000 labelled
        # images. Far too little for a masked auto-encoder (arXiv 2111.06377 trains 800 passes and more), so
        # it shows what such a teacher is worth, not what the methods are. One recipe for all, fixed in
        # advance.
        "cifar10-cpu": CifarScale(
            "cifar10-cpu",
            small,
            METHODS,
            replace(recipes.MAE, steps=4000),
            replace(recipes.STUDENT, steps=600),
            {method: ({},) for method in METHODS},
            labels=5000,
            study_share=1.0,
            path=data,
        ),
        # For 2 CPU cores: about 2 passes of pre-training over CIFAR-10, 33 over 1,169 photographs.
        "pacs": PacsScale(
            "pacs",
            photographs,
            METHODS,
            replace(recipes.STUDENT, steps=800),
            replace(recipes.STUDENT, steps=300),
            {method: grid(lr=_LR) for method in METHODS},
            labels=None,
            study_share=1.0,
            path=data,
        ),
        # For one GPU: about 360 passes of pre-training and 90 of training over 45,000 images.
        "cifar10": CifarScale(
            "cifar10",
            Architecture("cifar"),
            METHODS,
            replace(recipes.MAE, steps=32_000, batch_size=512, mixed_precision="bf16"),
            replace(recipes.STUDENT, steps=8000, batch_size=512, mixed_precision="bf16"),
            tuning,
            labels=None,
            path=data,
        ),
    }
