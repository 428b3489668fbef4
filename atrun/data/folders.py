"""Folders of images as they lie on the disk: which files are read, of which split and which class.

The class is the first folder below the split, as in torchvision's `ImageFolder`. What is not read is said.
"""

import os
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from PIL import Image, ImageFile

from atrun.data.catalogue import SPLIT_NAMES

WAY_OUT = (
    "each class needs a folder, such as FOLDER/train/cat/1.jpg and FOLDER/train/dog/2.jpg;"
    " `python -m atlib pretrain` learns without labels"
)
SPLITS = "splits are folders called train, validation and test"


@cache
def picture_types() -> frozenset[str]:
    """The endings of files that are read as pictures: those that Pillow opens, with plug-ins of before."""
    Image.init()

    def opens(kind: str) -> bool:
        reader = Image.OPEN.get(kind, (None,))[0]
        header_alone = isinstance(reader, type) and issubclass(reader, ImageFile.StubImageFile)
        return not (reader is None or kind == "MPEG" or header_alone)

    return frozenset(ending for ending, kind in Image.registered_extensions().items() if opens(kind))


def pictures_below(folder: Path) -> list[Path]:
    """All pictures below a folder, through links too, in order of their paths; a warning names the rest."""
    files = list(_files(folder))
    _say_left_out(folder, [file for file, is_picture in files if not is_picture])
    return sorted((file for file, is_picture in files if is_picture), key=str)


def _say_left_out(folder: Path, left: Sequence[Path], why: str = "") -> None:
    """Warn of files below a folder that are not read: their number, by kind, and the first."""
    if left:
        kinds = Counter(file.suffix.lower() or "without an ending" for file in left).most_common()
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds)
        first = left[0].relative_to(folder)
        warnings.warn(f"{folder}: not read: {listed}{why}; the first: {first}", stacklevel=3)


class ImageFolders(Mapping):
    """The splits of a folder of images, each a `datasets.Dataset` that is read when it is asked for.

    A split is a folder in the first level that is called like one; without such, all images are "train".
    labelled=False: images alone, wherever they lie.
    """

    def __init__(self, path: Path, labelled: bool = True):
        self.path, self.labelled = Path(os.path.abspath(path)), labelled
        self.folders = _splits(self.path)
        if not any(map(_holds_pictures, self.folders.values())):
            raise FileNotFoundError(f"{path} holds no images, such as train/cat/1.jpg, and no train*.parquet")

    def __iter__(self) -> Iterator[str]:
        return iter(self.folders)

    def __len__(self) -> int:
        return len(self.folders)

    def __contains__(self, split: object) -> bool:  # of a mapping, this would read the split
        return split in self.folders

    def __getitem__(self, split: str):
        import datasets  # takes seconds, and a list of files does not need it

        folder = self.folders[split]
        files = pictures_below(folder)
        rows, features = {"image": list(map(str, files))}, {"image": datasets.Image()}
        if self.labelled:
            beside = [file for file in files if file.parent == folder]
            files = [file for file in files if file.parent != folder]
            class_of = [file.relative_to(folder).parts[0] for file in files]
            names = self._names(split, Counter(class_of))
            _say_left_out(folder, beside, " (beside the folders of the classes)")
            number = {name: index for index, name in enumerate(names)}
            rows = {"image": list(map(str, files)), "label": [number[name] for name in class_of]}
            features["label"] = datasets.ClassLabel(names=names)
        return datasets.Dataset.from_dict(rows, datasets.Features(features))

    def _names(self, split: str, counts: Mapping[str, int]) -> list[str]:
        """The classes of a split: those that the training images have, if there are some."""
        folder, train = self.folders[split], self.folders.get("train")
        if not counts:
            raise ValueError(f"{folder} holds images and no class folders: {WAY_OUT}")
        names = sorted(counts) if train is None else [path.name for path in _visible_folders(train)]
        seen = Counter(map(_as_seen, names))
        if alike := [name for name in names if seen[_as_seen(name)] > 1]:
            raise ValueError(f"{train or folder}: classes look alike, {alike[:5]!a}: merge or rename them")
        if train is None:
            return names
        if unknown := sorted(counts.keys() - set(names)):
            listed = ", ".join(f"{name!a} ({counts[name]} images)" for name in unknown[:5])
            raise ValueError(f"{folder}: {len(unknown)} classes are not in {train}: {listed}")
        if empty := [name for name in names if not counts.get(name) and not _holds_pictures(train / name)]:
            raise ValueError(f"{train}: class folders without an image, {empty[:5]!a}: remove them")
        if len(names) < 2:
            raise ValueError(f"{train} has one class, {names[0]!r}: {WAY_OUT}")
        return names


def _as_seen(name: str) -> str:
    """A name without what the eye does not tell apart: case, spaces, marks of no width, forms of accents."""
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return " ".join("".join(letter for letter in plain if unicodedata.category(letter) != "Cf").split())


def _hidden(name: str) -> bool:
    """Whether a system keeps a file or folder of that name for itself."""
    return name.startswith(".") or name == "__MACOSX"


def _visible_folders(path: Path) -> list[Path]:
    return sorted(below for below in path.iterdir() if below.is_dir() and not _hidden(below.name))


def _files(folder: Path) -> Iterator[tuple[Path, bool]]:
    """All files below a folder, but for hidden ones that are no pictures, and whether each is read."""

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        here = Path(root)
        if here.is_symlink() and any(here.samefile(parent) for parent in here.parents):
            raise ValueError(f"{here} is a link to a folder that holds it: take it away")
        folders.sort()
        hidden = any(map(_hidden, here.relative_to(folder).parts))
        for name in sorted(names):
            is_picture = os.path.splitext(name)[1].lower() in picture_types()
            if is_picture or not (hidden or _hidden(name)):
                yield here / name, is_picture and not (hidden or _hidden(name))


def _holds_pictures(path: Path) -> bool:
    if path.is_dir():
        return any(is_picture for _, is_picture in _files(path))
    return path.suffix.lower() in picture_types()


def _splits(path: Path) -> dict[str, Path]:
    """The folder of each split; "train" beside "bus" and "car" is a class, where it holds no folders."""
    folders = _visible_folders(path)
    split_of = {name: split for split, names in SPLIT_NAMES.items() for name in names}
    called = {below: split_of[below.name.lower()] for below in folders if below.name.lower() in split_of}
    if len(set(called.values())) < 2 and len(called) < len(folders):
        called = {below: split for below, split in called.items() if _visible_folders(below)}
    if not called:
        names = {folder.name for below in folders for folder in (below, *_visible_folders(below))}
        first_words = {re.split(r"[_\-. ]", name.lower())[0] for name in names}
        if sum(not first_words.isdisjoint(called) for called in SPLIT_NAMES.values()) > 1:
            listed = ", ".join(sorted(names)[:5])
            warnings.warn(f"{path}: {listed} are read as classes or as parts of them: {SPLITS}", stacklevel=2)
        return {"train": path}
    read = ", ".join(below.name for below in called)
    if len(set(called.values())) < len(called):
        raise ValueError(f"{path} has two folders for one split among {read}: keep one")
    others = [below for below in sorted(path.iterdir()) if below not in called and not _hidden(below.name)]
    if unread := [below.name for below in others if _holds_pictures(below)]:
        listed = ", ".join(unread[:5])
        warnings.warn(f"{path}: images are read from {read} and not from {listed}: {SPLITS}", stacklevel=2)
    return {split: below for below, split in called.items()}
