"""`python -m atlib evaluate`: models on a test or a set under a shift, several also as an ensemble."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atfamily.detection.evaluate import evaluate_detector
from atfamily.detection.files import load_detector
from atfamily.measures.predictions import ensemble_logits
from atfamily.measures.subsets import accuracy_on
from atlib.checkpoint import read_header
from atlib.data import Images
from atlib.evaluate import predict, score
from atlib.objectives import outputs as outputs_of
from atrun.build import READING, coco_images, held_out, held_out_images, require_size
from atrun.classes import classes_of, labels_by_name
from atrun.config import (
    COCO,
    TRUST_DATA,
    RunConfig,
    is_run,
    read_config,
    read_settings,
    require_use,
    settings,
)
from atrun.configure import data_name, evaluated_split
from atrun.data.decoding import CorruptImage, decode
from atrun.data.generated import is_generated
from atrun.data.natural_shifts import SHIFTED, open_shifted
from atrun.data.transforms import AS_STORED, Augmentation
from atrun.looking.file_preparation import augmentation_of, preparation_in
from atrun.overrides import help_text, pairs
from atrun.runner import device, is_main_process, load_result, tested_as, weights_of

LOOKED_AT = 16  # images of two sets, evenly spread, whose pixels tell the sets apart


class ModelOnTest(NamedTuple):
    """A model and what it is tested on. targets: classes, or sets of right ones; on: data and split in words;
    classes: of a set under a shift, those among the model's, None for all; note: said at the end."""

    path: Path
    model: nn.Module
    images: Any
    targets: Tensor
    on: str
    classes: tuple[int, ...] | None = None
    shifted: bool = False
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    paths = "a finished run, or a file of weights that one has left; of several also the ensemble"
    parser.add_argument("paths", type=Path, nargs="+", metavar="DIR|FILE", help=paths)
    parser.add_argument("--data", metavar="NAME|PATH", help="default: what the run was trained on")
    parser.add_argument("--split", help="default: the one that the run evaluates on")
    shifted = (
        "in place of data: cifar10.1, imagenetv2, imagenet-a, imagenet-r, imagenet-sketch or imagenet-real,"
        " from the hub or --data_path FOLDER"
    )
    parser.add_argument("--shifted", metavar="NAME", help=shifted)
    parser.add_argument("--averaged", action="store_true", help="the run's averaged weights")
    parser.add_argument("--trust-data", action="store_true", help=TRUST_DATA)
    every = {name: one for of in settings().values() for name, one in of.items()}
    unsaid = {name: every[name]._replace(default=MISSING) for name in READING}
    title = "How the data are read, as further options (default: as the run reads its own)"
    parser.epilog = help_text({title: unsaid})
    parser.set_defaults(run=evaluate_command, takes_settings=True)


def evaluate_command(arguments: argparse.Namespace) -> int:
    shifted = arguments.shifted
    if shifted is not None and (arguments.data, arguments.split) != (None, None):
        raise ValueError(f"--shifted {shifted} is data of its own: leave --data and --split out")
    files = [_file_of(path, arguments) for path in arguments.paths]
    reading = read_settings(pairs(arguments.settings), READING)
    detectors = [path for path, run in files if (run.detects if run else "detector" in read_header(path))]
    if detectors and (len(files) > 1 or shifted is not None):
        raise ValueError(f"{detectors[0]} holds a detector: evaluate it by itself, on data {COCO!r}")
    if detectors:
        text = _on_coco(*files[0], arguments, reading)
    else:
        tests = [_test_of(path, config, arguments, reading) for path, config in files]
        if len({classes_of(path) for path, _ in files} - {None}) > 1:
            raise ValueError("no ensemble: these models have other classes, or in another order")
        text = "\n".join(measured_lines(tests))
    if is_main_process():
        print(text)
    return 0


def _file_of(path: Path, arguments: argparse.Namespace) -> tuple[Path, RunConfig | None]:
    """The weights of a run's folder or a file, and the config of their run, where they lie in its folder."""
    weights, folder = weights_of(path, arguments.averaged), path if path.is_dir() else path.parent
    elsewhere = arguments.data is not None or arguments.shifted is not None
    if not path.is_dir() and not is_run(folder):
        if not elsewhere:
            raise ValueError(f"{path} lies in no run's folder: name the data with --data")
        return weights, None
    config = read_config(folder, arguments.trust_data or elsewhere)
    if config.method.pretrains:
        raise ValueError(f"{folder} is without a class head: train --recipe fine-tune --teacher {folder}")
    return weights, config


