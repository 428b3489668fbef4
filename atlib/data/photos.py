"""Photographs at any size, read by index: rows of a `datasets` split that are decoded and transformed when
they are asked for.

`atlib.data.images.Images` holds a small set in memory; this is the same interface over one that does not fit.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from atlib.data.catalogue import Known, open_rows_of
from atlib.data.decoding import (
    Called,
    CorruptImage,
    Made,
    Share,
    Transform,
    Wanted,
    as_is,
    as_stored,
    check_on_corrupt,
    corrupt_image,
    decode,
    deliver,
    in_a_group_of_its_own,
    make,
    note_left_out,
    seed_of,
)
from atlib.data.sampler import Batch, ShardSpec, my_batches, my_repeats
from atlib.data.transforms import Augmentation

# --- Which label a stored label means: as it is, through a map between classes, or left out because only some
# classes are wanted ---

Stored = int | str  # a label as a data set stores it


class Labelling(NamedTuple):
    """label: what every stored label that is wanted means. wanted: the stored labels whose images are kept,
    None for all. names: of the labels, in order. stored: the names of the stored labels where they are
    numbers that count names."""

    label: Mapping[Stored, int]
    wanted: frozenset[Stored] | None
    names: tuple[str, ...]
    stored: tuple[str, ...]

    def of(self, stored: Stored, index: int) -> int | None:
        """The label of image `index`, None when its class is left out. Raises `ValueError` for a stored label
        that means nothing."""
        if stored in self.label:
            return self.label[stored]
        if stored == -1:
            raise ValueError(f"image {index} has the label -1: this split was published without labels")
        exists = stored in range(len(self.stored)) if self.stored else True
        if exists and self.wanted is not None and stored not in self.wanted:
            return None
        if self.stored and exists:
            raise ValueError(
                f"image {index} has the label {stored} ({self.stored[stored]}), which class_map does not map:"
                " add it there, or leave its images out with classes=, the stored labels that are wanted"
            )
        raise ValueError(
            f"image {index} has the label {stored!r}, which is not one of the"
            f" {len(self.stored) or len(self.label)} that are known"
            f" ({_some(range(len(self.stored)) if self.stored else self.label)}): pass class_map=, or check"
            " label_column= (on the command line --set label_column=NAME)"
        )


def make_labelling(
    names: Sequence[str],
    class_map: Mapping[Stored, int] | None = None,
    classes: Iterable[Stored] | None = None,
) -> Labelling:
    """Make the labelling of a data set whose stored labels are numbers with these `names`; no names: whatever
    `class_map` maps.

    classes: the stored labels that are wanted, None for all. class_map: what they mean; without one, what is
    stored. The names of mapped labels are those of the stored labels that mean them. Raises `ValueError` for
    stored labels that do not exist and for a map to something else than class indices.
    """
    classes = None if classes is None else tuple(classes)
    if class_map is None and not names:
        raise ValueError(
            "the labels are no class indices with names: pass class_map= from what is stored to class indices"
        )
    wrong = [label for label in (class_map or {}).values() if not isinstance(label, int) or label < 0]
    if wrong:
        raise ValueError(f"class_map must map to class indices from 0 on, got {wrong[0]!r}")
    known = range(len(names)) if names else class_map
    for what, given in (("class_map", class_map or ()), ("classes", classes or ())):
        unknown = [stored for stored in given if stored not in known]
        if unknown:
            raise ValueError(
                f"{what} names the label {unknown[0]!r}, which the data do not have: they have {_some(known)}"
            )
    wanted = None if classes is None else frozenset(classes)
    if wanted is not None and not wanted:
        raise ValueError("classes is empty: name at least one stored label, or leave it out for all")
    label = {
        stored: stored if class_map is None else class_map[stored]
        for stored in known
        if (wanted is None or stored in wanted) and (class_map is None or stored in class_map)
    }
    return Labelling(
        label, wanted, tuple(names) if class_map is None else _mapped_names(names, label), tuple(names)
    )


def _mapped_names(names: Sequence[str], label: Mapping[Stored, int]) -> tuple[str, ...]:
    found: dict[int, list[str]] = {}
    for stored, meant in label.items():
        found.setdefault(meant, []).append(names[stored] if names else str(stored))
    return tuple(" / ".join(found.get(index, [str(index)])) for index in range(max(found, default=-1) + 1))


def _some(labels: Iterable[Stored]) -> str:
    """The first and the last of many labels."""
    labels = list(labels)
    return (
        ", ".join(map(repr, labels))
        if len(labels) <= 12
        else f"{', '.join(map(repr, labels[:3]))} ... {labels[-1]!r}"
    )


class Photos(Dataset):
    """Images on disk with their targets, for training (`epoch`) and evaluation (`loader`). `photos[i]` is one
    (image, target).

    rows: a `datasets.Dataset` whose column `image_column` is undecoded. targets: labels (n,). classes: their
    names. augmentation: what images go through, in `epoch` as it says for training if `train` (else, and
    everywhere else, as for evaluation); None: they are taken as they are, scaled as
    `atlib.data.images.Images` scales, and must be of one size. on_corrupt: what `epoch` does with an image
    that cannot be decoded, "raise" or "skip"; `corrupt` collects those seen, {index: why}. workers: processes
    that `loader` decodes in. `left_out`: how many images `readable` has left out.
    """

    def __init__(
        self,
        rows,
        image_column: str,
        targets: Tensor,
        classes: Sequence[str],
        *,
        augmentation: Augmentation | None = None,
        train: bool = False,
        on_corrupt: str = "raise",
        workers: int = 0,
    ):
        check_on_corrupt(on_corrupt)
        if len(rows) != len(targets):
            raise ValueError(f"{len(rows)} images, but {len(targets)} targets")
        self.rows, self.image_column, self.targets, self.classes = rows, image_column, targets, tuple(classes)
        self.augmentation, self.train, self.on_corrupt, self.workers = (
            augmentation,
            train,
            on_corrupt,
            workers,
        )
        self.corrupt: dict[int, str] = {}
        self.left_out = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.take([index])
        return images[0], targets[0]

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch at `indices` as evaluation sees it: float32 (B, 3, height, width) and its targets. Raises
        `CorruptImage`."""
        made = self._make([(index, None) for index in indices])
        if made.corrupt:
            raise corrupt_image(made.corrupt)
        return made.images[: len(made.indices)], made.targets[: len(made.indices)]

    __getitems__ = take

    def loader(self, batch_size: int) -> DataLoader:
        """A DataLoader of (images, targets) in order, every image once, as evaluation sees them.

        Raises `CorruptImage` whatever `on_corrupt` is: an evaluation on fewer images is another one.
        `readable` says which there are.
        """
        batches = [
            range(first, min(first + batch_size, len(self))) for first in range(0, len(self), batch_size)
        ]
        return DataLoader(
            Called(self.take),
            sampler=batches,
            batch_size=None,
            collate_fn=as_is,
            num_workers=self.workers,
            generator=torch.Generator(),
            worker_init_fn=in_a_group_of_its_own,
        )

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of an epoch, decoded by `workers` processes ahead of time (0: by this one).

        Order and augmentation hang on seed, epoch and index alone: not on the number of workers, nor on where
        the epoch is taken up again. Raises `CorruptImage` with on_corrupt="raise".
        """

        def seed(index: int, repeat: int) -> int | None:
            return (
                seed_of(part.seed, part.epoch, index, repeat)
                if self.train and self.augmentation is not None
                else None
            )

        shares = (
            Share([(index, seed(index, repeat)) for index, repeat in zip(indices, repeats)], weight)
            for (indices, weight), repeats in zip(my_batches(len(self), part), my_repeats(len(self), part))
        )
        return deliver(self._make, shares, workers=workers, on_corrupt=self.on_corrupt, corrupt=self.corrupt)

    def select(self, indices: Sequence[int]) -> "Photos":
        """The images at `indices`, in that order, under the same treatment."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return Photos(
            self.rows.select(chosen.tolist()),
            self.image_column,
            self.targets[chosen],
            self.classes,
            augmentation=self.augmentation,
            train=self.train,
            on_corrupt=self.on_corrupt,
            workers=self.workers,
        )

    def readable(self) -> "Photos":
        """The images that can be decoded; the others are noted in this set's `corrupt`. Decodes every image
        once, in `workers` processes.

        Raises `CorruptImage` where none can be decoded.
        """
        whole = DataLoader(
            Called(self._why_not),
            sampler=range(len(self)),
            batch_size=None,
            collate_fn=as_is,
            num_workers=self.workers,
            generator=torch.Generator(),
            worker_init_fn=in_a_group_of_its_own,
        )
        found = {index: why for index, why in enumerate(whole) if why is not None}
        if not found:
            return self
        if len(found) == len(self):
            raise CorruptImage(f"none of the {len(self)} images can be decoded (image 0: {found[0]})")
        note_left_out(found, self.corrupt)
        left = self.select([index for index in range(len(self)) if index not in found])
        left.left_out = len(found)
        return left

    def _make(self, wanted: Sequence[tuple[int, int | None]]) -> Made:
        """The images at (index, seed of the augmentation); runs in a worker."""
        files = self.rows[[index for index, _ in wanted]][self.image_column]
        entries = [
            Wanted(index, file, self.targets[index].item(), seed)
            for (index, seed), file in zip(wanted, files)
        ]
        return make(entries, look_of(self.augmentation), self._blank)

    def _why_not(self, index: int) -> str | None:
        try:
            decode(self.rows[index][self.image_column])
        except CorruptImage as error:
            return str(error)

    def _blank(self) -> Image.Image:
        """A picture that comes out of the transform in the size of all others."""
        if self.augmentation is not None:
            return Image.new("RGB", (256, 256))
        for index in range(len(self)):
            if self._why_not(index) is None:
                return Image.new("RGB", decode(self.rows[index][self.image_column]).size)
        raise CorruptImage(f"none of the {len(self)} images can be decoded")


