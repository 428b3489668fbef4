"""Data sets by name: names, paths and hub ids are told apart, and files hold what was published."""

import warnings

import datasets
import numpy as np
import pyarrow.parquet
import pytest

from atrun.data.catalogue import CATALOGUE, find
from atrun.data.hub import open_rows_of
from atrun.data.photos import open_photos
from atrun.data.stream import open_stream
from atrun.data.transforms import Augmentation
from tests.helpers import shared
from tests.picture_files import index_of, picture, rows, write_parquet

SMALL = Augmentation(image_size=8)


@pytest.fixture
def hub(monkeypatch):
    """`datasets.load_dataset` for hub ids: says what was asked for, gives four pictures for every split."""
    asked, real = [], datasets.load_dataset

    def load_dataset(name, streaming=False, data_files=None, **options):
        if "/" not in name:
            return real(name, streaming=streaming, data_files=data_files, **options)
        asked.append((name, data_files, options))
        columns = {"image_column": "img" if "cifar" in name else "image"}
        columns |= {"label_column": "fine_label" if "cifar100" in name else "label"}
        given = rows(range(4), label=datasets.Value("int64"), **columns)
        published = ("train", "validation") if "food" in name else ("train", "test")
        splits = {split: given for split in data_files or published}
        if not streaming:
            return datasets.DatasetDict(splits)
        return datasets.IterableDatasetDict({s: r.to_iterable_dataset() for s, r in splits.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_names_paths_and_hub_ids_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_parquet(tmp_path / "owner" / "set", "train", range(3))
    assert find("cifar10") == ("uoft-cs/cifar10", None, CATALOGUE["cifar10"])
    assert find("cifar10", folder) == ("cifar10", folder, CATALOGUE["cifar10"])
    assert find("owner/thing") == ("owner/thing", None, None)
    assert find("owner/set")[1].samefile(folder) and find(folder)[1] == folder
    assert find(folder) == (str(folder), folder, None)
    with pytest.raises(FileNotFoundError):
        find("./nowhere")


@pytest.mark.parametrize(
    "name, split, wanted",
    [
        ("imagenet-1k", "validation", ("ILSVRC/imagenet-1k", {"validation": "data/validation-*.parquet"})),
        ("cifar100", "test", ("uoft-cs/cifar100", None)),
        ("food101", "validation", ("ethz/food101", None)),
    ],
)
def test_hub_is_asked_for_one_split_where_others_are_large(hub, name, split, wanted):
    rows, _, _, known = open_rows_of(name, None, split)
    assert hub[0][:2] == wanted and len(rows) == 4 and known is CATALOGUE[name]
    streamed = open_stream(name, split=split, augmentation=SMALL)
    assert hub[1][:2] == wanted and len(streamed.classes) == CATALOGUE[name].classes
    assert len(streamed) == CATALOGUE[name].images[split]


def test_training_images_with_a_published_validation_split_are_all_used(hub):
    """The files of one split alone must not look like a set without validation images."""
    with pytest.warns(UserWarning, match="train .* 4 .*1,281,167"):
        photos = open_photos("imagenet-1k")
    assert len(photos) == 4 and len(photos.classes) == 1000
    with pytest.raises(ValueError):
        open_photos("imagenet-1k", split="test")
    with pytest.raises(ValueError, match="stream"):
        open_stream("cifar10", split="train", augmentation=SMALL)


def test_training_and_validation_images_where_both_and_a_test_split_are_published(tmp_path, monkeypatch):
    """Flowers' 2,040 images: both splits, in this order; no union where the validation split is reported."""
    for split, indices in (("train", range(5)), ("validation", range(5, 8)), ("test", range(8, 12))):
        write_parquet(tmp_path, split, indices)
    images = {"train": 5, "validation": 3, "train+validation": 8, "test": 4}
    monkeypatch.setitem(CATALOGUE, "flowers102", CATALOGUE["flowers102"]._replace(classes=3, images=images))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for split, indices in (("train+validation", range(8)), ("train", range(5)), ("test", range(8, 12))):
            photos = open_photos("flowers102", path=tmp_path, split=split)
            assert [index_of(image) for image in photos.take(range(len(photos)))[0]] == list(indices)
    for file in tmp_path.glob("test*"):
        file.unlink()
    with pytest.raises(ValueError):
        open_photos(tmp_path, split="train+validation")


def test_a_known_name_reads_a_folder_per_class(tmp_path, monkeypatch):
    """ImageNet as it is unpacked: classes are in the order of the WordNet ids, whatever is in a class."""
    ids = ("n02123045", "n01440764", "n01514859")
    for index in range(12):
        split = "train" if index < 9 else "VAL"
        file = tmp_path / split / ids[index % 3] / f"ILSVRC2012_val_{index:08}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(index).save(file)
    with pytest.raises(ValueError):  # not a thousand classes
        open_photos("imagenet-1k", path=tmp_path)
    with pytest.raises(ValueError, match="stream"):
        open_stream("imagenet-1k", path=tmp_path, augmentation=SMALL)
    for name in ("imagenet-1k", "cifar100"):  # the columns of the second have other names on the hub
        images = {"train": 9, "validation": 3}
        monkeypatch.setitem(CATALOGUE, name, CATALOGUE[name]._replace(classes=3, images=images))
        for split, indices in (("train", range(9)), ("validation", range(9, 12))):
            photos = open_photos(name, path=tmp_path, split=split)
            shown = [index_of(image) for image in photos.take(range(len(photos)))[0]]
            assert sorted(shown) == list(indices) and photos.classes == tuple(sorted(ids))
            assert [photos.classes[label] for label in photos.targets] == [ids[i % 3] for i in shown]


def test_cifar10_has_the_published_counts_and_the_same_held_out_tenth():
    path = shared("data", "cifar10")
    for split in ("train", "test"):
        assert len(open_rows_of("cifar10", path, split)[0]) == CATALOGUE["cifar10"].images[split]
    photos = open_photos("cifar10", path=path, split="validation")
    labels = pyarrow.parquet.read_table(path / "train.parquet", columns=["label"])["label"].to_numpy()
    held_out = np.random.default_rng(0).permutation(50_000)[:5_000]
    assert photos.targets.tolist() == labels[held_out].tolist()
