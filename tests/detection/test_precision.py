"""Our average precision is COCO's, and both say what a reader expects of predictions that are known."""

import numpy as np
import pytest
import torch

from atbook.worlds.scenes import generate_scenes, scene_objects
from atfamily.detection.objects import Found, Objects
from atfamily.detection.precision import average_precision, coco_precision

pytest.importorskip("pycocotools", reason="needs pycocotools, the extra 'detection'")


@pytest.fixture(scope="module")
def objects():
    return scene_objects(generate_scenes("test", 50)).objects


def perfect(objects):
    return [Found(scene.boxes, scene.labels, torch.ones(len(scene.boxes)), scene.masks) for scene in objects]


def scattered(objects, seed):
    """Predictions of every quality: moved, doubled, of other classes, with equal scores among them."""
    rng, predictions = np.random.default_rng(seed), []
    for scene in objects:
        n = len(scene.boxes) + 3
        pick = rng.integers(len(scene.boxes), size=n)
        boxes = scene.boxes[pick] + torch.tensor(rng.normal(0, 2, (n, 4)), dtype=torch.float32)
        other = torch.tensor(rng.integers(8, size=n))
        labels = torch.where(torch.tensor(rng.random(n) < 0.8), scene.labels[pick], other)
        predictions.append(Found(boxes, labels, torch.tensor(rng.random(n)).round(decimals=1)))
    return predictions


@pytest.mark.parametrize("seed", range(2))
def test_ours_is_cocos(objects, seed):
    predictions = scattered(objects, seed)
    theirs = coco_precision(predictions, objects)
    assert 0.05 < theirs.ap < 0.8
    assert abs(average_precision(predictions, objects) - theirs.ap) < 1e-9
    assert abs(average_precision(predictions, objects, [0.5]) - theirs.ap50) < 1e-9
    assert abs(average_precision(predictions, objects, [0.75]) - theirs.ap75) < 1e-9


def test_no_predictions(objects):
    none = [Found(*(part[:0] for part in prediction)) for prediction in perfect(objects)]
    assert average_precision(none, objects) == coco_precision(none, objects).ap == 0
    sizes = coco_precision(none, objects)
    assert sizes.small == 0 and np.isnan(sizes.large), "nothing is large"


def test_the_size_of_a_predicted_mask_is_its_own_not_its_boxs():
    """A wrong mask, a thin line through a large box, is small, and counts among the small."""
    true, line = torch.zeros(2, 1, 64, 64, dtype=torch.bool)
    true[0, :10, :10], line[0].diagonal()[10:60] = True, True
    boxes, labels = torch.tensor([[0.0, 0, 10, 10], [10.0, 10, 60, 60]]), torch.zeros(2).long()
    objects = [Objects(boxes[:1], labels[:1], true, torch.tensor([False]))]
    found = [Found(boxes, labels, torch.tensor([0.5, 0.9]), torch.cat([true, line]))]
    assert coco_precision(found, objects, masks=True).small == pytest.approx(0.5)


def test_sizes_are_thirds_that_are_asked_for(objects):
    precision = coco_precision(perfect(objects), objects, sizes=(60.0, 120.0))
    assert precision[3:] == (1, 1, 1)
    assert np.isnan(coco_precision(perfect(objects), objects).large), "a scene is 64 pixels wide"


def test_a_prediction_within_a_crowd_is_neither_right_nor_wrong():
    box = torch.tensor([[0.0, 0, 10, 10], [20.0, 20, 60, 60]])
    true = [Objects(box, torch.tensor([0, 0]), None, torch.tensor([False, True]))]
    boxes = torch.tensor([[30.0, 30, 40, 40], [0.0, 0, 10, 10]])
    said = [Found(boxes, torch.zeros(2).long(), torch.tensor([0.9, 0.8]))]
    assert coco_precision(said, true).ap == pytest.approx(1)
    alone = [Objects(box[:1], torch.tensor([0]), None, torch.tensor([False]))]
    assert coco_precision(said, alone).ap < 1
