"""One training run as a frozen value that goes to JSON and back: all `resume` needs besides checkpoints."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from atlib._util import check_fields, require_known, write_atomically
from atlib.data.transforms import Augmentation
from atlib.plan import Plan
from atlib.run.overrides import read
from atlib.train.recipe import Recipe
from atlib.vit import Architecture

METHODS = ("scratch", "fine-tune", "copy", "distill", "retrieval", "mae")
NEED_TEACHER = ("fine-tune", "copy", "distill")
PRETRAINING = ("retrieval", "mae")
BUILT_IN = "marked-glyphs"  # the one data set that is generated, of 32 x 32 pixels
COCO = "coco"  # what detectors learn from, in COCO's form
HEADS = ("fcos", "faster-rcnn", "mask-rcnn")  # of a detector, as in `atlib.detection.detector.DETECTORS`
HEAD_SIZES = ("vitdet", "small")  # likewise, `SIZES`
PARTS = ("recipe", "plan", "augmentation", "model")  # fields of a run that have fields of their own
# Settings that only some runs have a use for: whose they are, and whether a run is one of those.
_READ = ("data_path", "image_column", "label_column", "training_split", "streaming", "on_corrupt")
_DECODER = ("decoder_width", "decoder_depth", "decoder_heads")
_ROWS = ("image_column", "label_column", "streaming", "on_corrupt")
_OF_HEADS = ("head_sizes", "jitter")
_CLASSES = (
    "label_smoothing",
    "mixup",
    "cutmix",
    "binary",
)  # of a recipe, 0 or False without classes of images
_LABELLED = ("evaluation_split", "evaluate_every", "task_weight", "binary")
USED_BY: tuple[tuple[tuple[str, ...], str, Callable[["RunConfig"], bool]], ...] = (
    (_READ, "data that are read", lambda run: run.data != BUILT_IN),
    (_ROWS, "data in rows", lambda run: run.heads is None),
    (_CLASSES, "classifying whole images", lambda run: run.heads is None),
    (_OF_HEADS, "detection", lambda run: run.heads is not None),
    (("mask_ratio", *_DECODER), "masked auto-encoding", lambda run: run.method == "mae"),
    (("teacher_heads", "teacher_architecture"), "a teacher", lambda run: run.teacher is not None),
    (("transfer_weight",), "Distill", lambda run: run.method == "distill"),
    (_LABELLED, "training with labels", lambda run: run.method not in PRETRAINING),
)
# The values that can be meant.
RULES = (
    (("seed", "workers", "evaluate_every"), lambda value: value >= 0, "must be at least 0"),
    (("save_every", "keep", *_DECODER), lambda value: value >= 1, "must be at least 1"),
    (("data_size",), lambda value: value is None or value >= 1, "must be at least 1, or None for all"),
    (("seed",), lambda value: value < 2**32, f"must be below 2**32 = {2**32}, as NumPy's generators ask for"),
    (("drop_path",), lambda value: 0 <= value < 1, "must be at least 0 and below 1"),
    (
        ("jitter",),
        lambda value: value is None or len(value) == 2 and 0 < value[0] <= value[1] < math.inf,
        "must be the least and the largest scale, such as (0.1, 2.0), or None for none",
    ),
)
# What may be another when a run goes on: it does not reach the weights, or (on_corrupt) lets it go on.
FREE = ("workers", "save_every", "keep", "tensorboard", "on_corrupt")
# What the command line has other options for, which look at the value and make it whole.
NO_SETTINGS = ("recipe_name", "data", "teacher", "seed", "tensorboard")


@dataclass(frozen=True)
class RunConfig:
    """A run; checked when it is built, without data and without weights.

    recipe_name: the published recipe it started from, for the record. recipe: in epochs, until the number of
    images is known (`on`). method: one of `METHODS`; "retrieval" and "mae" make a teacher. model: the student
    (of the last two, the teacher to be); without num_classes it gets the data's. teacher: a timm name or a
    file; teacher_heads, teacher_architecture: of a file whose weights do not tell
    (`atlib.teachers.load.load_teacher`). data, data_path, image_column, label_column, training_split: as in
    `atlib.data.photos.open_photos`; data_size: so many images, chosen by the seed (None: all); of a stream,
    their number, where nothing else says it. streaming: read rows as they come instead of by index.
    augmentation: None for the built-in world, whose images are taken as they are. plan: what is transferred
    (copy and distill). drop_path: the student's. mask_ratio, decoder_width, decoder_depth,
    decoder_heads: of the masked auto-encoder.
    heads: of a detector on the model, one of `HEADS`, trained on data "coco"; None: the model classifies.
    head_sizes: one of `HEAD_SIZES`. jitter: the range of large-scale jitter
    (`atlib.detection.coco.CocoObjects`), None for none.
    evaluation_split: evaluated at the end and after every `evaluate_every`-th pass (0: only at the end).
    on_corrupt: "raise" or "skip" (images that cannot be decoded; the evaluation then leaves them out).
    workers: processes that decode. save_every: steps between checkpoints, `keep` of which stay. Raises
    `ValueError` for a method without its teacher, a plan that does not fit the model, and values that cannot
    be meant.
    """

    recipe_name: str
    method: str
    model: Architecture
    data: str
    recipe: Recipe
    teacher: str | None = None
    teacher_heads: int | None = None
    teacher_architecture: str | None = None
    data_path: str | None = None
    data_size: int | None = None
    image_column: str | None = None
    label_column: str | None = None
    streaming: bool = False
    training_split: str = "train"
    augmentation: Augmentation | None = None
    plan: Plan | None = None
    drop_path: float = 0.0
    mask_ratio: float = 0.75
    decoder_width: int = 64
    decoder_depth: int = 2
    decoder_heads: int = 4
    evaluation_split: str = "test"
    evaluate_every: int = 0
    on_corrupt: str = "raise"
    workers: int = 0
    save_every: int = 500
    keep: int = 2
    tensorboard: bool = False
    seed: int = 0
    heads: str | None = None
    head_sizes: str | None = None
    jitter: tuple[float, float] | None = None

    def __post_init__(self):
        require_known("method", self.method, METHODS)
        require_known("on_corrupt", self.on_corrupt, ("raise", "skip"))
        if self.method in NEED_TEACHER and self.teacher is None:
            raise ValueError(
                f"{self.method} needs a teacher: a timm name or a file of weights, such as pre-training makes"
            )
        if self.method not in NEED_TEACHER and self.teacher is not None:
            raise ValueError(
                f"{self.method} has no teacher, got {self.teacher!r}: leave it out, or choose a"
                " recipe of copy, distill or fine-tune"
            )
        planned = None if self.plan is None else self.plan.how
        if planned != (self.method if self.method in ("copy", "distill") else None):
            raise ValueError(
                f"method {self.method!r} and plan {planned!r} do not go together: copy and distill have a"
                " plan that says so, other methods none"
            )
        check_fields(self, RULES)
        if self.method in PRETRAINING and (self.recipe.mixup or self.recipe.cutmix):
            raise ValueError(f"mixup and cutmix mix classes, and {self.method} has none: set them to 0")
        self._check_heads()
        if self.method == "retrieval" and self.data != BUILT_IN:
            raise ValueError(
                f"retrieval is a task of the built-in world, data 'marked-glyphs', not of {self.data!r}: use"
                " `pretrain mae`"
            )
        if (name := _not_finite(self.describe())) is not None:
            raise ValueError(f"{name} must be a finite number")
        self._check_model()

    def _check_heads(self) -> None:
        """A run on COCO detects, and no other does; it has no settings of classes and of their images."""
        if (self.heads is not None) != (self.data == COCO):
            raise ValueError(
                f"data {self.data!r} and heads {self.heads!r} do not go together: a detector (one of"
                f" {', '.join(HEADS)}) learns from data {COCO!r}, and nothing else does; choose a recipe of"
                " detection, such as vitdet-scratch-vit-base, with --data coco, or other data"
            )
        if self.heads is None:
            if self.head_sizes is not None or self.jitter is not None:
                raise ValueError(
                    f"head_sizes={self.head_sizes!r} and jitter={self.jitter!r} are of a detector, and this"
                    " run has no heads: leave them out"
                )
            return
        require_known("heads", self.heads, HEADS)
        require_known("head_sizes", self.head_sizes, HEAD_SIZES)
        if self.method in PRETRAINING:
            raise ValueError(
                f"{self.method} learns without objects, heads {self.heads!r} with them: leave one out"
            )
        classified = {name: getattr(self.recipe, name) for name in _CLASSES}
        of_images = {"augmentation": self.augmentation, "streaming": self.streaming}
        columns = {"image_column": self.image_column, "label_column": self.label_column}
        for name, value in (classified | of_images | columns).items():
            if value:
                raise ValueError(
                    f"{name}={value!r} is of classifying images, and a detector has no use for it"
                )
        if self.on_corrupt != "raise":
            raise ValueError(
                f"on_corrupt={self.on_corrupt!r}: an image of COCO that cannot be decoded is an error,"
                " 'raise'"
            )

    def _check_model(self) -> None:
        model = self.skeleton(self.model.overrides.get("num_classes", 2))
        if len(model.blocks) == 0:
            raise ValueError(f"the model {self.model.name!r} has no blocks: set model.depth to at least 1")
        if self.method == "mae":
            self._check_auto_encoder(model)
        if self.plan is not None:
            self.plan.layers_of(len(model.blocks))
        size = tuple(model.patch_embed.img_size)
        takes = f"the model {self.model.name!r} takes images of {size} pixels"
        if self.data == BUILT_IN and size != (32, 32):
            raise ValueError(
                f"{takes}, those of {BUILT_IN} have 32 x 32: choose a recipe of the built-in scale, or other"
                " --data"
            )
        if self.augmentation is not None and size != (self.augmentation.image_size,) * 2:
            raise ValueError(
                f"{takes}, the augmentation makes them of {self.augmentation.image_size}: change"
                " model.img_size or augmentation.image_size"
            )

    def _check_auto_encoder(self, model: torch.nn.Module) -> None:
        try:
            with torch.device("meta"):
                self.auto_encoder(model)
        except AssertionError as error:  # timm's blocks refuse a width that their heads do not divide
            raise ValueError(
                f"decoder_width={self.decoder_width} makes no decoder ({error}): take a multiple of"
                f" decoder_heads={self.decoder_heads}"
            ) from error

    def auto_encoder(self, vit: torch.nn.Module) -> torch.nn.Module:
        """The masked auto-encoder that trains `vit`."""
        from atlib.train.pretrain import MaskedAutoencoder  # imported here: other runs do not need it

        decoder = self.decoder_width, self.decoder_depth, self.decoder_heads
        return MaskedAutoencoder(vit, self.mask_ratio, *decoder)

    def on(self, images: int) -> "RunConfig":
        """The run on so many training images: its recipe in steps."""
        return replace(self, recipe=self.recipe.on(images))

    def architecture(self, num_classes: int) -> Architecture:
        """The model for so many classes, unless it has its own `num_classes`; without a class head for
        masking and for detection."""
        headless = self.method == "mae" or self.heads is not None
        arguments: dict[str, Any] = {"num_classes": 0 if headless else num_classes}
        if self.augmentation is not None:
            arguments["img_size"] = self.augmentation.image_size
        if self.drop_path:
            arguments["drop_path_rate"] = self.drop_path
        return Architecture(self.model.name, arguments | dict(self.model.overrides))

    def skeleton(self, num_classes: int) -> torch.nn.Module:
        """The model without weights, on the meta device. Raises `ValueError` where it cannot be built."""
        try:
            with torch.device("meta"):
                return self.architecture(num_classes).build()
        except Exception as error:  # whatever timm meets first
            raise ValueError(
                f"the model {self.model.name!r} cannot be built with {dict(self.model.overrides)}: {error}"
            ) from error

    def describe(self) -> dict:
        """All fields as plain JSON values, for a record and for config.json."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def fingerprint(self) -> dict:
        """What must be the same when a run goes on."""
        return {name: value for name, value in self.describe().items() if name not in FREE}

    def require_use(self, names: Iterable[str]) -> None:
        """Raise `ValueError` for a setting that this run has no use for: it was meant for something."""
        for asked in names:
            for settings, use, has in USED_BY:
                if asked in settings and not has(self):
                    raise ValueError(
                        f"{asked} would change nothing: it belongs to {use}, not to a run of method"
                        f" {self.method!r} on {self.data!r}; leave it out"
                    )


