"""Where experiments are run: the built-in worlds on a laptop, CIFAR-10 and PACS on a patient CPU, CIFAR-10 on
a GPU; and scenes, where objects are to be found."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from atbook.lab.other_images import other_of_class
from atbook.lab.pacs import DOMAINS, load_pacs
from atbook.lab.tuning import ABOVE_GUESSING, Ladder, Range
from atbook.worlds import glyph_images, glyphs, mosaics, phrases, pretext
from atbook.worlds.phrases import generate_phrases, phrase_sentences
from atbook.worlds.scenes import SceneWorld, generate_scenes, scene_images, scene_objects
from atfamily.contrast import MomentumPair
from atfamily.detection.objects import ObjectImages
from atfamily.sentences import Sentences
from atfamily.seq2seq import EncoderDecoder
from atlib import mae
from atlib._util import require_known
from atlib.analysis import describe_layers
from atlib.data import Images, crop_and_flip, pair
from atlib.loading import seed_for
from atlib.objectives import Loss, student_loss
from atlib.recipe import Recipe
from atlib.train import train
from atlib.vit import Architecture
from atrun.checkpoint_manager import CheckpointManager
from atrun.data.catalogue import draw
from atrun.data.photos import load

# A teacher, its architecture, and the history of its training.
Made = tuple[VisionTransformer, Architecture, list[dict]]
PHOTO_TWINS = ("same class", "other class")  # what a teacher may see in place of a photograph
BLANK = "blank"  # the teacher sees the image, and the student one without anything in it
GREY = 128  # of all pixels of that one


def twin_method(twin: str) -> str:
    """The name of Copy whose teacher sees a twin of the student's image."""
    return f"copy-{twin.replace(' ', '-')}-twin"


class TeacherFailed(RuntimeError):
    """A teacher has not learned its own task, so nothing can be asked of its students."""


def _itself(vit: VisionTransformer, central: Callable[[], VisionTransformer]) -> nn.Module:
    return vit


def _glyphs(split: str, size: int, seed: int, world: glyphs.World) -> glyphs.Glyphs:
    return glyphs.generate(split, size, seed, world)


def _no_teacher() -> VisionTransformer:
    raise ValueError("this schooling learns from the central teacher of its seed: pass central=")


@dataclass(frozen=True)
class Schooling:
    """One way to make a teacher, or any other model that is pre-trained without labels."""

    # Of the teacher, in file names.
    name: str
    # The pre-text task: how many numbers the model gives, what was drawn -> images with their targets, and
    # what it is trained on.
    outputs: int = pretext.RETRIEVAL_OUTPUTS
    images: Callable[[Any], Images] = pretext.retrieval_images
    loss: Loss = pretext.retrieval_loss
    # The distribution of images (None: that of the scale it is made at, `within`), and what draws from it:
    # (split, size, seed, world) -> what `images` takes.
    world: glyphs.World | SceneWorld | None = glyphs.World()
    draw: Callable[[str, int, int, Any], Any] = _glyphs
    # Number of validation images.
    validation: int = 2000
    # Of the ViT, and changes to its constructor arguments.
    preset: str = "glyphs"
    model: Mapping = field(default_factory=dict)
    # To the recipe.
    changes: Mapping = field(default_factory=dict)
    # The largest share of the pre-text that a teacher may have left unlearned (`unlearned`) on validation
    # images; one that is above it is trained again for twice the steps.
    gate: float = math.inf
    # (ViT, () -> the central teacher of its seed) -> what is trained, a module with the ViT in it.
    around: Callable[[VisionTransformer, Callable[[], VisionTransformer]], nn.Module] = _itself
    # Measures that module on validation images.
    unlearned: Callable[[nn.Module, Images], float] = pretext.unlearned
    # Other first weights than the central teacher's, for a model that learns from it.
    again: int = 0
    # Whether how even its maps of validation images are (`evenness`) is measured too.
    measures_maps: bool = False

    def within(self, world: glyphs.World | SceneWorld) -> "Schooling":
        """The same in a scale's world, unless it has one of its own."""
        return self if self.world is not None else replace(self, world=world)

    def make(
        self,
        recipe: Recipe,
        unlabelled: int,
        seed: int,
        progress: str | None = None,
        central: Callable[[], VisionTransformer] = _no_teacher,
    ) -> Made:
        """Pre-train a teacher on `unlabelled` images. `seed` decides all. What it has left unlearned is in
        the last entry of its history, beside the evenness of its maps where that is measured. central: gives
        the central teacher of this seed, for a schooling that needs it. Raises `TeacherFailed` when more is
        unlearned than the gate lets pass, after eight times the steps."""
        if self.world is None:
            raise ValueError(f"the schooling {self.name!r} has no world: say which with within(world)")
        architecture = Architecture(self.preset, {**self.model, "num_classes": self.outputs})
        images = self.images(self.draw("unlabelled", unlabelled, seed, self.world))
        held_out = self.images(self.draw("validation", self.validation, 0, self.world))
        recipe = replace(recipe, **self.changes)
        for longer in (1, 2, 4, 8):
            torch.manual_seed(seed_for(seed, "teacher", self.again))
            model = architecture.build()
            trained = self.around(model, central)
            history = train(
                trained,
                images.to(place_of_training()),
                replace(recipe, steps=longer * recipe.steps),
                loss=self.loss,
                seed=seed_for(seed, "teacher order"),
                evaluate=lambda trained: {"unlearned": self.unlearned(trained, held_out)},
                progress=progress,
            )
            if history[-1]["unlearned"] <= self.gate:
                made = trained.result if isinstance(trained, MomentumPair) else model
                if self.measures_maps:
                    history[-1]["evenness"] = evenness(made, held_out)
                return made, architecture, history
        raise TeacherFailed(
            f"the teacher {self.name} of seed {seed} has left {history[-1]['unlearned']:.2f} of its own task"
            f" unlearned after {history[-1]['step']} steps, the gate is {self.gate}: no student was trained;"
            " its scale needs a longer pre-training (`atbook.lab.scales`)"
        )


