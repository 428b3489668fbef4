"""Photographs as they come: orders of their own, again from the middle, and with gaps."""

import json

import pytest

from atlib.recipe import Recipe
from atlib.train import train
from atrun.checkpoint_manager import CheckpointManager
from atrun.data.stream import open_stream
from tests.picture_files import PLAIN, SMALL, all_batches, pictures_in, write_arrow


@pytest.fixture
def stream(tmp_path):
    """A function that writes pictures into arrow files and opens them as a stream."""

    def opened(images=23, parts=4, corrupt=(), **options):
        here = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        folder = write_arrow(here, "train", range(images), parts=parts, corrupt=corrupt)
        options = {"augmentation": PLAIN} | options
        return open_stream(folder, split="train+validation", **options)

    return opened


def test_order_is_drawn_anew_by_seed_and_epoch_and_comes_again(stream):
    photos = stream(40, parts=4)

    def order(seed, epoch):
        return tuple(pictures_in(all_batches(photos, seed=seed, epoch=epoch)))

    orders = {of: order(*of) for of in ((0, 0), (0, 1), (1, 0), (1, 1))}
    assert len({*orders.values(), tuple(range(40))}) == 5 and order(1, 1) == orders[1, 1]


def test_corrupt_images_are_counted_over_a_pass_that_was_interrupted(stream, small_vit, tmp_path):
    recipe = Recipe(steps=10, batch_size=5)

    def trained(folder, **options):
        vit = small_vit(img_size=8, patch_size=4, num_classes=3)
        photos = stream(augmentation=SMALL, corrupt=range(0, 23, 3), on_corrupt="skip")
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
