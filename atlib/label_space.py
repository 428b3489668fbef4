"""Which class a stored label means: WordNet ids, names and numbers to the class indices of ImageNet-1k or CIFAR-10."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

from timm.data import ImageNetInfo


class LabelSpace(NamedTuple):
    """The classes of a classifier, in order, by name and, for ImageNet, by WordNet id; `classes`: the indices of those that a data set
    has (None: all)."""

    names: tuple[str, ...]
    ids: tuple[str, ...] = ()
    classes: tuple[int, ...] | None = None

    def indices(self, labels: Sequence[str | int], given: Sequence[str] | None = None) -> list[int]:
        """The class index of every label; `given`: the names that numbers in `labels` count, in any order (None: none are given).

        Raises `ValueError` for a label that is none of the classes, or can be two of them.
        """
        spellings = self._spellings()
        found = {label: self._index(label, given, spellings) for label in set(labels)}
        unknown = [label for label, index in found.items() if index is None]
        if unknown:
            first = _text(unknown[0], given)
            number = first.isdigit() and self.classes is not None
            raise ValueError(("no label is" if len(unknown) == len(found) else f"{len(unknown)} of {len(found)} different labels are not")
                             + f" among the {len(self.classes or self.names)} classes of the data set, such as {first!r}"
                             + (": a number does not say whether it counts all classes or these; store WordNet ids" if number else ""))
        return [found[label] for label in labels]

    def _index(self, label: str | int, given: Sequence[str] | None, spellings: Mapping[str, set[int]]) -> int | None:
        means = spellings.get(_text(label, given), set())
        if len(means) > 1 and given is not None and len(given) == len(self.names) and label in means:
            return label  # a list of all classes, two of which are called the same (two are "crane"): its order decides
        if len(means) > 1:
            raise ValueError(f"the label {_text(label, given)!r} can be class {' or '.join(map(str, sorted(means)))}: store WordNet ids instead")
        return next(iter(means), None)

    def _spellings(self) -> Mapping[str, set[int]]:
        """Every way to write a class, and what it can mean: "n01440764", "tench, Tinca tinca", "tench"; "0" where all classes are there."""
        spelled = defaultdict(set)
        for index in range(len(self.names)) if self.classes is None else self.classes:
            own = {self.names[index], self.names[index].split(", ")[0], *self.ids[index : index + 1]}
            # ImageNetV2's folders are called 0 to 999; in a set of 200 classes a number could count these or all.
            for spelling in own | ({str(index)} if self.classes is None else set()):
                spelled[spelling].add(index)
        return spelled


def timm_file(name: str) -> str:
    """The text of one of the class lists that timm ships."""
    return (resources.files("timm.data") / "_info" / name).read_text(encoding="utf-8")


def _imagenet() -> LabelSpace:
    info = ImageNetInfo()
    return LabelSpace(tuple(info.label_descriptions()), tuple(info.label_names()))


def _subset(name: str) -> LabelSpace:
    return IMAGENET._replace(classes=tuple(map(IMAGENET.ids.index, timm_file(f"imagenet_{name}_synsets.txt").split())))


def _text(label: str | int, given: Sequence[str] | None) -> str:
    return str(label if given is None else given[label]).replace("_", " ")


CIFAR10 = LabelSpace(("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"))
IMAGENET = _imagenet()
IMAGENET_A, IMAGENET_R = _subset("a"), _subset("r")  # 200 classes each, as in their authors' eval.py
