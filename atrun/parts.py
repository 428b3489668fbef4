"""What a run has that not every run has: a part for each thing that can be trained, and for each way in which
images come. A setting belongs to the part whose field it is."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from inspect import get_annotations
from typing import Any, ClassVar

from atlib._util import require_known
from atrun.data.generated import is_generated
from atrun.data.loading import ON_CORRUPT
from atrun.data.transforms import Augmentation
from atrun.log import TRACKERS
from atrun.method import Method

COCO = "coco"  # what detectors learn from, in COCO's form
DETECTORS = ("fcos", "faster-rcnn", "mask-rcnn")  # as in `atfamily.detection.detector.DETECTORS`
DETECTOR_SIZES = ("vitdet", "small")  # likewise, `SIZES`


def check_values(values: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a field of a run outside its range, and for a word that is not known; None is
    always in it."""

    def require(names: str, fits: Callable[[Any], bool], needs: str) -> None:
        for name in names.split():
            value = values.get(name)
            if value is not None and not fits(value):
                raise ValueError(f"{name}={value!r} must be {needs}")

    def are_two(value) -> bool:
        return len(tuple(value)) == 2 and all(0 < one < math.inf for one in value)

    require("seed", lambda seed: 0 <= seed < 2**32, "from 0 to 2**32 - 1")  # as NumPy's generators ask for
    require("drop_path", lambda rate: 0 <= rate <= 0.99, "from 0 to 0.99")
    counts = "save_every keep reference_images teacher_image_size data_size decoder_width decoder_depth"
    counts += " decoder_heads mask_unit projector_layers hidden_width projection_width outputs"
    require(f"{counts} bottleneck_width local_size", lambda count: count >= 1, "1 or more")
    from_0 = "workers evaluate_every maps_every local_views attention_weight"
    require(from_0, lambda value: 0 <= value < math.inf, "0 or more")
    require("momentum temperature_warmup frozen", lambda share: 0 <= share <= 1, "from 0 to 1")
    require("attention_temperature contrast_temperature", lambda t: 0 < t < math.inf, "above 0")
    require("teacher_temperature local_scale jitter", are_two, "two numbers above 0")
    require("jitter", lambda scales: scales[0] <= scales[1], "the least and the largest scale")
    known = {"detector": DETECTORS, "detector_sizes": DETECTOR_SIZES}
    known |= {"on_corrupt": ON_CORRUPT, "tracker": TRACKERS}
    for name, words in known.items():
        if values.get(name) is not None:
            require_known(name, values[name], words)


class Part:
    """Fields that some runs have. says: what they belong to, in a message, which is the docstring; of_recipe:
    the fields of a recipe that are of use to these runs only."""

    says: ClassVar[str]
    of_recipe: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls):
        cls.says = (cls.__doc__ or cls.__name__).removesuffix(".")


# --- What is trained ---


@dataclass(frozen=True)
class Labelled(Part):
    """Training with labels."""

    of_recipe = ("task_weight",)

    #: the split that is evaluated at the end
    evaluation_split: str = "test"
    #: evaluated after every so many passes too; 0: only at the end
    evaluate_every: int = 0


@dataclass(frozen=True)
class Classify(Labelled):
    """Classifying whole images."""

    of_recipe = ("label_smoothing", "mixup", "cutmix", "binary")

    #: epochs between pictures of where teacher and student look in six images; 0: none
    maps_every: int = 0


@dataclass(frozen=True)
class Detect(Labelled):
    """Detection."""

    #: one of `DETECTORS`
    detector: str | None = None
    #: the sizes of its pyramid and heads, one of `DETECTOR_SIZES`
    detector_sizes: str = "vitdet"
    #: least and largest scale of large-scale jitter (`atrun.data.coco.CocoObjects`), None for none
    jitter: tuple[float, float] | None = None


@dataclass(frozen=True)
class Masked(Part):
    """The methods that hide patches."""

    #: the share of the patches that are hidden
    mask_ratio: float = 0.75


@dataclass(frozen=True)
class Mae(Masked):
    """Masked auto-encoding."""

    #: width of the decoder's blocks
    decoder_width: int = 64
    #: their number
    decoder_depth: int = 2
    #: heads in each of them
    decoder_heads: int = 4


@dataclass(frozen=True)
class Dmae(Mae):
    """Distilled MAE (`atfamily.distilled_mae`)."""


@dataclass(frozen=True)
class AttnDistilled(Part):
    """AttnDistill (`atfamily.attndistill`)."""

    #: the factor on the loss of where it looks, beside that of the class token
    attention_weight: float = 0.1
    #: softens the product that merges heads
    attention_temperature: float = 10.0
    #: layers of the projector, which is dropped later
    projector_layers: int = 4


@dataclass(frozen=True)
class Taught(Part):
    """Learning from a teacher alone."""


@dataclass(frozen=True)
class Simmim(Masked):
    """SimMIM."""

    #: the share of the patches that are hidden
    mask_ratio: float = 0.6
    #: the side, in patches, of the squares that are hidden
    mask_unit: int = 1


@dataclass(frozen=True)
class Contrast(Part):
    """Learning by contrast (`atfamily.contrast`)."""

    #: width of the projector's, or the head's, inner layers
    hidden_width: int = 4096
    #: decay of the copy that follows, at the first step; 1 at the last
    momentum: float = 0.99


