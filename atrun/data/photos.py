"""Photographs at any size, read by index: rows of a `datasets` split, decoded when they are asked for; the
interface of `atlib.data.Images`, which holds a small set in memory."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset

from atlib._util import require_known
from atlib.data import UNLABELLED
from atlib.loading import Batch, ShardSpec, augmentation_seeds, loader_of, my_batches, my_repeats
from atlib.pair import Normalisation
from atrun.data.catalogue import open_rows_of
from atrun.data.decoding import AS_STORED, DataError, Transform, Wanted, as_stored, make
from atrun.data.loading import ON_CORRUPT, CorruptImage, Gaps, Made, Share, deliver
from atrun.data.transforms import Augmentation
from atrun.data.views import Views


class Photos(Dataset):
    """Images on disk with their targets, for training (`epoch`) and evaluation (`loader`). `photos[i]` is one
    (image, target).

    rows: a `datasets.Dataset` whose column `image_column` is undecoded. targets: labels (n,). classes: their
    names. augmentation: what images go through, in `epoch` as it says for training if `train` (else, and
    everywhere else, as for evaluation), or `atrun.data.views.Views`, of each image several; None: they are
    taken as they are, scaled as `atlib.data.Images` scales, and must be of one size. on_corrupt: what is done
    with an image that cannot be decoded, "raise" (`CorruptImage`) or "skip"; `corrupt` has those that were
    met, in training those of the current epoch, {index: why}. workers: processes that `loader` decodes in.
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
        self.rows, self.image_column, self.targets, self.classes = rows, image_column, targets, tuple(classes)
        self.augmentation, self.train, self.workers = augmentation, train, workers
        self.gaps = Gaps(on_corrupt)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def corrupt(self) -> dict[int, str]:
        """The images that could not be decoded, {index: why}."""
        return self.gaps.corrupt

    @property
    def normalisation(self) -> Normalisation:
        """How the images come out."""
        return AS_STORED if self.augmentation is None else self.augmentation.normalisation

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, targets = self.take([index])
        if len(images) == 0:
            raise CorruptImage(f"image {index} cannot be decoded ({self.corrupt[index]})")
        return images[0], targets[0]

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch at `indices` as evaluation sees it: float32 (B, 3, height, width) and its targets; with
        on_corrupt="skip" without those that cannot be decoded."""
        return self._noted(self._seen(indices))

    __getitems__ = take

    def loader(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches as `take` has them, in order, every image once. Raises `CorruptImage` where none is
        left."""
        batches, left = BatchSampler(range(len(self)), batch_size, drop_last=False), 0
        for made in loader_of(self._seen, batches, self.workers):
            images, targets = self._noted(made)
            left += len(images)
            if len(images):
                yield images, targets
        if len(self) and not left:
            raise CorruptImage(f"none of the {len(self)} images can be decoded ({self.corrupt[0]})")

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of an epoch, decoded by `workers` processes ahead of time (0: by this one).
        Order and augmentation hang on seed, epoch and index alone. `corrupt` begins anew."""
        self.gaps.corrupt.clear()

        def seeds_of(indices: list[int], repeats: list[int]) -> Sequence[int | None]:
            if not self.train or self.augmentation is None:
                return [None] * len(indices)
            return augmentation_seeds(part, torch.tensor(indices), torch.tensor(repeats)).tolist()

        shares = (
            Share([*zip(indices, seeds_of(indices, repeats))], weight)
            for (indices, weight), repeats in zip(my_batches(len(self), part), my_repeats(len(self), part))
        )
        return deliver(self._make, shares, self.gaps, workers=workers)

    def select(self, indices: Sequence[int]) -> "Photos":
        """The images at `indices`, in that order, under the same treatment."""
        chosen, index = copy.copy(self), torch.as_tensor(indices, dtype=torch.long)
        chosen.rows, chosen.targets = self.rows.select(index.tolist()), self.targets[index]
        chosen.gaps = Gaps(self.gaps.on_corrupt)
        return chosen

    def _make(self, wanted: Sequence[tuple[int, int | None]]) -> Made:
        """The images at (index, seed of the augmentation); runs in a worker."""
        files = self.rows[[index for index, _ in wanted]][self.image_column]
        asked = zip(wanted, files)
        entries = [Wanted(index, file, self.targets[index].item(), seed) for (index, seed), file in asked]
        return make(entries, look_of(self.augmentation))

    def _seen(self, indices: Sequence[int]) -> Made:
        return self._make([(index, None) for index in indices])

    def _noted(self, made: Made) -> tuple[Tensor, Tensor]:
        self.gaps.note(made.corrupt)
        return made.images[: len(made.indices)], made.targets[: len(made.indices)]


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

    name_or_path, path, split, image_column, label_column: as in `atrun.data.catalogue.open_rows_of`, whose
    errors it raises too. augmentation, train, on_corrupt, workers: as in `Photos`. labelled=False: images
    alone, of any folder, with the target `atlib.data.UNLABELLED`. `datasets` copies what it reads from
    parquet or the hub into its cache, once. Raises `DataError` for what holds no images or no class indices.
    """
    from atrun.data.hub import class_names

    rows, image_column, label_column, known = open_rows_of(
        name_or_path, path, split, image_column, label_column, labelled
    )
    if len(rows) == 0:
        way_out = ": too few to hold a tenth out; make a folder validation/" if split == "validation" else ""
        raise DataError(f"{name_or_path} {split} has no images{way_out}", "split")
    # first, since its message knows what the columns hold
    pictures = undecoded(rows, image_column).select_columns([image_column])
    names, labels = (), [UNLABELLED] * len(rows)
    if label_column is not None:
        names = class_names(rows, label_column, None if known is None else known.classes)
        labels = [checked_label(label, names, i) for i, label in enumerate(rows[label_column][:])]
    if known is not None and known.images.get(split) != len(rows):
        warnings.warn(
            f"{name_or_path} {split} has {len(rows):,} images here, {known.images.get(split, 0):,} were"
            " published: results will not compare with others'",
            stacklevel=2,
        )
    how = {"augmentation": augmentation, "train": train, "on_corrupt": on_corrupt, "workers": workers}
    return Photos(pictures, image_column, torch.tensor(labels), names, **how)


def checked_label(label: int, names: Sequence[str], index: int) -> int:
    """The label of image `index`, if it is the number of one of the classes. Raises `DataError`."""
    if label in range(len(names)):
        return label
    if label == -1:
        raise DataError(f"image {index} has the label -1: this split was published without labels", "split")
    raise DataError(
        f"image {index} has the label {label!r}, classes are numbered 0 to {len(names) - 1}: label_column=",
        "label_column",
    )


def undecoded(rows, image_column: str):
    """The rows with image files instead of pictures. Raises `DataError` for a column that holds no images."""
    import datasets

    from atrun.data.hub import holds_images

    if not holds_images(rows.features[image_column]):
        raise DataError(
            f"column {image_column!r} holds no images: image_column= names one of {list(rows.features)}",
            "image_column",
        )
    return rows.cast_column(image_column, datasets.Image(decode=False))
