"""Folders of images as they lie on the disk: which files are read, of which split and which class.

The class is the first folder below the split, as in torchvision's `ImageFolder`. What is not read is said.
"""

import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from PIL import Image, ImageFile

from atrun.data.decoding import DataError
from atrun.data.splits import SPLIT_NAMES

WAY_OUT = (
    "each class needs a folder of its own, such as FOLDER/train/cat/1.jpg and FOLDER/train/dog/2.jpg;"
    " `python -m atlib pretrain` learns without labels"
)


@cache
def picture_types() -> frozenset[str]:
    """The endings of files that are read as pictures, ".jpg" among them: those that Pillow opens, with the
    plug-ins that are registered before the first call."""
    Image.init()
    kinds = Image.registered_extensions().items()
    readers = ((ending, kind, Image.OPEN[kind][0]) for ending, kind in kinds if kind in Image.OPEN)
    # of these, Pillow knows the header alone
    stub = ("MPEG",)
    return frozenset(
        ending
        for ending, kind, reader in readers
        if kind not in stub and not (isinstance(reader, type) and issubclass(reader, ImageFile.StubImageFile))
    )


def pictures_below(folder: Path) -> list[Path]:
    """All pictures below a folder, through links too, in order of their paths; a warning names what is not
    read. Raises `OSError` for a folder that cannot be listed, `DataError` for a link that leads back."""
    taken, left = _divided(folder)
    say_left_out(folder, left)
    return taken


def say_left_out(folder: Path, left: Sequence[Path], why: str = "") -> None:
    """Warn of files below a folder that are not read: their number, by kind, and the first."""
    if not left:
        return
    kinds = Counter(file.suffix.lower() or "without an ending" for file in left)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    first = left[0].relative_to(folder)
    warnings.warn(f"{folder}: not read: {listed}{why}; the first: {first}", stacklevel=3)


class ImageFolders(Mapping):
    """The splits of a folder of images, each a `datasets.Dataset` that is read when it is asked for.

    A split is a folder in the first level that is called like one; without such, all images are "train".
    labelled=False: images alone, wherever they lie. Raises `ValueError` for two folders of one split,
    `FileNotFoundError` where there are no images, and, when a split is read, `DataError` for one without
    classes, for classes without training images, and for names of classes that look alike.
    """

    def __init__(self, path: Path, labelled: bool = True):
        self.path, self.labelled = Path(os.path.abspath(path)), labelled
        self.folders = _splits(self.path)
        if not any(map(_holds_pictures, self.folders.values())):
            raise FileNotFoundError(
                f"{path} holds no images: put them as {path}/train/cat/1.jpg, or give train*.parquet"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self.folders)

    def __len__(self) -> int:
        return len(self.folders)

    def __contains__(self, split: object) -> bool:  # of a mapping, this would read the split
        return split in self.folders

    def __getitem__(self, split: str):
        import datasets  # takes seconds, and a list of files does not need it

        folder = self.folders[split]
        files, left = _divided(folder)
        features = {"image": datasets.Image()}
        if not self.labelled:
            say_left_out(folder, left)
            rows = {"image": list(map(str, files))}
            return datasets.Dataset.from_dict(rows, datasets.Features(features))
        of_class: dict[str, list[Path]] = {}
        for file in files:
            of_class.setdefault(file.relative_to(folder).parts[0], []).append(file)
        beside = [file for file in files if file.parent == folder]
        for file in beside:
            del of_class[file.name]
        say_left_out(folder, left)
        names = self._names(split, {name: len(several) for name, several in of_class.items()})
        say_left_out(folder, beside, " (beside the folders of the classes)")
        number = {name: index for index, name in enumerate(names)}
        chosen = [(str(file), number[name]) for name, several in of_class.items() for file in several]
        rows = {"image": [file for file, _ in chosen], "label": [label for _, label in chosen]}
        features["label"] = datasets.ClassLabel(names=names)
        return datasets.Dataset.from_dict(rows, datasets.Features(features))

    def _names(self, split: str, counts: Mapping[str, int]) -> list[str]:
        """The classes of a split: those that the training images have, if there are some."""
        folder, train = self.folders[split], self.folders.get("train")
        if not counts:
            raise DataError(f"{folder} holds images and no class folders: {WAY_OUT}", "split")
        names = sorted(counts) if train is None else [each.name for each in _visible_folders(train)]
        refuse_alike(names, folder if train is None else train)
        if train is None:
            return names
        if unknown := sorted(counts.keys() - set(names)):
            listed = ", ".join(f"{name!r} ({counts[name]} images)" for name in unknown[:5])
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            hint = "".join(f"; {a!a} looks like {b!a}" for a, b in pairs_alike(unknown, names)[:1])
            raise DataError(
                f"{folder}: classes without training images in {train}: {listed}{more}{hint}", "split"
            )
        empty = [name for name in names if not counts.get(name) and not _holds_pictures(train / name)]
        if empty:
            listed = ", ".join(map(repr, empty[:5])) + (
                f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            )
            raise DataError(
                f"{train}: class folders without an image, {listed}: fill or remove them", "split"
            )
        if len(names) < 2:
            raise DataError(f"{train} has one class, {names[0]!r}, which nothing can be told from: {WAY_OUT}")
        return names


