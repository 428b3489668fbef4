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
from atrun.data.folders import pairs_alike

SHOWN = 5  # names in a message


def classes_of(path: str | Path) -> tuple[str, ...] | None:
    """The names of the classes that a file's model tells apart, in the order of its outputs; None where the
    file does not say. Raises `OSError` for a file that cannot be read."""
    said = read_header(path).get("classes")
    return tuple(map(str, said)) if isinstance(said, list) and said else None


def class_names(path: Path) -> tuple[str, ...]:
    """The names of the classes of a file of weights: as it says (`classes_of`), else as its run's training
    images have them. Raises `ValueError` where neither does."""
    said = classes_of(path)
    if said is not None:
        return said
    if not is_run(path.parent):
        raise ValueError(f'{path} does not name its classes: save_vit(..., {{"classes": [...]}}) writes them')
    return tuple(training_images(read_config(path.parent)).classes)


def labels_by_name(
    classes: Sequence[str] | None, model: nn.Module, images, name: str, path: str | Path
) -> tuple[Tensor, str]:
    """The labels (n,) of images as outputs of a model that tells `classes` apart (None: not known which), and
    what is to be said of it, "" where both have the same classes in one order.

    Classes are matched by their names, numbers too ("01" is 1); where one side has numbers in place of names,
    class k is output k. Raises `ValueError` for a model without a class head, for data with a class that the
    model does not know, and for another number or order of classes where names are missing. name: of the
    data, path: of the model, for these.
    """
    outputs = getattr(student_of(model), "num_classes", None)
    if outputs == 0:
        raise ValueError(f"{path} holds a ViT without a class head: evaluate a student trained on labels")
    data = tuple(images.classes)
    if not data or data == classes:
        return images.targets, ""
    numbers, outputs_numbers = _numbers(data), _numbers(classes or ())
    if classes is None and numbers and numbers != tuple(range(len(data))):
        raise ValueError(
            f"{path} does not name its classes, and those of {name}, {_some(data)}, are numbers in another"
            ' order: let save_vit(..., {"classes": [...]}) name them'
        )
    some_are_names = None in (numbers, outputs_numbers)
    if classes is None or _are_numbers(data) != _are_numbers(classes) and some_are_names:
        if outputs is not None and len(data) != outputs:
            apart = f"{outputs} apart{'' if classes is None else f', {_some(classes)}'}"
            raise ValueError(f"{name} has {len(data)} classes, {_some(data)}, and {path} tells {apart}")
        known = "the file does not name its classes" if classes is None else "classes are numbers there"
        return images.targets, f"\nclass k of the data was taken for output k: {known}"
    if not some_are_names:  # 01 is 1
        classes, data = (tuple(map(str, several)) for several in (outputs_numbers, numbers))
    counts = Counter(classes), Counter(data)
    if unknown := [one for one in data if one not in counts[0]]:
        alike = pairs_alike(unknown, classes)
        hint = f" ({alike[0][0]!a} looks like {alike[0][1]!a})" if alike else ""
        raise ValueError(
            f"{name} has {len(unknown)} classes of {len(data)} that {path} does not know, {_some(unknown)}"
            f"{hint}; it knows {_some(classes)}"
        )
    if twice := [one for one in data if any(count[one] > 1 for count in counts)]:
        raise ValueError(f"{_some(twice)}: more than one class has this name, in {name} or in {path}")
    output = {one: index for index, one in enumerate(classes)}
    place = torch.tensor([output[one] for one in data])
    fewer = f", {len(data)} of the {len(classes)} that it tells apart" if len(data) < len(classes) else ""
    return place[images.targets], f"\nclasses were matched by their names{fewer}"


def _are_numbers(classes: Sequence[str]) -> bool:
    """Whether these are no names but those that classes without names get."""
    return tuple(classes) == tuple(map(str, range(len(classes))))


def _numbers(classes: Sequence[str]) -> tuple[int, ...] | None:
    """The numbers that all of these names are; None where one is another word."""
    return tuple(map(int, classes)) if all(name.isdecimal() for name in classes) else None


def _some(classes: Sequence[str]) -> str:
    """A few names, for a message."""
    more = f" and {len(classes) - SHOWN} more" if len(classes) > SHOWN else ""
    return f"{', '.join(map(repr, classes[:SHOWN]))}{more}"
