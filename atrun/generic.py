"""Recipes without a model's name, derived from teacher, images and batch, each value by a rule."""

import math
from collections.abc import Mapping
from contextlib import suppress
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
from atlib.student import SIZES, student_sizes
from atlib.vit import VITS, Architecture, create_classifier, create_vit, without_weights
from atrun.config import UNTRAINED, built_for, read_settings
from atrun.data.catalogue import CATALOGUE
from atrun.data.decoding import CorruptImage, decode
from atrun.data.generated import is_generated, maker
from atrun.data.photos import open_photos
from atrun.data.transforms import Augmentation
from atrun.derived_plan import plan_of_sizes
from atrun.method import Method
from atrun.recipes import shared
from atrun.teachers.load import is_file, load_teacher

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
    Method.DISTILLATION_TOKEN: (0.5, 0.5, "hard distillation of DeiT, by a token (2012.12877, section 4)"),
}
SEEN = 500 * 512  # images, at least: the shortest schedule of the BiT-HyperRule (arXiv 1912.11370)
SMALL = 64  # pixels a side, up to which images are treated as CIFAR's
ANY, PATCH = (224, 224), 16  # of other networks: the size where they take any, and the steps of smaller ones
GRID = 14  # patches a side of a ViT with patches of 16 pixels at 224
LOOKED_AT = 20  # images whose size is looked at


class Derived(NamedTuple):
    """The values of a run by field, and the rules of those that were derived, by setting."""

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
        head = "these settings were derived; give one yourself, and it is taken instead:"
        return "\n".join([f"{self.values['method']}: {head}", *lines])


class Model(NamedTuple):
    """What a student is built like. vit, teacher: on the meta device; whose: "the teacher's", or "the
    model's" where --model names it; normalisation: of its or its teacher's images, where that is known."""

    architecture: Architecture
    vit: torch.nn.Module
    normalisation: Normalisation | None
    whose: str
    teacher: VisionTransformer | Eva | None