def _test_of(
    path: Path, config: RunConfig | None, arguments: argparse.Namespace, reading: dict
) -> ModelOnTest:
    """A model with the images that it is tested on, prepared as it wants them."""
    model, note = load_result(path), ""
    if arguments.shifted is not None:
        return shifted_test(path, model, arguments.shifted, *_preparation(path, model), reading)
    if arguments.data is None:
        require_use(reading, config.method, config.data)
        data = name = config.data
        split = arguments.split or config.evaluation_split
        images = held_out(replace(config, **reading), split)
    else:
        name = arguments.data
        data = data_name(name, reading.get("data_path"))
        split, augmentation = arguments.split or evaluated_split(data), None
        if not is_generated(data):
            augmentation, note = _preparation(path, model)
        elif reading:
            raise ValueError(f"--{next(iter(reading))} would change nothing: {data} are generated")
        images = held_out_images(data, split, augmentation, reading)
    places = [getattr(config, name, None) for name in ("data_path", "image_column", "label_column")]
    as_then = arguments.data is None or places == [None] * 3
    if config is not None and data == config.data and as_then and not reading:
        note += tested_anew(path, config, split, images)
    require_size(model, images, f"{name} {split}")
    labels, matched = labels_by_name(classes_of(path), model, images, f"{name} {split}", path)
    return ModelOnTest(path, model, images, labels, f"{name}, {split}", note=matched + note)


def tested_anew(path: Path, config: RunConfig, split: str, images) -> str:
    """What is to be said where a split holds other images than when the run was tested on it; else ""."""
    before = read_header(path).get("tested_on")
    current = tested_as(split, images)
    if before is None or before["split"] != split or before == {name: current.get(name) for name in before}:
        return ""
    return (
        f"\n{config.data}, {split}: other images than when the run ended ({before['images']:,} then,"
        f" {current['images']:,} now); the model may have learned from some"
    )


def _preparation(path: Path, model: nn.Module) -> tuple[Augmentation | None, str]:
    """How images are prepared for a file's weights, or a guess, noted."""
    is_known, augmentation = augmentation_of(path)
    preparation, normalisation = preparation_in(path, model)
    if is_known and (augmentation is not None or normalisation in (None, AS_STORED)):
        return augmentation, ""
    how = {name: getattr(preparation, name) for name in ("mean", "std", "crop_pct", "interpolation")}
    guess = Augmentation(preparation.size[0], **how)
    return guess, (
        f"\n{path} does not say how images were prepared for it; here they were taken at"
        f" {guess.image_size} pixels, crop {guess.crop_pct}, mean {guess.mean} and std {guess.std}"
    )


def _on_coco(path: Path, config: RunConfig | None, arguments: argparse.Namespace, reading: dict) -> str:
    """`evaluate` of a whole detector, on its run's folder of images or on another."""
    if arguments.data not in (None, COCO) or reading.keys() - {"data_path", "workers"}:
        raise ValueError(f"{path} holds a detector, which takes --data_path FOLDER of COCO's form alone")
    detector, classes, _ = load_detector(path)
    read_as = (None, evaluated_split(COCO)) if config is None else (config.data_path, config.evaluation_split)
    folder, split = reading.get("data_path", read_as[0]), arguments.split or read_as[1]
    size = detector.backbone.student.patch_embed.img_size[0]
    images = coco_images(folder, split, size=size, workers=reading.get("workers", 0))
    if images.classes != classes:
        raise ValueError(f"{folder}, {split} has categories {images.classes}, and {path} knows {classes}")
    precisions = evaluate_detector(detector.to(device()), images)
    figures = [f"{name.replace('_', ' ')} {100 * value:.1f}" for name, value in precisions.items()]
    text = ", ".join(figures) or "nothing to find"
    return f"{path} on {COCO}, {split}: {text} (per cent), of {len(images):,} images"


