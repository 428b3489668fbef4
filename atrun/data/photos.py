"""Photographs at any size, read by index: rows of a `datasets` split that are decoded and transformed when
they are asked for.

`atlib.data.Images` holds a small set in memory; this is the same interface over one that does not fit.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset

from atlib._util import require_known
from atlib.data import UNLABELLED
from atlib.loading import Batch, ShardSpec, augmentation_seeds, loader_of, my_batches, my_repeats
from atlib.pair import Normalisation
from atrun.data.catalogue import Known, open_rows_of
from atrun.data.decoding import AS_STORED, CannotStream, DataError, Transform, Wanted, as_stored, decode, make
from atrun.data.loading import ON_CORRUPT, CorruptImage, Made, Share, corrupt_image, deliver, note_left_out
from atrun.data.transforms import Augmentation
from atrun.data.views import Views


class Photos(Dataset):
    """Images on disk with their targets, for training (`epoch`) and evaluation (`loader`). `photos[i]` is one
    (image, target).

    rows: a `datasets.Dataset` whose column `image_column` is undecoded. targets: labels (n,). classes: their
    names. augmentation: what images go through, in `epoch` as it says for training if `train` (else, and
    everywhere else, as for evaluation), or `atrun.data.views.Views`, of each image several; None: they are
    taken as they are, scaled as `atlib.data.Images` scales, and must be of one size. on_corrupt: what
    `epoch` does with an image that cannot be decoded, "raise" or "skip"; `corrupt` has those of the
    current epoch, {index: why}. workers: processes that `loader` decodes in. `left_out`: how many images
    `readable` has left out.
    """

    def __init__(
        self,
        rows,
        image_column: str,
        targets: Tensor,
        classes: Sequence[str],
        *,
        augmentation: Augmentation | Views | None = None,
        train: bool = False,
        on_corrupt: str = "raise",
        workers: int = 0,
    ):
        require_known("on_corrupt", on_corrupt, ON_CORRUPT)
        if len(rows) != len(targets):
            raise ValueError(f"{len(rows)} images, but {len(targets)} targets")
        self.rows, self.image_column, self.targets, self.classes = rows, image_column, targets, tuple(classes)
        self.augmentation, self.train = augmentation, train
        self.on_corrupt, self.workers = on_corrupt, workers
        self.corrupt: dict[int, str] = {}
        self.warned: set[int] = set()  # once for each image, in however many epochs it is met
        self.left_out = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def normalisation(self) -> Normalisation:
        """How the images come out."""
        return AS_STORED if self.augmentation is None else self.augmentation.normalisation

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
        batches = BatchSampler(range(len(self)), batch_size, drop_last=False)
        return loader_of(self.take, batches, self.workers)

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of an epoch, decoded by `workers` processes ahead of time (0: by this one).

        Order and augmentation hang on seed, epoch and index alone: not on the number of workers, nor on where
        the epoch is taken up again. `corrupt` begins anew. Raises `CorruptImage` with on_corrupt="raise".
        """
        self.corrupt.clear()

        def seeds_of(indices: list[int], repeats: list[int]) -> Sequence[int | None]:
            if not self.train or self.augmentation is None:
                return [None] * len(indices)
            return augmentation_seeds(part, torch.tensor(indices), torch.tensor(repeats)).tolist()

        shares = (
            Share([*zip(indices, seeds_of(indices, repeats))], weight)
            for (indices, weight), repeats in zip(my_batches(len(self), part), my_repeats(len(self), part))
        )
        noted = {"corrupt": self.corrupt, "warned": self.warned}
        return deliver(self._make, shares, workers=workers, on_corrupt=self.on_corrupt, **noted)

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
        whole = loader_of(self._why_not, range(len(self)), self.workers)
        found = {index: why for index, why in enumerate(whole) if why is not None}
        if not found:
            return self
        if len(found) == len(self):
            raise CorruptImage(f"none of the {len(self)} images can be decoded (image 0: {found[0]})")
        note_left_out(found, self.corrupt, self.warned)
        left = self.select([index for index in range(len(self)) if index not in found])
        left.left_out = len(found)
        return left

    def _make(self, wanted: Sequence[tuple[int, int | None]]) -> Made:
        """The images at (index, seed of the augmentation); runs in a worker."""
        files = self.rows[[index for index, _ in wanted]][self.image_column]
        asked = zip(wanted, files)
        entries = [Wanted(index, file, self.targets[index].item(), seed) for (index, seed), file in asked]
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


