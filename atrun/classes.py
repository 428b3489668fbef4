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
        raise ValueError(
            f"{path} does not say its classes' names, and lies in no run's folder, which would; where you"
            ' wrote it yourself, let save_vit(..., {"classes": [...]}) say them'
        )
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
        raise ValueError(
            f"{path} holds a ViT without a class head, which says no class of an image: evaluate a student"
            " that was trained on labels, or train one, such as by a recipe of fine-tuning"
        )
    own = tuple(images.classes)
    if not own or own == classes:
        return images.targets, ""
    ours, theirs = _numbers(own), _numbers(classes or ())
    if classes is None and ours and ours != tuple(range(len(own))):
        raise ValueError(
            f"{path} does not name its classes, and those of {name}, {_some(own)}, are numbers in another"
            ' order: let save_vit(..., {"classes": [...]}) name them'
        )
    if classes is None or _are_numbers(own) != _are_numbers(classes) and None in (ours, theirs):
        if outputs is not None and len(own) != outputs:
            raise ValueError(
                f"{name} has {len(own)} classes, {_some(own)}, and {path} tells {outputs} apart"
                f"{'' if classes is None else f', {_some(classes)}'}: evaluate it on data with the classes"
                " that it was trained for"
            )
        known = "the file does not name its classes" if classes is None else "classes are numbers there"
        return images.targets, f"\nclass k of the data was taken for output k: {known}"
    if None not in (ours, theirs):  # 01 is 1
        classes, own = (tuple(map(str, each)) for each in (theirs, ours))
    counts = Counter(classes), Counter(own)
    if unknown := [each for each in own if each not in counts[0]]:
        alike = pairs_alike(unknown, classes)
        hint = f" ({alike[0][0]!a} looks like {alike[0][1]!a})" if alike else ""
        raise ValueError(
            f"{name} has {len(unknown)} classes of {len(own)} that {path} does not know, {_some(unknown)}"
            f"{hint}; it knows {_some(classes)}: evaluate it on data with the classes that it was trained for"
        )
    if twice := [each for each in own if any(count[each] > 1 for count in counts)]:
        raise ValueError(
            f"{_some(twice)}: more than one class has this name, in {name} or in {path}, so names do not say"
            " which is which: give every class a name of its own"
        )
    output = {each: index for index, each in enumerate(classes)}
    place = torch.tensor([output[each] for each in own])
    fewer = f", {len(own)} of the {len(classes)} that it tells apart" if len(own) < len(classes) else ""
    return place[images.targets], f"\nclasses were matched by their names{fewer}"


def _are_numbers(classes: Sequence[str]) -> bool:
    """Whether these are no names but those that classes without names get."""
    return tuple(classes) == tuple(map(str, range(len(classes))))


def _numbers(classes: Sequence[str]) -> tuple[int, ...] | None:
    """The numbers that all of these names are; None where one is another word."""
    return tuple(map(int, classes)) if all(each.isdecimal() for each in classes) else None


def _some(classes: Sequence[str]) -> str:
    """A few names, for a message."""
    more = f" and {len(classes) - SHOWN} more" if len(classes) > SHOWN else ""
    return f"{', '.join(map(repr, classes[:SHOWN]))}{more}"
