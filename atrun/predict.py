"""`python -m atlib predict`: what a run's model says of images that have no labels, as CSV or JSON."""

import argparse
import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from atlib._util import write_atomically
from atlib.checkpoint import read_header
from atlib.evaluate import predict, says_nothing
from atlib.pair import student_of
from atrun.classes import class_names
from atrun.config import is_run, read_config
from atrun.data.decoding import ON_CORRUPT
from atrun.data.folders import pictures_below
from atrun.data.photos import Photos
from atrun.looking.file_preparation import augmentation_of
from atrun.measure import readable
from atrun.runner import device, load_result, weights_of


class Prediction(NamedTuple):
    """What a model says of an image: its most likely class, and {class: its probability} of all, in order.
    They sum to 1 unless each class was learned by itself (`binary`)."""

    file: str
    name: str
    probabilities: dict[str, float]


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Files as they are named, and all images below folders, in order, as training finds them."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist: name images, or folders of images")
        below = pictures_below(path) if path.is_dir() else [path]
        if not below:
            raise FileNotFoundError(f"{path} holds no image")
        files += below
    return files


def predictions(path: Path, files: Sequence[Path], on_corrupt: str = "raise") -> list[Prediction]:
    """What the model in a file of weights says of image files, prepared as the file says. on_corrupt: of an
    image that cannot be decoded, "raise", or "skip", which warns and leaves it out."""
    import datasets  # takes seconds

    _, augmentation = augmentation_of(path)
    if augmentation is None:
        says_it = 'save_vit(..., {"augmentation": Augmentation(...).describe(), "classes": [...]}) says it'
        raise ValueError(f"{path} does not say how image files are prepared for it: {says_it}")
    model = load_result(path).to(device())
    if (outputs := student_of(model).num_classes) == 0:
        raise ValueError(f"{path} has no class head: `train --recipe fine-tune --teacher {path}` makes one")
    names = class_names(path)
    if outputs != (different := len({*names})):
        raise ValueError(f"{path} has {outputs} outputs and {different} names of classes")
    features = datasets.Features({"image": datasets.Image(decode=False)})
    rows = datasets.Dataset.from_dict({"image": [str(file.absolute()) for file in files]}, features)
    unknown, how = torch.zeros(len(files), dtype=torch.long), {"on_corrupt": on_corrupt}
    photos = Photos(rows, "image", unknown, names, augmentation=augmentation, **how)
    logits = predict(model, photos, batch_size=64)
    read = [files[index] for index in readable(photos)]
    for file, nothing in zip(read, says_nothing(logits)):
        if nothing:
            raise ValueError(f"of {file} the model says NaN or infinity: look for NaN in its weights")
    binary = read_header(path).get("binary")
    if binary is None and is_run(path.parent):  # a file of before it was said there
        binary = read_config(path.parent, trust_data=True).recipe.binary
    shares = logits.sigmoid() if binary else logits.softmax(-1)
    rows = zip(read, shares.argmax(-1).tolist(), shares.tolist())
    return [Prediction(str(file), names[best], dict(zip(names, row))) for file, best, row in rows]


def as_csv(predicted: Sequence[Prediction]) -> str:
    """A line for each image: file, class, its probability, then the probability of every class."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first, names = ["file", "class", "probability"], predicted[0].probabilities
    if clash := {*first} & {*names}:
        raise ValueError(f"a column and a class are both called {min(clash)!r}: take --out FILE.json")
    writer.writerow([*first, *names])
    for row in predicted:
        shares = [f"{share:.6f}" for share in (row.probabilities[row.name], *row.probabilities.values())]
        writer.writerow([row.file, row.name, *shares])
    return text.getvalue()


def as_json(predicted: Sequence[Prediction]) -> str:
    """A list with {"file", "class", "probabilities": {class: share}} for each image."""
    entries = [{"file": file, "class": name, "probabilities": shares} for file, name, shares in predicted]
    return json.dumps(entries, indent=1, allow_nan=False) + "\n"


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("path", type=Path, metavar="RUN|FILE", help="a finished run, or its weights")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE|FOLDER")
    parser.add_argument("--out", type=Path, metavar="FILE.csv|.json", help="default: the CSV is printed")
    parser.add_argument("--averaged", action="store_true", help="the run's averaged weights")
    on_corrupt = "stop at an image that cannot be decoded (the default), or leave it out and say so"
    names = "--on-corrupt", "--on_corrupt"
    parser.add_argument(*names, choices=ON_CORRUPT, default="raise", help=on_corrupt)
    parser.set_defaults(run=predict_command)


def predict_command(arguments: argparse.Namespace) -> int:
    out, kinds = arguments.out, {".csv": as_csv, ".json": as_json}
    if (ending := ".csv" if out is None else out.suffix.lower()) not in kinds:
        raise ValueError(f"--out {out}: name a file that ends in .csv or .json")
    path = weights_of(arguments.path, arguments.averaged)
    text = kinds[ending](predictions(path, image_files(arguments.images), arguments.on_corrupt))
    print(text if out is None else f"{write_atomically(out, text.encode())}\n", end="")
    return 0
