"""One training run as a frozen value that goes to JSON and back: all `resume` needs besides checkpoints."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from atlib._util import write_atomically
from atlib.pair import Normalisation
from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.vit import VITS, Architecture
from atrun.data.generated import require_installed
from atrun.data.transforms import Augmentation
from atrun.method import Method, method_of_run
from atrun.overrides import Setting, read, said_of
from atrun.parts import (
    PRETEXTS,
    READINGS,
    TASKS,
    AttnDistilled,
    Classify,
    CocoFolder,
    Detect,
    Dino,
    Dmae,
    Generated,
    Mae,
    Moco,
    Rows,
    Simmim,
    Taught,
    check_values,
    kinds_of,
    names_of,
    require_use,
    unfit,
)
from atrun.untrained import UNTRAINED, check_untrained

TRUST_DATA = "run the function that makes a run's data, though it is of no installed package"
# What may be another when a run goes on: it does not reach the weights, or (on_corrupt) lets it go on.
FREE = ("workers", "save_every", "keep", "tracker", "on_corrupt", "maps_every")
# What a run says of its teacher's images, where that does not say it itself.
TEACHER_SEES = ("teacher_image_size", "teacher_mean", "teacher_std")
# What has fields of its own, which the command line calls `plan.what`; those of a recipe as they stand.
VALUES = {"recipe": Recipe, "plan": Plan, "augmentation": Augmentation, "model": Architecture}
# What the command line has other options for, which look at the value and make it whole.
NO_SETTINGS = ("recipe_name", "data", "teacher", "seed")


@dataclass(frozen=True)
class RunConfig:
    """A run; checked when it is built, without data and without weights. `of` builds it from flat names, as
    the command line and config.json have them.

    Raises `ValueError` for parts that are not those of the method and the data, for a method without its
    teacher, a plan that does not fit the model, and values that cannot be meant.
    """

    #: the published recipe it started from, for the record
    recipe_name: str
    #: what the student gets: scratch, fine-tune, copy, distill ... (`atrun.method.Method`)
    method: Method
    #: the student (of pre-training the teacher to be); without num_classes it gets the data's
    model: Architecture
    #: a name of the catalogue, a path, "coco", or a function (`atrun.data.generated`)
    data: str
    #: in epochs, until the number of images is known (`on`)
    recipe: Recipe
    #: what is trained
    task: Classify | Detect | Mae | Dmae | AttnDistilled | Taught | Moco | Dino | Simmim
    #: how its images come
    reading: Generated | Rows | CocoFolder
    #: a timm name or a file
    teacher: str | None = None
    #: the teacher's heads, where a file's weights do not tell (`atrun.teachers.load.load_teacher`)
    teacher_heads: int | None = None
    #: the timm name of a model that has such weights, likewise
    teacher_architecture: str | None = None
    #: pixels a side of the teacher's images; None: the student's
    teacher_image_size: int | None = None
    #: mean of the teacher's images, per channel; None: as it says itself
    teacher_mean: tuple[float, float, float] | None = None
    #: standard deviation of the teacher's images, likewise
    teacher_std: tuple[float, float, float] | None = None
    #: what is transferred (copy and distill)
    plan: Plan | None = None
    #: a timm name or a file that the student starts from, in place of random weights
    student_weights: str | None = None
    #: the layers whose features are distilled; None: all; pairs {student's: teacher's} where depths differ
    feature_layers: Iterable[int] | Mapping[int, int] | None = None
    #: training images, chosen by the seed, whose mean map is copied
    reference_images: int = 1000
    #: the student's rate of stochastic depth
    drop_path: float = 0.0
    #: processes that decode
    workers: int = 0
    #: steps between checkpoints
    save_every: int = 500
    #: so many checkpoints stay
    keep: int = 2
    #: also send the log to tensorboard (in the run's folder), wandb or mlflow
    tracker: str | None = None
    #: decides first weights, order and augmentation
    seed: int = 0

    @classmethod
    def of(cls, **values: Any) -> "RunConfig":
        """The run of these flat fields, {name: value}: its own and those of its parts. Raises `ValueError`
        also for a field that such a run does not have."""
        task, reading = kinds_of(method_of_run(values.get("method", "")), values.get("data", ""))
        own = [field.name for field in fields(cls) if field.name not in ("task", "reading")]
        unknown = [name for name in values if name not in (*own, *names_of(task, reading))]
        if "detector" in unknown and values["detector"] is not None:
            raise unfit(values["data"], values["detector"])
        if unknown:
            run = f"{values['method']!r} on {values.get('data')!r}"
            raise ValueError(f"a run of {run} has no {', '.join(unknown)}")
        parts = {
            part: kind(**{name: values[name] for name in names_of(kind) if name in values})
            for part, kind in (("task", task), ("reading", reading))
        }
        return cls(**{name: values[name] for name in own if name in values}, **parts)

    def __post_init__(self):
        object.__setattr__(self, "method", method_of_run(self.method))
        object.__setattr__(self, "feature_layers", _normal(self.feature_layers))
        if (got := (type(self.task), type(self.reading))) != (kinds := kinds_of(self.method, self.data)):
            raise ValueError(f"{self.method!r} on {self.data!r} has the parts {kinds}, got {got}")
        if self.method.needs_teacher != (self.teacher is not None):
            needs = "needs a teacher, a timm name or a file" if self.teacher is None else "has no teacher"
            raise ValueError(f"{self.method} {needs}, got {self.teacher!r}")
        planned = None if self.plan is None else self.plan.how
        if planned != self.method.how:
            raise ValueError(f"method {self.method!r} and plan {planned!r} do not go together")
        check_values(self.flat())
        if (self.teacher_mean is None) != (self.teacher_std is None):
            raise ValueError("give both teacher_mean and teacher_std, or neither")
        for name in ("teacher_mean", "teacher_std"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(map(float, value)))
        _ = self.teacher_normalisation  # checks the values
        if self.student_weights is not None and not self.method.keeps_weights_apart:
            raise ValueError(f"student_weights={self.student_weights!r}: {self.method} has no use for them")
        if self.teacher == UNTRAINED:
            check_untrained(self)
        if self.method.pretrains and (self.recipe.mixup or self.recipe.cutmix):
            raise ValueError(f"mixup and cutmix mix classes, and {self.method} has none: set them to 0")
        if isinstance(self.task, Detect):
            if self.task.detector is None:
                raise unfit(self.data, None)
            for name in Classify.of_recipe:
                if value := getattr(self.recipe, name):
                    raise ValueError(f"{name}={value!r}: a detector has no use for it")
        if (name := _not_finite(self.describe())) is not None:
            raise ValueError(f"{name} must be a finite number")
        self._check_model()

    @property
    def teacher_normalisation(self) -> Normalisation | None:
        """How the teacher's images are normalised, where the run says it and not the teacher itself."""
        return None if self.teacher_mean is None else Normalisation(self.teacher_mean, self.teacher_std)

    @property
    def augmentation(self) -> Augmentation | None:
        """What is done to images that are read; None where they are taken as they are."""
        return self.reading.augmentation if isinstance(self.reading, Rows) else None

    def flat(self) -> dict[str, Any]:
        """All fields, those of its parts among them, by the names that `of` takes."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        task, reading = own.pop("task"), own.pop("reading")
        return own | vars(task) | vars(reading)

    def changed(self, **values: Any) -> "RunConfig":
        """With other values of some flat fields."""
        return RunConfig.of(**{**self.flat(), **values})

    def _check_model(self) -> None:
        name, model = self.model.name, self.skeleton(self.model.overrides.get("num_classes", 2))
        if not isinstance(model, VITS):
            if self.method is not Method.SCRATCH or not isinstance(self.task, Classify):
                raise ValueError(f"{name!r} is a {type(model).__name__}, no ViT: it can only be scratch")
            if self.task.maps_every:
                raise ValueError(f"maps_every={self.task.maps_every}: {name!r} has no maps, set it to 0")
        elif self.method is Method.DISTILLATION_TOKEN and not hasattr(model, "dist_token"):
            raise ValueError(f"{name!r} has no distillation token: name a DeiT, set model.distilled to true")
        elif len(model.blocks) == 0:
            raise ValueError(f"the model {name!r} has no blocks: set model.depth to at least 1")
        if self.method.pretrains and not isinstance(self.task, Taught):
            try:
                with torch.device("meta"):
                    self.pretext(model, self.skeleton(0) if self.method.needs_teacher else None)
            except AssertionError as error:  # timm's blocks refuse a width that their heads do not divide
                width, heads = self.task.decoder_width, self.task.decoder_heads
                raise ValueError(f"decoder_width={width} is no multiple of decoder_heads={heads}") from error
        if self.plan is not None:
            self.plan.layers_of(len(model.blocks))
        if self.feature_layers is not None:
            Plan(layers=self.feature_layers).layers_of(len(model.blocks))
        size = built_for(model)
        if None not in (size, self.augmentation) and size != (self.augmentation.image_size,) * 2:
            wanted = self.augmentation.image_size
            raise ValueError(f"{name!r} takes images of {size} pixels, augmentation.image_size is {wanted}")

    def pretext(
        self,
        vit: torch.nn.Module,
        teacher: torch.nn.Module | None = None,
        images: Normalisation | None = None,
    ) -> torch.nn.Module:
        """What trains `vit` on images alone: what hides patches of them, a pair of it and a copy that
        follows, or one of it and its teacher. images: how they are normalised, where there is a teacher."""
        # imported here: other runs do not need them
        from atfamily import contrast, distilled_mae, simmim
        from atfamily.attndistill import AttnDistill
        from atlib import mae

        match self.task:
            case Mae() as task:
                decoder = task.decoder_width, task.decoder_depth, task.decoder_heads
                painter = mae.MaskedAutoencoder(vit, task.mask_ratio, *decoder)
                if not isinstance(task, Dmae):
                    return painter
                return distilled_mae.DistilledMae(teacher, painter, normalisation=images)
            case AttnDistilled() as task:
                how = {"attention_weight": task.attention_weight, "projector_layers": task.projector_layers}
                how["temperature"] = task.attention_temperature
                return AttnDistill(teacher, vit, normalisation=images, **how)
            case Simmim() as task:
                return simmim.SimMim(vit, task.mask_ratio, task.mask_unit)
            case Moco() as task:
                patches = contrast.draw_patches(vit) if task.freeze_patches else vit
                alike = {name: getattr(task, name) for name in ("momentum", "freeze_patches")}
                widths = {"projection": task.projection_width, "hidden": task.hidden_width}
                return contrast.MoCo(patches, temperature=task.contrast_temperature, **widths, **alike)
            case Dino() as task:
                alike = ("outputs", "teacher_temperature", "temperature_warmup", "momentum", "frozen")
                alike = {name: getattr(task, name) for name in (*alike, "lengths", "local_size")}
                widths = {"hidden": task.hidden_width, "bottleneck": task.bottleneck_width}
                return contrast.Dino(vit, **widths, **alike)
        raise ValueError(f"{self.method} learns from labels: no pre-text trains its model")

    def on(self, images: int) -> "RunConfig":
        """The run on so many training images: its recipe in steps."""
        return replace(self, recipe=self.recipe.on(images))

    def architecture(self, num_classes: int) -> Architecture:
        """The model for so many classes, unless it has its own `num_classes`; without a class head for
        masking and for detection."""
        headless = not isinstance(self.task, Classify)
        arguments: dict[str, Any] = {"num_classes": 0 if headless else num_classes}
        if self.augmentation is not None:
            arguments["img_size"] = self.augmentation.image_size
        if self.drop_path:
            arguments["drop_path_rate"] = self.drop_path
        return Architecture(self.model.name, arguments | dict(self.model.overrides))

    def skeleton(self, num_classes: int) -> torch.nn.Module:
        """The model without weights, on the meta device. Raises `ValueError` where it cannot be built."""
        try:
            model = Architecture.read(self.architecture(num_classes)._asdict())  # as its files will be read
            with torch.device("meta"):
                return model.build_classifier()
        except Exception as error:  # whatever timm meets first
            given = dict(self.model.overrides)
            raise ValueError(f"{self.model.name!r} cannot be built with {given}: {error}") from error

    def describe(self) -> dict:
        """The flat fields as plain JSON values, for a record and for config.json."""
        return {name: as_plain(value) for name, value in self.flat().items()}

    def fingerprint(self) -> dict:
        """What must be the same when a run goes on."""
        described = self.describe()
        # a run of before there were these goes on
        unsaid = [name for name in TEACHER_SEES if described[name] is None]
        return {name: value for name, value in described.items() if name not in (*FREE, *unsaid)}

    def require_use(self, names: Iterable[str]) -> None:
        """Raise `ValueError` for a setting that this run has no use for: it was meant for something."""
        require_use(names, self.method, self.data)


def built_for(model: torch.nn.Module) -> tuple[int, int] | None:
    """Height and width of the images that a model was built for; None for a network that takes any."""
    embed = getattr(model, "patch_embed", getattr(model, "stem", None))  # ResMLPs and Mixers have a stem
    size = getattr(embed, "img_size", None)
    return None if size is None else tuple(size)


def settings(model: Iterable[str] = ()) -> dict[str, Any]:
    """Every setting of a run by its name on the command line, with its type: the fields of the run, of its
    parts and of its recipe by their names, those of plan and augmentation as `plan.what` and
    `augmentation.flip`; `model` chooses another model, and `model.NAME` is any of its constructor's arguments
    (those to be listed are given)."""
    apart = ("task", "reading", *VALUES, *NO_SETTINGS)
    kinds: dict[str, Any] = {}
    for of in (RunConfig, *TASKS, *READINGS, Recipe):
        types = get_type_hints(of)
        kinds |= {name: types[name] for name in names_of(of) if name not in apart}
    for part in ("plan", "augmentation"):
        kinds |= {f"{part}.{name}": kind for name, kind in get_type_hints(VALUES[part]).items()}
    # a method is read by its name, and checked with all others by `RunConfig`
    return kinds | {"model": str, "method": str} | dict.fromkeys(model, Any)


def explained(pretraining: bool) -> dict[str, dict[str, Setting]]:
    """What the help of `train`, or of `pretrain`, says of the `settings`, {title: {name: what is said}}: a
    section for what every run has, and one for each part that only some have."""
    of_run = said_of(RunConfig)
    # both are read by their names
    of_run |= {name: of_run[name]._replace(kind=str) for name in ("method", "model")}
    apart = ("task", "reading", "recipe", "plan", *NO_SETTINGS)
    sections = {"Of the run": {name: one for name, one in of_run.items() if name not in apart}}
    tasks = [task for task in TASKS if pretraining == (task in PRETEXTS)]
    for part in dict.fromkeys(part for kind in (*tasks, *READINGS) for part in reversed(kind.__mro__)):
        if is_dataclass(part) and (own := {k: one for k, one in said_of(part).items() if k not in VALUES}):
            sections[part.says] = own
    sections["Of the recipe"] = said_of(Recipe)
    for part in ("augmentation",) if pretraining else ("plan", "augmentation"):
        sections[f"Of the {part}"] = {f"{part}.{name}": one for name, one in said_of(VALUES[part]).items()}
    return sections


def with_settings(values: Mapping[str, Any], changes: Mapping[str, str]) -> RunConfig:
    """The run of these flat fields with some `settings`, as texts, in place of theirs; of `values`, what such
    a run does not have is left out.

    Nothing is checked before all are applied: a model and an image size may be wrong one by one and right
    together. Raises `ValueError` for unknown names (with the close ones), values of another type, values that
    cannot be meant, and settings that such a run has no use for.
    """
    asked = read(changes, settings(name for name in changes if name.startswith("model.")))
    if (name := _not_finite(asked)) is not None:
        raise ValueError(f"{name}: it must be a finite number")
    method, data = method_of_run(asked.get("method", values["method"])), values["data"]
    require_use(changes, method, data)
    # a recipe of detection on other data is an error, not a recipe of classifying
    has = {field.name for field in fields(RunConfig)} | {*names_of(*kinds_of(method, data)), "detector"}
    values = {name: value for name, value in values.items() if name in has}
    if not method.transfers:
        values["plan"] = None  # of a recipe that transfers, by another method
    inner: dict[str, dict[str, Any]] = {part: {} for part in VALUES}
    for name, value in asked.items():
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
    return RunConfig.of(**{**values, "model": values["model"]._replace(overrides=overrides)})


def write_config(folder: Path, config: RunConfig) -> Path:
    """Write FOLDER/config.json, whole or not at all."""
    return write_atomically(
        config_path(folder), (json.dumps(config.describe(), indent=1, allow_nan=False) + "\n").encode()
    )


def read_config(folder: Path, trust_data: bool = False) -> RunConfig:
    """The run that a folder holds. Raises `FileNotFoundError`, or as `read_config_file` does."""
    path = config_path(folder)
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no run: `python -m atlib train ... --out {folder}`")
    return read_config_file(path, trust_data)


def read_config_file(path: Path, trust_data: bool = False) -> RunConfig:
    """The run that a config.json describes. trust_data: its data may be made by any function; otherwise by
    one of an installed package. Raises `ValueError` for another function, `OSError` naming a file that is
    damaged."""
    try:
        values = _tuples(json.loads(path.read_text(encoding="utf-8")))
        if values.pop("tensorboard", False):  # of before there were other trackers
            values["tracker"] = "tensorboard"
        made = {name: kind(**_tuples(values[name])) for name, kind in VALUES.items() if values.get(name)}
        config = RunConfig.of(**{**values, **made})
    except (UnicodeDecodeError, TypeError, AttributeError, ValueError) as error:
        raise OSError(f"{path} does not describe a run ({type(error).__name__}: {error})") from error
    if not trust_data:
        require_installed(config.data)
    return config


def config_path(folder: Path) -> Path:
    """Where a run's folder keeps its config."""
    return Path(folder) / "config.json"


def is_run(path: Path) -> bool:
    """Whether a path is a run's folder, by its config: other folders have a config.json of another kind."""
    try:
        return "recipe_name" in json.loads(config_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def as_plain(value: object) -> object:
    """A value as JSON has it."""
    if isinstance(value, Method):
        return value.value
    if isinstance(value, Architecture):
        return {
            "name": value.name,
            "overrides": {name: as_plain(item) for name, item in value.overrides.items()},
        }
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    return [as_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _normal(layers: Iterable[int] | Mapping[int, int] | None) -> tuple | None:
    """Layers as the command line, Python or JSON give them, in one form."""
    if layers is None or isinstance(layers, Mapping):
        return layers and Plan(layers=layers).layers
    return tuple(tuple(layer) if isinstance(layer, (list, tuple)) else layer for layer in layers)


def _not_finite(value: object, name: str = "") -> str | None:
    """Where in nested plain values a number is infinite or NaN, which JSON could not say; None: nowhere."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name}={value}"
    inside = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    for key, item in inside.items() if isinstance(inside, dict) else ():
        if (where := _not_finite(item, f"{name}.{key}".removeprefix("."))) is not None:
            return where
    return None


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that they were."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
