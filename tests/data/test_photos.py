"""Photographs by index: files in every form, order and coverage, augmentation, corrupt files, labels."""

import io
import json
from traceback import clear_frames

import datasets
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as vision

from atlib.evaluate import evaluate
from atlib.recipe import Recipe
from atlib.train import train
from atrun.data.decoding import CorruptImage
from atrun.data.photos import open_photos
from atrun.data.stream import open_stream
from tests.helpers import same
from tests.picture_files import (
    CLASSES,
    PLAIN,
    SMALL,
    all_batches,
    annotate,
    encoded,
    index_of,
    picture,
    pictures_in,
    rows,
    write_arrow,
    write_folders,
    write_parquet,
)


@pytest.fixture
def pictures(tmp_path):
    """A function that writes 23 pictures, some of them corrupt, and opens them."""

    def opened(corrupt=(), count=23, **options):
        here = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        folder = write_parquet(here, "train", range(count), corrupt=corrupt)
        return open_photos(folder, split="train+validation", **options)

    return opened


def test_images_and_targets_are_those_of_the_files(pictures):
    photos = pictures()
    images, targets = photos.take([7, 0, 7])
    expected = torch.stack([(vision.pil_to_tensor(picture(i)).float() / 255 - 0.5) / 0.25 for i in (7, 0, 7)])
    assert torch.equal(images, expected) and targets.tolist() == [1, 0, 1]
    assert photos.classes == tuple(CLASSES) and photos.targets.tolist() == [i % 3 for i in range(23)]
    assert len(photos.take([])[0]) == 0


def saved_arrow(here, order):
    rows(order).save_to_disk(here / "saved")
    return next((here / "saved").glob("*.arrow"))


def bare_bytes(here, order):
    """A parquet file that no `datasets` wrote: bytes, and numbers for labels."""
    columns = {"image": [encoded(picture(i)) for i in order], "label": [i % 3 for i in order]}
    datasets.Dataset.from_dict(columns).to_parquet(here / "test.parquet")
    return here


def saved_dict(here, order):
    datasets.DatasetDict({"train": rows(range(20, 25)), "test": rows(order)}).save_to_disk(here)
    return here


