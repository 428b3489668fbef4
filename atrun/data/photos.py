"""Photographs at any size, read by index: rows of a `datasets` split, decoded when they are asked for; the
interface of `atlib.data.Images`, as which `load` and `hold` have a small set in memory."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import normalize, to_tensor

from atlib._util import require_known
from atlib.data import UNLABELLED, Images
from atlib.loading import Batch, ShardSpec, in_order, loader_of, my_seeded_batches
from atlib.pair import Normalisation
from atrun.data.catalogue import draw
from atrun.data.decoding import ON_CORRUPT, CorruptImage, Made, decode, large_pictures
from atrun.data.transforms import AS_STORED, Augmentation, in_two
from atrun.data.views import Views

NAMED = 20  # corrupt images that are warned about one by one


class Decoded:
    """What images by index and images as they come have in common. Arguments: as in `Photos`."""

    def __init__(self, classes: Sequence[str], augmentation: Augmentation | Views | None, on_corrupt: str):
        require_known("on_corrupt", on_corrupt, ON_CORRUPT)
        self.classes, self.augmentation, self.on_corrupt = tuple(classes), augmentation, on_corrupt
        #: the images that could not be decoded, in training those of the current epoch, {index: why}
        self.corrupt: dict[int, str] = {}
        self._warned: set[int] = set()

    @property
    def normalisation(self) -> Normalisation:
        """How the images come out."""
        return AS_STORED if self.augmentation is None else self.augmentation.normalisation

    def note(self, corrupt: dict[int, str]) -> None:
        """Add to `corrupt`, with a warning for each of the first `NAMED` images, and one for all others."""
        self.corrupt |= corrupt
        if corrupt and self.on_corrupt == "raise":
            index, why = next(iter(corrupt.items()))
            raise CorruptImage(f"image {index} cannot be decoded ({why}); on_corrupt='skip' leaves it out")
        for index in sorted(corrupt.keys() - self._warned):  # once for each image, in however many epochs
            message = f"image {index} cannot be decoded and is left out ({corrupt[index]})"
            if len(self._warned) == NAMED:
                message = f"more than {NAMED} images cannot be decoded: others are counted"
            if len(self._warned) <= NAMED:
                warnings.warn(message, stacklevel=3)
            self._warned.add(index)

    def made(self, wanted: Iterable[tuple]) -> Made:
        """Images decoded and treated, of (index, file, target, seed of the augmentation, None for evaluation)
        each; a black one stands for a share of which none can be decoded."""
        images, targets, indices, corrupt = [], [], [], {}
        for index, file, target, seed in wanted:
            try:
                picture = decode(file)
            except CorruptImage as error:
                corrupt[index] = str(error)
                continue
            with large_pictures():
                images.append(self._treated(picture, seed))
            targets.append(target)
            indices.append(index)
        if not images:
            images, targets = [self._treated(Image.new("RGB", (256, 256)), None)], [0]
        return Made(torch.stack(images), torch.tensor(targets), indices, corrupt)

    def _treated(self, picture: Image.Image, seed: int | None) -> Tensor:
        if (a := self.augmentation) is None:
            return normalize(to_tensor(picture), AS_STORED.mean, AS_STORED.std)
        return a.evaluate(picture) if seed is None else a.train(picture, seed)

    def deliver(
        self, make: Callable[[Sequence], Made], shares: Iterable[tuple[Sequence, float]], workers: int
    ) -> Iterator[Batch]:
        """One batch for each (what `make` makes images of, weight), in order, made by `workers` processes
        ahead of time (0: by this one). The weight of what cannot be decoded falls to the rest of its share,
        so that over all processes every image counts as much as without a gap."""
        for made, weight in loader_of(partial(_weighted, make), shares, workers, pin=True):
            self.note(made.corrupt)
            yield Batch(made.images, made.targets, made.indices, weight)


def _weighted(make: Callable[[Sequence], Made], share: tuple[Sequence, float]) -> tuple[Made, float]:
    """A share made, and its weight less that of what cannot be decoded; runs in a worker."""
    made, weight = make(share[0]), share[1]
    return made, weight * (len(made.indices) / len(share[0]))


class Photos(Decoded):
    """Images on disk with their targets, for training (`epoch`) and evaluation (`loader`, `take`).

    rows: a `datasets.Dataset` whose column `image_column` is undecoded. targets: labels (n,). classes: their
    names. augmentation: what images go through, in `epoch` as it says for training, else as for evaluation,
    or `atrun.data.views.Views`, of each image several; None: they are taken as they are, scaled as
    `atlib.data.Images` scales, and must be of one size. on_corrupt: what is done with an image that cannot be
    decoded, "raise" (`CorruptImage`) or "skip". workers: processes that `loader` decodes in.
    """

    def __init__(
        self,
        rows,
        image_column: str,
        targets: Tensor,
        classes: Sequence[str],
        *,
        augmentation: Augmentation | Views | None = None,
        on_corrupt: str = "raise",
        workers: int = 0,
    ):
        super().__init__(classes, augmentation, on_corrupt)
        self.rows, self.image_column, self.targets, self.workers = rows, image_column, targets, workers

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def source_files(self) -> list[str]:
        """What is read, in its order: files of images, or tables of them."""
        first = self.rows[0][self.image_column] if len(self) and self.rows.cache_files else None
        if first is not None and first["bytes"] is not None:
            # their copies in the cache are called after the sources' names, sizes and times
            return [file["filename"] for file in self.rows.cache_files]
        pictures = self.rows.with_format("arrow")[:][self.image_column].to_pylist()
        return [picture["path"] for picture in pictures if picture and picture["path"]]

    def take(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch at `indices` as evaluation sees it: float32 (B, 3, height, width) and its targets; with
        on_corrupt="skip" without those that cannot be decoded."""
        return self._noted(self._seen(indices))

    def loader(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches as `take` has them, in order. Raises `CorruptImage` where no image is left."""
        left = 0
        for made in loader_of(self._seen, in_order(len(self), batch_size), self.workers):
            images, targets = self._noted(made)
            left += len(images)
            if len(images):
                yield images, targets
        if len(self) and not left:
            raise CorruptImage(f"none of the {len(self)} images can be decoded ({self.corrupt[0]})")

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of an epoch, decoded by `workers` processes ahead of time (0: by this one).
        Order and augmentation hang on seed, epoch and index alone. `corrupt` begins anew."""
        self.corrupt.clear()
        return self.deliver(self._make, my_seeded_batches(len(self), part), workers)

    def select(self, indices: Sequence[int]) -> "Photos":
        """The images at `indices`, in that order, under the same treatment."""
        chosen, index = copy.copy(self), torch.as_tensor(indices, dtype=torch.long)
        chosen.rows, chosen.targets = self.rows.select(index.tolist()), self.targets[index]
        chosen.corrupt, chosen._warned = {}, set()
        return chosen

    def _make(self, wanted: Sequence[tuple[int, int | None]]) -> Made:
        """The images at (index, seed of the augmentation); runs in a worker."""
        files = self.rows[[index for index, _ in wanted]][self.image_column]
        asked = zip(wanted, files)
        return self.made((i, file, self.targets[i].item(), seed) for (i, seed), file in asked)

    def _seen(self, indices: Sequence[int]) -> Made:
        return self._make([(index, None) for index in indices])

    def _noted(self, made: Made) -> tuple[Tensor, Tensor]:
        self.note(made.corrupt)
        return made.images[: len(made.indices)], made.targets[: len(made.indices)]


def hold(photos: Photos, device: torch.device, most: float, workers: int = 0) -> Images | None:
    """Photographs to train on, decoded once and held on a device, where they are then augmented: batches of
    the same bits. most: bytes that they may take; workers: processes that decode. None where they take more,
    are not of one size, cannot all be decoded, or are augmented by more than `in_two` can."""
    a, prepare, augment = photos.augmentation, None, None
    if a is not None:
        parts = in_two(a) if isinstance(a, Augmentation) else None
        if parts is None:
            return None
        prepare, augment = parts

    def made(indices: Sequence[int]) -> Tensor | None:
        try:
            pictures = [decode(file) for file in photos.rows[indices][photos.image_column]]
        except CorruptImage:
            return None
        with large_pictures():
            arrays = [np.array(picture if prepare is None else prepare(picture)) for picture in pictures]
        alike = len({array.shape for array in arrays}) == 1
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2) if alike else None

    count, first = len(photos), made([0])
    if first is None or first.numel() * count > most:
        return None
    if a is not None and a.crop == "padded" and a.padding >= min(first.shape[-2:]):
        return None  # torchvision reflects reflections
    pixels = torch.empty((count, *first.shape[1:]), dtype=torch.uint8, device=device)
    batches = in_order(count, 256)
    for batch, part in zip(batches, loader_of(made, batches, workers)):
        if part is None or part.shape[1:] != pixels.shape[1:]:
            return None
        pixels[batch.start : batch.stop] = part
    scaled = photos.normalisation
    held = Images(pixels, photos.targets.to(device), photos.classes, scaled.mean, scaled.std, augment)
    held.source = photos  # by which a run goes on, wherever it holds them then
    return held