def look_of(augmentation: Augmentation | None) -> Transform:
    """What an image goes through: (picture, seed) to tensor, as for evaluation where the seed is None."""
    if augmentation is None:
        return as_stored
    return lambda picture, seed: (
        augmentation.evaluate(picture) if seed is None else augmentation.train(picture, seed)
    )


def open_photos(
    name_or_path: str | Path,
    *,
    path: str | Path | None = None,
    split: str = "train",
    augmentation: Augmentation | None = None,
    train: bool,
    image_column: str | None = None,
    label_column: str | None = None,
    on_corrupt: str = "raise",
    class_map: Mapping[Stored, int] | None = None,
    classes: Iterable[Stored] | None = None,
    workers: int = 0,
) -> Photos:
    """Open a split of a data set for reading by index.

    name_or_path, path, split, image_column, label_column: as in `atlib.data.catalogue.open_rows_of`. classes:
    the stored labels whose images are wanted (None: all). class_map: what they mean, {stored: label}.
    augmentation, train, on_corrupt, workers: as in `Photos`. Nothing is decoded yet; `datasets` copies what
    it reads from parquet or the hub into its cache, once, as large as the files.

    Raises what `open_rows_of` raises, and `ValueError` for a split without images, a column that holds none,
    and labels that are out of range or not mapped, naming the label.
    """
    check_on_corrupt(on_corrupt)
    rows, image_column, label_column, known = open_rows_of(
        name_or_path, path, split, image_column, label_column
    )
    if len(rows) == 0:
        held_out = (
            ": where none are published, a tenth of the training images is held out, which of so few is none."
            " Put some into a split of their own, as in FOLDER/validation/cat/1.jpg, or name another split"
            " (on the command line --set evaluation_split=NAME)"
        )
        raise ValueError(f"{name_or_path} {split} has no images{held_out if split == 'validation' else ''}")
    pictures = undecoded(rows, image_column).select_columns(
        [image_column]
    )  # first, since its message knows what the columns hold
    stored = rows[label_column][:]
    labelling = make_labelling(names_of(rows, label_column, known, class_map is not None), class_map, classes)
    labels = [labelling.of(label, index) for index, label in enumerate(stored)]
    wanted = [index for index, label in enumerate(labels) if label is not None]
    if not wanted:
        raise ValueError(f"{name_or_path} {split} has no image of the classes {list(classes)}")
    if known is not None and known.images.get(split) != len(rows):
        warnings.warn(
            f"{name_or_path} {split} has {len(rows):,} images here, {known.images.get(split, 0):,} were"
            " published: results will not compare with others'",
            stacklevel=2,
        )
    return Photos(
        pictures if len(wanted) == len(rows) else pictures.select(wanted),
        image_column,
        torch.tensor([labels[index] for index in wanted]),
        labelling.names,
        augmentation=augmentation,
        train=train,
        on_corrupt=on_corrupt,
        workers=workers,
    )


