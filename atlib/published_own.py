"""This project's own recipes, read from the records of its tuning; and every recipe by its name."""

from dataclasses import replace
from pathlib import Path

from atlib.augmentation import Augmentation
from atlib.experiment import Job, Place, chosen
from atlib.feed import steps_per_epoch
from atlib.names import require_known
from atlib.published import METHODS, PUBLISHED, Published
from atlib.record import read_record, results_folder
from atlib.scales import TUNING_SEED, Scale, scales

# As `Images` normalises both; the built-in world is not augmented, CIFAR-10 as `crop_and_flip` does it.
_PLAIN = Augmentation(32, crop="centre", flip=0.0, crop_pct=1.0, mean=(0.5,) * 3, std=(0.25,) * 3)
_CROPPED = replace(_PLAIN, crop="padded", padding=4, flip=0.5)
_SCALES = {"built-in": _PLAIN, "cifar10-cpu": _CROPPED, "cifar10": _CROPPED}
_OWN = {f"{scale}-{method}": (scale, method) for scale in _SCALES for method in METHODS}


def published(name: str) -> Published:
    """A recipe by name: a paper's from `PUBLISHED`, or "SCALE-METHOD" as this project chose it, such as "built-in-copy".

    Raises `ValueError` for an unknown name, with the close ones, and `FileNotFoundError` for a recipe of ours whose tuning has no records here.
    """
    if name in PUBLISHED:
        return PUBLISHED[name]
    require_known("recipe", name, [*PUBLISHED, *_OWN])
    return _own(*_OWN[name])


def names() -> tuple[str, ...]:
    """The names of all recipes that `published` can give here: the papers', and ours that have been tuned."""
    return *PUBLISHED, *(name for name in _OWN if _is_there(name))


def _own(scale_name: str, method: str) -> Published:
    """A recipe of the central experiment in epochs and rates per 256 images; its `recipe` for the scale's own images is the very one that was run."""
    place = Place(scale_name, None, results_folder() / "transfer" / scale_name, Path())
    scale = scales()[scale_name]
    trial, trials = chosen(place, method), len(scale.tuning[method])
    if trials == 1:
        used, source = scale.recipe(scale.tuning[method][0]).describe(), f"this project, atlib.scales, {scale_name!r}: fixed in advance"
    else:
        job = f"{Job(method, TUNING_SEED, trial).name}.json"
        used = read_record(place.records / job).config["recipe"]
        source = f"this project, the best of {trials} on the validation split: results/transfer/{scale_name}/{job}"
    batch_size = used.pop("batch_size")
    epochs = used.pop("steps") / steps_per_epoch(_images(scale), batch_size)
    shared = {name: tuple(value) if isinstance(value, list) else value for name, value in used.items()
              if name not in ("lr", "warmup") and name in Published.__dataclass_fields__}
    return Published(
        f"{scale_name}-{method}", source, model=scale.student.name, options=scale.student.overrides, method=method,
        epochs=epochs, warmup_epochs=used["warmup"] * epochs, batch_size=batch_size, base_lr=used["lr"] * 256 / batch_size,
        augmentation=_SCALES[scale_name], **shared)


def _images(scale: Scale) -> int:
    if scale.labels is not None:
        return scale.labels
    from atlib.catalogue import CATALOGUE

    return CATALOGUE[scale.name].images["train"]


def _is_there(name: str) -> bool:
    try:
        published(name)
    except FileNotFoundError:
        return False
    return True