def open_photos(
    name_or_path: str | Path,
    *,
    path: str | Path | None = None,
    split: str = "train",
    augmentation: Augmentation | Views | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    on_corrupt: str = "raise",
    workers: int = 0,
    labelled: bool = True,
) -> Photos:
    """Open a split of a data set for reading by index.

    name_or_path, path, split, image_column, label_column: as in `atrun.data.hub.open_rows_of`, whose
    errors it raises too. augmentation, on_corrupt, workers: as in `Photos`. labelled=False: images alone, of
    any folder, with the target `atlib.data.UNLABELLED`. `datasets` copies what it reads from
    parquet or the hub into its cache, once.
    """
    from atrun.data.hub import column_classes, open_rows_of

    columns = image_column, label_column, labelled
    rows, image_column, label_column, entry = open_rows_of(name_or_path, path, split, *columns)
    if len(rows) == 0:
        way_out = ": too few to hold a tenth out; make a folder validation/" if split == "validation" else ""
        raise ValueError(f"{name_or_path} {split} has no images{way_out}")
    # first, since its message knows what the columns hold
    pictures = undecoded(rows, image_column).select_columns([image_column])
    names, labels = (), [UNLABELLED] * len(rows)
    if label_column is not None:
        names = column_classes(rows, label_column, None if entry is None else entry.classes)
        labels = [checked_label(label, names, i) for i, label in enumerate(rows[label_column][:])]
    if entry is not None and entry.images.get(split) != len(rows):
        counts = f"{len(rows):,} images here, {entry.images.get(split, 0):,} were published"
        warnings.warn(f"{name_or_path} {split} has {counts}: results will not compare", stacklevel=2)
    options = {"augmentation": augmentation, "on_corrupt": on_corrupt, "workers": workers}
    return Photos(pictures, image_column, torch.tensor(labels), names, **options)