def names_of(rows, label_column: str, known: Known | None, mapped: bool) -> tuple[str, ...]:
    """The names of the stored labels: those in the data, else the numbers of the classes that are known or,
    read by index, found.

    mapped: whether a class map says what labels mean, so that they need not be class indices; () where they
    are not. Raises `ValueError` when the data have another number of classes than was published, and for
    labels that are no class indices.
    """
    import datasets

    from atlib.data.hub import class_names

    feature = rows.features[label_column]
    counts = isinstance(feature, datasets.Value) and feature.dtype.startswith(("int", "uint"))
    if known is not None and counts:
        return tuple(map(str, range(known.classes)))
    if not isinstance(feature, datasets.ClassLabel) and mapped:
        return ()
    if not isinstance(feature, datasets.ClassLabel) and isinstance(rows, datasets.IterableDataset):
        raise ValueError(
            f"column {label_column!r} says neither how many classes there are nor their names, and a stream"
            " cannot be searched for them: pass class_map=, or read it by index with open_photos (on the"
            " command line without --set streaming=true)"
        )
    names = class_names(rows, label_column)
    if known is not None and len(names) != known.classes:
        raise ValueError(
            f"the data have {len(names)} classes, {known.classes} were published: they are another set; open"
            " them by their path alone (on the command line --data FOLDER, without --set data_path=)"
        )
    return names


def undecoded(rows, image_column: str):
    """The rows with the files of their images instead of pictures. Raises `ValueError` for a column that
    holds no images."""
    import datasets

    from atlib.data.hub import holds_images, which_columns

    feature = rows.features[image_column]
    if not holds_images(feature):
        raise ValueError(
            f"column {image_column!r} holds {feature}, not images: name the right one with image_column=,"
            f" there are {', '.join(rows.column_names)}; {which_columns(rows)}"
        )
    return rows.cast_column(image_column, datasets.Image(decode=False))
