"""Objects in COCO's form: read, jittered together with boxes and masks, and what cannot be used is named."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from atbook.worlds.glyphs import SHAPES
from atbook.worlds.scenes import SceneWorld, generate_scenes, scene_objects
from atfamily.detection.objects import Found, ObjectImages, Objects
from atlib.pair import IMAGENET
from atrun.data.coco import CocoObjects, Placed, place_objects
from atrun.data.decoding import CorruptImage
from tests.detection.coco_folder import export_coco

pytest.importorskip("pycocotools", reason="needs pycocotools, the extra 'detection'")

SCENES = 20
EMPTY, CROWDED = 3, 5  # the image without objects, and the one whose first object is a crowd


@pytest.fixture(scope="module")
def scenes():
    """Without noise, so that each object has one colour; some hide parts of others."""
    world = SceneWorld(noise=0.0, overlap=0.3, fewest=3)
    objects = scene_objects(generate_scenes("train", SCENES, world=world))
    objects.objects[EMPTY] = without_objects(*objects.pixels.shape[-2:])
    crowd = objects.objects[CROWDED].crowd.clone()
    crowd[0] = True
    objects.objects[CROWDED] = objects.objects[CROWDED]._replace(crowd=crowd)
    return objects


@pytest.fixture(scope="module")
def files(scenes, tmp_path_factory):
    """The folder of images and the file of annotations."""
    return export_coco(scenes, tmp_path_factory.mktemp("scenes"))


def without_objects(height, width):
    masks = torch.zeros(0, height, width, dtype=torch.bool)
    return Objects(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), masks, torch.zeros(0).bool())


def one_object(mask, label=0):
    down, across = mask.nonzero().unbind(1)
    box = torch.stack([across.min(), down.min(), across.max() + 1, down.max() + 1]).float()
    return Objects(box[None], torch.tensor([label]), mask[None], torch.tensor([False]))


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def rgb(image):
    """An image as a model gets it, in levels from 0 to 255 again."""
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (IMAGENET.mean, IMAGENET.std))
    return 255 * (image * std + mean)


def changed(files, tmp_path, change):
    """The annotations with a change, beside the same images."""
    content = json.loads(files[1].read_text())
    change(content)
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(content))
    return files[0], file


# --- written and read ---


def test_what_is_written_is_read(scenes, files):
    coco = CocoObjects(*files, size=64)
    assert len(coco) == SCENES and coco.classes == SHAPES
    images, objects = coco.take(range(SCENES))
    for number, (mine, image) in enumerate(zip(scenes.objects, images)):
        assert same(coco.original(number), mine) and same(objects[number], mine)
        assert (rgb(image) - scenes.pixels[number].float()).abs().max() < 1e-3
    assert len(objects[EMPTY].boxes) == 0 and objects[EMPTY].masks.shape == (0, 64, 64)
    assert objects[CROWDED].crowd.tolist() == [True] + [False] * (len(objects[CROWDED].boxes) - 1)


@pytest.mark.parametrize("written", ["characters", "numbers"])
def test_run_lengths_are_those_of_cocos_program(written, scenes, files, tmp_path):
    """Masks of every kind: none and all pixels, noise with many short runs, and long runs."""
    from pycocotools import mask as run_lengths

    rng = np.random.default_rng(0)
    shares = [0.0, 1.0, *rng.random(20)]
    masks = [rng.random((64, 64)) < share for share in shares] + [np.tri(64, dtype=bool)]
    segmentations = []
    for mask in masks:
        packed = run_lengths.encode(np.asfortranarray(mask.astype(np.uint8)))
        counts = packed["counts"].decode()
        if written == "numbers":
            flat = mask.T.reshape(-1)
            edges = np.flatnonzero(np.diff(np.concatenate([[False], flat]))).tolist()
            counts = np.diff([0, *edges, flat.size]).tolist()
        segmentations.append({"size": [64, 64], "counts": counts})

    def change(content):
        form = content["annotations"][0]
        of_first = enumerate(segmentations)
        content["annotations"] = [form | {"id": i, "image_id": 0, "segmentation": x} for i, x in of_first]

    read = CocoObjects(*changed(files, tmp_path, change), size=64).original(0).masks
    assert (read.numpy() == np.stack(masks)).all()


def test_polygons_are_drawn(files, tmp_path):
    """Two rectangles of one object."""

    def change(content):
        first = content["annotations"][0]
        first["segmentation"] = [[2, 3, 10, 3, 10, 8, 2, 8], [20, 30, 40, 30, 40, 50, 20, 50]]

    mask = CocoObjects(*changed(files, tmp_path, change), size=64).original(0).masks[0]
    expected = torch.zeros(64, 64, dtype=torch.bool)
    expected[3:8, 2:10] = expected[30:50, 20:40] = True
    assert torch.equal(mask, expected)


def test_categories_are_classes_in_the_order_of_their_ids(files, tmp_path):
    def change(content):
        content["categories"] = [{"id": 100 - c["id"], "name": c["name"]} for c in content["categories"]]
        for annotation in content["annotations"]:
            annotation["category_id"] = 100 - annotation["category_id"]

    read = CocoObjects(*changed(files, tmp_path, change), size=64)
    plain = CocoObjects(*files, size=64)
    assert read.classes == SHAPES[::-1]
    assert torch.equal(read.original(0).labels, 7 - plain.original(0).labels)


# --- placed ---


def test_jitter_moves_pixels_boxes_and_masks_together(scenes, files):
    """Against each pixel's place in the scene; and an object's inner pixels have its colour still."""
    size = 96
    jittered = CocoObjects(*files, size=size, jitter=(0.3, 2.0))
    kinds, checked = set(), 0
    for number in range(SCENES):
        for seed in (2 * number + 1, 1000 + number):
            place = jittered.placed(number, seed)
            image, objects = jittered.one(number, seed)
            assert 0.3 * size / 64 <= place.scale <= 2 * size / 64
            kinds |= {(place.flipped, place.scale * 64 > size)}
            scale = round(place.scale * 64) / 64  # a picture has whole pixels
            column, row = ((np.arange(size) + 0.5 + first) / scale for first in (place.left, place.top))
            # a middle on the line between two pixels of the scene is of either
            surely = np.ix_(*(np.abs(places - places.round()) > 1e-3 for places in (row, column)))
            column, row = column.astype(int), row.astype(int)
            inside = (row < 64)[:, None] & (column < 64)[None]
            row, column = row.clip(max=63), column.clip(max=63)
            if place.flipped:
                column = 63 - column
            assert (image[:, torch.from_numpy(~inside)] == 0).all()
            for i, mask in enumerate(scenes.objects[number].masks.numpy()):
                expected = mask[np.ix_(row, column)] & inside
                if expected.sum() < 40:  # what is about to leave may be there or not
                    continue
                overlaps = [(mask.numpy() & expected).sum() for mask in objects.masks]
                best = int(np.argmax(overlaps))
                checked += 1
                assert objects.labels[best] == scenes.objects[number].labels[i]
                assert (objects.masks[best].numpy()[surely] == expected[surely]).all()
                down, across = np.nonzero(objects.masks[best].numpy())
                around = [across.min(), down.min(), across.max() + 1, down.max() + 1]
                assert np.abs(objects.boxes[best].numpy() - around).max() <= 1
                # two pixels and more from all that is not the object, and from the square's edge
                padded = nn.functional.pad(torch.from_numpy(expected)[None].float(), (2,) * 4)
                inner = -nn.functional.max_pool2d(-padded, 5, 1)[0] == 1
                colour = scenes.pixels[number][:, torch.from_numpy(mask)][:, 0].float()
                if inner.any() and place.scale >= 1:
                    assert (rgb(image)[:, inner] - colour[:, None]).abs().max() < 8
    assert len(kinds) == 4, "flipped or not, cut or not"
    assert checked > 60


def test_an_object_that_is_cut_keeps_what_is_seen_of_it():
    """An L: down the left edge, and along the lower one."""
    mask = torch.zeros(40, 40, dtype=torch.bool)
    mask[10:30, 10:14] = mask[26:30, 10:30] = True
    whole, other = one_object(mask, 3), one_object(mask.flip(0), 4)
    both = Objects(*(torch.cat(parts) for parts in zip(whole, other)))

    def seen(left, top, size, masks=True):
        objects = both if masks else both._replace(masks=None)
        return place_objects(objects, Placed(1.0, left, top, False), 40, 40, size)

    assert seen(0, 0, 40).boxes.tolist() == both.boxes.tolist()
    # the square shows columns 20 to 39 and rows 20 to 39: the L's foot, and nothing of the other
    right = seen(20, 20, 20)
    assert right.labels.tolist() == [3] and right.boxes.tolist() == [[0, 6, 10, 10]]
    assert torch.equal(right.masks[0], mask[20:, 20:])
    # without masks the boxes are cut, and nobody knows
    assert seen(20, 20, 20, masks=False).boxes.tolist() == [[0, 0, 10, 10]] * 2
    nothing = seen(31, 31, 8)
    assert len(nothing.boxes) == len(nothing.labels) == len(nothing.masks) == len(nothing.crowd) == 0


def test_what_is_found_is_carried_back_to_the_image(tmp_path):
    """Of images that are wider than high."""
    height, width = 40, 60
    pixels = torch.zeros(2, 3, height, width, dtype=torch.uint8)
    objects = []
    for number in range(2):
        mask = torch.zeros(height, width, dtype=torch.bool)
        mask[8:24, 20 + number : 50] = True
        pixels[number][:, mask] = 200
        objects.append(one_object(mask, number))
    wide = CocoObjects(*export_coco(ObjectImages(pixels, objects), tmp_path), size=30)
    assert [len(batch) for batch, _ in wide.loader(1)] == [1, 1]
    _, objects = wide.take([0])
    (true,) = objects
    carried = wide.back(0, Found(true.boxes, true.labels, torch.ones(1), true.masks))
    assert carried.boxes.tolist() == [[20, 8, 50, 24]] and carried.masks.shape == (1, height, width)
    assert (carried.masks != wide.original(0).masks).sum() <= 2 * (30 + 16), "but for a pixel around it"
    none = Found(torch.zeros(0, 4), true.labels[:0], torch.zeros(0), true.masks[:0])
    assert wide.back(0, none).masks.shape == (0, height, width)
    beyond = wide.back(0, Found(torch.tensor([[0.0, 0, 30, 30]]), true.labels, torch.ones(1)))
    assert beyond.boxes.tolist() == [[0, 0, 60, 40]] and beyond.masks is None


# --- what cannot be used ---


def annotation(**values):
    """Give the third annotation, with id 3, other values."""

    def change(content):
        content["annotations"][2] |= values

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(annotation(bbox=box) for box in ([60, 10, 20, 10], [10, 10, 0, 10], [10, 10, float("nan"), 10])),
        *(annotation(**{key: 99}) for key in ("category_id", "image_id")),
        *(annotation(segmentation=x) for x in ([[1, 1, 5, 5]], {"size": [32, 64], "counts": [2048]})),
        lambda content: content["annotations"][2].pop("segmentation"),
        lambda content: content["images"].append(content["images"][1]),
        lambda content: content["annotations"].append(content["annotations"][1]),
    ],
)
def test_annotations_that_cannot_be_used_are_named(files, tmp_path, change):
    images, file = changed(files, tmp_path, change)
    with pytest.raises(ValueError):
        CocoObjects(images, file, size=64)


def test_an_edge_that_is_rounded_is_not_outside(files, tmp_path):
    images, file = changed(files, tmp_path, annotation(bbox=[50.4, 40, 14.2, 24.5]))
    box = CocoObjects(images, file, size=64).original(0).boxes[2].tolist()
    assert box == pytest.approx([50.4, 40, 64, 64])


@pytest.mark.parametrize("counts", [[4000], [2000, 2097, -1], "", "zzzz"], ids=str)
def test_run_lengths_that_do_not_fill_the_image_are_named(files, tmp_path, counts):
    """pycocotools makes pixels of them from what lies in memory."""
    change = annotation(segmentation={"size": [64, 64], "counts": counts})
    read = CocoObjects(*changed(files, tmp_path, change), size=64)
    with pytest.raises(ValueError):
        read.original(0)


def test_an_image_that_is_not_there_broken_or_of_another_size_is_named(files, scenes, tmp_path):
    images, file = export_coco(ObjectImages(scenes.pixels[:4], scenes.objects[:4], SHAPES), tmp_path)
    name = f"{2:012d}.png"
    whole = (images / name).read_bytes()
    (images / name).write_bytes(whole[: len(whole) // 2])
    read = CocoObjects(images, file, size=64)
    with pytest.raises(CorruptImage):
        read.take([2])
    Image.new("RGB", (32, 64)).save(images / name)
    with pytest.raises(ValueError):
        read.take([2])
    assert len(read.take([0, 1, 3])[0]) == 3
    (images / name).unlink()
    with pytest.raises(FileNotFoundError):
        CocoObjects(images, file, size=64)


TRANSPOSED = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}


@pytest.mark.parametrize("orientation", [1, *TRANSPOSED])
@pytest.mark.parametrize("of", ["shown", "stored"])
@pytest.mark.parametrize("size", [(60, 40), (48, 48)])
def test_boxes_and_pixels_are_turned_together_or_the_image_is_refused(tmp_path, orientation, of, size):
    """label-studio#6608, ultralytics#19222: viewers turn photographs by their EXIF, COCO's does not."""
    shown = np.zeros((size[1], size[0], 3), np.uint8)
    shown[5:15, 5:20] = 255
    shown = Image.fromarray(shown)
    stored = shown if orientation == 1 else shown.transpose(TRANSPOSED[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.jpg", exif=exif, quality=95)
    seen = np.asarray(shown if of == "shown" else stored)[..., 0] > 128
    (top, bottom), (left, right) = (np.flatnonzero(seen.any(axis))[[0, -1]].tolist() for axis in (1, 0))
    entry = {"id": 0, "file_name": "a.jpg", "width": seen.shape[1], "height": seen.shape[0]}
    box = {"id": 0, "image_id": 0, "category_id": 3, "bbox": [left, top, right - left + 1, bottom - top + 1]}
    content = {"images": [entry], "annotations": [box], "categories": [{"id": 3, "name": "square"}]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    images = CocoObjects(tmp_path, tmp_path / "a.json", size=60, masks=False)
    if orientation != 1 and (orientation < 5 or size[0] == size[1]):  # which view is meant cannot be known
        with pytest.raises(ValueError):
            images.take([0])
        return
    pixels, objects = images.take([0])
    x0, y0, x1, y1 = objects[0].boxes[0].round().int().tolist()
    inside = pixels[0, 0, y0 + 2 : y1 - 2, x0 + 2 : x1 - 2]
    assert inside.numel() > 20 and inside.min() > 1 and (pixels[0, 0] > 1).sum() < 1.7 * inside.numel() + 150
