"""What `evaluate` measures: models on a test, on a set under a shift, and several of them as an ensemble."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atfamily.measures.predictions import ensemble_logits
from atfamily.measures.subsets import accuracy_on
from atlib.data import Images
from atlib.evaluate import predict, score
from atrun.build import require_size
from atrun.data.decoding import decode
from atrun.data.loading import CorruptImage
from atrun.data.transforms import Augmentation

LOOKED_AT = 16  # images of two sets, evenly spread, whose pixels tell the sets apart


class ModelOnTest(NamedTuple):
    """A model and what it is tested on. path: its file; images: prepared as it wants them; targets: their
    classes, or the sets of right ones; on: data and split in words; classes: those of the data among the
    model's, of a set under a shift, None where all are; shifted: whether it is one; note: said at the end."""

    path: Path
    model: nn.Module
    images: Any
    targets: Tensor
    on: str
    classes: tuple[int, ...] | None = None
    shifted: bool = False
    note: str = ""


def shifted_test(
    path: Path, model: nn.Module, name: str, augmentation: Augmentation | None, note: str, reading: dict
) -> ModelOnTest:
    """The test of a model on one of `SHIFTED`. reading: of the settings of how data are read, `data_path`,
    `workers` and `on_corrupt`.

    Raises `ValueError` for a model that does not know the classes that the set's are among, for a setting
    without use, and what `open_shifted` raises."""
    from atrun.data.natural_shifts import SHIFTED, open_shifted  # reads timm's lists of classes

    for column in ("image_column", "label_column"):
        if column in reading:
            raise ValueError(f"--{column} would change nothing: {name} has columns of its own; leave it out")
    opened = open_shifted(
        name,
        reading.get("data_path"),
        augmentation=augmentation,
        on_corrupt=reading.get("on_corrupt", "raise"),
        workers=reading.get("workers", 0),
    )
    require_size(model, opened.images, name)
    of_all, classes = len(SHIFTED[name].space.names), opened.classes
    outputs = model(opened.images.take([0])[0][:1].to(next(model.parameters()).device))
    outputs = getattr(outputs, "logits", outputs).shape[1]
    if outputs != of_all:
        raise ValueError(
            f"{path} has {outputs} outputs, and the classes of {name} are among {of_all}: it tests models of"
            f" {'CIFAR-10' if of_all == 10 else 'ImageNet-1k'}"
        )
    on = name if classes is None else f"{name} ({len(classes):,} of {of_all:,} classes)"
    return ModelOnTest(path, model, opened.images, opened.targets, on, classes, shifted=True, note=note)


def same_images(first: Any, second: Any) -> bool:
    """Whether two sets hold the same images in the same order, wherever they are read and however a model
    wants them prepared: as many, and the same pixels as they are stored, in `LOOKED_AT` of them.

    Names and labels do not tell: two folders of other images may have equal labels, and a copy of a folder
    has another path."""
    if len(first) != len(second):
        return False
    places = {index * len(first) // LOOKED_AT for index in range(LOOKED_AT)} if len(first) else ()
    return all(_stored(first, place) == _stored(second, place) for place in sorted(places))


def _stored(images: Any, index: int) -> tuple[Sequence[int], bytes]:
    """Size and pixels of an image before it is prepared for a model; nothing of one that is corrupt."""
    if isinstance(images, Images):
        pixels = images.pixels[index]
        return tuple(pixels.shape), pixels.cpu().numpy().tobytes()
    try:
        picture = decode(images.rows[index][images.image_column])
    except CorruptImage:  # what evaluates the images says so, or leaves it out
        return (), b""
    return picture.size, picture.tobytes()


def decoded(images: Any) -> list[int]:
    """The indices of the images that an evaluation did not leave out, in order: of what `predict` returns."""
    return [index for index in range(len(images)) if index not in getattr(images, "corrupt", {})]


def measured_lines(tests: Sequence[ModelOnTest]) -> list[str]:
    """What `evaluate` prints: a line for each model, and one for the ensemble of several, the mean of their
    class probabilities (arXiv 2411.09702, figure of ensembles).

    Raises `ValueError` where several are not tested on the same images or know other classes."""
    logits, lines = [], []
    for test in tests:
        first = tests[0]
        alike = test is first or same_images(test.images, first.images)
        if not alike or not torch.equal(test.targets, first.targets):
            raise ValueError(
                f"{test.path} is tested on {test.on}, and {first.path} on {first.on}: an ensemble is of"
                " the same images; name them with --data and --split"
            )
        logits.append(predict(test.model.to("cuda" if torch.cuda.is_available() else "cpu"), test.images))
        test.model.to("cpu")
        lines.append(f"{test.path} on {test.on}: {_figures(test, logits[-1])}{test.note}")
    if len(tests) > 1:
        mean = ensemble_logits(logits)
        lines.append(
            f"the ensemble of {len(tests)}, the mean of their probabilities: {_figures(tests[0], mean)}"
        )
    return lines


def _figures(test: ModelOnTest, logits: Tensor) -> str:
    targets = test.targets[decoded(test.images)]
    left_out = len(test.targets) - len(targets)
    without = f" (without {left_out:,} that cannot be decoded)" if left_out else ""
    of_images = f"{len(targets):,} images{without}"
    if test.shifted:
        return f"accuracy {100 * accuracy_on(logits, targets, test.classes):.2f} % of {of_images}"
    measured = score(logits, targets)
    return f"accuracy {100 * measured.accuracy:.2f} % of {of_images}, loss {measured.loss:.4f}"