RETRIEVAL = Schooling("retrieval")
# What it does with scenes in place of glyphs.
_OF_SCENES = {"images": scene_images, "world": SceneWorld(), "draw": generate_scenes, "preset": "scenes"}


def painter(vit: VisionTransformer, central: Callable[[], VisionTransformer]) -> mae.MaskedAutoencoder:
    """An auto-encoder that sees half of the patches, not a quarter: an object or a mark covers few."""
    return mae.MaskedAutoencoder(vit, mask_ratio=0.5)


# Scenes, painted: a hidden patch can be foretold from its object's others. Half of the patches hold noise
# alone, so that whoever knew every object would still leave 0.63 unpainted.
PAINTED_SCENES = Schooling(
    "mae", 0, loss=mae.mae_loss, around=painter, unlearned=pretext.unpainted, validation=300, **_OF_SCENES
)
# Scenes with one label each, that of the largest object: what an image classifier is pre-trained on.
LABELLED_SCENES = Schooling(
    "supervised",
    len(glyphs.SHAPES),
    loss=student_loss,
    changes={"betas": Recipe().betas, "label_smoothing": Recipe().label_smoothing},
    validation=300,
    **_OF_SCENES,
)
GATE = 0.2  # of the variance of the pixels to retrieve, for the teachers of the two worlds
# The other pre-text: name the hue of the marked glyph. It needs the same routing; its features say nothing
# about shapes.
COLOUR = Schooling("colour", len(glyphs.HUES), pretext.colour_images, pretext.colour_loss)


class Worth(NamedTuple):
    """What the tuning seed's teacher must be worth before students are compared. Nothing that Copy or Distill
    brings is part of it.

    gain: the least accuracy of fine-tune less that of scratch, each the best of its trials on validation
    images. evenness: the largest that its maps may have, as the function `evenness` measures it.
    """

    gain: float
    evenness: float


CENTRAL_METHODS = ("scratch", "fine-tune", "copy", "copy-q", "copy-untrained", "copy-fine-tuned", "distill")
# Of the two worlds' tables: scratch from three first weights, and what the teacher saw in place of the image.
WORLD_METHODS = (
    *CENTRAL_METHODS,
    "scratch-2",
    "scratch-3",
    "copy-k",
    "copy-v",
    *map(twin_method, glyphs.TWINS),
    "distill-long",
)
# Of photographs, whose scenes cannot be drawn again.
PHOTO_METHODS = (*CENTRAL_METHODS, "scratch-2", "scratch-3", *map(twin_method, (*PHOTO_TWINS, BLANK)))
TUNING_SEED = 100  # its teacher, labels and initialisation appear in no reported figure


