"""Photographs as they come: every image once over any number of processes, in equal steps, again from the
middle, and with gaps."""

import json
from traceback import clear_frames

import datasets
import pytest
import torch

from atlib.loading import ShardSpec
from atlib.recipe import Recipe
from atlib.train import train
from atrun.checkpoint_manager import CheckpointManager
from atrun.data.decoding import DataError
from atrun.data.loading import CorruptImage
from atrun.data.photos import open_photos
from atrun.data.stream import PhotoStream, open_stream
from atrun.data.transforms import Augmentation
from tests.helpers import shared
from tests.picture_files import (
    CLASSES,
    PLAIN,
    SMALL,
    all_batches,
    check_every_image_once,
    index_of,
    pictures_in,
    write_arrow,
    write_parquet,
)


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


@pytest.mark.parametrize("count", [20, 23, 4])
# all rows read, or own shards
@pytest.mark.parametrize("world, parts", [(1, 1), (2, 1), (2, 4), (3, 4), (3, 3), (4, 4)])
def test_every_image_once_in_equal_steps(stream, world, parts, count):
    check_every_image_once(stream(count, parts), world, count)


def test_steps_are_the_same_for_any_number_of_processes_that_read_everything(stream):
    photos = stream(23, parts=1)
    alone = all_batches(photos)
    for world in (2, 3):
        ranks = [all_batches(photos, world=world, rank=rank) for rank in range(world)]
        for step, batch in enumerate(alone):
            together = {
                place: index_of(image)
                for batches in ranks
                for place, image in zip(batches[step].indices, batches[step].images)
            }
            assert together == dict(zip(batch.indices, pictures_in([batch])))


def test_only_own_shards_are_read_where_they_divide_evenly(stream, monkeypatch):
    """Four files with pictures 0, 4, 8 ...; 1, 5, 9 ...: two processes read two files each, of which each
    picture tells its own."""
    photos = stream(40, parts=4)
    for rank in range(2):
        found = pictures_in(all_batches(photos, world=2, rank=rank))
        assert {picture % 4 for picture in found} == {rank, rank + 2} and len(found) == 20


def test_uneven_shards_end_together(tmp_path):
    write_arrow(tmp_path, "train1", range(30))
    write_arrow(tmp_path, "train2", range(30, 37))
    photos = open_stream(tmp_path, split="train+validation", augmentation=PLAIN, train=False)
    ranks = [all_batches(photos, world=2, rank=rank, batch_size=8) for rank in range(2)]
    assert [sorted(pictures_in(batches)) for batches in ranks] == [list(range(30)), list(range(30, 37))]
    assert [[len(batch.indices) for batch in batches] for batches in ranks] == [
        [6, 6, 6, 6, 6],
        [1, 1, 2, 1, 2],
    ]
    assert [batch.weight for batch in ranks[1]] == pytest.approx([2 * n / (6 + n) for n in (1, 1, 2, 1, 2)])


@pytest.mark.parametrize("training", [False, True])
def test_a_process_without_an_image_goes_along_with_weight_0(tmp_path, training):
    write_arrow(tmp_path, "train1", range(9))
    write_arrow(tmp_path, "train2", [9])
    photos = open_stream(tmp_path, split="train+validation", augmentation=PLAIN, train=training)
    batches = all_batches(photos, world=2, rank=1)
    assert [batch.weight for batch in batches] == [0, pytest.approx(2 / 6)] and batches[0].indices == []
    assert batches[0].images.shape == (1, 3, 8, 8) and pictures_in(batches) == [9]


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


@pytest.mark.parametrize("world, parts", [(1, 4), (2, 4), (2, 1)])
def test_an_epoch_does_not_hang_on_workers_or_where_it_is_taken_up(stream, world, parts):
    photos = stream(augmentation=SMALL, train=True, parts=parts)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    whole = all_batches(photos, world=world, rank=world - 1)
    for start, workers in ((0, 2), (2, 0), (3, 1)):
        for a, b in zip(
            all_batches(photos, workers, world=world, rank=world - 1, start=start), whole[start:], strict=True
        ):
            assert a.indices == b.indices and a.weight == b.weight
            assert torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets)
    assert torch.equal(torch.get_rng_state(), before)
    again = all_batches(photos, world=world, rank=world - 1, epoch=2)
    assert not any(
        torch.equal(a, b) for one, other in zip(whole, again) for a, b in zip(one.images, other.images)
    )


def test_repeats_go_to_different_processes_with_different_augmentation(stream):
    photos = stream(12, augmentation=SMALL, train=True, parts=2)
    ranks = [all_batches(photos, world=2, rank=rank, repeats=2, batch_size=4) for rank in range(2)]
    assert all(not torch.equal(a, b) for one, other in zip(*ranks) for a, b in zip(one.images, other.images))
    plain = stream(12, parts=2)
    ranks = [
        pictures_in(all_batches(plain, world=2, rank=rank, repeats=2, batch_size=4)) for rank in range(2)
    ]
    assert ranks[0] == ranks[1] and len(set(ranks[0])) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_are_named_or_skipped_and_counted(stream, workers):
    photos = stream(corrupt=(4, 11), on_corrupt="skip")
    batches = all_batches(photos, workers)
    assert sorted(pictures_in(batches)) == [i for i in range(23) if i not in (4, 11)]
    assert sorted(why.split()[-1] for why in photos.corrupt.values()) == ["picture11.png", "picture4.png"]
    assert not {place for batch in batches for place in batch.indices} & set(photos.corrupt)
    planned = [5, 5, 5, 5, 3]
    assert [batch.weight for batch in batches] == [
        len(batch.indices) / whole for batch, whole in zip(batches, planned)
    ]
    all_batches(photos, workers, start=5)
    assert photos.corrupt == {}, "of the epoch before"
    with pytest.raises(CorruptImage) as caught:
        all_batches(stream(corrupt=(4, 11)), workers)
    clear_frames(caught.tb)  # as in test_photos


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


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("count", [25, 20])
def test_a_wrong_number_of_images_is_found_out(stream, parts, count):
    wrong = PhotoStream(stream(23, parts=parts).rows, count, "image", "label", CLASSES, augmentation=PLAIN)
    with pytest.raises(DataError) as caught:
        all_batches(wrong)
    assert caught.value.argument == "count"


def test_parquet_files_are_streamed_too(tmp_path, no_pause):
    write_parquet(tmp_path / "data", "test", range(7))
    photos = open_stream(tmp_path, split="test", augmentation=PLAIN, train=False)
    assert (
        len(photos) == 7
        and sorted(pictures_in(all_batches(photos))) == list(range(7))
        and photos.classes == tuple(CLASSES)
    )
    assert open_stream(
        write_parquet(tmp_path / "more", "test", range(7), parts=3), split="test", augmentation=PLAIN
    ).sizes == [3, 2, 2]


def test_cifar10_streams_what_photos_reads(no_pause):
    path, test = shared("data", "cifar10"), Augmentation(image_size=32, crop_pct=1.0)
    streamed = open_stream("cifar10", path=path, split="test", augmentation=test, train=False, buffer=100)
    read = open_photos("cifar10", path=path, split="test", augmentation=test, train=False)
    assert len(streamed) == len(read) == 10_000 and streamed.classes == read.classes
    batch = next(streamed.epoch(ShardSpec(0, 0, 16)))
    known = {image.sum().item(): index for index, (image, _) in enumerate(read.select(range(400)))}
    places = [known.get(image.sum().item()) for image in batch.images]
    assert all(place is None or read.targets[place] == target for place, target in zip(places, batch.targets))
