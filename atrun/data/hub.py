"""Open a split through Hugging Face's `datasets`, from the hub or local files, with errors that help."""

import glob
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import datasets

from atlib._util import require_known
from atrun.data.catalogue import SPLIT_NAMES, VALIDATION_SHARE, Entry, find, fixed_order
from atrun.data.folders import ImageFolders

IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label")
Rows = datasets.Dataset | datasets.IterableDataset


def open_rows_of(
    name_or_path: str | Path,
    path: str | Path | None,
    split: str,
    image_column: str | None = None,
    label_column: str | None = None,
    labelled: bool = True,
) -> tuple[datasets.Dataset, str, str | None, Entry | None]:
    """Open a split of a data set by name, path or hub id: its rows, image and label column (None with
    labelled=False), and what is published about it (None without a name).

    A path may be parquet or arrow files named after their splits, one such file, a data set saved by
    `datasets`, one folder per class, whose sorted names are the classes, below a folder per split or none, or
    images with annotations in COCO's format, as iNaturalist's authors pack them. Where no validation split is
    published, a tenth of "train" becomes it; where one is published beside a test split, "train+validation"
    is both.
    """
    name, place, entry = find(name_or_path, path)
    if entry is not None and entry.files:
        require_known(f"split of {name_or_path}", split, entry.images)
    files = None if entry is None else entry.files.get(split)
    if place is None and files is not None:
        rows = open_rows(name, None, split, files)
    else:
        splits = _from_hub(name) if place is None else _from_files(name, place, labelled)
        parts, held_out = _parts(splits, split, name)
        published = [splits[part] for part in parts]
        rows = published[0] if len(published) == 1 else datasets.concatenate_datasets(published)
        if held_out:
            order, count = fixed_order(len(rows)), round(VALIDATION_SHARE * len(rows))
            rows = rows.select(order[:count] if split == "validation" else order[count:])
    return rows, *columns_of(rows, image_column, label_column, labelled), entry


def open_streamed(
    name: str, path: str | Path | None, split: str, files: str | None = None
) -> tuple[datasets.IterableDataset, list[str] | None]:
    """The rows of a published split as they come, and the local files that are its shards (the hub: None)."""
    if path is None and files is not None:
        return _from_hub(name, split, files, streaming=True)[split], None
    if path is None:
        splits, builder = _from_hub(name, streaming=True), ""
    else:
        builder = "parquet" if (splits := _files_of(Path(path), "parquet")) else "arrow"
        splits = splits or _files_of(Path(path), "arrow")
        if not splits:
            raise ValueError(f"{path} holds no parquet or arrow files to stream: open_photos reads it")
    parts, held_out = _parts(splits, split, name)
    if held_out or len(parts) > 1:
        raise ValueError(f"{split!r} of {name} is no published split, and cannot be streamed: open_photos")
    if path is None:
        return splits[parts[0]], None
    return _read(splits[parts[0]], builder, streaming=True), splits[parts[0]]


def columns_of(
    rows: Rows, image: str | None = None, label: str | None = None, labelled: bool = True
) -> tuple[str, str | None]:
    """The image and the label column, those named, else those that are usually so called; or None for it."""
    images = IMAGE_COLUMNS if image is None else (image,)
    labels = LABEL_COLUMNS if label is None else (label,)
    return find_column(rows, images, "image"), find_column(rows, labels, "label") if labelled else None


def open_rows(name: str, path: str | Path | None, split: str, files: str | None = None) -> datasets.Dataset:
    """All rows of a published split with all their columns, nothing held out; of a `path` that has one split,
    that one. files: on the hub, the pattern of the split's files, so that no others are downloaded."""
    if path is None:
        splits = _from_hub(name, split if files else None, files)
    else:
        splits = _from_files(name, Path(path))
        if len(splits) == 1:
            return next(iter(splits.values()))
    require_known(f"split of {name}", split, splits)
    return splits[split]


def _from_hub(name: str, split: str | None = None, files: str | None = None, **options):
    """The splits of a data set on the hub; with `files`, the pattern of one split's files, that one alone."""
    if files is not None:
        options |= {"data_files": {split: files}, "verification_mode": "no_checks"}
    try:
        return datasets.load_dataset(name, **options)
    except Exception as error:  # datasets, huggingface_hub and httpx each have their own errors
        raise ConnectionError(f"{name!r} is not read from the hub ({error!r}): give path=") from error


def _from_files(name: str, path: Path, labelled: bool = True) -> Mapping[str, datasets.Dataset]:
    if name == "imagefolder":
        return ImageFolders(path, labelled)
    for builder in ("parquet", "arrow"):
        if files := _files_of(path, builder):
            return {split: _read(several, builder) for split, several in files.items()}
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = datasets.load_from_disk(str(path))
        return saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
    annotated = {}  # as iNaturalist's authors call them: train2018.json, val2018.json
    for split, pattern in (("train", "train*.json"), ("validation", "val*.json")):
        for number, file in enumerate(sorted(path.glob(pattern))):
            if number:
                raise ValueError(f"{path} holds {pattern} more than once: keep one of them")
            annotated[split] = _read_annotated(file)
    return annotated or ImageFolders(path, labelled)


