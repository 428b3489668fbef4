"""Photographs by index: files in every form, order and coverage, augmentation that hangs on nothing else,
corrupt files, labels."""

from traceback import clear_frames

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as vision

from atlib.evaluate import evaluate
from atlib.loading import ShardSpec
from atlib.recipe import Recipe
from atlib.train import train
from atrun.data.decoding import DataError, as_stored
from atrun.data.loading import CorruptImage
from atrun.data.photos import open_photos
from atrun.data.transforms import Augmentation
from tests.helpers import same, shared
from tests.picture_files import (
    CLASSES,
    PLAIN,
    SMALL,
    all_batches,
    annotate,
    check_every_image_once,
    encoded,
    index_of,
    picture,
    rows,
    write_folders,
    write_parquet,
)


@pytest.fixture
def pictures(tmp_path):
    """A function that writes 23 pictures, some of them corrupt, and opens them."""

    def opened(corrupt=(), count=23, train=False, **options):
        folder = write_parquet(
            tmp_path / f"set{len(list(tmp_path.iterdir()))}", "train", range(count), corrupt=corrupt
        )
        return open_photos(folder, split="train+validation", train=train, **options)

    return opened


def test_images_and_targets_are_those_of_the_files(pictures):
    photos = pictures()
    images, targets = photos.take([7, 0, 7])
    expected = torch.stack([(vision.pil_to_tensor(picture(i)).float() / 255 - 0.5) / 0.25 for i in (7, 0, 7)])
    assert torch.equal(images, expected) and targets.tolist() == [1, 0, 1]
    assert (
        len(photos) == 23
        and photos.classes == tuple(CLASSES)
        and photos.targets.tolist() == [i % 3 for i in range(23)]
    )
    assert torch.equal(photos[4][0], photos.take([4])[0][0]) and photos[4][1] == 1
    assert len(photos.take([])[0]) == 0


@pytest.mark.parametrize(
    "form", ["parquet", "arrow", "arrow file", "saved", "saved dict", "folders", "bytes", "annotated"]
)
def test_every_form_gives_the_same_images(tmp_path, form):
    here = tmp_path / "set"
    here.mkdir()
    if form == "parquet":
        write_parquet(here / "data", "test", range(10), parts=2)
        order = [*range(0, 10, 2), *range(1, 10, 2)]
    else:
        order = list(range(10))
    if form == "arrow":
        rows(order).save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(here / "test.arrow")
    if form == "arrow file":
        rows(order).save_to_disk(tmp_path / "saved")
        here = next((tmp_path / "saved").glob("*.arrow")).rename(tmp_path / "some.arrow")
    if form == "saved":
        rows(order).save_to_disk(here)
    if form == "saved dict":
        datasets.DatasetDict({"train": rows(range(20, 25)), "test": rows(order)}).save_to_disk(here)
    if form == "folders":
        write_folders(here, "test", order)
        order = sorted(order, key=lambda index: (index % 3, index))
    if form == "bytes":  # a parquet file that no `datasets` wrote: bare bytes, numbers for labels
        columns = {"image": [encoded(picture(i)) for i in order], "label": [i % 3 for i in order]}
        datasets.Dataset.from_dict(columns).to_parquet(here / "test.parquet")
    if form == "annotated":
        annotate(here, "val2018.json", order)
    split = {"arrow file": "train+validation", "saved": "train+validation", "annotated": "validation"}.get(
        form, "test"
    )
    photos = open_photos(here, split=split, train=False)
    images, targets = photos.take(range(10))
    assert [index_of(image) for image in images] == order
    assert targets.tolist() == [i % 3 for i in order] == photos.targets.tolist()
    assert photos.classes == (("0", "1", "2") if form == "bytes" else tuple(CLASSES))


@pytest.mark.parametrize("count", [20, 23, 4])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_image_once_over_all_processes(pictures, world, count):
    photos = pictures(count=count)
    check_every_image_once(photos, world, count)
    for batch in all_batches(photos, world=world, rank=world - 1):
        assert [index_of(image) for image in batch.images] == batch.indices