def settings(model: Iterable[str] = ()) -> dict[str, Any]:
    """Every setting of a run by its name on the command line, with its type: the fields of the run and of its
    recipe by their names, those of its parts as `plan.what` and `augmentation.flip`; `model` chooses another
    model, and `model.NAME` is any of its constructor's arguments (those to be listed are given)."""
    kinds = get_type_hints(RunConfig) | get_type_hints(Recipe)
    for part, of in (("plan", Plan), ("augmentation", Augmentation)):
        kinds |= {f"{part}.{name}": kind for name, kind in get_type_hints(of).items()}
    own = {name: kind for name, kind in kinds.items() if name not in (*PARTS, *NO_SETTINGS)}
    return own | {"model": str} | dict.fromkeys(model, Any)


def with_settings(values: Mapping[str, Any], changes: Mapping[str, str]) -> RunConfig:
    """The run of these fields with some `settings`, as texts, in place of theirs.

    Nothing is checked before all are applied: a model and an image size may be wrong one by one and right
    together. Raises `ValueError` for unknown names (with the close ones), values of another type, values that
    cannot be meant, and settings that such a run has no use for.
    """
    found = read(changes, settings(name for name in changes if name.startswith("model.")))
    if (name := _not_finite(found)) is not None:
        raise ValueError(f"{name}: it must be a finite number")
    model = values["model"]
    changed: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, value in found.items():
        part, dot, inner = name.partition(".")
        if dot:
            parts[part][inner] = value
        elif name in Recipe.__dataclass_fields__:
            parts["recipe"][name] = value
        elif name == "model":
            model = model._replace(name=value)
        else:
            changed[name] = value
    for part in ("plan", "augmentation"):
        if parts[part] and values.get(part) is None:
            raise ValueError(
                f"{part}.{next(iter(parts[part]))}: this run has no {part} (method {values['method']!r},"
                f" recipe {values['recipe_name']!r})"
            )
        if parts[part]:
            changed[part] = replace(values[part], **parts[part])
    changed["recipe"] = values["recipe"].changed(parts["recipe"])
    changed["model"] = model._replace(overrides={**model.overrides, **parts["model"]})
    run = RunConfig(**{**values, **changed})
    run.require_use(changes)
    return run