FORMS = {  # how ten pictures are written, and the split that they are
    "parquet": (lambda here, order: write_parquet(here / "data", "test", order).parent, "test"),
    "arrow": (lambda here, order: saved_arrow(here, order).rename(here / "test.arrow").parent, "test"),
    "arrow file": (saved_arrow, "train+validation"),
    "saved": (lambda here, order: saved_arrow(here, order).parent, "train+validation"),
    "saved dict": (saved_dict, "test"),
    "folders": (lambda here, order: write_folders(here, "test", order), "test"),
    "bytes": (bare_bytes, "test"),
    "annotated": (lambda here, order: annotate(here, "val2018.json", order) or here, "validation"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images(tmp_path, form):
    write, split = FORMS[form]
    order = sorted(range(10), key=lambda index: (index % 3, index)) if form == "folders" else list(range(10))
    photos = open_photos(write(tmp_path, order), split=split)
    images, targets = photos.take(range(10))
    assert [index_of(image) for image in images] == order
    assert targets.tolist() == [i % 3 for i in order] == photos.targets.tolist()
    assert photos.classes == (("0", "1", "2") if form == "bytes" else tuple(CLASSES))


@pytest.mark.parametrize("there", [(0, 1, 2), (0, 2)])
def test_files_of_a_split_that_are_not_there_are_said(tmp_path, recwarn, there):
    for part in there:
        rows(range(5 * part, 5 * part + 5)).to_parquet(tmp_path / f"test-{part:05d}-of-00003.parquet")
    assert len(open_photos(tmp_path, split="test")) == 5 * len(there)
    said = [str(one.message) for one in recwarn if "of 3 files" in str(one.message)]
    assert len(said) == (len(there) < 3)


def test_an_image_that_annotations_give_two_classes_has_none_of_them(tmp_path):
    annotate(tmp_path, "val2018.json", range(4))
    found = json.loads((tmp_path / "val2018.json").read_text())
    again = [one | {"id": 10 + one["id"]} for one in found["annotations"]]
    (tmp_path / "val2018.json").write_text(json.dumps(found | {"annotations": found["annotations"] + again}))
    photos = open_photos(tmp_path, split="validation")
    assert photos.targets.tolist() == [0, 1, 2, 0]
    again[2]["category_id"] = 20  # the last of one image, of another class
    (tmp_path / "val2018.json").write_text(json.dumps(found | {"annotations": found["annotations"] + again}))
    with pytest.raises(OSError):
        open_photos(tmp_path, split="validation")


def test_evaluation_sees_the_middle_in_order_and_never_augmentation(pictures):
    photos = pictures(augmentation=SMALL, workers=1)
    expected = torch.stack([SMALL.evaluate(picture(index)) for index in range(23)])
    assert torch.equal(photos.take(range(23))[0], expected)
    loaded = list(photos.loader(10))
    assert [len(images) for images, _ in loaded] == [10, 10, 3]
    assert torch.equal(torch.cat([images for images, _ in loaded]), expected)
    assert torch.equal(torch.cat([targets for _, targets in loaded]), photos.targets)


class ByColour(torch.nn.Module):
    """Knows the right label of a picture from its colour, but takes all owls for cats."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, images):
        labels = torch.tensor([index_of(image) % 3 for image in images])
        return torch.nn.functional.one_hot(labels.masked_fill(labels == 2, 0), 3).float() + self.weight


def streamed(here, corrupt, **options):
    folder = write_arrow(here, "train", range(23), parts=4, corrupt=corrupt)
    return open_stream(folder, split="train+validation", augmentation=PLAIN, **options)


def by_index(here, corrupt, **options):
    folder = write_parquet(here, "train", range(23), corrupt=corrupt)
    return open_photos(folder, split="train+validation", augmentation=PLAIN, **options)


@pytest.mark.parametrize("open_them, workers", [(streamed, 0), (by_index, 2)])
def test_a_corrupt_image_is_named_or_skipped_and_counted(tmp_path, open_them, workers):
    photos = open_them(tmp_path / "skip", (4, 11, 12), on_corrupt="skip")
    batches = all_batches(photos, workers)
    assert sorted(pictures_in(batches)) == [i for i in range(23) if i not in (4, 11, 12)]
    names = {why.split()[-1] for why in photos.corrupt.values()}
    assert names == {"picture4.png", "picture11.png", "picture12.png"}
    whole = all_batches(open_them(tmp_path / "whole", ()))
    for batch, healthy in zip(batches, whole, strict=True):
        kept = [place for place, index in enumerate(healthy.indices) if index not in photos.corrupt]
        assert batch.indices == [healthy.indices[place] for place in kept]
        assert torch.equal(batch.images, healthy.images[kept])
        assert torch.equal(batch.targets, healthy.targets[kept])
        assert batch.weight == len(kept) / len(healthy.indices)
    all_batches(photos, workers, start=5)
    assert photos.corrupt == {}, "of the epoch before"
    with pytest.raises(CorruptImage) as caught:
        all_batches(open_them(tmp_path / "raise", (4,)), workers)
    clear_frames(caught.tb)  # which hold the workers, and torch waits 5 seconds for those that it collects


def test_training_counts_the_gaps_and_does_not_hang_on_workers(pictures, small_vit):
    recipe = Recipe(steps=10, batch_size=5, clip=1.0)

    def trained(photos, workers):
        vit = small_vit(img_size=8, patch_size=4, num_classes=3, drop_path_rate=0.1)
        return vit.state_dict(), train(vit, photos, recipe, seed=2, progress=None, cpu=True, workers=workers)

    def photos(*corrupt):
        return pictures(corrupt=corrupt, augmentation=SMALL, on_corrupt="skip")

    weights, history = trained(photos(4, 11), 0)
    assert [passed["corrupt_indices"] for passed in history] == [[4, 11], [4, 11]]
    assert same(trained(photos(4, 11), 1)[0], weights) and not same(trained(photos(), 0)[0], weights)


def test_a_share_without_any_readable_image_counts_nothing(pictures):
    photos = pictures(corrupt=(1, 2), count=4, on_corrupt="skip", augmentation=SMALL)
    batches = all_batches(photos, batch_size=1)
    assert sorted(index for batch in batches for index in batch.indices) == [0, 3]
    assert sorted(batch.weight for batch in batches) == [0, 0, 1, 1]
    assert len({batch.images.shape for batch in batches}) == 1
    assert all(len(batch.targets) == 1 for batch in batches)


def test_an_evaluation_decodes_once_and_leaves_out_what_it_cannot(pictures, monkeypatch):
    photos = pictures(corrupt=(4, 11), augmentation=PLAIN, on_corrupt="skip")
    seen, plain = [], datasets.Image.decode_example
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *all: seen.append(1) or plain(*all))
    found = evaluate(ByColour(), photos, batch_size=1)  # batches of which nothing is left, too
    assert len(seen) == 23 and sorted(photos.corrupt) == [4, 11] and found.count == 21
    assert found.accuracy == pytest.approx(15 / 21)
    left = photos.select([i for i in range(23) if i not in photos.corrupt])
    assert torch.equal(torch.cat([labels for _, labels in photos.loader(5)]), left.targets)
    assert len(photos.take([4, 5])[0]) == 1
    with pytest.raises(CorruptImage):
        list(pictures(corrupt=(4,), augmentation=PLAIN).loader(10))
    with pytest.raises(CorruptImage):
        list(pictures(range(3), 3, augmentation=PLAIN, on_corrupt="skip").loader(10))


def test_a_missing_file_of_an_image_folder_is_named(tmp_path):
    folder = write_folders(tmp_path / "set", "test", range(6))
    photos = open_photos(folder, split="test", on_corrupt="skip")
    (folder / "test" / "cat" / "003.png").unlink()
    all_batches(photos)
    assert [*photos.corrupt] == [1] and "003.png" in photos.corrupt[1]


def test_grey_transparent_and_turned_pictures(tmp_path):
    turned, exif, buffer = Image.new("RGB", (6, 4)), Image.Exif(), io.BytesIO()
    turned.putpixel((0, 0), (255, 0, 0))
    exif[0x0112] = 6  # the camera was held upright: turn clockwise
    turned.save(buffer, "PNG", exif=exif)
    plain = Image.new("L", (4, 6), 9), Image.new("RGBA", (4, 6), (1, 2, 3, 4))
    files = [*map(encoded, plain), buffer.getvalue()]
    datasets.Dataset.from_dict({"image": files, "label": [0, 0, 0]}).to_parquet(tmp_path / "test.parquet")
    images, _ = open_photos(tmp_path, split="test").take([0, 1, 2])
    pixels = ((images * 0.25 + 0.5) * 255).round()
    assert pixels[0].unique().tolist() == [9] and pixels[1, :, 0, 0].tolist() == [1, 2, 3]
    assert (pixels[2, 0] == 255).nonzero().tolist() == [[0, 3]]
