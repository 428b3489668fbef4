"""Folders of images: which folder is the class, what is read, what is not and is said, names that look alike.

Cases: pytorch/vision#2605, pytorch-tiny-imagenet#4, clip-interrogator-ext#50, datasets#4621, datasets#7468.
"""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from atrun.data.photos import open_photos
from atrun.data.stream import open_stream
from atrun.predict import image_files
from tests.picture_files import SMALL, write_parquet


def fill(folder, count=2, suffix=".png"):
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        Image.fromarray(np.full((8, 8, 3), 20 * index, np.uint8)).save(folder / f"{index}{suffix}")
    return folder


def opened(folder, split="train+validation", **options):
    return open_photos(folder, split=split, **options)


@pytest.fixture
def cats_and_dogs(tmp_path):
    for name in ("cat", "dog"):
        fill(tmp_path / "photos" / "train" / name, 10)
    return tmp_path / "photos"


@pytest.mark.parametrize(
    "names", [["train_images/cat", "val_images/cat"], ["cat/train", "cat/val", "dog/train"]]
)
def test_splits_that_are_read_as_classes_are_named(tmp_path, names):
    for name in names:
        fill(tmp_path / name)
    with pytest.warns(UserWarning, match="splits are folders called"):
        images = opened(tmp_path, split="train")
    assert list(images.classes) == sorted({name.split("/")[0] for name in names})


@pytest.mark.parametrize("below", ["a/b/c", "train"])
def test_the_class_is_the_first_folder_below_the_split(tmp_path, below):
    for split in ("train", "validation"):
        for name in ("jump", "run"):
            fill(tmp_path / split / name / below, 3)
            fill(tmp_path / split / name, 1)
    for split in ("train", "validation"):
        photos, theirs = opened(tmp_path, split), ImageFolder(tmp_path / split)
        assert list(photos.classes) == theirs.classes and len(photos) == len(theirs) == 8
        assert photos.targets.bincount().tolist() == [4, 4]
    without = opened(tmp_path / "train")  # classes that lie at the top
    assert without.classes == ("jump", "run") and len(without) == 8


@pytest.mark.parametrize("what", ["picture", "split"])
def test_links_are_followed(tmp_path, cats_and_dogs, what):
    elsewhere = fill(tmp_path / "disk" / "owl", 3)
    train = cats_and_dogs / "train"
    if what == "picture":
        (train / "owl").mkdir()
        for file in elsewhere.iterdir():
            (train / "owl" / file.name).symlink_to(file)
    else:
        (train / "owl").symlink_to(elsewhere)
        train.rename(tmp_path / "moved")
        train.symlink_to(tmp_path / "moved")
    photos = opened(cats_and_dogs)
    assert photos.classes == ("cat", "dog", "owl") and photos.targets.bincount().tolist() == [10, 10, 3]
    assert len(image_files([cats_and_dogs])) == 23
    assert photos.take([22])[0].shape == (1, 3, 8, 8)


def test_a_link_that_leads_back_is_refused_and_not_followed_forty_times(cats_and_dogs):
    (cats_and_dogs / "train" / "cat" / "again").symlink_to("..")
    with pytest.raises(ValueError):
        opened(cats_and_dogs)


@pytest.mark.parametrize("name", ["photos [2024]", "a*?"])
def test_names_are_literal(tmp_path, cats_and_dogs, name):
    decoy = fill(tmp_path / "photos 2" / "train" / "bird")
    folder = cats_and_dogs.rename(tmp_path / name)
    (folder / "train" / "cat").rename(folder / "train" / f"cat {name}")
    photos = opened(folder)
    assert len(photos) == 20 and photos.classes == (f"cat {name}", "dog") and decoy.exists()
    assert photos.take([0, 19])[1].tolist() == [0, 1]
    assert len(image_files([folder])) == 20
    table = write_parquet(tmp_path / "tables" / name, "train", range(6))
    write_parquet(tmp_path / "tables" / "a2", "train", range(3))
    assert len(opened(table)) == 6
    assert len(open_stream(table, split="train+validation", augmentation=SMALL)) == 6


