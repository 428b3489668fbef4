"""Which class is which output: a model is measured on its own classes alone, matched by their names."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from atlib.checkpoint import read_header
from atlib.pair import student_of
from atrun.build import training_images
from atrun.config import is_run, read_config

SHOWN = 5  # names in a message


def classes_of(path: str | Path) -> tuple[str, ...] | None:
    """The names of the classes of a file's model, in the order of its outputs; None where it does not say."""
    names = read_header(path).get("classes")
    return tuple(map(str, names)) if isinstance(names, list) and names else None


def require_classes(path: str | Path, images) -> None:
    """Raise `ValueError` where a file's model has other classes than images, or in another order."""
    classes, data = classes_of(path), tuple(map(str, images.classes))
    if classes is not None and data and classes != data:
        raise ValueError(f"{path} has classes {_some(classes)}, the data {_some(data)}")


def class_names(path: Path) -> tuple[str, ...]:
    """The names of the classes of a file of weights: as it says, else as its run's training images do."""
    names = classes_of(path)
    if names is not None:
        return names
    if not is_run(path.parent):
        raise ValueError(f'{path} does not name its classes: save_vit(..., {{"classes": [...]}}) writes them')
    return tuple(training_images(read_config(path.parent)).classes)


def labels_by_name(
    classes: Sequence[str] | None, model: nn.Module, images, name: str, path: str | Path
) -> tuple[Tensor, str]:
    """The labels (n,) of images as outputs of a model of `classes` (None: not known which), and what is to be
    said of it. name: of the data, path: of the model. Classes are matched by their names, numbers too ("01"
    is 1); where one side has numbers in place of names, class k is output k."""
    outputs = getattr(student_of(model), "num_classes", None)
    if outputs == 0:
        raise ValueError(f"{path} holds a ViT without a class head: evaluate a student trained on labels")
    data = tuple(images.classes)
    if not data or data == classes:
        return images.targets, ""
    numbers, outputs_numbers = _numbers(data), _numbers(classes or ())
    if classes is None and numbers and numbers != tuple(range(len(data))):
        raise ValueError(f"{path} names no classes, and {name} has numbers in another order: {_some(data)}")
    some_are_names = None in (numbers, outputs_numbers)
    counted = [tuple(names) == tuple(map(str, range(len(names)))) for names in (data, classes or ())]
    if classes is None or counted[0] != counted[1] and some_are_names:
        if outputs is not None and len(data) != outputs:
            raise ValueError(f"{name} has {len(data)} classes, {_some(data)}, {path} has {outputs}")
        reason = "the file does not name its classes" if classes is None else "classes are numbers there"
        return images.targets, f"\nclass k of the data was taken for output k: {reason}"
    if not some_are_names:  # 01 is 1
        classes, data = (tuple(map(str, names)) for names in (outputs_numbers, numbers))
    counts = Counter(classes), Counter(data)
    if unknown := [class_name for class_name in data if class_name not in counts[0]]:
        raise ValueError(f"{name} has classes that {path} lacks, {_some(unknown)}; it has {_some(classes)}")
    if twice := [class_name for class_name in data if any(count[class_name] > 1 for count in counts)]:
        raise ValueError(f"{_some(twice)}: two classes of this name in {name} or {path}")
    place = torch.tensor([classes.index(class_name) for class_name in data])
    fewer = f", {len(data)} of the {len(classes)} that it tells apart" if len(data) < len(classes) else ""
    return place[images.targets], f"\nclasses were matched by their names{fewer}"


def _numbers(classes: Sequence[str]) -> tuple[int, ...] | None:
    """The numbers that all of these names are; None where one is another word."""
    return tuple(map(int, classes)) if all(name.isdecimal() for name in classes) else None


def _some(classes: Sequence[str]) -> str:
    return ", ".join(map(ascii, classes[:SHOWN])) + (" ..." if len(classes) > SHOWN else "")