def refuse_alike(names: Iterable[str], where: object) -> None:
    """Raise `DataError` for names of classes that look equal and are not: by case, spaces at their ends, or
    the form of their accents."""
    names = list(names)
    if found := pairs_alike(names, names):
        listed = ", ".join(f"{a!a} and {b!a}" for a, b in found[:5])
        raise DataError(f"{where}: names of classes that look alike, {listed}: merge or rename them")


def pairs_alike(some: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
    """Names of `some` with the last other one of `others` that looks like it, each two once."""
    looks: dict[str, list[str]] = {}
    for name in others:
        looks.setdefault(as_seen(name), []).append(name)
    pairs = ((name, other) for name in some for other in looks.get(as_seen(name), ()) if other != name)
    return list({frozenset(pair): pair for pair in pairs}.values())


def as_seen(name: str) -> str:
    """A name without what an eye does not see: its Unicode form, case, marks of no width, outer spaces."""
    plain = unicodedata.normalize("NFKC", name).casefold()
    shown = (each for each in unicodedata.normalize("NFKC", plain) if unicodedata.category(each) != "Cf")
    return " ".join("".join(shown).split())


def _hidden(name: str) -> bool:
    """Whether a system keeps a file or folder of that name for itself."""
    return name.startswith(".") or name == "__MACOSX"


def _visible_folders(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_dir() and not _hidden(each.name))


def _files(folder: Path) -> Iterator[tuple[Path, bool]]:
    """All files below a folder, and whether each is read as a picture. Hidden ones that are no pictures are
    nobody's data."""
    known = picture_types()
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        here = Path(root)
        if here.is_symlink() and any(here.samefile(parent) for parent in here.parents):
            raise DataError(f"{here} is a link to a folder that holds it: take it away")
        folders.sort()
        hidden = any(map(_hidden, here.relative_to(folder).parts))
        for name in sorted(names):
            is_picture = os.path.splitext(name)[1].lower() in known
            if is_picture or not (hidden or _hidden(name)):
                yield here / name, is_picture and not (hidden or _hidden(name))


def _divided(folder: Path) -> tuple[list[Path], list[Path]]:
    """The pictures below a folder, and the other files."""
    taken, left = [], []
    for file, is_picture in _files(folder):
        (taken if is_picture else left).append(file)
    for file in taken:
        if not str(file).isascii():
            _require_utf8(file)
    return sorted(taken, key=str), left


def _require_utf8(file: Path) -> None:
    try:
        str(file).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{str(file)!a}: a name that is no UTF-8: rename it") from error


def _raise(error: OSError) -> None:
    raise error


def _holds_pictures(path: Path) -> bool:
    return any(is_picture for _, is_picture in _files(path))


def _splits(path: Path) -> dict[str, Path]:
    """The folder of each split. One alone that is called like a split, beside others, must hold folders:
    "train" may be a class, beside "bus" and "car"."""
    folders = _visible_folders(path)
    called = {
        each: split for each in folders for split in SPLIT_NAMES if each.name.lower() in SPLIT_NAMES[split]
    }
    if len(set(called.values())) < 2 and len(called) < len(folders):
        called = {each: split for each, split in called.items() if _visible_folders(each)}
    if not called:
        _warn_of_splits_by_other_names(path, folders)
        return {"train": path}
    others = [each for each in sorted(path.iterdir()) if each not in called and not _hidden(each.name)]
    pictures = [
        each.name
        for each in others
        if (_holds_pictures(each) if each.is_dir() else each.suffix.lower() in picture_types())
    ]
    if pictures:
        warnings.warn(
            f"{path}: images are read from {', '.join(each.name for each in called)} and not from"
            f" {', '.join(pictures[:5])}: splits are folders called train, validation and test",
            stacklevel=2,
        )
    found: dict[str, Path] = {}
    for each, split in called.items():
        if split in found:
            raise ValueError(
                f"{path} has two folders for {split!r}, {found[split].name} and {each.name}: keep one"
            )
        found[split] = each
    return found


def _warn_of_splits_by_other_names(path: Path, folders: Sequence[Path]) -> None:
    parent: dict[str, Path] = {}
    for folder in folders:
        for part in _visible_folders(folder):
            if parent.setdefault(part.name, folder) != folder:
                warnings.warn(
                    f"{path}: {part.name!r} is in {parent[part.name].name} and in {folder.name}; the classes"
                    " are the folders above. If these are splits, call them train, validation and test",
                    stacklevel=2,
                )
                return
