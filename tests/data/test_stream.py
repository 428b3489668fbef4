"""Photographs as they come: every image once over any number of processes, in equal steps, again from the
middle, and with gaps."""

import json

import datasets
import pytest

from atlib.loading import ShardSpec
from atlib.recipe import Recipe
from atlib.train import train
from atrun.checkpoint_manager import CheckpointManager
from atrun.data.photos import open_photos
from atrun.data.stream import open_stream
from atrun.data.transforms import Augmentation
from tests.helpers import shared
from tests.picture_files import CLASSES, PLAIN, SMALL, all_batches, pictures_in, write_arrow, write_parquet


@pytest.fixture
def no_pause(monkeypatch):
    """When it has read parquet files, `datasets` 5.2 sleeps for 5 seconds."""
    monkeypatch.setattr(datasets.iterable_dataset.time, "sleep", lambda seconds: None)


@pytest.fixture
def stream(tmp_path):
    """A function that writes pictures into arrow files and opens them as a stream."""

    def opened(images=23, parts=4, corrupt=(), **options):
        here = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        folder = write_arrow(here, "train", range(images), parts=parts, corrupt=corrupt)
        options = {"augmentation": PLAIN, "train": False, "buffer": 6} | options
        return open_stream(folder, split="train+validation", **options)

    return opened


def test_order_is_drawn_anew_by_seed_and_epoch_and_comes_again(stream):
    photos = stream(40, parts=4)
    orders = {
        (seed, epoch): pictures_in(all_batches(photos, seed=seed, epoch=epoch))
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len({tuple(order) for order in orders.values()}) == 6 and all(
        order != list(range(40)) for order in orders.values()
    )
    assert pictures_in(all_batches(photos, seed=1, epoch=2)) == orders[1, 2]


def test_corrupt_images_are_counted_over_a_pass_that_was_interrupted(stream, small_vit, tmp_path):
    recipe = Recipe(steps=10, batch_size=5)

    def trained(folder, **options):
        vit = small_vit(img_size=8, patch_size=4, num_classes=3)
        photos = stream(augmentation=SMALL, train=True, corrupt=range(0, 23, 3), on_corrupt="skip")
        keeper = CheckpointManager(tmp_path / folder, every=100)
        return train(vit, photos, recipe, seed=2, progress=None, cpu=True, keeper=keeper, **options)

    def corrupt_so_far(folder):
        newest = CheckpointManager(tmp_path / folder, every=100).latest()
        return json.loads((newest / "facts.json").read_text())["corrupt"]

    whole = trained("whole")
    assert [passed["corrupt"] for passed in whole] == [8, 8]
    trained("stopped", stop_at=1)
    first = corrupt_so_far("stopped")
    assert 0 < len(first) < 8, "some before, some after"
    trained("stopped", stop_at=4)
    assert set(first) <= set(corrupt_so_far("stopped"))
    trained("stopped", stop_at=5)
    assert corrupt_so_far("stopped") == [], "the pass is over"
    assert trained("stopped") == whole


def test_parquet_files_are_streamed_too(tmp_path, no_pause):
    write_parquet(tmp_path / "data", "test", range(7))
    photos = open_stream(tmp_path, split="test", augmentation=PLAIN, train=False)
    assert (
        len(photos) == 7
        and sorted(pictures_in(all_batches(photos))) == list(range(7))
        and photos.classes == tuple(CLASSES)
    )


def test_cifar10_streams_what_photos_reads(no_pause):
    path, test = shared("data", "cifar10"), Augmentation(image_size=32, crop_pct=1.0)
    streamed = open_stream("cifar10", path=path, split="test", augmentation=test, train=False, buffer=100)
    read = open_photos("cifar10", path=path, split="test", augmentation=test, train=False)
    assert len(streamed) == len(read) == 10_000 and streamed.classes == read.classes
    batch = next(streamed.epoch(ShardSpec(0, 0, 16)))
    known = {image.sum().item(): index for index, (image, _) in enumerate(read.select(range(400)))}
    places = [known.get(image.sum().item()) for image in batch.images]
    assert all(place is None or read.targets[place] == target for place, target in zip(places, batch.targets))
