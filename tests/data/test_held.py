"""Photographs that are decoded once and held give the bits of those that are read in every pass."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from atlib.data import Images
from atrun import __main__ as command
from atrun.checkpoint_manager import identity_of
from atrun.data.photos import hold, open_photos
from atrun.data.transforms import Augmentation
from tests.picture_files import all_batches, cut_jpeg, encoded, write_parquet
from tests.run.photographs import asked

CPU, COUNT = torch.device("cpu"), 21
PADDED = Augmentation(12, crop="padded", padding=3)
MORE = 10**9
AUGMENTATIONS = {
    "as stored": None, "padded": PADDED, "nowhere else to lie": replace(PADDED, padding=0),
    "larger": replace(PADDED, image_size=20, padding=4, flip=0.3, mean=(0.5,) * 3, std=(0.25,) * 3),
    "the middle": Augmentation(10, crop="centre"),
}  # fmt: skip


def noise(sizes=((16, 12),), damaged=None):
    """Files of pictures in which every pixel says where it was."""
    drawn = np.random.default_rng(0)
    shapes = [(*sizes[index % len(sizes)][::-1], 3) for index in range(COUNT)]
    files = [encoded(Image.fromarray(drawn.integers(0, 256, shape, dtype=np.uint8))) for shape in shapes]
    if damaged is not None:
        files[damaged] = cut_jpeg(damaged)
    return [{"bytes": file, "path": f"{index}.png"} for index, file in enumerate(files)]


def photographs(folder, augmentation, **options):
    path = write_parquet(folder, "train", range(COUNT), files=noise(**options))
    return open_photos(path, split="train+validation", augmentation=augmentation)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_same_bits(tmp_path, name):
    photos = photographs(tmp_path, AUGMENTATIONS[name])
    images = hold(photos, CPU, MORE)
    assert type(images) is Images and images.classes == photos.classes
    assert images.normalisation == photos.normalisation
    for options in ({}, {"epoch": 2}, {"world": 2, "rank": 1}, {"start": 2}, {"repeats": 3}):
        for one, other in zip(all_batches(images, **options), all_batches(photos, **options), strict=True):
            assert one.indices == other.indices and one.weight == other.weight
            assert torch.equal(one.images, other.images) and torch.equal(one.targets, other.targets)


def test_what_is_read_in_every_pass_as_before(tmp_path):
    """What takes more room, needs Pillow, is of several sizes, or cannot be decoded."""
    fits = photographs(tmp_path / "fits", PADDED)
    assert hold(fits, CPU, COUNT * 3 * 12 * 16) and hold(fits, CPU, COUNT * 3 * 12 * 16 - 1) is None
    for changed in (
        {"crop": "random-resized"},
        {"rand_augment": "rand-m9"},
        {"three_augment": True},
        {"color_jitter": 0.4},
        {"random_erasing": 0.25},
        {"padding": 12},
    ):
        assert hold(photographs(tmp_path / str(*changed), replace(PADDED, **changed)), CPU, MORE) is None
    sizes = [(16, 12), (12, 16)]
    assert hold(photographs(tmp_path / "two sizes", PADDED, sizes=sizes), CPU, MORE) is None
    assert hold(photographs(tmp_path / "squares", replace(PADDED, crop="centre"), sizes=sizes), CPU, MORE)
    assert hold(photographs(tmp_path / "damaged", PADDED, damaged=20), CPU, MORE) is None


def test_held_or_not_it_is_the_same_data_to_go_on_with(tmp_path):
    photos = photographs(tmp_path, PADDED)
    assert identity_of(hold(photos, CPU, MORE)) == identity_of(photos)


def test_a_run(tmp_path, capsys):
    """Ends with the same bits, and says at its start where its images are."""
    data = write_parquet(tmp_path / "data", "train", range(COUNT), files=noise())
    write_parquet(tmp_path / "data", "validation", range(6))
    plain = ["augmentation.crop=padded", "augmentation.rand_augment=null", "augmentation.random_erasing=0"]
    weights, said = [], []
    for most in ("0", "1"):
        out = tmp_path / most
        assert command.main(asked(data, out, *plain, f"on_device={most}")) == 0
        weights.append((out / "student.safetensors").read_bytes())
        said.append("held on cpu" in capsys.readouterr().err)
    assert weights[0] == weights[1] and said == [False, True]