def test_an_epoch_hangs_on_seed_epoch_and_index_alone(pictures):
    """Not on workers, processes, where it is taken up again, or what was drawn elsewhere; and no generator of
    others moves."""
    photos = pictures(augmentation=SMALL, train=True)
    whole = all_batches(photos)
    one = {index: image for batch in whole for index, image in zip(batch.indices, batch.images)}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for batches in (all_batches(photos), all_batches(photos, workers=2)):
        assert [batch.indices for batch in batches] == [batch.indices for batch in whole]
        assert all(
            torch.equal(a.images, b.images) and torch.equal(a.targets, b.targets)
            for a, b in zip(batches, whole, strict=True)
        )
    later = all_batches(photos, start=2, workers=1)
    assert all(
        torch.equal(a.images, b.images) and a.indices == b.indices
        for a, b in zip(later, whole[2:], strict=True)
    )
    for batch in all_batches(photos, world=2, rank=1):
        assert all(torch.equal(image, one[index]) for index, image in zip(batch.indices, batch.images))
    assert torch.equal(torch.get_rng_state(), before)
    for other in (all_batches(photos, epoch=2), all_batches(photos, seed=4)):
        assert [batch.indices for batch in other] != [batch.indices for batch in whole]
        assert not any(
            torch.equal(image, one[index])
            for batch in other
            for index, image in zip(batch.indices, batch.images)
        )


def test_repeats_of_an_image_are_augmented_differently(pictures):
    photos = pictures(augmentation=SMALL, train=True)
    batches = all_batches(photos, batch_size=6, repeats=3, world=3) + all_batches(
        photos, batch_size=6, repeats=3, world=3, rank=1
    )
    seen = [(index, image) for batch in batches for index, image in zip(batch.indices, batch.images)]
    twice = [[image for other, image in seen if other == index] for index in {index for index, _ in seen}]
    assert max(map(len, twice)) == 2 and not any(torch.equal(*images) for images in twice if len(images) == 2)


def test_evaluation_sees_the_middle_in_order_and_never_augmentation(pictures):
    photos = pictures(augmentation=SMALL, train=True, workers=1)
    assert all(
        torch.equal(image, SMALL.evaluate(picture(index)))
        for index, image in enumerate(photos.take(range(23))[0])
    )
    for several in (photos, pictures(augmentation=SMALL)):
        loaded = list(several.loader(10))
        assert [len(images) for images, _ in loaded] == [10, 10, 3]
        assert torch.equal(torch.cat([images for images, _ in loaded]), photos.take(range(23))[0])
        assert torch.equal(torch.cat([targets for _, targets in loaded]), photos.targets)
    plain = pictures(augmentation=SMALL)  # train=False: an epoch shuffles, and changes nothing
    for batch in all_batches(plain):
        assert torch.equal(batch.images, photos.take(batch.indices)[0])