def derive(name: str, data: str, teacher: str | None, changes: Mapping[str, str], seed: int = 0) -> Derived:
    """The recipe `name`, one of `atrun.method.DERIVED`, for these data and this teacher; of `changes`,
    settings as texts, those that other values hang on are taken into account. The images are counted, the
    sizes of some are looked at, and a teacher's file is read.
    """
    method = Method(name)
    settings = read_settings(changes)
    images, side = _material(data, settings, seed, not method.is_unlabelled)
    model = _model(teacher, settings, name)
    of_model = model.architecture.name if isinstance(model.architecture.name, str) else "{...}"
    rules = {"model": f"{of_model}: {model.whose}, with all its components (2605.07191)"}
    size = side if is_generated(data) else _image_size(model, side, rules)
    size = settings.get("augmentation.image_size", size)

    batch = 2 ** math.floor(math.log2(max(16, min(256, images / 16))))
    rules["batch_size"] = f"{batch}: at least 16 steps a pass over {images:,} images, at most 256 a step"
    batch, passes = settings.get("batch_size", batch), PASSES.get(method, 200)
    epochs = max(passes, math.ceil(SEEN / images))
    rules["epochs"] = (
        f"{epochs}: the {passes} of the paper (2411.09702), or as many as show {SEEN:,} images, the shortest"
        " schedule of the BiT-HyperRule (1912.11370)"
    )
    steps_a_pass = steps_per_epoch(images, batch)
    if "steps" in settings:
        epochs = settings["steps"] / steps_a_pass
    epochs = settings.get("epochs", epochs)
    every = max(1, round(epochs / 10))
    rules["evaluate_every"] = f"{every} passes: some ten times in a run"

    # rates; the rules are ViTs': of others no branches are dropped, and the rate is DeiT-B's
    is_vit = isinstance(model.vit, VITS)
    depth, width = (len(model.vit.blocks), model.vit.embed_dim) if is_vit else (0, WIDTH)
    if is_vit:
        rules["maps_every"] = rules["evaluate_every"]
    weights = (1.0, 3.0)
    if method in WEIGHTS:
        *weights, why = WEIGHTS[method]
        beside = "" if weights[0] == 1 else f", beside task_weight {weights[0]}"
        rules["transfer_weight"] = f"{weights[1]}{beside}: {why}"
    source = shared("_tuned" if method in (Method.COPY, Method.FINE_TUNE) else "_scratch")["recipe"]
    warmup = source["warmup_epochs"] / passes
    rules["warmup"] = f"{warmup:g}: of all steps, as {source['warmup_epochs']} of the paper's {passes} passes"
    rate = RATE * math.sqrt(batch / BATCH) * WIDTH / width
    for_width = f"and to 1 / width, here {width} (2203.03466)"
    rules["lr"] = (
        f"{rate:.3g}: {RATE} at width {WIDTH} and {BATCH:,} images a step (DeiT, 2012.12877), in proportion"
        " to the square root of the batch, as is right for Adam (2205.10287),"
        f" {for_width if is_vit else 'with no rule for a network that is no ViT'}"
    )
    layer_decay = None
    if method is Method.FINE_TUNE:
        layer_decay = 0.65 if depth <= 12 else 0.75
        rules["layer_decay"] = f"{layer_decay}: MAE's, 0.65 for 12 layers and 0.75 for 24 (2111.06377)"
    average = 0.9999 if epochs * steps_a_pass >= 50_000 else None
    why = "0.9999 (2411.09702) in runs of 50,000 steps or more, five times its span"
    rules["ema"] = f"{average or 'null'}: {why}"
    derived = {"epochs": epochs, "warmup": warmup, "batch_size": batch, "lr": rate, "ema": average}
    derived |= {"layer_decay": layer_decay, "task_weight": weights[0], "transfer_weight": weights[1]}
    recipe = Recipe(**_without(source, "warmup_epochs", "base_lr", "clip"), **derived)
    drop_path = 0.0
    if method is not Method.COPY:
        drop_path = min(0.3, depth // 12 / 10)
        rules["drop_path"] = f"{drop_path}: MAE's recipes, 0.1 for each 12 layers (2111.06377)"

    normalised = {} if model.normalisation is None else vars(model.normalisation)
    augmentation = Augmentation(**shared("_erased")["augmentation"], image_size=size, **normalised)
    crop = "random-resized: with RandAugment, random erasing, mixup and cutmix, as the paper (2411.09702)"
    if size <= SMALL or method.is_unlabelled:
        recipe = replace(recipe, mixup=0.0, cutmix=0.0)
    if size <= SMALL:
        augmentation = Augmentation(size, crop="padded", padding=4, crop_pct=1.0, **normalised)
        crop = f"padded: up to {SMALL} pixels a side as CIFAR's (1512.03385), crop and flip; no mixup"
    architecture = model.architecture
    if is_generated(data):
        rules["mixup"] = f"{recipe.mixup}: none up to {SMALL} pixels a side, else the paper's (2411.09702)"
        architecture = architecture._replace(overrides={**architecture.overrides, "img_size": size})
    else:
        rules["augmentation.crop"] = crop

    # the plan, and for features the layers of the plan that would distill
    layers: dict[str, Any] = {"plan": None}
    if method.transfers or method.distils_features:
        sizes = (_sizes(vit) for vit in (model.teacher or model.vit, model.vit))
        plan, whys = plan_of_sizes(*sizes, method.how or "distill")
        if method.transfers:
            layers = {"plan": plan}
            rules |= {f"plan.{name}": why for name, why in whys.items()}
        else:
            layers["feature_layers"], rules["feature_layers"] = plan.layers, whys["layers"]
    values: dict[str, Any] = {
        "method": method,
        "model": architecture,
        "recipe": recipe,
        **layers,
        "teacher": teacher if method.needs_teacher else None,
        "drop_path": drop_path,
        "augmentation": augmentation,
        "evaluate_every": every,
        "maps_every": every if is_vit else 0,
    }
    unused = ("evaluate_every", "maps_every") if method.is_unlabelled else ()
    return Derived(values, _without(rules, *unused))


def _material(data: str, settings: Mapping[str, Any], seed: int, labelled=True) -> tuple[int, int | None]:
    """How many images there are, and the median of the shorter sides of some that were looked at, or None."""
    split, size = settings.get("training_split", "train"), settings.get("data_size")
    if is_generated(data):
        images = maker(data)(split=split, size=size, seed=seed)
        return len(images), min(images.take([0])[0].shape[-2:])
    if settings.get("streaming") and size is None:
        raise ValueError("a stream does not say how many images it has: --data_size NUMBER")
    is_published = data in CATALOGUE and "data_path" not in settings  # a copy may have fewer images
    count = CATALOGUE[data].images_in(split) if is_published else None
    if settings.get("streaming") or count is not None:
        return size or count, None
    options = {name: settings.get(name) for name in ("image_column", "label_column")} | {"labelled": labelled}
    photos = open_photos(data, path=settings.get("data_path"), split=split, **options)
    some = range(0, len(photos), max(1, len(photos) // LOOKED_AT))
    sides = []
    for index in some:
        with suppress(CorruptImage):  # the run comes upon it, too, and stops there or leaves it out as asked
            sides.append(min(decode(photos.rows[index][photos.image_column]).size))
    if not sides:
        raise CorruptImage(f"none of the {len(some)} images that were looked at can be decoded")
    return size or len(photos), round(median(sides))


def _model(teacher: str | None, settings: Mapping[str, Any], name: str) -> Model:
    extra = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
    named, taught = settings.get("model"), teacher not in (None, UNTRAINED)
    if teacher is None and Method(name).needs_teacher:
        raise ValueError(f"the recipe {name!r} needs a teacher: --teacher, a timm name or a file of weights")
    if named is None and not taught:
        raise ValueError(f"the recipe {name!r} needs to know what to build: --model NAME, a timm name")
    # of an untrained teacher, and without one, the model says all
    source = teacher if taught else named
    of_teacher, normalisation = Architecture(source), None
    if taught and is_file(teacher):
        heads, architecture = settings.get("teacher_heads"), settings.get("teacher_architecture")
        read_teacher = load_teacher(teacher, heads=heads, architecture=architecture, quiet=True)
        of_teacher, normalisation = read_teacher.architecture, read_teacher.normalisation
    elif timm.is_model(source) and (published := timm.get_pretrained_cfg(source)) is not None:
        normalisation = Normalisation(published.mean, published.std)
    if "teacher_mean" in settings and "teacher_std" in settings:
        normalisation = Normalisation(settings["teacher_mean"], settings["teacher_std"])
    built = of_teacher if named is None else Architecture(named)
    plain = _without(built.overrides, "num_classes", "img_size")
    if name == Method.DISTILLATION_TOKEN and "distilled" not in str(built.name):
        extra, plain = {"distilled": True} | extra, plain | {"distilled": True}
    with without_weights():
        create = create_classifier if name == Method.SCRATCH else create_vit
        try:
            vit = create(built.name, **{**built.overrides, "num_classes": 0, **extra})
        except (TypeError, AssertionError, ZeroDivisionError) as error:
            if not extra:
                raise
            options = " ".join(f"--model.{setting} {value}" for setting, value in extra.items())
            raise ValueError(f"{options}: {built.name} cannot be built so ({error})") from error
        paired = isinstance(vit, VITS) and taught
        vit_of_teacher = create_vit(of_teacher.name, **of_teacher.overrides) if paired else None
    whose = "the teacher's" if named is None else "the model's"
    return Model(Architecture(built.name, plain), vit, normalisation, whose, vit_of_teacher)


def _image_size(model: Model, side: int | None, rules: dict[str, str]) -> int:
    """The model's, or less where the images are smaller; its rule is added."""
    native, patch = (built_for(model.vit) or ANY)[0], PATCH
    if isinstance(model.vit, VITS):
        native, patch = model.vit.patch_embed.img_size[0], model.vit.patch_embed.patch_size[0]
    size, why = native, model.whose
    if side is not None:
        whole = -(-side // patch) * patch
        size = min(native, max(whole, GRID * patch))
        if size == whole != native:
            why = f"the images' shorter side, {side}, in whole patches of {patch} pixels"
        elif size != native:
            why = f"{GRID} patches of {patch} pixels; the images' shorter side, {side}, has fewer"
    rules["augmentation.image_size"] = f"{size}: {why}"
    return size


def _sizes(vit: VisionTransformer | Eva) -> Sizes:
    """What a plan hangs on, without a forward. Teacher and student get images of one size, so that patches
    differ where their pixels do: the grid is that of the largest image that both could take whole."""
    heads, width = vit.blocks[0].attn.num_heads, vit.embed_dim
    down, across = vit.patch_embed.patch_size
    grid = ANY[0] // down, ANY[1] // across
    return Sizes(len(vit.blocks), heads, width // heads, grid, None, (0, 0, 0))


def student_settings(student: str | None, teacher: str | None, changes: Mapping[str, str]) -> dict[str, str]:
    """The settings with what `--student`, a timm name or a size, stands for, where they do not say it."""
    if student is None:
        return dict(changes)
    if timm.is_model(student):
        return {"model": student, **changes}
    if student not in (*SIZES, "half"):
        raise ValueError(f"--student {student}: tiny, small, half or a timm name")
    settings = read_settings({name: text for name, text in changes.items() if name.startswith("teacher_")})
    vit = _model(teacher, settings, Method.COPY.value).teacher
    return {f"model.{name}": str(value) for name, value in student_sizes(vit, student).items()} | changes


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