def load(
    name: str,
    path: str | Path | None = None,
    *,
    split: str = "train",
    size: int | None = None,
    seed: int = 0,
    image_size: int | None = None,
) -> Images:
    """A split of a data set by name, in memory.

    name, path, split: as in `atrun.data.hub.open_rows_of`, or "parquet" or "imagefolder" with a `path`.
    Where a data set has no validation split, a tenth of "train" becomes it, the same images always, and
    "train" is the rest. size: the number of images, a random choice by `seed` (None: all). image_size:
    shorter side resized to it, then centre crop (None: as they are; they must then be of one size).
    """
    from atrun.data.hub import open_rows_of

    rows, image_column, label_column, _ = open_rows_of(name, path, split)
    return images_in_memory(rows, image_column, label_column, size, seed, image_size, f"{name} {split}")


def images_in_memory(
    rows, image: str, label: str, size: int | None, seed: int, image_size: int | None, what: str
) -> Images:
    """Some rows of a `datasets.Dataset`, decoded; image, label: its columns, the others as in `load`."""
    from atrun.data.hub import column_classes

    classes = column_classes(rows, label)
    rows = undecoded(rows, image).select(draw(len(rows), size, seed, what))
    decoded = []
    for index in range(len(rows)):
        try:
            picture = decode(rows[index][image])
        except CorruptImage as error:
            raise OSError(f"image {index} cannot be decoded ({error})") from error
        if image_size is not None:
            picture = ImageOps.fit(picture, (image_size, image_size))
        decoded.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    return Images(torch.stack(decoded), torch.tensor(rows[label][:]), classes)


def checked_label(label: int, names: Sequence[str], index: int) -> int:
    """The label of image `index`, if it is the number of one of the classes. Raises `ValueError`."""
    if label in range(len(names)):
        return label
    if label == -1:
        raise ValueError(f"image {index} has the label -1: this split was published without labels")
    raise ValueError(f"image {index} has the label {label!r} of 0 to {len(names) - 1}: label_column=")


def undecoded(rows, image_column: str):
    """The rows with image files instead of pictures. Raises `ValueError` for a column without images."""
    import datasets

    feature = rows.features[image_column]
    binary = isinstance(feature, datasets.Value) and feature.dtype in ("binary", "large_binary")
    if not (binary or isinstance(feature, (datasets.Image, dict))):
        raise ValueError(f"column {image_column!r} has no images: image_column={list(rows.features)}")
    return rows.cast_column(image_column, datasets.Image(decode=False))
