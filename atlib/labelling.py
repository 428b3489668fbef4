"""Which label a stored label means: as it is, through a map between classes, or left out because only some classes are wanted."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Stored = int | str  # a label as a data set stores it


class Labelling(NamedTuple):
    """label: what every stored label that is wanted means. wanted: the stored labels whose images are kept, None for all. names: of the
    labels, in order. stored: the names of the stored labels where they are numbers that count names."""

    label: Mapping[Stored, int]
    wanted: frozenset[Stored] | None
    names: tuple[str, ...]
    stored: tuple[str, ...]

    def of(self, stored: Stored, index: int) -> int | None:
        """The label of image `index`, None when its class is left out. Raises `ValueError` for a stored label that means nothing."""
        if stored in self.label:
            return self.label[stored]
        if stored == -1:
            raise ValueError(f"image {index} has the label -1: this split was published without labels")
        exists = stored in range(len(self.stored)) if self.stored else True
        if exists and self.wanted is not None and stored not in self.wanted:
            return None
        if self.stored and exists:
            raise ValueError(f"image {index} has the label {stored} ({self.stored[stored]}), which class_map does not map: add it there, or leave "
                             "its images out with classes=, the stored labels that are wanted")
        raise ValueError(f"image {index} has the label {stored!r}, which is not one of the {len(self.stored) or len(self.label)} that are known "
                         f"({_some(range(len(self.stored)) if self.stored else self.label)}): pass class_map=, or check label_column= "
                         "(on the command line --set label_column=NAME)")


def make_labelling(names: Sequence[str], class_map: Mapping[Stored, int] | None = None, classes: Iterable[Stored] | None = None) -> Labelling:
    """Make the labelling of a data set whose stored labels are numbers with these `names`; no names: whatever `class_map` maps.

    classes: the stored labels that are wanted, None for all. class_map: what they mean; without one, what is stored. The names of
    mapped labels are those of the stored labels that mean them.
    Raises `ValueError` for stored labels that do not exist and for a map to something else than class indices.
    """
    classes = None if classes is None else tuple(classes)
    if class_map is None and not names:
        raise ValueError("the labels are no class indices with names: pass class_map= from what is stored to class indices")
    wrong = [label for label in (class_map or {}).values() if not isinstance(label, int) or label < 0]
    if wrong:
        raise ValueError(f"class_map must map to class indices from 0 on, got {wrong[0]!r}")
    known = range(len(names)) if names else class_map
    for what, given in (("class_map", class_map or ()), ("classes", classes or ())):
        unknown = [stored for stored in given if stored not in known]
        if unknown:
            raise ValueError(f"{what} names the label {unknown[0]!r}, which the data do not have: they have {_some(known)}")
    wanted = None if classes is None else frozenset(classes)
    if wanted is not None and not wanted:
        raise ValueError("classes is empty: name at least one stored label, or leave it out for all")
    label = {stored: stored if class_map is None else class_map[stored] for stored in known
             if (wanted is None or stored in wanted) and (class_map is None or stored in class_map)}
    return Labelling(label, wanted, tuple(names) if class_map is None else _mapped_names(names, label), tuple(names))


def _mapped_names(names: Sequence[str], label: Mapping[Stored, int]) -> tuple[str, ...]:
    found: dict[int, list[str]] = {}
    for stored, meant in label.items():
        found.setdefault(meant, []).append(names[stored] if names else str(stored))
    return tuple(" / ".join(found.get(index, [str(index)])) for index in range(max(found, default=-1) + 1))


def _some(labels: Iterable[Stored]) -> str:
    """The first and the last of many labels."""
    labels = list(labels)
    return ", ".join(map(repr, labels)) if len(labels) <= 12 else f"{', '.join(map(repr, labels[:3]))} ... {labels[-1]!r}"