@dataclass(frozen=True)
class Moco(Contrast):
    """MoCo-v3."""

    #: numbers by which images are told apart
    projection_width: int = 256
    #: divides the cosines of two images
    contrast_temperature: float = 0.2
    #: leave the patch projection as it is drawn
    freeze_patches: bool = True


@dataclass(frozen=True)
class Dino(Contrast):
    """DINO."""

    #: numbers that the head says of an image, which are compared
    outputs: int = 65536
    #: numbers from which the head's last layer makes them
    bottleneck_width: int = 256
    #: in the teacher's softmax, at the first step, and after the share `temperature_warmup` of the run
    teacher_temperature: tuple[float, float] = (0.04, 0.04)
    #: the share of the run in which it grows
    temperature_warmup: float = 0.0
    #: the share of the run in which the head's last layer is not trained
    frozen: float = 0.01
    #: learn the lengths of the last layer's directions too
    lengths: bool = False
    #: small views of an image, beside the two large ones
    local_views: int = 8
    #: least and largest share of its area that they crop
    local_scale: tuple[float, float] = (0.05, 0.4)
    #: pixels a side at which they are computed, by a model with dynamic_img_size; None: at full size
    local_size: int | None = None


# --- How images come ---


@dataclass(frozen=True)
class Reading(Part):
    """Data."""

    #: a split, or several as "train+validation"
    training_split: str = "train"
    #: so many images, chosen by the seed; None: all. Of a stream, their number, where nothing else says it
    data_size: int | None = None


@dataclass(frozen=True)
class Generated(Reading):
    """Data that are generated (`atrun.data.generated`)."""


@dataclass(frozen=True)
class Files(Reading):
    """Data that are read."""

    #: where the files of named data are
    data_path: str | None = None


@dataclass(frozen=True)
class Rows(Files):
    """Data that are read in rows (`atrun.data.photos.open_photos`)."""

    #: the column of images; None: one of the usual names
    image_column: str | None = None
    #: the column of labels, likewise
    label_column: str | None = None
    #: read rows as they come instead of by index
    streaming: bool = False
    #: what to do about an image that cannot be decoded: "skip", say it, count it and go on, also in the
    #: evaluation, or "raise"
    on_corrupt: str = "skip"
    #: None: images are taken as they are
    augmentation: Augmentation | None = None


@dataclass(frozen=True)
class CocoFolder(Files):
    """Data in COCO's form."""


TASKS: tuple[type, ...] = (Classify, Detect, Mae, Dmae, AttnDistilled, Taught, Moco, Dino, Simmim)
READINGS: tuple[type, ...] = (Generated, Rows, CocoFolder)
# what a method that makes a teacher trains
_PRETEXTS: dict[Method, type] = {
    Method.MAE: Mae,
    Method.DMAE: Dmae,
    Method.ATTNDISTILL: AttnDistilled,
    Method.DISTILL_UNLABELLED: Taught,
    Method.FEATURES_UNLABELLED: Taught,
    Method.MOCO: Moco,
    Method.DINO: Dino,
    Method.SIMMIM: Simmim,
}
PRETEXTS: tuple[type, ...] = (*_PRETEXTS.values(),)


def kinds_of(method: Method, data: str) -> tuple[type, type]:
    """The parts of a run by this method on these data: what it trains, and how its images come. Raises
    `ValueError` where there is no such run."""
    if data != COCO:
        return _PRETEXTS.get(method, Classify), (Generated if is_generated(data) else Rows)
    if method not in (Method.SCRATCH, Method.FINE_TUNE, Method.COPY, Method.DISTILL):
        raise ValueError(f"{method} trains no detector, as data {COCO!r} need: choose other data")
    return Detect, CocoFolder


def unfit(data: str, detector: str | None) -> ValueError:
    """The error of a detector that has no data to learn from, or the other way round."""
    return ValueError(
        f"data {data!r}, detector {detector!r}: a detector, and nothing else, learns from {COCO!r}"
    )


def require_use(names: Iterable[str], method: Method, data: str) -> None:
    """Raise `ValueError` for a setting that such a run has no use for: it was meant for something."""
    kinds = kinds_of(method, data)
    for name in names:
        owner = owner_of(name)
        says = None if owner is None or any(issubclass(kind, owner) for kind in kinds) else owner.says
        if name.startswith("teacher_") and not method.needs_teacher:
            says = "a teacher"
        if name == "transfer_weight" and not method.has_transfer_loss:
            says = "Distill"
        if name == "feature_layers" and method not in (Method.FEATURES, Method.FEATURES_UNLABELLED):
            says = "the method features"
        if name == "reference_images" and method is not Method.MEAN_MAPS:
            says = "the method mean-maps"
        if says is not None:
            raise ValueError(f"{name} would change nothing of {method} on {data!r}: it belongs to {says}")


def owner_of(name: str) -> type[Part] | None:
    """The part that a setting belongs to; None for what every run has."""
    for kind in (*TASKS, *READINGS):
        for part in kind.__mro__:
            if issubclass(part, Part) and name in (*get_annotations(part), *vars(part).get("of_recipe", ())):
                return part
    return None


def names_of(*kinds: type) -> tuple[str, ...]:
    """The fields of parts, each once."""
    return tuple(dict.fromkeys(field.name for kind in kinds for field in fields(kind)))
