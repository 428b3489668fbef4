"""An epoch of any data: each image once over all processes, found again in the middle, no generator moved"""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from atbook.worlds.scenes import generate_scenes, scene_objects
from atlib.data import Images, as_data
from atrun.data.coco import CocoObjects
from atrun.data.photos import open_photos
from atrun.data.stream import open_stream
from atrun.data.views import looks, small_views
from tests.detection.coco_folder import export_coco
from tests.picture_files import SMALL, all_batches, write_arrow, write_parquet

COUNT = 21  # of steps of 5 the last has one image, and a process without one


class Noisy(Dataset):
    """Draws from all three global generators, as transforms do."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        drawn = random.random() + np.random.rand() + torch.rand(()).item()
        return torch.full((3, 8, 8), index / COUNT + drawn), index


def noisy(images, seeds):
    """Another image for every seed."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
    drawn = [torch.randint(0, 256, images.shape[1:], generator=generator) for generator in generators]
    return torch.stack(drawn).to(torch.uint8)


def in_memory(augment):
    pixels = torch.randint(256, (COUNT, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    return Images(pixels.to(torch.uint8), torch.arange(COUNT), augment=augment)


def scenes(here):
    pytest.importorskip("pycocotools", reason="needs pycocotools, the extra 'detection'")
    made = scene_objects(generate_scenes("train", COUNT))
    return CocoObjects(*export_coco(made, here), size=64, jitter=(0.5, 2.0))


AS = {"split": "train+validation", "augmentation": SMALL}
KINDS = {
    "images": lambda here: in_memory(noisy),
    "views": lambda here: in_memory(small_views(looks((0.2, 1.0), local=2))),
    "torch": lambda here: as_data(Noisy()),
    "photographs": lambda here: open_photos(write_parquet(here, "train", range(COUNT)), **AS),
    "stream": lambda here: open_stream(write_arrow(here, "train", range(COUNT), parts=4), **AS),
    "scenes": scenes,
}


def states():
    return repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_hangs_on_seed_epoch_and_index_alone(tmp_path, kind):
    data = KINDS[kind](tmp_path)
    before, whole = states(), all_batches(data)
    assert [len(batch.indices) for batch in whole] == [5, 5, 5, 5, 1] and len(data) == COUNT
    assert sorted(index for batch in whole for index in batch.indices) == list(range(COUNT))
    alone = {index: image for batch in whole for index, image in zip(batch.indices, batch.images)}
    for world in (2, 3):
        ranks = [all_batches(data, world=world, rank=rank) for rank in range(world)]
        for step, *parts in zip(whole, *ranks, strict=True):
            seen = [pair for part in parts if part.weight for pair in zip(part.indices, part.images)]
            assert sorted(index for index, _ in seen) == sorted(step.indices)
            assert all(torch.equal(image, alone[index]) for index, image in seen)
            mean = sum(part.weight * part.images.double().mean(0) for part in parts) / world
            torch.testing.assert_close(mean, step.images.double().mean(0), rtol=1e-6, atol=1e-6)
    for start, workers in ((2, 0), (3, 1)):
        for later, step in zip(all_batches(data, workers, start=start), whole[start:], strict=True):
            assert later.indices == step.indices and later.weight == step.weight
            assert torch.equal(later.images, step.images)
            assert kind == "scenes" or torch.equal(later.targets, step.targets)
    assert states() == before
    for other in (all_batches(data, epoch=2), all_batches(data, seed=4)):
        pairs = [pair for batch in other for pair in zip(batch.indices, batch.images)]
        assert len(pairs) == COUNT and not any(torch.equal(image, alone[index]) for index, image in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_of_an_image_go_to_different_processes_and_differ(tmp_path, kind):
    data = KINDS[kind](tmp_path)
    ranks = [all_batches(data, world=2, rank=rank, repeats=2, batch_size=6) for rank in range(2)]
    for one, other in zip(*ranks, strict=True):
        if one.weight and other.weight:
            count = min(len(one.images), len(other.images))
            assert all(not torch.equal(a, b) for a, b in zip(one.images[:count], other.images[:count]))
