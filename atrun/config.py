"""One training run as a frozen value that goes to JSON and back: all `resume` needs besides checkpoints."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from atfamily import contrast, distilled_mae, simmim
from atfamily.attndistill import AttnDistill
from atlib import mae
from atlib._util import as_plain, write_atomically
from atlib.pair import Normalisation
from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.vit import VITS, Architecture, without_weights
from atrun.data.generated import is_generated, require_installed
from atrun.data.transforms import Augmentation
from atrun.method import Method, method_of_run
from atrun.overrides import Setting, fields_of, read
from atrun.teachers.names import config_says

COCO = "coco"  # what detectors learn from, in COCO's form
UNTRAINED = "untrained"  # in place of a teacher's name or file
Detectors = Literal["fcos", "faster-rcnn", "mask-rcnn"]  # as in `atfamily.detection.detector.DETECTORS`
DetectorSizes = Literal["vitdet", "small"]  # likewise, `SIZES`
TRUST_DATA = "run the function that makes a run's data, though it is of no installed package"
# What may be another when a run goes on: it does not reach the weights, or (on_corrupt) lets it go on.
FREE = ("workers", "on_device", "save_every", "keep", "tracker", "on_corrupt", "maps_every")
# What has fields of its own, which the command line calls `plan.what`; those of a recipe as they stand.
VALUES = {"recipe": Recipe, "plan": Plan, "augmentation": Augmentation, "model": Architecture}
# What the command line has other options for, which look at the value and make it whole.
NO_SETTINGS = ("recipe_name", "data", "teacher", "seed")
OF_CLASSIFYING = ("label_smoothing", "mixup", "cutmix", "binary")  # of a recipe

_METHODS = frozenset(Method)
_LABELLED = frozenset(method for method in Method if not method.pretrains)
_DETECTING = frozenset((Method.SCRATCH, Method.FINE_TUNE, Method.COPY, Method.DISTILL))
_WHOLE = frozenset(("rows", "generated"))  # kinds of data, as `unused` tells them apart
_ANY = _WHOLE | {COCO}
# Settings that only some runs have, {what they belong to: (names, methods, kinds of data)}. The config.json
# of another run does not name them.
PARTS = {
    "Training with labels": ("evaluation_split evaluate_every task_weight", _LABELLED, _ANY),
    "Classifying whole images": (" ".join(("maps_every", *OF_CLASSIFYING)), _LABELLED, _WHOLE),
    "Detection": ("detector detector_sizes jitter", _DETECTING, {COCO}),
    "The methods that hide patches": ("mask_ratio", {m for m in Method if m.hides_patches}, _ANY),
    "Masked auto-encoding": ("decoder_width decoder_depth decoder_heads", {Method.MAE, Method.DMAE}, _ANY),
    "AttnDistill": ("attention_weight attention_temperature projector_layers", {Method.ATTNDISTILL}, _ANY),
    "SimMIM": ("mask_unit", {Method.SIMMIM}, _ANY),
    "Learning by contrast (`atfamily.contrast`)": ("hidden_width momentum", {Method.MOCO, Method.DINO}, _ANY),
    "MoCo-v3": ("projection_width contrast_temperature freeze_patches", {Method.MOCO}, _ANY),
    "DINO": (
        "outputs bottleneck_width teacher_temperature temperature_warmup frozen lengths local_views"
        " local_scale local_size",
        {Method.DINO},
        _ANY,
    ),
    "Data that may be held on the device": ("on_device", _METHODS, _WHOLE),
    "Data that are read": ("data_path", _METHODS, {COCO, "rows"}),
    "Data that are read in rows (`atrun.data.photos.open_photos`)": (
        "image_column label_column streaming on_corrupt augmentation",
        _METHODS,
        {"rows"},
    ),
}
# Likewise, of what every config.json names.
USES = {
    "a teacher": (
        "teacher_heads teacher_architecture teacher_image_size teacher_mean teacher_std",
        {method for method in Method if method.needs_teacher},
        _ANY,
    ),
    "Distill": ("transfer_weight", {method for method in Method if method.has_transfer_loss}, _ANY),
    "the method features": ("feature_layers", {m for m in Method if m.distils_features}, _ANY),
    "the method mean-maps": ("reference_images", {Method.MEAN_MAPS}, _ANY),
    "a teacher beside them": ("student_weights", {m for m in Method if m.keeps_weights_apart}, _ANY),
    "an augmentation of one view (`atrun.data.views`)": (
        "augmentation.crop augmentation.padding augmentation.rand_augment augmentation.three_augment"
        " augmentation.color_jitter augmentation.random_erasing",
        {method for method in Method if not method.contrasts},
        _ANY,
    ),
}


# The least and the largest value of fields of a run, of each number in a pair.
BOUNDS = (
    (0, 2**32 - 1, "seed"),  # as NumPy's generators ask for
    (0, 0.99, "drop_path"),
    (0, 1, "temperature_warmup frozen"),
    (0, math.inf, "workers on_device evaluate_every maps_every local_views attention_weight"),
    (1, math.inf, "save_every keep reference_images teacher_image_size data_size"),
    (1, math.inf, "decoder_width decoder_depth decoder_heads projector_layers"),
    (1, math.inf, "hidden_width projection_width outputs bottleneck_width local_size"),
    (1e-9, math.inf, "attention_temperature local_scale jitter"),
)
PAIRS = ("teacher_temperature", "local_scale", "jitter")


def unused(method: Method, data: str, of: Mapping[str, tuple] = {**PARTS, **USES}) -> dict[str, str]:
    """The settings that a run by this method on these data has no use for, and what they belong to."""
    kind = COCO if data == COCO else "generated" if is_generated(data) else "rows"
    return {
        name: says
        for says, (names, methods, kinds) in of.items()
        if method not in methods or kind not in kinds
        for name in names.split()
    }


def require_use(names: Iterable[str], method: Method, data: str) -> None:
    """Raise `ValueError` for a setting that such a run has no use for: it was meant for something."""
    without_use = unused(method, data)
    for name in names:
        if name in without_use:
            title = without_use[name]
            raise ValueError(f"{name} would change nothing of {method} on {data!r}: {title} has it")


@dataclass(frozen=True)
class RunConfig:
    """A run; checked when it is built, without data and without weights. Fields that only some runs have
    (`PARTS`) are at their defaults in others. Raises `ValueError` for what cannot be meant."""

    recipe_name: str  #: the published recipe it started from, for the record
    method: Method  #: what the student gets: scratch, fine-tune, copy, distill ... (`atrun.method.Method`)
    model: Architecture  #: the student, or the teacher to be; without num_classes it gets the data's
    data: str  #: a name of the catalogue, a path, "coco", or a function (`atrun.data.generated`)
    recipe: Recipe  #: in epochs, until the number of images is known (`on`)
    teacher: str | None = None  #: a timm name or a file
    #: the teacher's heads, where a file's weights do not tell (`atrun.teachers.load.load_teacher`)
    teacher_heads: int | None = None
    teacher_architecture: str | None = None  #: the timm name of a model that has such weights, likewise
    teacher_image_size: int | None = None  #: pixels a side of the teacher's images; None: the student's
    teacher_mean: tuple[float, float, float] | None = None  #: of its images; None: as it says itself
    teacher_std: tuple[float, float, float] | None = None  #: standard deviation, likewise
    plan: Plan | None = None  #: what is transferred (copy and distill)
    student_weights: str | None = None  #: a timm name or a file that the student starts from
    #: the layers whose features are distilled; None: all; pairs {student's: teacher's} where depths differ
    feature_layers: Iterable[int] | Mapping[int, int] | None = None
    reference_images: int = 1000  #: training images, chosen by the seed, whose mean map is copied
    drop_path: float = 0.0  #: the student's rate of stochastic depth
    workers: int = 0  #: processes that decode
    save_every: int = 500  #: steps between checkpoints
    keep: int = 2  #: so many checkpoints stay
    #: also send the log there; tensorboard's is in the run's folder
    tracker: Literal["tensorboard", "wandb", "mlflow"] | None = None
    seed: int = 0  #: decides first weights, order and augmentation

    # --- With labels ---

    evaluation_split: str = "test"  #: the split that is evaluated at the end
    evaluate_every: int = 0  #: evaluated after every so many passes too; 0: only at the end
    maps_every: int = 0  #: epochs between pictures of where teacher and student look in six images; 0: none
    detector: Detectors | None = None  #: what is trained on the ViT, of data "coco"
    detector_sizes: DetectorSizes = "vitdet"  #: of its pyramid and heads
    #: least and largest scale of large-scale jitter (`atrun.data.coco.CocoObjects`), None for none
    jitter: tuple[float, float] | None = None

    # --- Without labels ---

    mask_ratio: float = 0.75  #: the share of the patches that are hidden
    decoder_width: int = 64  #: width of the decoder's blocks
    decoder_depth: int = 2  #: their number
    decoder_heads: int = 4  #: heads in each of them
    attention_weight: float = 0.1  #: the factor on the loss of where it looks, beside that of the class token
    attention_temperature: float = 10.0  #: softens the product that merges heads
    projector_layers: int = 4  #: layers of the projector, which is dropped later
    mask_unit: int = 1  #: the side, in patches, of the squares that are hidden
    hidden_width: int = 4096  #: width of the projector's, or the head's, inner layers
    momentum: float = 0.99  #: decay of the copy that follows, at the first step; 1 at the last
    projection_width: int = 256  #: numbers by which images are told apart
    contrast_temperature: float = 0.2  #: divides the cosines of two images
    freeze_patches: bool = True  #: leave the patch projection as it is drawn
    outputs: int = 65536  #: numbers that the head says of an image, which are compared
    bottleneck_width: int = 256  #: numbers from which the head's last layer makes them
    #: in the teacher's softmax, at the first step, and after the share `temperature_warmup` of the run
    teacher_temperature: tuple[float, float] = (0.04, 0.04)
    temperature_warmup: float = 0.0  #: the share of the run in which it grows
    frozen: float = 0.01  #: the share of the run in which the head's last layer is not trained
    lengths: bool = False  #: learn the lengths of the last layer's directions too
    local_views: int = 8  #: small views of an image, beside the two large ones
    local_scale: tuple[float, float] = (0.05, 0.4)  #: least and largest share of its area that they crop
    #: pixels a side at which they are computed, by a model with dynamic_img_size; None: at full size
    local_size: int | None = None

    # --- How images come ---

    on_device: float = 2.0  #: GiB of training images that may be held on the device, decoded once
    training_split: str = "train"  #: a split, or several as "train+validation"
    #: so many images, chosen by the seed; None: all. Of a stream, their number, where nothing else says it
    data_size: int | None = None
    data_path: str | None = None  #: where the files of named data are
    image_column: str | None = None  #: the column of images; None: one of the usual names
    label_column: str | None = None  #: the column of labels, likewise
    streaming: bool = False  #: read rows as they come instead of by index
    #: what to do about an image that cannot be decoded: "skip", say it, count it and go on, also in the
    #: evaluation, or "raise"
    on_corrupt: Literal["raise", "skip"] = "skip"
    augmentation: Augmentation | None = None  #: None: images are taken as they are

    def __post_init__(self):
        object.__setattr__(self, "method", method_of_run(self.method))
        object.__setattr__(self, "feature_layers", Plan(layers=self.feature_layers).layers)
        if self.detects != (self.detector is not None):
            raise ValueError(f"detector {self.detector!r}, data {self.data!r}: it takes {COCO!r}, alone")
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        require_use(changed, self.method, self.data)
        if self.method.needs_teacher != (self.teacher is not None):
            needs = "needs a teacher, a timm name or a file" if self.teacher is None else "has no teacher"
            raise ValueError(f"{self.method} {needs}, got {self.teacher!r}")
        planned = None if self.plan is None else self.plan.how
        if planned != self.method.how:
            raise ValueError(f"method {self.method!r} and plan {planned!r} do not go together")
        for least, most, names in BOUNDS:
            for name in names.split():
                value = getattr(self, name)
                numbers = value if isinstance(value, (tuple, list)) else (value,)
                fits = (least <= number <= most and math.isfinite(number) for number in numbers)
                if value is not None and not all(fits):
                    raise ValueError(f"{name}={value!r}: from {least} to {most}")
        for name in PAIRS:
            if (pair := getattr(self, name)) is not None and len(pair) != 2:
                raise ValueError(f"{name}={pair!r}: two numbers")
        if self.jitter is not None and self.jitter[0] > self.jitter[1]:
            raise ValueError(f"jitter={self.jitter!r}: the least and the largest scale")
        if (self.teacher_mean is None) != (self.teacher_std is None):
            raise ValueError("give both teacher_mean and teacher_std, or neither")
        _ = self.teacher_normalisation  # checks the values
        if self.teacher == UNTRAINED:
            if self.method is Method.FINE_TUNE:
                raise ValueError(f"fine-tune with --teacher {UNTRAINED} is training from scratch")
            if self.method.pretrains:  # both files would be the folder's teacher.safetensors
                raise ValueError(f"{self.method} makes a teacher: it cannot have --teacher {UNTRAINED}")
            if (self.teacher_heads, self.teacher_architecture) != (None, None):
                told = f"teacher_heads={self.teacher_heads}, teacher_architecture={self.teacher_architecture}"
                raise ValueError(f"{told}: {UNTRAINED}, it is the student's")
        if self.method.pretrains and (self.recipe.mixup or self.recipe.cutmix):
            raise ValueError(f"mixup and cutmix mix classes, and {self.method} has none: set them to 0")
        for name in OF_CLASSIFYING if self.detects else ():
            if value := getattr(self.recipe, name):
                raise ValueError(f"{name}={value!r}: a detector has no use for it")
        json.dumps(self.describe(), allow_nan=False)  # raises `ValueError` for what is not finite
        self._check_model()

    @property
    def detects(self) -> bool:
        """Whether a detector is trained."""
        return self.data == COCO

    @property
    def classifies(self) -> bool:
        """Whether whole images are classified."""
        return not self.detects and not self.method.pretrains

    @property
    def teacher_normalisation(self) -> Normalisation | None:
        """How the teacher's images are normalised, where the run says it and not the teacher itself."""
        return None if self.teacher_mean is None else Normalisation(self.teacher_mean, self.teacher_std)

    def flat(self) -> dict[str, Any]:
        """The fields that such a run has."""
        without_use = unused(self.method, self.data, PARTS)
        return {name: value for name, value in vars(self).items() if name not in without_use}

    def _check_model(self) -> None:
        name, model = self.model.name, self.skeleton(self.model.overrides.get("num_classes", 2))
        if not isinstance(model, VITS):
            if self.method is not Method.SCRATCH or not self.classifies:
                raise ValueError(f"{name!r} is a {type(model).__name__}, no ViT: it can only be scratch")
            if self.maps_every:
                raise ValueError(f"maps_every={self.maps_every}: {name!r} has no maps, set it to 0")
        elif self.method is Method.DISTILLATION_TOKEN and not hasattr(model, "dist_token"):
            raise ValueError(f"{name!r} has no distillation token: name a DeiT, set model.distilled to true")
        elif len(model.blocks) == 0:
            raise ValueError(f"the model {name!r} has no blocks: set model.depth to at least 1")
        if self.method.has_pretext:
            try:
                with without_weights():
                    self.pretext(model, self.skeleton(0) if self.method.needs_teacher else None)
            except AssertionError as error:  # timm's blocks refuse a width that their heads do not divide
                width, heads = self.decoder_width, self.decoder_heads
                raise ValueError(f"decoder_width={width}: no multiple of decoder_heads={heads}") from error
        if self.plan is not None:
            self.plan.layers_of(len(model.blocks))
        if self.feature_layers is not None:
            Plan(layers=self.feature_layers).layers_of(len(model.blocks))
        size = built_for(model)
        if None not in (size, self.augmentation) and size != (self.augmentation.image_size,) * 2:
            raise ValueError(f"{name!r} takes images of {size} pixels: set augmentation.image_size")

    def pretext(
        self,
        vit: torch.nn.Module,
        teacher: torch.nn.Module | None = None,
        images: Normalisation | None = None,
    ) -> torch.nn.Module:
        """What trains `vit` on images alone. images: how they are normalised, where there is a teacher."""
        match self.method:
            case Method.MAE | Method.DMAE:
                decoder = self.decoder_width, self.decoder_depth, self.decoder_heads
                painter = mae.MaskedAutoencoder(vit, self.mask_ratio, *decoder)
                if self.method is Method.MAE:
                    return painter
                return distilled_mae.DistilledMae(teacher, painter, normalisation=images)
            case Method.ATTNDISTILL:
                how = {"attention_weight": self.attention_weight, "projector_layers": self.projector_layers}
                how["temperature"] = self.attention_temperature
                return AttnDistill(teacher, vit, normalisation=images, **how)
            case Method.SIMMIM:
                return simmim.SimMim(vit, self.mask_ratio, self.mask_unit)
            case Method.MOCO:
                patches = contrast.draw_patches(vit) if self.freeze_patches else vit
                alike = {name: getattr(self, name) for name in ("momentum", "freeze_patches")}
                widths = {"projection": self.projection_width, "hidden": self.hidden_width}
                return contrast.MoCo(patches, temperature=self.contrast_temperature, **widths, **alike)
            case Method.DINO:
                alike = ("outputs", "teacher_temperature", "temperature_warmup", "momentum", "frozen")
                alike = {name: getattr(self, name) for name in (*alike, "lengths", "local_size")}
                widths = {"hidden": self.hidden_width, "bottleneck": self.bottleneck_width}
                return contrast.Dino(vit, **widths, **alike)
        raise ValueError(f"{self.method} learns from labels: no pre-text trains its model")

    def on(self, images: int) -> "RunConfig":
        """The run on so many training images: its recipe in steps."""
        return replace(self, recipe=self.recipe.on(images))

    def architecture(self, num_classes: int) -> Architecture:
        """The model for so many classes, unless it has its own `num_classes`."""
        arguments: dict[str, Any] = {"num_classes": num_classes if self.classifies else 0}
        if self.augmentation is not None:
            arguments["img_size"] = self.augmentation.image_size
        if self.drop_path:
            arguments["drop_path_rate"] = self.drop_path
        return Architecture(self.model.name, arguments | dict(self.model.overrides))

    def skeleton(self, num_classes: int) -> torch.nn.Module:
        """The model without weights, on the meta device. Raises `ValueError` where it cannot be built."""
        try:
            model = Architecture.read(self.architecture(num_classes)._asdict())  # as its files will be read
            with without_weights():
                return model.build_classifier()
        except Exception as error:  # whatever timm meets first
            overrides = dict(self.model.overrides)
            raise ValueError(f"{self.model.name!r} cannot be built with {overrides}: {error}") from error

    def describe(self) -> dict:
        """The flat fields as plain JSON values, for a record and for config.json."""
        return {name: as_plain(value) for name, value in self.flat().items()}

    def fingerprint(self) -> dict:
        """What must be the same when a run goes on."""
        return {name: value for name, value in self.describe().items() if name not in FREE}


