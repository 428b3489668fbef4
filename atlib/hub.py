"""Open a split through the Hugging Face `datasets` library, from the hub or from local files, with errors that help."""

from pathlib import Path

import datasets
import numpy as np

from atlib.names import require_known

IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label")
VALIDATION_SHARE = 0.1  # of "train", where a data set publishes no validation split


def open_split(name: str, path: str | Path | None, split: str) -> tuple[datasets.Dataset, str, str, tuple[str, ...]]:
    """The rows of a split, its image and label column, and the class names; see `atlib.data.load` for the arguments."""
    splits = _from_hub(name) if path is None else _from_files(name, Path(path))
    wanted = _choose(splits, split, name)
    image_column = find_column(wanted, IMAGE_COLUMNS, "image")
    label_column = find_column(wanted, LABEL_COLUMNS, "label")
    return wanted, image_column, label_column, class_names(wanted, label_column)


def open_rows(name: str, path: str | Path | None, split: str, files: str | None = None) -> datasets.Dataset:
    """All rows of a published split with all their columns, nothing held out.

    files: on the hub, the pattern of the split's files, so that large other splits are not downloaded. With a `path`: a
    parquet file, a folder of them (the split's, or the only ones there are), or a folder with one folder per class.
    """
    if path is None:
        options = {} if files is None else {"data_files": {split: files}, "verification_mode": "no_checks"}
        splits = _from_hub(name, **options)
    else:
        path = Path(path)
        one_folder_per_class = path.is_dir() and not any(path.glob("*.parquet")) and not any(path.glob("data/*.parquet"))
        splits = _from_files("imagefolder" if one_folder_per_class else name, path)
        if len(splits) == 1:
            return next(iter(splits.values()))
    require_known(f"split of {name}", split, splits)
    return splits[split]


def _from_hub(name: str, **options) -> datasets.DatasetDict:
    try:
        return datasets.load_dataset(name, **options)
    except Exception as error:
        # datasets, huggingface_hub and httpx each have their own errors for "no network" and "no such data set"
        raise ConnectionError(
            f"the data set {name!r} could not be read from https://huggingface.co/datasets/{name} "
            f"(cache: {datasets.config.HF_DATASETS_CACHE}; cause: {type(error).__name__}: {error}). Without a network: fetch its "
            f"parquet files on another machine, name them train.parquet, test.parquet, and pass their folder as path=.") from error


def _from_files(name: str, path: Path) -> datasets.DatasetDict:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if name == "imagefolder":
        return _read(path, "imagefolder", data_dir=str(path))
    files = {}
    for split in ("train", "validation", "test"):  # our own naming, and the hub's: data/train-00000-of-00001.parquet
        found = sorted(path.glob(f"{split}*.parquet")) + sorted(path.glob(f"data/{split}-*.parquet"))
        if found:
            files[split] = [str(file) for file in found]
    if path.is_file():
        files = {"train": [str(path)]}
    if not files:
        raise FileNotFoundError(f"no train*.parquet, validation*.parquet or test*.parquet in {path}")
    return datasets.DatasetDict({split: _read(" or ".join(several), "parquet", data_files=several)["train"] for split, several in files.items()})


def _read(source: Path | str, builder: str, data_files=None, data_dir: str | None = None) -> datasets.DatasetDict:
    try:
        return datasets.load_dataset(builder, data_files=data_files, data_dir=data_dir)
    except Exception as error:
        raise OSError(f"{source} cannot be read as {builder} ({type(error).__name__}: {error}); it was left as it is") from error


def _choose(splits: datasets.DatasetDict, split: str, name: str) -> datasets.Dataset:
    if "validation" in splits or "train" not in splits:
        require_known(f"split of {name}", split, splits)
        return splits[split]
    require_known(f"split of {name}", split, (*splits, "validation", "train+validation"))
    if split not in ("train", "validation"):
        return splits["train" if split == "train+validation" else split]
    order = np.random.default_rng(0).permutation(len(splits["train"]))  # fixed: the tenth must never depend on a run's seed
    held_out = round(VALIDATION_SHARE * len(order))
    return splits["train"].select(order[:held_out] if split == "validation" else order[held_out:])


def find_column(rows: datasets.Dataset, names: tuple[str, ...], kind: str) -> str:
    """The first of `names` that is a column of `rows`."""
    for name in names:
        if name in rows.column_names:
            return name
    raise ValueError(f"no {kind} column: looked for {', '.join(names)}, the data set has {', '.join(rows.column_names)}")


def class_names(rows: datasets.Dataset, column: str) -> tuple[str, ...]:
    """The names of the classes that a column of class indices has; their numbers where it has no names."""
    feature = rows.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return tuple(feature.names)
    labels = set(rows[column])
    wrong = [label for label in labels if not isinstance(label, int) or label < 0]
    if wrong:
        raise ValueError(f"the labels in column {column!r} must be class indices from 0 on, got {wrong[0]!r}: cast the column to datasets.ClassLabel")
    return tuple(map(str, range(max(labels, default=-1) + 1)))
