"""Recipes without a model's name: what a run on one's own images needs, derived from the teacher, the images
and the batch, each value by a rule with its source."""

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import timm
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from atlib.compatibility import Sizes
from atlib.loading import steps_per_epoch
from atlib.pair import Normalisation
from atlib.recipe import Recipe
from atlib.student import SIZES, plan_of_sizes, student_sizes
from atlib.vit import VITS, Architecture, create_classifier, create_vit
from atrun.config import built_for, settings
from atrun.data.catalogue import CATALOGUE
from atrun.data.generated import is_generated, maker
from atrun.data.transforms import Augmentation
from atrun.method import Method
from atrun.overrides import read
from atrun.parts import COCO
from atrun.recipes import shared
from atrun.teachers.load import is_file, load_teacher
from atrun.untrained import NOTHING_TO_TUNE, UNTRAINED

NAMES = (
    Method.SCRATCH,
    Method.FINE_TUNE,
    Method.COPY,
    Method.DISTILL,
    Method.FEATURES,
    Method.LOGITS,
    Method.HARD_LOGITS,
    Method.DISTILL_UNLABELLED,
    Method.FEATURES_UNLABELLED,
)
# What the rules start from, and their sources.
WIDTH, BATCH, RATE = 768, 1024, 1e-3  # DeiT's ViT-B (arXiv 2012.12877, table 9): 5e-4 per 512 images
PASSES = {Method.COPY: 100, Method.FINE_TUNE: 50}  # of others 200
# Weights of the task and of the transfer loss, and their source.
WEIGHTS = {
    Method.DISTILL: (1.0, 3.0, "the paper's main result (2411.09702)"),
    Method.FEATURES: (1.0, 1.0, "all but the paper's main result (2411.09702)"),
    Method.DISTILL_UNLABELLED: (1.0, 1.0, "it is the whole loss"),
    Method.FEATURES_UNLABELLED: (1.0, 1.0, "it is the whole loss"),
    Method.LOGITS: (0.9, 0.1, "soft distillation of DeiT (2012.12877, equation 2)"),
    Method.HARD_LOGITS: (0.5, 0.5, "hard distillation of DeiT (2012.12877, equation 3)"),
}
SEEN = 500 * 512  # images, at least: the shortest schedule of the BiT-HyperRule (arXiv 1912.11370)
SMALL = 64  # pixels a side, up to which images are treated as CIFAR's
ANY, PATCH = (224, 224), 16  # of other networks: the size where they take any, and the steps of smaller ones
GRID = 14  # patches a side of a ViT with patches of 16 pixels at 224
LOOKED_AT = 20  # images whose size is looked at


class Derived(NamedTuple):
    """The values of a run by the names of `RunConfig.of`, and of those that were derived the rule, by the
    setting that changes it."""

    values: dict[str, Any]
    rules: dict[str, str]

    def text(self, given: Mapping[str, str]) -> str:
        """A line for each value that was derived and not given: the setting, and its rule."""
        instead = {"lr": "base_lr", "epochs": "steps"}
        lines = [
            f"  --{name} {rule}"
            for name, rule in self.rules.items()
            if name not in given and instead.get(name) not in given
        ]
        return "\n".join(["these settings were derived; give one yourself, and it is taken instead:", *lines])


class Material(NamedTuple):
    """What the rules look at."""

    #: training images
    images: int
    #: the median of the shorter sides of some of them, in pixels; None where none was looked at
    side: int | None
    #: whether they come as they are, so that the student has to take them so
    fixed: bool


class Model(NamedTuple):
    """What a student is built like."""

    architecture: Architecture
    #: on the meta device, or with weights that are not looked at; to be trained from scratch, any classifier
    vit: VisionTransformer | Eva | torch.nn.Module
    #: how its images, or its teacher's, are normalised, where that is known
    normalisation: Normalisation | None
    #: in a rule: "the teacher's", or "the model's" where --model names it
    whose: str
    #: the teacher on the meta device, where there is one to pair with
    teacher: VisionTransformer | Eva | None


