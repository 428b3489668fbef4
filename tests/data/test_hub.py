"""What is read through the `datasets` library: files in the hub's layout, damaged ones, the real CIFAR-10."""

import datasets
import pytest
from PIL import Image

from atrun.data import load
from atrun.data.hub import open_rows_of
from tests.picture_files import index_of, rows, write_parquet


def indices_in(images):
    return [index_of(image) for image, _ in images]


@pytest.fixture
def folder(tmp_path):
    """100 training and 12 test images."""
    write_parquet(tmp_path / "set" / "data", "train", range(100), parts=2)
    return write_parquet(tmp_path / "set" / "data", "test", range(300, 312)).parent


def test_a_tenth_of_train_is_held_out_as_validation(folder):
    splits = ("train", "validation", "train+validation")
    train, validation, both = (load("parquet", folder, split=split) for split in splits)
    assert (len(train), len(validation), len(both)) == (90, 10, 100)
    assert set(indices_in(train)) | set(indices_in(validation)) == set(range(100)) == set(indices_in(both))
    assert not set(indices_in(train)) & set(indices_in(validation))
    for images in (train, validation):
        assert images.targets.tolist() == [index % 3 for index in indices_in(images)]


def test_a_size_chooses_by_seed(folder):
    chosen = {seed: indices_in(load("parquet", folder, size=20, seed=seed)) for seed in (0, 1)}
    assert all(len(set(indices)) == 20 for indices in chosen.values()) and set(chosen[0]) != set(chosen[1])
    again = load("parquet", folder, size=20, seed=0)
    assert indices_in(again) == chosen[0] and again.targets.tolist() == [index % 3 for index in chosen[0]]
    with pytest.raises(ValueError):
        load("parquet", folder, split="test", size=13)


@pytest.mark.parametrize("name", ["validation.parquet", "data/val-00000-of-00001.parquet"])
def test_a_published_validation_split_is_used_as_it_is(folder, name):
    """Unread, its place was taken by a tenth of the training images, without a word."""
    rows(range(200, 205)).to_parquet(folder / name)
    assert indices_in(load("parquet", folder, split="validation")) == list(range(200, 205))
    assert len(load("parquet", folder, split="train")) == 100


@pytest.mark.parametrize("name", ["train.parquet", "data/train.parquet", "train-00000-of-00001.parquet"])
def test_a_split_that_is_there_twice_is_not_read_twice(folder, name):
    rows(range(100)).to_parquet(folder / name)
    place = folder / "data" if name == "data/train.parquet" else folder
    with pytest.raises(ValueError):
        load("parquet", place, split="train")


def folders_of(root, *folders):
    """Three pictures in each folder, each picture different from all others."""
    for place, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (8, 8), (place, index, 0)).save(root / folder / f"{index}.png")


@pytest.mark.parametrize("name", ["bullet_train", "val"])
def test_a_class_may_be_called_like_a_split(tmp_path, name):
    """`datasets` alone reads such a class's validation images as training images, and twice."""
    folders_of(tmp_path, *(f"{split}/{each}" for split in ("Train", "VAL") for each in ("bus", name)))
    for split, first in (("train", 0), ("validation", 2)):
        rows, _, label, _ = open_rows_of("imagefolder", tmp_path, split)
        places = [image.getpixel((0, 0))[:2] for image in rows["image"][:]]
        assert sorted(places) == [(first + place, index) for place in (0, 1) for index in range(3)]
        assert rows.features[label].names == sorted(("bus", name))


def test_folders_that_may_be_meant_as_splits_are_named(tmp_path):
    folders_of(tmp_path / "one", "train/bus", "train/car", "holdout/bus")
    with pytest.warns(UserWarning, match="from train and not from holdout"):
        assert len(open_rows_of("imagefolder", tmp_path / "one", "train+validation")[0]) == 6
    folders_of(tmp_path / "three", "val/bus", "valid/bus")
    with pytest.raises(ValueError):
        open_rows_of("imagefolder", tmp_path / "three", "validation")


def test_no_network_says_what_would_have_been_downloaded(monkeypatch, no_network):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="uoft-cs/cifar100"):
        load("cifar100")
