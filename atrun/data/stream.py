"""Photographs at any size, read as they come: for more than the disk holds, or straight from the hub."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch

from atlib._util import require_known
from atlib.data import UNLABELLED
from atlib.loading import Batch, ShardSpec, augmentation_seeds, my_positions
from atrun.data.catalogue import find
from atrun.data.photos import Decoded, checked_label, undecoded
from atrun.data.transforms import Augmentation
from atrun.data.views import Views

HELD = 4096  # images in memory, from which the next one is drawn


class PhotoStream(Decoded):
    """Images that can be read in their order only, for training; any number of processes takes the same
    steps: each reads all rows and decodes its own.

    rows: a `datasets.IterableDataset` whose image column is undecoded, of `count` images; label_column: None
    without labels. augmentation, on_corrupt: as in `atrun.data.photos.Photos`. An image's index is its place
    in the shuffled stream.
    """

    def __init__(
        self,
        rows,
        count: int,
        image_column: str,
        label_column: str | None,
        classes: Sequence[str],
        *,
        augmentation: Augmentation | Views,
        on_corrupt: str = "raise",
    ):
        super().__init__(classes, augmentation, on_corrupt)
        self.rows, self.count, self.image_column, self.label_column = rows, count, image_column, label_column

    def __len__(self) -> int:
        return self.count

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        """One process's batches of an epoch, decoded by `workers` processes ahead of time (0: by this one).
        Raises `ValueError` where the stream has not as many images as was said."""
        self.corrupt.clear()
        return self.deliver(self.made, self._shares(part), workers)

    def _shares(self, part: ShardSpec) -> Iterator[tuple[Sequence[tuple], float]]:
        """What this process decodes in every step of the epoch, as `made` takes it, and the step's weight."""
        shuffled = self.rows.shuffle(seed=part.seed, buffer_size=HELD)
        shuffled.set_epoch(part.epoch)
        images, at, row = iter(shuffled), -1, {}
        for positions, weight in my_positions(self.count, part):
            wanted, places = [], torch.tensor(positions)
            seeds = augmentation_seeds(part, places, places % part.repeats).tolist()
            for position, seed in zip(positions, seeds):
                while at < position // part.repeats:
                    at, row = at + 1, next(images, None)
                    if row is None:
                        raise ValueError(f"the stream has only {at} of {self.count} images: data_size=")
                label = UNLABELLED
                if self.label_column is not None:
                    label = checked_label(row[self.label_column], self.classes, at)
                wanted.append((position, row[self.image_column], label, seed))
            yield wanted, weight
        # of other processes, after this one's last
        expected = self.count - at - 1
        if part.repeats == 1 and at >= 0 and sum(1 for _ in islice(images, expected + 1)) > expected:
            raise ValueError(f"the stream has more than {self.count} images: data_size=")


def open_stream(
    name_or_path: str | Path,
    *,
    path: str | Path | None = None,
    split: str = "train",
    augmentation: Augmentation | Views,
    image_column: str | None = None,
    label_column: str | None = None,
    on_corrupt: str = "raise",
    count: int | None = None,
    labelled: bool = True,
) -> PhotoStream:
    """Open a published split for reading as it comes, from the hub or from parquet or arrow files, uncopied.

    Arguments and errors are those of `atrun.data.photos.open_photos`. count: the number of images, where
    neither local files nor the publication say it.
    """
    name, place, entry = find(name_or_path, path)
    if entry is not None:
        require_known(f"split of {name_or_path}", split, entry.images)
    from atrun.data.hub import column_classes, columns_of, open_streamed  # `datasets` takes seconds

    rows, files = open_streamed(name, place, split, None if entry is None else entry.files.get(split))
    image_column, label_column = columns_of(rows, image_column, label_column, labelled)
    wanted = [image_column, *([label_column] if labelled else [])]
    pictures = undecoded(rows, image_column).select_columns(wanted)
    published = None if entry is None else entry.classes
    classes = column_classes(rows, label_column, published) if labelled else ()
    if files is not None:
        whole = sum(map(_rows_in, files))
    elif rows.split in (announced := rows.info.splits or {}):
        whole = announced[rows.split].num_examples
    else:
        whole = None if entry is None else entry.images.get(split)
    if None not in (count, whole) and count != whole:
        raise ValueError(f"{name_or_path} {split} has {whole:,} images, not {count:,}: leave data_size out")
    count = count if whole is None else whole
    if not count:  # steps and schedule hang on it
        raise ValueError(f"{name_or_path} {split} has no images, or does not say how many: data_size=")
    how = {"augmentation": augmentation, "on_corrupt": on_corrupt}
    return PhotoStream(pictures, count, image_column, label_column, classes, **how)


def _rows_in(file: str) -> int:
    """The number of rows of a parquet or arrow file, from its metadata."""
    import pyarrow.parquet

    if Path(file).suffix == ".arrow":
        with pyarrow.memory_map(file) as source:
            return sum(batch.num_rows for batch in pyarrow.ipc.open_stream(source))
    return pyarrow.parquet.read_metadata(file).num_rows