@dataclass(frozen=True)
class Scale:
    """One scale: model, budget, and for every method the same recipes to choose from on the validation split.

    Everything random follows from one seed, each part from a stream of its own (`atlib.loading.ROLES`): the
    teacher's and student's initialisation, the unlabelled and labelled images, the order. Validation and test
    images are the same for all seeds, and no image is in both. `twin`: with it, each image comes with another
    one for the teacher to see (`atlib.data.pair`).
    """

    name: str
    student: Architecture
    # Of the central experiment, in the order of its table; none where students are no classifiers.
    methods: tuple[str, ...]
    # The teacher's recipe (None where it is not trained here), and the students' before a trial's changes.
    pretraining: Recipe | None
    training: Recipe
    # Of each method: changes to choose from.
    tuning: Mapping[str, Sequence[dict]]
    # Number of the students' training images; None for all.
    labels: int | None
    # Of its teachers; None: whatever they are worth, students are compared.
    worth: Worth | None = None
    # Steps between checkpoints of a teacher's pre-training; None: it is short, and begins anew.
    keep_every: int | None = None
    # Whether its teachers are pre-trained here, one a seed; else a study brings its own.
    makes_teachers: bool = True
    # Number of a teacher's training images; None for all, or for not known.
    unlabelled: int | None = None
    # Numbers of validation and test images; None for all.
    held_out_sizes: Mapping[str, int | None] = field(
        default_factory=lambda: {"validation": 2000, "test": 4000}
    )
    # Number of the teacher's images that is taken for what is estimated from its maps.
    few: int = 8000
    # A folder with the images (None: from the hub); for "pacs", "mosaics" and published teachers' scales one
    # that holds `cifar10` and `pacs`.
    path: Path | None = None

    def make_teacher(self, seed: int, progress: str | None = None) -> Made:
        """Pre-train a teacher."""
        return self.schooling().make(self.pretraining, self.unlabelled, seed, progress)

    def schooling(self) -> Schooling:
        """How its teachers are made."""
        raise NotImplementedError

    def labelled(self, seed: int, number: int | None = None, twin: str | None = None) -> Any:
        """The students' training images, or another number of them."""
        return self._images("train", number or self.labels, seed, twin)

    def unlabelled_images(self, seed: int) -> Images:
        """The first `few` of the teacher's images, for what is estimated from its maps; their labels are not
        for use."""
        return self._images("unlabelled", min(self.few, self.unlabelled or self.few), seed)

    def held_out(self, split: str, twin: str | None = None) -> Any:
        """ "validation" or "test": the same images for all seeds."""
        require_known("split", split, self.held_out_sizes)
        return self._images(split, self.held_out_sizes[split], 0, twin)

    def elsewhere(self, split: str, twin: str | None = None) -> dict[str, Images]:
        """Further sets that a run is evaluated on, by name: none unless a scale has them."""
        return {}

    def recipe(self, changes: Mapping) -> Recipe:
        """The training recipe with a trial's changes."""
        return replace(self.training, **changes)

    def _images(self, split: str, size: int | None, seed: int, twin: str | None = None) -> Any:
        """The first images of a split ("train", "unlabelled" or held out), with what the teacher sees."""
        images = self._drawn(split, size, seed)
        if twin is None:
            return images
        return with_blanks(images) if twin == BLANK else pair(images, self._drawn(split, size, seed, twin))

    def _drawn(self, split: str, size: int | None, seed: int, twin: str | None = None) -> Any:
        """Images of a world, or their twins."""
        raise NotImplementedError


@dataclass(frozen=True)
class GlyphScale(Scale):
    """A built-in world: the teacher learns retrieval on unlabelled images, students learn shapes from few
    labels. Twins are those of `atbook.worlds.glyphs.TWINS`, and `BLANK`."""

    unlabelled: int = 40_000
    world: glyphs.World = glyphs.World()
    gate: float = math.inf

    def schooling(self) -> Schooling:
        return replace(RETRIEVAL, world=self.world, gate=self.gate)

    def _drawn(self, split: str, size: int | None, seed: int, twin: str | None = None) -> Images:
        return glyph_images(glyphs.generate(split, size, seed, self.world, twin))