@pytest.mark.parametrize("suffix", [".JP2", ".webp"])
def test_one_list_of_types_for_training_and_prediction(cats_and_dogs, suffix):
    fill(cats_and_dogs / "train" / "cat" / "more", 3, suffix)
    assert len(opened(cats_and_dogs)) == len(image_files([cats_and_dogs])) == 23
    assert len(opened(cats_and_dogs).take(range(23))[0]) == 23


def test_what_is_not_read_is_named_with_its_number(cats_and_dogs):
    cat = cats_and_dogs / "train" / "cat"
    for name in ("1.HEIC", "2.heic", "notes.txt", "scan"):
        (cat / name).write_bytes(b"\0")
    for read in (opened, lambda folder: opened(folder, labelled=False), lambda folder: image_files([folder])):
        with pytest.warns(UserWarning, match="2 .heic, 1 .txt, 1 without an ending; the first: .*1.HEIC"):
            assert len(read(cats_and_dogs)) == 20


def test_what_systems_leave_is_neither_read_nor_a_class(cats_and_dogs, recwarn):
    train = cats_and_dogs / "train"
    for place in (cats_and_dogs, train, train / "cat"):
        (place / ".DS_Store").write_bytes(b"\0")
    (train / ".cache").mkdir()
    (train / "__MACOSX").mkdir()
    assert opened(cats_and_dogs).classes == ("cat", "dog") and not recwarn
    fill(train / "cat" / ".ipynb_checkpoints", 2)
    (train / "dog" / "._0.png").write_bytes(b"AppleDouble")
    with pytest.warns(UserWarning, match="not read: 3 .png"):
        assert len(opened(cats_and_dogs)) == 20


def test_a_picture_beside_the_classes_is_named_and_takes_no_class_away(cats_and_dogs):
    Image.new("RGB", (8, 8)).save(cats_and_dogs / "train" / "overview.png")
    with pytest.warns(UserWarning, match="1 .png.*overview.png"):
        photos = opened(cats_and_dogs)
    assert photos.classes == ("cat", "dog") and len(photos) == 20


def test_classes_are_those_of_the_training_images(cats_and_dogs):
    fill(cats_and_dogs / "val" / "dog", 3)
    photos = opened(cats_and_dogs, "validation")
    assert photos.classes == ("cat", "dog") and photos.targets.tolist() == [1, 1, 1]
    fill(cats_and_dogs / "val" / "Cat", 6)
    with pytest.raises(ValueError):
        opened(cats_and_dogs, "validation")
    assert len(opened(cats_and_dogs, "train")) == 20


def test_a_training_class_without_an_image_is_refused(cats_and_dogs):
    (cats_and_dogs / "train" / "owl").mkdir()
    (cats_and_dogs / "train" / "owl" / "1.heic").write_bytes(b"\0")
    with pytest.raises(ValueError):
        opened(cats_and_dogs)
    assert len(opened(cats_and_dogs, labelled=False)) == 20


@pytest.mark.parametrize("one, other", [("caf\u00e9", "cafe\u0301"), ("dog", "Dog "), ("ab", "a\u200bb")])
def test_names_that_look_equal_and_are_not_are_refused(tmp_path, one, other):
    for name in (one, other):
        fill(tmp_path / "train" / name)
    with pytest.raises(ValueError):
        opened(tmp_path)


def test_the_files_are_those_of_torchvision_in_order(tmp_path):
    for name in ("b", "a", "a-b", "10", "9"):
        fill(tmp_path / "train" / name / "deep", 2)
        fill(tmp_path / "train" / name, 11)
    photos, theirs = opened(tmp_path), ImageFolder(tmp_path / "train")
    assert list(photos.classes) == theirs.classes
    rows = photos.rows.cast_column("image", datasets.Image(decode=False))
    read = {file["path"]: label for file, label in zip(rows["image"], photos.targets.tolist())}
    assert read == dict(theirs.samples)
    assert torch.equal(photos.targets.bincount(), torch.full((5,), 13))
