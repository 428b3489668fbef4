"""Precision of detectors whose answers are known; two processes: `tests/train/test_divided_weights.py`."""

import json

import pytest
import torch

from atfamily.detection.evaluate import evaluate_detector
from atfamily.detection.precision import coco_precision
from atrun.data.coco import CocoObjects
from tests.detection.coco_folder import coco_folder
from tests.detection.knows import Knows

pytest.importorskip("pycocotools")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Five scenes, seen at twice their size."""
    folder = coco_folder(tmp_path_factory.mktemp("coco"), val2017=5)
    return CocoObjects(folder / "val2017", folder / "annotations" / "instances_val2017.json", size=128)


def test_who_knows_all_has_one_and_who_looks_elsewhere_nothing(images):
    model = Knows(images).train()
    figures = evaluate_detector(model, images, batch_size=2)
    assert model.training
    assert figures["box_AP"] == figures["mask_AP"] == figures["box_AP75"] == figures["mask_APs"] == 1
    assert not {name for name in figures if name.endswith("APl")}, "no glyph is as large as that"
    assert max(evaluate_detector(Knows(images, moved=64), images).values()) < 0.1
    only_boxes = evaluate_detector(Knows(images, masks=False), images)
    assert {name.split("_")[0] for name in only_boxes} == {"box"} and only_boxes["box_AP"] == 1


def test_a_little_off_it_is_what_the_images_own_pixels_say(images):
    figures = evaluate_detector(Knows(images, moved=6), images)
    in_own_pixels = Knows(images, moved=3)
    in_own_pixels.known = [(torch.tensor(float(i)), images.original(i)) for i in range(len(images))]
    said = [in_own_pixels.said(torch.tensor(float(i))) for i in range(len(images))]
    expected = coco_precision(said, [images.original(i) for i in range(len(images))])
    assert 0 < expected.ap < 1
    assert figures["box_AP"] == pytest.approx(expected.ap, abs=1e-9)
    assert figures["box_AP50"] == pytest.approx(expected.ap50, abs=1e-9)


def test_sizes_of_boxes_are_those_that_the_file_says_of_masks(images, tmp_path):
    """COCO's own: its areas are of masks, also where boxes alone are read."""
    said = json.loads(images.file.read_text())
    for annotation in said["annotations"]:
        annotation["area"] = 33.0**2
    (file := tmp_path / "medium.json").write_text(json.dumps(said))
    medium = CocoObjects(images.folder, file, size=128, masks=False)
    figures = evaluate_detector(Knows(images, masks=False), medium)
    assert figures["box_APm"] == 1 and "box_APs" not in figures