@dataclass(frozen=True)
class CifarScale(Scale):
    """CIFAR-10: the teacher is a masked auto-encoder of the training images, students learn from all or some
    labels, of images that are cropped and flipped at random. Twins are `PHOTO_TWINS` and `BLANK`."""

    held_out_sizes: Mapping[str, int | None] = field(
        default_factory=lambda: {"validation": None, "test": None}
    )

    def make_teacher(
        self, seed: int, progress: str | None = None, keeper: CheckpointManager | None = None
    ) -> Made:
        """Pre-train a teacher. How even its maps of validation images are is in the last entry of its
        history. keeper: keeps it along the way, and goes on with it."""
        torch.manual_seed(seed_for(seed, "teacher"))
        model = mae.MaskedAutoencoder(self.student.build(), decoder_width=96)
        history = train(
            model,
            self._images("unlabelled", self.unlabelled, seed)
            .with_augment(crop_and_flip())
            .to(place_of_training()),
            self.pretraining,
            loss=mae.mae_loss,
            seed=seed_for(seed, "teacher order"),
            evaluate=lambda model: {"evenness": evenness(model.vit, self.held_out("validation"))},
            progress=progress,
            keeper=keeper,
        )
        return model.vit, self.student, history

    def _images(self, split: str, size: int | None, seed: int, twin: str | None = None) -> Images:
        role = {"train": "labels", "unlabelled": "unlabelled"}.get(split)
        of, drawn_by = ("train", seed_for(seed, role)) if role else (split, 0)
        images = with_twins(load("cifar10", self.path, split=of, size=size, seed=drawn_by), twin, seed)
        return images.with_augment(crop_and_flip()) if split == "train" else images