def write_config(folder: Path, config: RunConfig) -> Path:
    """Write FOLDER/config.json, whole or not at all."""
    return write_atomically(
        config_path(folder), (json.dumps(config.describe(), indent=1, allow_nan=False) + "\n").encode()
    )


def read_config(folder: Path) -> RunConfig:
    """The run that a folder holds. Raises `FileNotFoundError`, or `OSError` naming a file that is damaged."""
    path = config_path(folder)
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} holds no run, {path.name} is missing: start one with `python -m atlib train ... --out"
            f" {folder}`"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"recipe": Recipe, "plan": Plan, "augmentation": Augmentation, "model": Architecture}
        parts = {name: kind(**_tuples(values[name])) for name, kind in kinds.items() if values.get(name)}
        return RunConfig(**{**values, **parts})
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError, ValueError) as error:
        raise OSError(
            f"{path} does not describe a run ({type(error).__name__}: {error}); it was left as it is"
        ) from error


def config_path(folder: Path) -> Path:
    """Where a run's folder keeps its config."""
    return Path(folder) / "config.json"


def _plain(value: object) -> object:
    """A value as JSON has it."""
    if isinstance(value, Architecture):
        return {
            "name": value.name,
            "overrides": {name: _plain(each) for name, each in value.overrides.items()},
        }
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def _not_finite(value: object, name: str = "") -> str | None:
    """Where in nested plain values a number is infinite or NaN, which JSON could not say; None: nowhere."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name}={value}"
    inside = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    for key, each in inside.items() if isinstance(inside, dict) else ():
        if (found := _not_finite(each, f"{name}.{key}".removeprefix("."))) is not None:
            return found
    return None


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that they were."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