def built_for(model: torch.nn.Module) -> tuple[int, int] | None:
    """Height and width of the images that a model was built for; None for a network that takes any."""
    embed = getattr(model, "patch_embed", getattr(model, "stem", None))  # ResMLPs and Mixers have a stem
    size = getattr(embed, "img_size", None)
    return None if size is None else tuple(size)


@cache
def settings() -> dict[str, dict[str, Setting]]:
    """Every setting of a run by its name on the command line, {title: {name: what is said of it}}, but for
    `model.NAME`, any argument of the model's constructor."""
    of_run = fields_of(RunConfig)
    # both are read by their names
    of_run |= {name: of_run[name]._replace(kind=str) for name in ("method", "model")}
    sections = {"Of the run": {}} | {
        title: {name: of_run.pop(name) for name in names.split() if name in of_run and name not in VALUES}
        for title, (names, *_) in PARTS.items()
    }
    elsewhere = ("recipe", "plan", "augmentation", *NO_SETTINGS)
    sections["Of the run"] = {name: one for name, one in of_run.items() if name not in elsewhere}
    sections["Of the recipe"] = fields_of(Recipe)
    for part in ("plan", "augmentation"):
        sections[f"Of the {part}"] = {f"{part}.{name}": one for name, one in fields_of(VALUES[part]).items()}
    return sections