class ByColour(torch.nn.Module):
    """Knows the right label of a picture from its colour, but takes all owls for cats."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, images):
        labels = torch.tensor([index_of(image) % 3 for image in images])
        return torch.nn.functional.one_hot(labels.masked_fill(labels == 2, 0), 3).float() + self.weight


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_image_is_named_or_skipped_and_counted(pictures, workers):
    photos = pictures(corrupt=(4, 11, 12), augmentation=SMALL, train=True, on_corrupt="skip")
    healthy = pictures(augmentation=SMALL, train=True)
    batches = all_batches(photos, workers)
    assert sorted(photos.corrupt) == [4, 11, 12] and all("picture" in why for why in photos.corrupt.values())
    for batch, whole in zip(batches, all_batches(healthy), strict=True):
        kept = [place for place, index in enumerate(whole.indices) if index not in (4, 11, 12)]
        assert batch.indices == [whole.indices[place] for place in kept]
        assert torch.equal(batch.images, whole.images[kept]) and torch.equal(
            batch.targets, whole.targets[kept]
        )
        assert batch.weight == len(kept) / len(whole.indices)
    fatal = pictures(corrupt=(4,), on_corrupt="raise", augmentation=SMALL)
    with pytest.raises(CorruptImage) as caught:
        all_batches(fatal, workers)
    clear_frames(caught.tb)  # which hold the workers, and torch waits 5 seconds for those that it collects
    assert list(fatal.corrupt) == [4]


def test_training_counts_the_gaps_and_does_not_hang_on_workers(pictures, small_vit):
    recipe = Recipe(steps=10, batch_size=5, clip=1.0)

    def trained(photos, workers):
        vit = small_vit(img_size=8, patch_size=4, num_classes=3, drop_path_rate=0.1)
        return vit.state_dict(), train(vit, photos, recipe, seed=2, progress=None, cpu=True, workers=workers)

    def photos(*corrupt):
        return pictures(corrupt=corrupt, augmentation=SMALL, train=True, on_corrupt="skip")

    weights, history = trained(photos(4, 11), 0)
    assert [passed["corrupt"] for passed in history] == [2, 2] and [
        passed["corrupt_indices"] for passed in history
    ] == [[4, 11], [4, 11]]
    assert not any("corrupt_indices" in passed for passed in trained(photos(), 0)[1])
    assert same(trained(photos(4, 11), 1)[0], weights) and not same(trained(photos(), 0)[0], weights)


def test_corrupt_are_those_of_the_pass(pictures):
    """With repeats a pass has a part of the images, and not always the corrupt one."""
    photos = pictures(corrupt=(5,), count=8, augmentation=SMALL, train=True, on_corrupt="skip")
    passes = []
    for epoch in range(4):
        wanted = {
            index
            for batch in pictures(count=8, augmentation=SMALL, train=True).epoch(
                ShardSpec(seed=3, epoch=epoch, batch_size=2, repeats=4)
            )
            for index in batch.indices
        }
        list(photos.epoch(ShardSpec(seed=3, epoch=epoch, batch_size=2, repeats=4)))
        passes.append((5 in wanted, list(photos.corrupt)))
    assert {was for was, _ in passes} == {True, False}
    assert all(found == ([5] if was else []) for was, found in passes)


def test_a_share_without_any_readable_image_counts_nothing(pictures):
    for options in ({"augmentation": SMALL, "train": True}, {}):
        photos = pictures(corrupt=(1, 2), count=4, on_corrupt="skip", **options)
        batches = all_batches(photos, batch_size=1)
        assert sorted(index for batch in batches for index in batch.indices) == [0, 3]
        assert sorted(batch.weight for batch in batches) == [0, 0, 1, 1]
        assert len({batch.images.shape for batch in batches}) == 1 and all(
            len(batch.targets) == 1 for batch in batches
        )


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_on_fewer_images_must_be_asked_for(pictures, workers):
    photos = pictures(corrupt=(4, 11), augmentation=PLAIN, on_corrupt="skip", workers=workers)
    with pytest.raises(CorruptImage) as caught:
        list(photos.loader(10))
    clear_frames(caught.tb)
    with pytest.raises(CorruptImage):
        photos[11]
    left = photos.readable()
    assert sorted(photos.corrupt) == [4, 11] and len(left) == 21
    assert torch.cat([targets for _, targets in left.loader(5)]).tolist() == [
        i % 3 for i in range(23) if i not in (4, 11)
    ]
    assert evaluate(ByColour(), left).accuracy == pytest.approx(15 / 21)
    assert left.readable() is left and (left.left_out, photos.left_out) == (2, 0)


def test_a_missing_file_of_an_image_folder_is_named(tmp_path):
    photos = open_photos(
        write_folders(tmp_path / "set", "test", range(6), corrupt=(5,)),
        split="test",
        train=False,
        on_corrupt="skip",
    )
    (tmp_path / "set" / "test" / "cat" / "003.png").unlink()
    all_batches(photos)
    assert {index: why.split(":")[0] for index, why in photos.corrupt.items()} == {
        1: "FileNotFoundError",
        5: "OSError",
    }
    assert "003.png" in photos.corrupt[1] and "005.png" in photos.corrupt[5]


def test_broken_network_is_no_corrupt_image(pictures, monkeypatch):
    def unreachable(self, value, token_per_repo_id=None):
        raise ConnectionError("no route to host")

    photos = pictures(on_corrupt="skip")
    monkeypatch.setattr(datasets.Image, "decode_example", unreachable)
    with pytest.raises(ConnectionError):
        all_batches(photos)


def test_images_of_several_sizes_need_an_augmentation(tmp_path):
    table = datasets.Dataset.from_dict(
        {"image": [picture(0), picture(1, (9, 9))], "label": [0, 1]},
        datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    table.to_parquet(tmp_path / "test.parquet")
    with pytest.raises(ValueError):
        open_photos(tmp_path, split="test", train=False).take([0, 1])
    images, _ = open_photos(tmp_path, split="test", augmentation=PLAIN, train=False).take([0, 1])
    assert [index_of(image) for image in images] == [0, 1]


def test_grey_transparent_and_turned_pictures(tmp_path):
    turned = Image.new("RGB", (6, 4), (0, 0, 0))
    turned.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn clockwise
    import io

    buffer = io.BytesIO()
    turned.save(buffer, "PNG", exif=exif)
    files = [
        encoded(Image.new("L", (4, 6), 9)),
        encoded(Image.new("RGBA", (4, 6), (1, 2, 3, 4))),
        buffer.getvalue(),
    ]
    datasets.Dataset.from_dict({"image": files, "label": [0, 0, 0]}).to_parquet(tmp_path / "test.parquet")
    images, _ = open_photos(tmp_path, split="test", train=False).take([0, 1, 2])
    pixels = ((images * 0.25 + 0.5) * 255).round()
    assert pixels[0].unique().tolist() == [9] and pixels[1, :, 0, 0].tolist() == [1, 2, 3]
    assert (pixels[2, 0] == 255).nonzero().tolist() == [[0, 3]]


def test_select_keeps_the_treatment(pictures):
    photos = pictures(augmentation=SMALL, train=True, on_corrupt="skip")
    some = photos.select([5, 0, 9])
    assert torch.equal(some.take([0, 1, 2])[0], photos.take([5, 0, 9])[0]) and some.targets.tolist() == [
        2,
        0,
        0,
    ]
    assert (some.train, some.on_corrupt, some.augmentation) == (True, "skip", SMALL)


def open_with(tmp_path, labels, label=datasets.ClassLabel(names=CLASSES), **options):
    write_parquet(tmp_path / "set", "test", range(len(labels)), labels=labels, label=label)
    return open_photos(tmp_path / "set", split="test", train=False, **options)


@pytest.mark.parametrize(
    "label, labels, argument",
    [
        (None, [0, -1], "split"),
        ("string", ["a"], "label_column"),
        ("float32", [0.5], "label_column"),
        (None, [], None),
    ],
)
def test_labels_that_mean_nothing_are_named(tmp_path, label, labels, argument):
    feature = datasets.ClassLabel(names=CLASSES) if label is None else datasets.Value(label)
    with pytest.raises(ValueError) as caught:
        open_with(tmp_path, labels, feature)
    assert getattr(caught.value, "argument", None) == argument


def test_label_beyond_the_names(tmp_path):
    table = rows([0, 1]).with_format("arrow")[:]
    import pyarrow.parquet

    # `datasets` itself would not have written this
    table = table.set_column(1, "label", pyarrow.array([0, 3]))
    pyarrow.parquet.write_table(
        table.replace_schema_metadata(rows([0]).data.schema.metadata), tmp_path / "test.parquet"
    )
    with pytest.raises(DataError):
        open_photos(tmp_path, split="test", train=False)


def test_columns_are_named_or_all_are_listed(tmp_path):
    write_parquet(
        tmp_path / "set", "test", range(4), image_column="photo", label_column="kind", size=[1, 2, 3, 4]
    )
    found = open_photos(
        tmp_path / "set", split="test", train=False, image_column="photo", label_column="kind"
    )
    assert [index_of(image) for image in found.take(range(4))[0]] == [0, 1, 2, 3]
    for options, argument in (
        ({}, "image_column"),
        ({"image_column": "photo", "label_column": "sort"}, "label_column"),
        ({"image_column": "size", "label_column": "kind"}, "image_column"),
    ):
        with pytest.raises(DataError) as caught:
            open_photos(tmp_path / "set", split="test", train=False, **options)
        assert caught.value.argument == argument


def test_cifar10_is_what_the_files_hold():
    photos = open_photos(
        "cifar10",
        path=shared("data", "cifar10"),
        split="test",
        augmentation=Augmentation(image_size=32, crop_pct=1.0),
        train=False,
    )
    assert (
        len(photos) == 10_000
        and len(photos.classes) == 10
        and photos.targets.bincount().tolist() == [1000] * 10
    )
    raw = datasets.load_dataset("parquet", data_files=str(shared("data", "cifar10", "test.parquet")))["train"]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (photos.augmentation.mean, photos.augmentation.std))
    for index in (0, 17, 9999):
        pixels = torch.from_numpy(np.array(raw[index]["img"])).permute(2, 0, 1) / 255
        torch.testing.assert_close(photos[index][0], (pixels - mean) / std)
    assert torch.equal(
        as_stored(raw[3]["img"]),
        open_photos("cifar10", path=shared("data", "cifar10"), split="test", train=False)[3][0],
    )
