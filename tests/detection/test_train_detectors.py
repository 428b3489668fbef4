"""Detectors and segmenters in the one training loop: gone on with, and the class of every pixel."""

import pytest
import torch

from atbook.worlds.scenes import generate_scenes, scene_objects
from atfamily.detection.detector import detection_loss, fcos, mask_rcnn
from atfamily.detection.segment import pixel_images
from atlib import AttentionTransfer, Plan
from atlib.recipe import Recipe
from atlib.train import train
from atrun.checkpoint_manager import CheckpointManager
from tests.detection.knows import scene_vit
from tests.helpers import same, state_of

RECIPE = Recipe(steps=5, batch_size=4, lr=1e-2, label_smoothing=0.0)  # 10 scenes: passes of three steps


def head(build, how, classes=8):
    student = scene_vit(0)
    model = student if how is None else AttentionTransfer(scene_vit(1), student, Plan(how=how))
    torch.manual_seed(2)
    return build(model, classes)


@pytest.fixture(scope="module")
def drawn():
    return generate_scenes("train", 100)


@pytest.fixture(scope="module")
def scenes(drawn):
    few = scene_objects(type(drawn)(*(part[:10] for part in drawn)))
    few.objects[3] = type(few.objects[3])(*(part[:0] for part in few.objects[3]))  # nothing is in it
    return few


@pytest.mark.parametrize("build, how", [(fcos, "copy"), (mask_rcnn, "distill")])
def test_a_detector_that_was_stopped_goes_on_with_the_same_bits(build, how, scenes, tmp_path):
    """In the middle of its second pass; Mask R-CNN draws which regions it learns from."""

    def run(folder=None, **options):
        model = head(build, how)
        keeper = None if folder is None else CheckpointManager(folder, every=100)
        options |= {"seed": 7, "progress": None, "keeper": keeper}
        history = train(model, scenes, RECIPE, loss=detection_loss, **options)
        return state_of(model), history

    whole, history = run()
    run(tmp_path, stop_at=4)
    torch.manual_seed(99)  # what was drawn between must not matter
    resumed, again = run(tmp_path)
    assert same(resumed, whole) and again == history and history[-1]["step"] == 5
    assert not same(whole, state_of(head(build, how)))


def test_the_class_of_every_pixel(drawn):
    """The one that the scenes were painted with."""
    images = pixel_images(scene_objects(drawn))
    for number in (0, 7):
        by_hand = torch.zeros(64, 64, dtype=torch.long)
        for i, shape in enumerate(drawn.shape[number]):
            if shape >= 0:
                by_hand[torch.from_numpy(drawn.instances[number]) == i + 1] = shape + 1
        assert torch.equal(images.targets[number], by_hand)
    assert images.classes[0] == "background" and len(images.classes) == 9
    assert torch.equal(images.pixels, torch.from_numpy(drawn.images))