def derive(name: str, data: str, teacher: str | None, changes: Mapping[str, str], seed: int = 0) -> Derived:
    """The recipe `name`, one of `NAMES`, for these data and this teacher; of `changes`, settings as texts,
    those that other values hang on are taken into account.

    The images are counted, and the sizes of some are looked at; of a teacher in a file the weights are read.
    A student from scratch is built like its teacher, whose weights are not used. An untrained teacher is
    built like its student, so that the model must be named. Raises `ValueError` without a teacher and without
    a model, for a detector's data, and what opening data and teachers raises.
    """
    method = Method(name)
    if teacher == UNTRAINED and method is Method.FINE_TUNE:
        raise ValueError(NOTHING_TO_TUNE)
    if data == COCO:
        raise ValueError(f"the recipe {name!r} classifies images; take a recipe of detection for {data!r}")
    kinds = settings(setting for setting in changes if setting.startswith("model."))
    told = read({setting: text for setting, text in changes.items() if setting in kinds}, kinds)
    for setting in ("batch_size", "steps"):
        if told.get(setting, 1) < 1:
            raise ValueError(f"--{setting} {told[setting]}: {setting} must be a whole number above 0")
    material = _material(data, told, seed, not method.is_unlabelled)
    model = _model(teacher, told, name)
    rules: dict[str, str] = {"model": f"{_named(model)}: {model.whose}, with all its components (2605.07191)"}
    size = _image_size(model, material, rules)
    size = told.get("augmentation.image_size", size)
    batch = told.get("batch_size", _batch(material.images, rules))
    epochs = _epochs(method, material.images, rules)
    if "steps" in told:
        epochs = told["steps"] / steps_per_epoch(material.images, batch)
    epochs = told.get("epochs", epochs)
    every = max(1, round(epochs / 10))
    rules["evaluate_every"] = f"{every} passes: some ten times in a run"
    is_vit = isinstance(model.vit, VITS)
    if is_vit:
        rules["maps_every"] = rules["evaluate_every"]
        depth, width = len(model.vit.blocks), model.vit.embed_dim
    else:  # the rules are ViTs': no branches are dropped, and the rate is DeiT-B's
        depth, width = 0, None
    tuned = method in (Method.COPY, Method.FINE_TUNE)
    weights = (1.0, 3.0)
    if method in WEIGHTS:
        *weights, why = WEIGHTS[method]
        beside = "" if weights[0] == 1 else f", beside task_weight {weights[0]}"
        rules["transfer_weight"] = f"{weights[1]}{beside}: {why}"
    recipe = Recipe(
        **_without(shared("_tuned" if tuned else "_scratch")["recipe"], "warmup_epochs", "base_lr", "clip"),
        epochs=epochs,
        warmup=_warmup(method, rules),
        batch_size=batch,
        lr=_rate(width, batch, rules),
        layer_decay=_layer_decay(depth, rules) if method is Method.FINE_TUNE else None,
        task_weight=weights[0],
        transfer_weight=weights[1],
        ema=_average(epochs * steps_per_epoch(material.images, batch), rules),
    )
    normalised = {} if model.normalisation is None else vars(model.normalisation)
    augmentation = Augmentation(**shared("_erased")["augmentation"], image_size=size, **normalised)
    if size <= SMALL or method.is_unlabelled:
        recipe = replace(recipe, mixup=0.0, cutmix=0.0)
    if size <= SMALL:
        augmentation = Augmentation(size, crop="padded", padding=4, crop_pct=1.0, **normalised)
    if material.fixed:
        rules["mixup"] = f"{recipe.mixup}: none up to {SMALL} pixels a side, else the paper's (2411.09702)"
    else:
        rules["augmentation.crop"] = _augmentation_rule(augmentation)
    values: dict[str, Any] = {
        "method": method,
        "model": _sized(model.architecture, size if material.fixed else None),
        "recipe": recipe,
        **_layers(method, model, rules),
        "teacher": teacher if method.needs_teacher else None,
        "drop_path": 0.0 if method is Method.COPY else _drop_path(depth, rules),
        "augmentation": augmentation,
        "evaluate_every": every,
        "maps_every": every if is_vit else 0,
    }
    unused = ("evaluate_every", "maps_every") if method.is_unlabelled else ()
    return Derived(values, _without(rules, *unused))


# --- What the rules look at ---