def look_of(augmentation: Augmentation | Views | None) -> Transform:
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
    augmentation: Augmentation | Views | None = None,
    train: bool,
    image_column: str | None = None,
    label_column: str | None = None,
    on_corrupt: str = "raise",
    workers: int = 0,
    labelled: bool = True,
) -> Photos:
    """Open a split of a data set for reading by index.

    name_or_path, path, split, image_column, label_column: as in `atrun.data.catalogue.open_rows_of`.
    augmentation, train, on_corrupt, workers: as in `Photos`. labelled=False: images alone, of any folder,
    each with the target `atlib.data.UNLABELLED`, and no classes. Nothing is decoded yet; `datasets` copies
    what it reads from parquet or the hub into its cache, once, as large as the files.

    Raises what `open_rows_of` raises, and `DataError` for a split without images, a column that holds none,
    and labels that are not class indices, naming the label.
    """
    require_known("on_corrupt", on_corrupt, ON_CORRUPT)
    rows, image_column, label_column, known = open_rows_of(
        name_or_path, path, split, image_column, label_column, labelled
    )
    if len(rows) == 0:
        held_out = (
            ": where none are published, a tenth of the training images is held out, which of so few is none."
            " Put some into a split of their own, as in FOLDER/validation/cat/1.jpg, or name another split"
        )
        why = held_out if split == "validation" else ""
        raise DataError(f"{name_or_path} {split} has no images{why}", "split")
    # first, since its message knows what the columns hold
    pictures = undecoded(rows, image_column).select_columns([image_column])
    names, labels = (), [UNLABELLED] * len(rows)
    if labelled:
        names = names_of(rows, label_column, known)
        labels = [checked_label(label, names, index) for index, label in enumerate(rows[label_column][:])]
    if known is not None and known.images.get(split) != len(rows):
        warnings.warn(
            f"{name_or_path} {split} has {len(rows):,} images here, {known.images.get(split, 0):,} were"
            " published: results will not compare with others'",
            stacklevel=2,
        )
    how = {"augmentation": augmentation, "train": train, "on_corrupt": on_corrupt, "workers": workers}
    return Photos(pictures, image_column, torch.tensor(labels), names, **how)


def names_of(rows, label_column: str, known: Known | None) -> tuple[str, ...]:
    """The names of the labels: those in the data, else the numbers of the classes that are known or, read by
    index, found.

    Raises `DataError` when the data have another number of classes than was published, and for labels that
    are no class indices.
    """
    import datasets

    from atrun.data.hub import class_names

    feature = rows.features[label_column]
    counts = isinstance(feature, datasets.Value) and feature.dtype.startswith(("int", "uint"))
    if known is not None and counts:
        return tuple(map(str, range(known.classes)))
    if not isinstance(feature, datasets.ClassLabel) and isinstance(rows, datasets.IterableDataset):
        raise CannotStream(
            f"column {label_column!r} says not which classes there are, as a stream must: use open_photos"
        )
    names = class_names(rows, label_column)
    if known is not None and len(names) != known.classes:
        have = f"the data have {len(names)} classes, {known.classes} were published"
        raise DataError(f"{have}: they are another set; open them by their path alone", "path")
    return names


def checked_label(label: int, names: Sequence[str], index: int) -> int:
    """The label of image `index`, if it is the number of one of the classes. Raises `DataError` naming it."""
    if label in range(len(names)):
        return label
    if label == -1:
        raise DataError(f"image {index} has the label -1: this split was published without labels", "split")
    raise DataError(
        f"image {index} has the label {label!r}, and the classes are numbered 0 to {len(names) - 1}: check"
        " label_column=",
        "label_column",
    )


def undecoded(rows, image_column: str):
    """The rows with image files instead of pictures. Raises `DataError` for a column that holds no images."""
    import datasets

    from atrun.data.hub import holds_images, which_columns

    feature = rows.features[image_column]
    if not holds_images(feature):
        holds = f"column {image_column!r} holds {feature}, not images"
        raise DataError(f"{holds}: {which_columns(rows)}; name one with image_column=", "image_column")
    return rows.cast_column(image_column, datasets.Image(decode=False))