def _files_of(path: Path, suffix: str) -> dict[str, list[str]]:
    """Each split's files, named as ours or the hub's, data/train-00000-of-00001.parquet; one is "train"."""
    if path.is_file():
        # Whatever one file is called it is read as parquet, unless it says that it is arrow.
        return {"train": [str(path)]} if (path.suffix == ".arrow") == (suffix == "arrow") else {}
    splits = {}
    for split in SPLIT_NAMES:
        short = "val" if split == "validation" else split  # val.parquet is validation, too
        patterns = [f"{short}*", *(f"data/{name}-*" for name in sorted({short, split}))]
        places = [sorted(path.glob(f"{pattern}.{suffix}")) for pattern in patterns]
        if files := [file for place in places for file in place]:
            splits[split] = [str(file) for file in files]
            shards = {file.name for file in files if re.search(r"-\d{5}-of-\d{5}\.", file.name)}
            whole = [file for file in files if file.stem in (short, split)]
            if sum(map(bool, places)) > 1 or len(whole) + bool(shards) > 1:  # all would be there twice
                raise ValueError(f"{split} is there more than once, as {files[0]} and {files[-1]}: keep one")
            total = sum({int(name.rpartition("-of-")[2].partition(".")[0]) for name in shards})
            if len(shards) < total:
                warnings.warn(f"{path}: of {split} {len(shards)} of {total} files are there", stacklevel=2)
    return splits


def _read_annotated(file: Path) -> datasets.Dataset:
    """Images beside a file of annotations (visipedia/inat_comp, 2018), labelled in order of category ids."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        categories = sorted(content["categories"], key=lambda category: category["id"])
        names = [str(category["name"]) for category in categories]
        if len(set(names)) < len(names):  # a ClassLabel wants every name once
            names = [f"{category['id']} {category['name']}" for category in categories]
        label = {category["id"]: index for index, category in enumerate(categories)}
        labelled = {(one["image_id"], label[one["category_id"]]) for one in content["annotations"]}
        label_of_image = dict(labelled)
        if len(label_of_image) < len(labelled):  # as in annotations of objects: the last would win
            raise ValueError("an image has several classes")
        columns = {
            "image": [str(file.parent / image["file_name"]) for image in content["images"]],
            "label": [label_of_image[image["id"]] for image in content["images"]],
        }
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"{file} is not in COCO's format ({type(error).__name__}: {error})") from error
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict(columns, features)


def _read(files: Sequence[str], builder: str, **options):
    """The rows of files, whose names are literal: `datasets` alone reads them as patterns."""
    try:
        literal = list(map(glob.escape, files))
        return datasets.load_dataset(builder, data_files=literal, **options)["train"]
    except Exception as error:
        if "corresponds to no data" in str(error):  # all that `datasets` says of files without a row
            raise ValueError(f"{' or '.join(files)} has no images") from error
        raise OSError(f"{' or '.join(files)} cannot be read as {builder} ({error!r})") from error


def _parts(splits, split: str, name: str) -> tuple[list[str], bool]:
    """The published splits that a split is made of, and whether it is a part of them, a tenth or the rest."""
    published = "validation" in splits or "train" not in splits
    # Beside a test split, a validation split is training data for those who report the first.
    whole = ("train+validation",) if not published or {"train", "validation", "test"} <= set(splits) else ()
    require_known(f"split of {name}", split, (*splits, *(() if published else ("validation",)), *whole))
    if published:
        return split.split("+"), False
    made_of_train = split in ("train", "validation", "train+validation")
    return ["train"] if made_of_train else [split], split in ("train", "validation")


def find_column(rows: Rows, names: tuple[str, ...], kind: str) -> str:
    """The first of `names` that is a column of `rows`. Raises `ValueError` listing what there is."""
    for name in names:
        if name in rows.column_names:
            return name
    raise ValueError(f"no {kind} column among {', '.join(rows.column_names)}: {kind}_column= names it")


def column_classes(rows: Rows, column: str, published: int | None = None) -> tuple[str, ...]:
    """The names of the classes of a column of class indices, or their numbers."""
    feature = rows.features[column]
    if isinstance(feature, datasets.ClassLabel):
        if published not in (None, len(feature.names)):
            raise ValueError(f"{len(feature.names)} classes, {published} were published: open it by its path")
        return tuple(feature.names)
    if published is not None and str(getattr(feature, "dtype", "")).startswith(("int", "uint")):
        return tuple(map(str, range(published)))
    if isinstance(rows, datasets.IterableDataset):
        raise ValueError(f"column {column!r} does not name its classes, as a stream must: open_photos")
    labels = set(rows[column])
    if wrong := [label for label in labels if not isinstance(label, int) or label < 0]:
        raise ValueError(f"column {column!r} holds {wrong[0]!r:.40}, no class index: label_column=")
    return tuple(map(str, range(max(labels, default=-1) + 1)))