def _material(data: str, told: Mapping[str, Any], seed: int, labelled: bool = True) -> Material:
    split = told.get("training_split", "train")
    if is_generated(data):
        images = maker(data)(split=split, size=told.get("data_size"), seed=seed)
        return Material(len(images), min(images.take([0])[0].shape[-2:]), fixed=True)
    if told.get("streaming") and "data_size" not in told:
        raise ValueError(
            "a stream does not say how many images it has, and the rules ask: --data_size NUMBER"
        )
    parts = split.split("+")
    known = CATALOGUE[data].images if data in CATALOGUE else {}
    if told.get("streaming") or set(parts) <= set(known):
        return Material(told.get("data_size") or sum(known[part] for part in parts), None, fixed=False)
    from atrun.data.decoding import decode
    from atrun.data.loading import CorruptImage
    from atrun.data.photos import open_photos  # imported here: `datasets` takes seconds

    how = {name: told.get(name) for name in ("image_column", "label_column")} | {"labelled": labelled}
    photos = open_photos(data, path=told.get("data_path"), split=split, train=True, **how)
    some = range(0, len(photos), max(1, len(photos) // LOOKED_AT))
    sides, why = [], None
    for index in some:
        try:
            sides.append(min(decode(photos.rows[index][photos.image_column]).size))
        except CorruptImage as error:  # the run comes upon it, too, and stops there or leaves it out as asked
            why = why or f"image {index}: {error}"
    if not sides:
        raise CorruptImage(f"none of the {len(some)} images that were looked at can be decoded ({why})")
    return Material(told.get("data_size") or len(photos), round(median(sides)), fixed=False)


def _model(teacher: str | None, told: Mapping[str, Any], name: str) -> Model:
    own = {setting.removeprefix("model."): told[setting] for setting in told if setting.startswith("model.")}
    needed = Method(name).needs_teacher
    if "model" not in told and (teacher == UNTRAINED or teacher is None and not needed):
        untrained = ": an untrained teacher is built like the student" if needed else ""
        other = "" if needed else ", or --teacher, a timm name or a file of weights"
        raise ValueError(
            f"the recipe {name!r} needs to know what to build{untrained}: --model NAME, a timm name{other}"
        )
    if teacher is None and needed:
        raise ValueError(f"the recipe {name!r} needs a teacher: --teacher, a timm name or a file of weights")
    # of an untrained teacher, and without one, the model says all
    source = told["model"] if teacher in (None, UNTRAINED) else teacher
    built = of_teacher = Architecture(source if teacher in (None, UNTRAINED) else teacher)
    if teacher not in (None, UNTRAINED) and is_file(teacher):
        heads, architecture = told.get("teacher_heads"), told.get("teacher_architecture")
        read_teacher = load_teacher(teacher, heads=heads, architecture=architecture, quiet=True)
        built = of_teacher = read_teacher.architecture
        normalisation = read_teacher.normalisation
    else:
        published = timm.get_pretrained_cfg(source) if timm.is_model(source) else None
        normalisation = None if published is None else Normalisation(published.mean, published.std)
    if "teacher_mean" in told and "teacher_std" in told:
        normalisation = Normalisation(told["teacher_mean"], told["teacher_std"])
    if "model" in told:
        built = Architecture(told["model"])
    whose = "the model's" if "model" in told else "the teacher's"
    plain = _without(built.overrides, "num_classes", "img_size")
    with torch.device("meta"):
        create = create_classifier if name == Method.SCRATCH else create_vit
        try:
            vit = create(built.name, **{**built.overrides, "num_classes": 0, **own})
        except (TypeError, AssertionError, ZeroDivisionError) as error:
            if not own:
                raise
            asked = " ".join(f"--model.{setting} {value}" for setting, value in own.items())
            raise ValueError(
                f"{asked}: {built.name} cannot be built so ({type(error).__name__}: {error}); the options are"
                " the constructor's of timm's model, such as depth, num_heads, embed_dim"
            ) from error
        paired = isinstance(vit, VITS) and teacher not in (None, UNTRAINED)
        of_teacher_vit = create_vit(of_teacher.name, **of_teacher.overrides) if paired else None
    return Model(Architecture(built.name, plain), vit, normalisation, whose, of_teacher_vit)


# --- The rules: each adds its line to `rules` ---


def _image_size(model: Model, material: Material, rules: dict[str, str]) -> int:
    if material.fixed:
        return material.side
    own, patch = (built_for(model.vit) or ANY)[0], PATCH
    if isinstance(model.vit, VITS):
        own, patch = model.vit.patch_embed.img_size[0], model.vit.patch_embed.patch_size[0]
    if material.side is None:
        size, why = own, model.whose
    else:
        whole = -(-material.side // patch) * patch
        size = min(own, max(whole, GRID * patch))
        if size == own:
            why = model.whose
        elif size == whole:
            why = f"the images' shorter side, {material.side}, in whole patches of {patch} pixels"
        else:
            why = f"{GRID} patches of {patch} pixels; the images' shorter side, {material.side}, has fewer"
    rules["augmentation.image_size"] = f"{size}: {why}"
    return size


def _batch(images: int, rules: dict[str, str]) -> int:
    batch = 2 ** math.floor(math.log2(max(16, min(256, images / 16))))
    rules["batch_size"] = f"{batch}: at least 16 steps a pass over {images:,} images, at most 256 a step"
    return batch


def _epochs(method: Method, images: int, rules: dict[str, str]) -> int:
    passes = PASSES.get(method, 200)
    epochs = max(passes, math.ceil(SEEN / images))
    rules["epochs"] = (
        f"{epochs}: the {passes} of the paper (2411.09702), or as many as show {SEEN:,} images, the shortest"
        " schedule of the BiT-HyperRule (1912.11370)"
    )
    return epochs


def _warmup(method: Method, rules: dict[str, str]) -> float:
    tuned = method in (Method.COPY, Method.FINE_TUNE)
    passes = shared("_tuned" if tuned else "_scratch")["recipe"]["warmup_epochs"]
    share = passes / PASSES.get(method, 200)
    rules["warmup"] = f"{share:g}: of all steps, as {passes} of the paper's {PASSES.get(method, 200)} passes"
    return share


def _rate(width: int | None, batch: int, rules: dict[str, str]) -> float:
    rate = RATE * math.sqrt(batch / BATCH) * WIDTH / (width or WIDTH)
    for_width = "with no rule for a network that is no ViT"
    if width is not None:
        for_width = f"and to 1 / width, here {width} (2203.03466)"
    rules["lr"] = (
        f"{rate:.3g}: {RATE} at width {WIDTH} and {BATCH:,} images a step (DeiT, 2012.12877), in proportion"
        f" to the square root of the batch, as is right for Adam (2205.10287), {for_width}"
    )
    return rate


def _layer_decay(depth: int, rules: dict[str, str]) -> float:
    decay = 0.65 if depth <= 12 else 0.75
    rules["layer_decay"] = f"{decay}: MAE's fine-tuning, 0.65 for 12 layers and 0.75 for 24 (2111.06377)"
    return decay


def _drop_path(depth: int, rules: dict[str, str]) -> float:
    rate = min(0.3, depth // 12 / 10)
    rules["drop_path"] = f"{rate}: MAE's recipes, 0.1 for each 12 layers (2111.06377)"
    return rate


def _average(steps: float, rules: dict[str, str]) -> float | None:
    average = 0.9999 if steps >= 50_000 else None
    rules["ema"] = (
        f"{average or 'null'}: 0.9999 (2411.09702) in runs of 50,000 steps or more, five times its span"
    )
    return average


def _augmentation_rule(augmentation: Augmentation) -> str:
    if augmentation.crop == "padded":
        return f"padded: up to {SMALL} pixels a side as CIFAR's (1512.03385), crop and flip; no mixup"
    return "random-resized: with RandAugment, random erasing, mixup and cutmix, as the paper (2411.09702)"


def _layers(method: Method, model: Model, rules: dict[str, str]) -> dict[str, Any]:
    """The plan, and for features the layers of the plan that would distill."""
    if not method.transfers and method not in (Method.FEATURES, Method.FEATURES_UNLABELLED):
        return {"plan": None}
    sizes = [_sizes(vit) for vit in (model.teacher or model.vit, model.vit)]
    plan, whys = plan_of_sizes(*sizes, method.how or "distill")
    if method.transfers:
        rules |= {f"plan.{name}": why for name, why in whys.items()}
        return {"plan": plan}
    rules["feature_layers"] = whys["layers"]
    return {"plan": None, "feature_layers": plan.layers}


def _sizes(vit: VisionTransformer | Eva) -> Sizes:
    """What a plan hangs on, without a forward. Teacher and student get images of one size, so that patches
    differ where their pixels do: the grid is that of the largest image that both could take whole."""
    heads, width = vit.blocks[0].attn.num_heads, vit.embed_dim
    down, across = vit.patch_embed.patch_size
    grid = ANY[0] // down, ANY[1] // across
    return Sizes(len(vit.blocks), heads, width // heads, grid, None, (0, 0, 0))


def student_settings(student: str, teacher: str | None, changes: Mapping[str, str]) -> dict[str, str]:
    """What `--student` stands for, as settings: a timm name is the model, and a size is read by
    `atlib.student.student_sizes`. Raises `ValueError` for another name and without a teacher."""
    if timm.is_model(student):
        return {"model": student}
    if student not in (*SIZES, "half"):
        raise ValueError(f"--student {student}: tiny, small, half or a timm name")
    if teacher in (None, UNTRAINED):
        raise ValueError(f"--student {student} is a size of the teacher's architecture: --teacher NAME")
    kinds = settings(setting for setting in changes if setting.startswith("teacher_"))
    told = read({setting: text for setting, text in changes.items() if setting in kinds}, kinds)
    vit = _model(teacher, told, Method.COPY.value).teacher
    return {f"model.{name}": str(value) for name, value in student_sizes(vit, student).items()}


def _named(model: Model) -> str:
    name = model.architecture.name
    return name if isinstance(name, str) else "{...}"


def _sized(architecture: Architecture, size: int | None) -> Architecture:
    """For data that come as they are, the model of their size."""
    if size is None:
        return architecture
    return architecture._replace(overrides={**architecture.overrides, "img_size": size})


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