@dataclass(frozen=True)
class PacsScale(Scale):
    """PACS: students learn seven classes from photographs, cropped and flipped at random, and are tested on
    photographs, paintings, cartoons and sketches. For every seed they learn from all photographs, or a number
    of them that the seed draws.

    The teacher has learned CIFAR-10 with its labels: PACS has too few photographs to pre-train on, and a
    masked auto-encoder that two CPU cores can train has maps that are nearly uniform. Its maps are estimated
    from PACS's photographs. Twins are `PHOTO_TWINS` and `BLANK`.
    """

    image_size: int = 32

    def make_teacher(self, seed: int, progress: str | None = None) -> Made:
        torch.manual_seed(seed_for(seed, "teacher"))
        architecture = self.student._replace(overrides={**self.student.overrides, "num_classes": 10})
        model = architecture.build()
        drawn_by = seed_for(seed, "unlabelled")
        images = _cifar10(self.path, "train", self.unlabelled, drawn_by, self.image_size)
        history = train(
            model,
            images.with_augment(crop_and_flip()).to(place_of_training()),
            self.pretraining,
            seed=seed_for(seed, "teacher order"),
            progress=progress,
        )
        return model, architecture, history

    def elsewhere(self, split: str, twin: str | None = None) -> dict[str, Images]:
        """With "test", everything in the other three domains: nothing of them is trained or tuned on."""
        domains = DOMAINS[1:] if split == "test" else ()
        return {domain: with_twins(self._of((domain,), "all"), twin, 0) for domain in domains}

    def _images(self, split: str, size: int | None, seed: int, twin: str | None = None) -> Images:
        photographs = self._of(("photo",), "train" if split == "unlabelled" else split)
        if split != "train":
            return with_twins(photographs, twin, 0)
        chosen = draw(len(photographs), size, seed_for(seed, "labels"), "PACS")
        images = with_twins(photographs.select(chosen), twin, seed)
        return images.with_augment(crop_and_flip(self.image_size // 8))

    def _of(self, domains: tuple[str, ...], split: str) -> Images:
        return _pacs(domains, self.path, split, None, 0, self.image_size)


@dataclass(frozen=True)
class PublishedScale(Scale):
    """Photographs for students of a teacher that others have trained (`atbook.lab.real`): students learn
    from some labels, drawn by the seed, and are mirrored at random. Twins are `PHOTO_TWINS` and `BLANK`."""

    # (folder, split, number of images, seed, pixels a side) -> images.
    draw: Callable[[Path | None, str, int | None, int, int], Images] = None
    # The same for what is not trained on, by name: all of it is tested on.
    far: Mapping[str, Callable[[Path | None, str, int | None, int, int], Images]] = field(
        default_factory=dict
    )
    image_size: int = 56
    # Pixels by which training images are shifted at random, too, at most; 0 for students with stored maps
    # (`atlib.MapCache`), which are of an image and of its mirror.
    padding: int = 0

    def elsewhere(self, split: str, twin: str | None = None) -> dict[str, Images]:
        """With "test", what is not trained on."""
        far = self.far if split == "test" else {}
        return {name: with_twins(self._of(draw, "all", None, 0), twin, 0) for name, draw in far.items()}

    def _images(self, split: str, size: int | None, seed: int, twin: str | None = None) -> Images:
        if split != "train":
            return with_twins(self._of(self.draw, split, size, 0), twin, 0)
        images = self._of(self.draw, split, size, seed_for(seed, "labels"))
        return with_twins(images, twin, seed).with_augment(crop_and_flip(self.padding))

    def _of(self, draw, split: str, number: int | None, seed: int) -> Images:
        images = draw(self.path, split, number, seed, self.image_size)
        return replace(images, mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)  # the teacher's


@lru_cache(maxsize=8)
def _cifar10(path: Path | None, split: str, number: int | None, seed: int, image_size: int) -> Images:
    folder = None if path is None else path / "cifar10"
    return load("cifar10", folder, split=split, size=number, seed=seed, image_size=image_size)


@lru_cache(maxsize=8)
def _pacs(
    domains: tuple[str, ...], path: Path | None, split: str, number: int | None, seed: int, image_size: int
) -> Images:
    folder = None if path is None else path / "pacs"
    return load_pacs(domains, folder, split=split, size=number, seed=seed, image_size=image_size)


@dataclass(frozen=True)
class MosaicScale(Scale):
    """Find with photographs of CIFAR-10 (`atbook.worlds.mosaics`): the teacher learns to paint the framed
    one, students learn its class from some labels. Two thirds of the training photographs are the teacher's,
    the others the students'. Twins are those of `atbook.worlds.mosaics.TWINS`, and `BLANK`."""

    unlabelled: int = 40_000
    gate: float = math.inf

    def schooling(self) -> Schooling:
        return Schooling(
            "mosaics",
            3 * mosaics.CELL**2,
            mosaics.mosaic_retrieval,
            draw=lambda split, size, seed, world: self.drawn(split, size, seed),
            model={"img_size": mosaics.SIDE * mosaics.CELL, "patch_size": mosaics.CELL},
            gate=self.gate,
        )

    def drawn(self, split: str, size: int, seed: int, twin: str | None = None) -> mosaics.Mosaics:
        """Mosaics of a split, with the choices behind them."""
        return mosaics.draw_mosaics(self._photographs(split), size, seed_for(seed, "labels"), twin)

    def _drawn(self, split: str, size: int | None, seed: int, twin: str | None = None) -> Images:
        return mosaics.mosaic_images(self.drawn(split, size, seed, twin), self._photographs(split).classes)

    def _photographs(self, split: str) -> Images:
        """What a split's mosaics are made of."""
        held_out = split in self.held_out_sizes
        photographs = _cifar10(self.path, split if held_out else "train", None, 0, mosaics.CELL)
        if held_out:
            return photographs
        of_teacher = 2 * len(photographs) // 3
        places = range(of_teacher) if split == "unlabelled" else range(of_teacher, len(photographs))
        return photographs.select(places)


@dataclass(frozen=True)
class SceneScale(Scale):
    """Scenes: the teacher is a masked auto-encoder of unlabelled ones, students learn from labelled ones what
    is where. No student classifies images, so `methods` are none; a study of this scale says what its
    variants choose from. Raises `ValueError` for a twin, which scenes do not have."""

    unlabelled: int = 8000
    few: int = 1000
    world: SceneWorld = SceneWorld()
    held_out_sizes: Mapping[str, int | None] = field(default_factory=lambda: {"validation": 300, "test": 500})

    def schooling(self) -> Schooling:
        return replace(PAINTED_SCENES, world=self.world)

    def _images(
        self, split: str, size: int | None, seed: int, twin: str | None = None
    ) -> Images | ObjectImages:
        if twin is not None:
            raise ValueError(f"scenes have no twins, got twin={twin!r}: leave it out")
        images_of = scene_images if split == "unlabelled" else scene_objects
        return images_of(generate_scenes(split, size, seed, self.world))


class Translator(NamedTuple):
    """What builds a translator, as an `Architecture` builds a ViT; with 0.3 M parameters."""

    name: str = "phrases"
    overrides: Mapping = {}

    def build(self) -> EncoderDecoder:
        words = {"words_in": phrases.SOURCE_WORDS, "words_out": phrases.TARGET_WORDS}
        sizes = {"width": 64, "depth": 2, "heads": 4, "hidden": 256, "longest": phrases.MOST_SOURCE}
        return EncoderDecoder(**words | sizes | self.overrides)


@dataclass(frozen=True)
class SentenceScale(Scale):
    """Sentences of a generated language: students learn to translate from few, the study's own teacher from
    many. No student classifies images, so `methods` are none. The twin is "order": what tells a student where
    to look reads the sentence with other markers, whose words are translated in another order."""

    unlabelled: int = 20_000  # that a teacher learns from
    held_out_sizes: Mapping[str, int | None] = field(
        default_factory=lambda: {"validation": 500, "test": 1000}
    )

    def plenty(self, seed: int) -> Sentences:
        """A teacher's training sentences, which are translated too."""
        return self._images("unlabelled", self.unlabelled, seed)

    def _images(self, split: str, size: int | None, seed: int, twin: str | None = None) -> Sentences:
        drawn = generate_phrases(split, size, seed)
        if twin is None:
            return phrase_sentences(drawn)
        require_known("twin", twin, ("order",))
        return phrase_sentences(drawn, generate_phrases(split, size, seed, other_order=True))


def place_of_training() -> str:
    """Where everything is trained, and images should be by then: the GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def evenness(vit: VisionTransformer, images: Images) -> float:
    """How even a ViT's maps are: their mean entropy over images, layers and heads as a share of ln N, which
    uniform maps have. From 0 to 1."""
    layers = describe_layers(vit, images)
    tokens = vit.patch_embed.num_patches + vit.num_prefix_tokens
    return torch.stack([layer.entropy for layer in layers]).mean().item() / math.log(tokens)


def with_twins(images: Images, twin: str | None, seed: int) -> Images:
    """Photographs with what the teacher sees: the same (None), one of `PHOTO_TWINS`, or `BLANK`. Raises
    `ValueError` for another word."""
    if twin is None:
        return images
    if twin == BLANK:
        return with_blanks(images)
    require_known("twin", twin, PHOTO_TWINS)
    return pair(images, other_of_class(images, twin == "same class", seed_for(seed, "twins")))


def with_blanks(images: Images) -> Images:
    """For the student a grey image, the same one each time, and for its teacher the images as they are: all
    that such a student can know of an image is what the teacher's maps say."""
    return pair(replace(images, pixels=torch.full_like(images.pixels, GREY)), images)


# the names, without what they stand for: those whose students are classifiers, and all
CLASSIFYING = ("find", "match", "cifar10-cpu", "pacs", "cifar10")
# with a teacher that others have trained
PUBLISHED = ("real-cifar10", "real-pacs", "real-cifar10-98px")
# the same with all labels and students as large as their teacher
FULL = ("real-cifar10-full", "real-cifar10-long")
SCALES = (*CLASSIFYING, *PUBLISHED, *FULL, "mosaics", "scenes", "phrases")
# Masked auto-encoding, AdamW as in He et al. 2022 (arXiv 2111.06377), appendix A: β2 = 0.95, weight decay
# 0.05.
MAE = Recipe(steps=2000, lr=1e-3, betas=(0.9, 0.95), label_smoothing=0.0)
CIFAR_IMAGES = 45_000  # to train on: CIFAR-10's training split without the tenth that is for validation
# One range for all methods. It is wide: the search tries five to two dozen recipes of it.
AXES = {
    "lr": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 0.128, 0.256, 0.512, 1.024, 2.048),
    "weight_decay": (0.01, 0.03, 0.1, 0.3, 1.0),
}
START = {"lr": 4e-3, "weight_decay": 0.1}
# Students who may all stay near guessing, such as those of a twin, need rates that are far apart: a search
# that goes uphill could stay where it starts.
ALL_RATES = Ladder("lr", AXES["lr"][2:12])
# The same, and on beyond both ends while nothing has left guessing, one of eight classes.
UNTIL_LEARNED = Ladder("lr", AXES["lr"][2:12], beyond=2, learned=1 / 8 + ABOVE_GUESSING)
WEIGHTS = {"transfer_weight": (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)}
# As wide for all; these go uphill until all neighbours of the best are no better.
RATE_UPHILL = Range({"lr": AXES["lr"]}, {"lr": START["lr"]}, {}, 0.0)
RATE_AND_WEIGHT = Range({"lr": AXES["lr"], **WEIGHTS}, {"lr": START["lr"], "transfer_weight": 3.0}, {}, 0.0)


def _equal_chances(methods: Sequence[str], steps: int) -> dict[str, Range]:
    """One search in one range for all methods at one budget, but for distill-long, which has the paper's
    twice as many steps."""
    by_weight = {"axes": AXES | WEIGHTS, "start": START | {"transfer_weight": 3.0}}
    return {
        **dict.fromkeys(methods, Range(AXES, START, {})),
        "distill": Range(**by_weight, also={}),
        "distill-long": Range(**by_weight, also={"steps": 2 * steps}),
    }


def _world(name: str, pretraining: Recipe, world: glyphs.World) -> GlyphScale:
    """One of the two worlds."""
    training = Recipe(steps=500)
    tuning = _equal_chances(WORLD_METHODS, training.steps)
    if world.task == "match":  # near their start nothing learns, and going uphill ends there
        tuning["copy-message-twin"] = UNTIL_LEARNED
    return GlyphScale(
        name,
        Architecture("glyphs"),
        WORLD_METHODS,
        pretraining,
        training,
        tuning,
        labels=1000,
        world=world,
        gate=GATE,
    )


_PUBLISHED = Recipe(steps=950, batch_size=32)


def _published_student(classes: int, image_size: int = 56) -> Architecture:
    overrides = {"img_size": image_size, "embed_dim": 96, "num_classes": classes}
    return Architecture("vit_small_patch14_dinov2", overrides)


@lru_cache
def scales(data: Path | None = None) -> dict[str, Any]:
    """All scales by name; data: their `path`."""
    # 16 patches + class token, at the resolution of CIFAR-10: what a CPU can train.
    small, photographs = (Architecture("glyphs", {"num_classes": classes}) for classes in (10, 7))
    # For one GPU. The teacher: 800 passes, with the warm-up and the rate (in proportion to the batch) of He
    # et al. 2022 (arXiv 2111.06377, appendix A). A batch is a fifteenth of the images: all are of one size,
    # so that the model is compiled once. Students are not compiled: that takes longer than their 80 passes.
    pretraining = replace(
        MAE,
        epochs=800,
        warmup_epochs=40,
        base_lr=1.5e-4,
        batch_size=3000,
        mixed_precision="bf16",
        compile=True,
    )
    methods = tuple(method for method in PHOTO_METHODS if method != "copy-fine-tuned")
    on_gpu = CifarScale(
        "cifar10",
        Architecture("cifar"),
        methods,
        pretraining.on(CIFAR_IMAGES),
        Recipe(steps=800, batch_size=500, mixed_precision="bf16"),
        dict.fromkeys(methods, Ladder("lr", (3e-4, 1e-3, 3e-3))),
        labels=5000,
        worth=Worth(gain=0.05, evenness=0.8),
        keep_every=500,
        path=data,
    )
    published = PublishedScale(
        "real-cifar10",
        _published_student(10),
        (),
        None,
        _PUBLISHED,
        {},
        labels=2000,
        makes_teachers=False,
        draw=_cifar10,
        path=data,
        held_out_sizes={"validation": 2000, "test": 5000},
    )
    all_held_out = {"validation": None, "test": None}
    full = replace(
        published,
        name="real-cifar10-full",
        student=Architecture(
            "vit_small_patch14_dinov2", {"img_size": 56, "num_classes": 10, "init_values": 0}
        ),
        training=Recipe(epochs=6, batch_size=1000, mixed_precision="bf16").on(CIFAR_IMAGES),
        labels=None,
        padding=7,
        held_out_sizes=all_held_out,
    )
    mosaic = {"img_size": mosaics.SIDE * mosaics.CELL, "patch_size": mosaics.CELL, "num_classes": 10}
    made = (
        _world("find", pretext.RETRIEVAL, glyphs.World()),
        _world("match", replace(pretext.RETRIEVAL, steps=3000), glyphs.World(task="match")),
        # For 2 CPU cores: about 11 passes of masked auto-encoding over CIFAR-10, 15 over 5,000 labelled
        # images. Far too little for a masked auto-encoder (arXiv 2111.06377 trains 800 passes and more), so
        # it shows what such a teacher is worth, not what the methods are.
        CifarScale(
            "cifar10-cpu",
            small,
            PHOTO_METHODS,
            replace(MAE, steps=4000),
            Recipe(steps=600),
            dict.fromkeys(PHOTO_METHODS, Ladder("lr", (1e-3, 2e-3, 4e-3, 8e-3))),
            labels=5000,
            path=data,
        ),
        # For 2 CPU cores: about 2 passes of pre-training over CIFAR-10, 33 over 1,169 photographs.
        PacsScale(
            "pacs",
            photographs,
            PHOTO_METHODS,
            Recipe(steps=800),
            Recipe(steps=300),
            dict.fromkeys(PHOTO_METHODS, Ladder("lr", (5e-4, 1e-3, 2e-3, 4e-3, 8e-3))),
            labels=None,
            path=data,
        ),
        on_gpu,
        # For 2 CPU cores: 15 passes over 2,000 labelled images, by students as deep as the teacher, with its
        # heads and its LayerScale, but 96 wide.
        published,
        # The same on photographs, paintings and cartoons, and tested on sketches too.
        replace(
            published,
            name="real-pacs",
            student=_published_student(7),
            draw=partial(_pacs, DOMAINS[:3]),
            far={"sketch": partial(_pacs, DOMAINS[3:])},
            held_out_sizes=all_held_out,
        ),
        # CIFAR-10 in a finer grid, 7 x 7 patches in place of 4 x 4: do finer maps say less of the class?
        replace(
            published, name="real-cifar10-98px", student=_published_student(10, image_size=98), image_size=98
        ),
        # For one GPU: 6 passes over all labelled images, by students as large as the teacher, which runs
        # beside them: an image is shifted and mirrored anew each time. They have no LayerScale, with which
        # those of "real-cifar10" are worse.
        full,
        # The same for 100 passes, as many as Copy has in the paper: long enough to be worth compiling.
        replace(
            full,
            name="real-cifar10-long",
            training=replace(full.training, steps=100 * full.training.steps // 6, compile=True),
        ),
        # For 2 CPU cores: nine small photographs of CIFAR-10, of which the framed one is asked for.
        MosaicScale(
            "mosaics",
            Architecture("glyphs", mosaic),
            (),
            replace(pretext.RETRIEVAL, steps=3000),
            Recipe(steps=500),
            {},
            labels=2000,
            path=data,
            gate=0.4,
        ),
        # For 2 CPU cores: 48 passes of masked auto-encoding over 8,000 scenes, 12 of detection over 2,000.
        SceneScale(
            "scenes",
            Architecture("scenes", {"num_classes": 0}),
            (),
            replace(MAE, steps=3000, lr=4e-3),
            Recipe(steps=1500, batch_size=16, label_smoothing=0.0),
            {},
            labels=2000,
        ),
        # For a CPU core: about 20 passes of a translator over 1,000 sentences.
        SentenceScale(
            "phrases",
            Translator(),
            (),
            None,
            Recipe(steps=300, batch_size=64),
            {},
            labels=1000,
            makes_teachers=False,
        ),
    )
    return {scale.name: scale for scale in made}
