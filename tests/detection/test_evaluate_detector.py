"""Precision of a detector on images in COCO's form: detectors whose answers are known, and two processes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from atlib.detection import evaluate
from atlib.detection.coco import CocoObjects
from atlib.detection.evaluate import evaluate_detector
from atlib.detection.objects import Found
from atlib.detection.precision import coco_precision
from tests.detection.coco_folder import coco_folder

pytest.importorskip("pycocotools")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Five scenes, seen at twice their size."""
    folder = coco_folder(tmp_path_factory.mktemp("coco"), val2017=5)
    return CocoObjects(folder / "val2017", folder / "annotations" / "instances_val2017.json", size=128)


class Knows(nn.Module):
    """A detector that knows an image when it sees it, and says of it what is there, moved to the right."""

    def __init__(self, images, moved=0, masks=True):
        super().__init__()
        self.weight, self.heads = nn.Parameter(torch.zeros(1)), SimpleNamespace(masks=masks)
        self.known, self.moved = [images.one(number, None) for number in range(len(images))], moved

    def forward(self, batch):
        assert not self.training
        return SimpleNamespace(found=[self.said(image) for image in batch])

    def said(self, image):
        true = next(objects for pixels, objects in self.known if torch.equal(pixels, image))
        masks = torch.roll(true.masks, self.moved, -1) if self.heads.masks else None
        boxes = true.boxes + self.moved * torch.tensor([1.0, 0, 1, 0])
        boxes = boxes.clamp(max=true.masks.shape[-1])  # nothing is said outside an image
        return Found(boxes, true.labels, torch.ones(len(true.labels)), masks)


def test_who_knows_all_has_one_and_who_looks_elsewhere_nothing(images):
    model = Knows(images).train()
    found = evaluate_detector(model, images, batch_size=2)
    assert model.training
    assert found["box_AP"] == found["mask_AP"] == found["box_AP75"] == found["mask_APs"] == 1
    assert not {name for name in found if name.endswith("APl")}, "no glyph is as large as that"
    assert max(evaluate_detector(Knows(images, moved=64), images).values()) < 0.1
    only_boxes = evaluate_detector(Knows(images, masks=False), images)
    assert {name.split("_")[0] for name in only_boxes} == {"box"} and only_boxes["box_AP"] == 1


def test_a_little_off_it_is_what_the_images_own_pixels_say(images):
    found = evaluate_detector(Knows(images, moved=6), images)
    in_own_pixels = Knows(images, moved=3)
    in_own_pixels.known = [(torch.tensor(float(i)), images.original(i)) for i in range(len(images))]
    said = [in_own_pixels.said(torch.tensor(float(i))) for i in range(len(images))]
    expected = coco_precision(said, [images.original(i) for i in range(len(images))])
    assert 0 < expected.ap < 1
    assert found["box_AP"] == pytest.approx(expected.ap, abs=1e-9)
    assert found["box_AP50"] == pytest.approx(expected.ap50, abs=1e-9)


def test_two_processes_look_at_each_image_once(images, monkeypatch):
    model, whole = Knows(images, moved=6), evaluate_detector(Knows(images, moved=6), images, batch_size=2)
    shares, results = [], []

    def gather(own):
        shares.append(own)
        return [each for share in shares for each in share]

    monkeypatch.setattr(evaluate, "gather_object", gather)
    for rank in (1, 0):  # the first has all that the others have sent
        here = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            get_rank=lambda rank=rank: rank,
            get_world_size=lambda: 2,
        )
        monkeypatch.setattr(evaluate, "dist", here)
        results.append(evaluate_detector(model, images, batch_size=2))
    assert [[each[0] for each in share] for share in shares] == [[2, 3], [0, 1, 4]]
    assert results == [{}, whole]