def shifted_test(
    path: Path, model: nn.Module, name: str, augmentation: Augmentation | None, note: str, reading: dict
) -> ModelOnTest:
    """The test of a model on one of `SHIFTED`; reading: `data_path`, `workers` and `on_corrupt`."""
    if columns := reading.keys() & {"image_column", "label_column"}:
        raise ValueError(f"--{min(columns)} would change nothing: {name} has columns of its own")
    options = {"augmentation": augmentation, **reading}
    opened = open_shifted(name, options.pop("data_path", None), **options)
    require_size(model, opened.images, name)
    of_all, classes = len(SHIFTED[name].space.names), opened.classes
    first = opened.images.take([0])[0]
    outputs = outputs_of(model, first.to(next(model.parameters()).device)).logits.shape[1]
    if outputs != of_all:
        raise ValueError(f"{path} has {outputs} outputs; {name} tests models of {of_all} classes")
    spelled = SHIFTED[name].space._replace(classes=None).spelled()
    names = [class_name.replace("_", " ") for class_name in classes_of(path) or ()]
    right = {class_name for output, class_name in enumerate(names) if output in spelled.get(class_name, ())}
    if moved := [class_name for class_name in names if class_name in spelled and class_name not in right]:
        raise ValueError(f"{path} has classes in another order than {name}: {', '.join(moved[:5])}")
    if names and not right:
        note += f"\nclass k of {name} was taken for output k: the model's are called otherwise"
    on = name if classes is None else f"{name} ({len(classes):,} of {of_all:,} classes)"
    return ModelOnTest(path, model, opened.images, opened.targets, on, classes, shifted=True, note=note)


def same_images(first: Any, second: Any) -> bool:
    """Whether two sets are as many images, of which `LOOKED_AT` have the same stored pixels."""

    def stored(images: Any, index: int) -> tuple[Sequence[int], bytes]:  # before it is prepared for a model
        if isinstance(images, Images):
            pixels = images.pixels[index]
            return tuple(pixels.shape), pixels.cpu().numpy().tobytes()
        try:
            picture = decode(images.rows[index][images.image_column])
        except CorruptImage:  # what evaluates the images says so, or leaves it out
            return (), b""
        return picture.size, picture.tobytes()

    if len(first) != len(second):
        return False
    places = {index * len(first) // LOOKED_AT for index in range(LOOKED_AT)} if len(first) else ()
    return all(stored(first, place) == stored(second, place) for place in sorted(places))


def readable(images: Any) -> list[int]:
    """The indices of the images that an evaluation did not leave out, in order: of what `predict` returns."""
    return [index for index in range(len(images)) if index not in getattr(images, "corrupt", {})]


def measured_lines(tests: Sequence[ModelOnTest]) -> list[str]:
    """What `evaluate` prints: a line for each model, and one for the ensemble of several, the mean of their
    class probabilities (arXiv 2411.09702, figure of ensembles)."""
    logits, lines, first = [], [], tests[0]
    for test in tests:
        alike = test is first or same_images(test.images, first.images)
        if not alike or not torch.equal(test.targets, first.targets):
            raise ValueError(f"no ensemble: {test.path} is tested on {test.on}, {first.path} on {first.on}")
        logits.append(predict(test.model.to(device()), test.images))
        test.model.to("cpu")
        lines.append(f"{test.path} on {test.on}: {_figures(test, logits[-1])}{test.note}")
    if len(tests) > 1:
        mean = _figures(first, ensemble_logits(logits))
        lines.append(f"the ensemble of {len(tests)}, the mean of their probabilities: {mean}")
    return lines


def _figures(test: ModelOnTest, logits: Tensor) -> str:
    targets = test.targets[readable(test.images)]
    of_images = f"{len(targets):,} images"
    if left_out := len(test.targets) - len(targets):
        of_images += f" (without {left_out:,} that cannot be decoded)"
    if test.shifted:
        return f"accuracy {100 * accuracy_on(logits, targets, test.classes):.2f} % of {of_images}"
    measured = score(logits, targets)
    return f"accuracy {100 * measured.accuracy:.2f} % of {of_images}, loss {measured.loss:.4f}"