def read_settings(texts: Mapping[str, str], names: Iterable[str] | None = None) -> dict[str, Any]:
    """The values of some `settings` (names: of some of them only), {name: value} for {name: text}."""
    kinds = {name: one.kind for section in settings().values() for name, one in section.items()}
    return read(texts, kinds if names is None else {name: kinds[name] for name in names})


def with_settings(values: Mapping[str, Any], changes: Mapping[str, str]) -> RunConfig:
    """The run of these fields with some `settings`, as texts, in place of theirs. Nothing is checked before
    all are applied: a model and an image size may be wrong one by one and right together."""
    changed = read_settings(changes)
    method, data = method_of_run(changed.get("method", values["method"])), values["data"]
    require_use(changes, method, data)
    # a recipe of detection on other data is an error, not a recipe of classifying
    without_use = unused(method, data).keys() - {"detector"}
    values = {name: value for name, value in values.items() if name not in without_use}
    if not method.transfers:
        values["plan"] = None  # of a recipe that transfers, by another method
    inner: dict[str, dict[str, Any]] = {part: {} for part in VALUES}
    for name, value in changed.items():
        part, dot, field = name.partition(".")
        if dot:
            inner[part][field] = value
        elif name in Recipe.__dataclass_fields__:
            inner["recipe"][name] = value
        elif name == "model":
            values["model"] = values["model"]._replace(name=value)
        else:
            values[name] = value
    for part in ("plan", "augmentation"):
        if inner[part] and values.get(part) is None:
            raise ValueError(f"{part}.{next(iter(inner[part]))}: a run of {str(method)!r} has no {part}")
        if inner[part]:
            values[part] = replace(values[part], **inner[part])
    values["recipe"] = values["recipe"].changed(inner["recipe"])
    overrides = {**values["model"].overrides, **inner["model"]}
    return RunConfig(**{**values, "model": values["model"]._replace(overrides=overrides)})


def write_config(folder: Path, config: RunConfig) -> Path:
    """Write FOLDER/config.json, whole or not at all."""
    text = json.dumps(config.describe(), indent=1, allow_nan=False) + "\n"
    return write_atomically(folder / "config.json", text.encode())


def read_config(folder: Path, trust_data: bool = False) -> RunConfig:
    """The run that a folder, or a config.json, describes; trust_data: its data may be made by any function,
    also of no installed package. Raises `OSError` for a file that is missing or damaged."""
    path = Path(folder)
    path = path if path.suffix == ".json" else path / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}: `python -m atlib train ... --out {path.parent}`")
    try:
        values = _tuples(json.loads(path.read_text(encoding="utf-8")))
        made = {name: kind(**_tuples(values[name])) for name, kind in VALUES.items() if values.get(name)}
        config = RunConfig(**{**values, **made})
    except (UnicodeDecodeError, TypeError, AttributeError, ValueError) as error:
        raise OSError(f"{path} does not describe a run ({type(error).__name__}: {error})") from error
    if not trust_data:
        require_installed(config.data)
    return config


def is_run(path: Path) -> bool:
    """Whether a path is a run's folder, by its config: other folders have a config.json of another kind."""
    return config_says(path, "recipe_name")


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that they were."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
