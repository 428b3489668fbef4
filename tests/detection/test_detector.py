"""Detectors on a ViT or a pair: losses of any number of objects, gradients, and what is said of an image."""

import pytest
import torch

from atbook.worlds.glyphs import SHAPES
from atbook.worlds.scenes import generate_scenes, scene_objects
from atfamily.detection.detector import SMALL, RegionHeads, detect, detection_loss, fcos, mask_rcnn
from atfamily.detection.objects import ObjectBatch, Objects
from atlib import AttentionTransfer, Plan, create_vit
from atlib.recipe import Recipe
from tests.detection.knows import scene_vit
from tests.helpers import Bomb, random_images, randomise

MAKE = {"fcos": fcos, "mask_rcnn": mask_rcnn}
LOSSES = {
    "fcos": {"classification", "bbox_regression", "bbox_ctrness"},
    "mask_rcnn": {"loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask"},
}


def backbone(kind):
    """A ViT, or a pair with a plan."""
    if kind == "plain":
        return randomise(scene_vit(2), 1)
    return AttentionTransfer(randomise(scene_vit(1)), randomise(scene_vit(2), 1), Plan(how=kind))


def detector(name, kind="plain"):
    torch.manual_seed(3)
    return MAKE[name](backbone(kind), len(SHAPES))


def nothing(size=64):
    masks = torch.zeros(0, size, size, dtype=torch.bool)
    return Objects(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), masks, torch.zeros(0).bool())


@pytest.fixture(scope="module")
def scenes():
    return scene_objects(generate_scenes("train", 4))


def losses(model, images, objects):
    """With the boxes that are sampled chosen alike."""
    torch.manual_seed(5)
    return model.train()(images, objects)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("kind, empty", [("copy", (1,)), ("distill", (0, 1, 2))], ids=str)
def test_losses_are_finite_with_and_without_objects(scenes, name, kind, empty):
    images, objects = scenes.take([0, 1, 2])
    objects = ObjectBatch([nothing() if i in empty else scene for i, scene in enumerate(objects)])
    model = detector(name, kind)
    said = losses(model, images, objects)
    assert said.losses.keys() == LOSSES[name] and said.found == []
    total = sum(said.losses.values()) + said.transfer_loss
    assert torch.isfinite(total) and all(loss.ndim == 0 for loss in said.losses.values())
    total.backward()
    for part in (model.pyramid, model.heads):
        gradients = [parameter.grad for parameter in part.parameters() if parameter.grad is not None]
        assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients)
    said = model.eval()(images, objects)  # evaluation does not look at them
    assert said.losses == {} and said.transfer_loss.item() == 0 and len(said.found) == 3


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("how", ["copy", "distill"])
def test_gradients_and_the_transfer_loss_of_a_pair(scenes, name, how):
    """The transfer loss is the pair's own; a copied backbone's q and k get no gradient, others do."""
    images, objects = scenes.take([0, 1])
    model = detector(name, how)
    pair = model.backbone.vit
    said = losses(model, images, objects)
    assert said.transfer_loss.item() == pytest.approx(pair.train()(images).transfer_loss.item(), rel=1e-6)
    assert (said.transfer_loss.item() > 0) == (how == "distill")
    sum(said.losses.values()).backward()
    assert all(parameter.grad is None for parameter in pair.teacher.parameters())
    for block in pair.student.blocks:
        q, k, v = block.attn.qkv.weight.grad.chunk(3)
        assert (q.abs().max() > 0) == (k.abs().max() > 0) == (how == "distill") and v.abs().max() > 0


def test_the_loss_of_a_step_is_weighted_as_the_recipe_says(scenes):
    images, objects = scenes.take([0, 1])
    model = detector("fcos", "distill").train()
    said = model(images, objects)
    recipe = Recipe(transfer_weight=3.0, task_weight=0.5)
    expected = 0.5 * sum(loss.item() for loss in said.losses.values()) + 3 * said.transfer_loss.item()
    assert detection_loss(model, images, objects, recipe).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_only_copy_needs_its_teacher_to_detect(scenes, how):
    model = detector("fcos", how)
    model.backbone.vit.teacher.patch_embed = Bomb("the teacher")
    images, objects = scenes.take([0])
    with pytest.raises(AssertionError):
        model.train()(images, objects)
    if how == "copy":
        with pytest.raises(AssertionError):
            model.eval()(images)
    else:
        assert len(model.eval()(images).found) == 1


@pytest.mark.parametrize("name", MAKE)
def test_crowds_reach_no_loss(scenes, name):
    images, objects = scenes.take([0, 1])
    with_crowd = []
    for scene in objects:
        box, mask = torch.tensor([[3.0, 3, 61, 61]]), torch.ones(1, 64, 64, dtype=torch.bool)
        more = Objects(box, torch.tensor([2]), mask, torch.tensor([True]))
        with_crowd.append(Objects(*(torch.cat(parts) for parts in zip(more, scene))))
    single = [scene._replace(crowd=torch.zeros_like(scene.crowd)) for scene in with_crowd]
    model = detector(name)
    batches = (objects, with_crowd, single)
    without, crowds, counted = (losses(model, images, ObjectBatch(one)).losses for one in batches)
    assert all(torch.equal(without[key], crowds[key]) for key in without)
    assert any(without[key] != counted[key] for key in without)


@pytest.mark.parametrize("name", MAKE)
def test_what_is_said_of_an_image(scenes, name):
    """Classes from 0, and masks of the image's size that lie in their boxes."""
    model = detector(name)
    if name == "fcos":  # nothing is sure of itself before it has learned
        model.heads.fcos.head.classification_head.cls_logits.bias.data[:] = 1.0
    else:
        model.heads.regions.score_thresh = 0.0
    predictions = detect(model, scenes)
    assert sum(len(prediction.boxes) for prediction in predictions) > 20
    for prediction in predictions:
        assert len(prediction.boxes) <= SMALL.kept and set(prediction.labels.tolist()) <= set(range(8))
        assert (prediction.masks is None) == (name == "fcos")
        for box, mask in zip(prediction.boxes, () if prediction.masks is None else prediction.masks):
            assert mask.shape == (64, 64) and mask.dtype == torch.bool
            down, across = mask.nonzero().unbind(1)
            if len(down):
                assert across.min() >= box[0] - 2 and across.max() <= box[2] + 2
                assert down.min() >= box[1] - 2 and down.max() <= box[3] + 2


def test_classes_are_counted_from_0_outside_and_the_background_is_inside():
    """Every region is said to be the first class: 0, where torchvision's program counts 1."""
    heads = RegionHeads(8, 8, SMALL, masks=True).eval()
    predictor = heads.regions.box_predictor
    for part in (predictor.cls_score, predictor.bbox_pred):
        torch.nn.init.zeros_(part.weight)
        torch.nn.init.zeros_(part.bias)
    predictor.cls_score.bias.data[1] = 9.0
    levels = [random_images(1, SMALL.width, side, side) for side in (16, 8, 4)]
    _, (prediction,) = heads(levels, torch.zeros(1, 3, 64, 64), None)
    assert predictor.cls_score.out_features == 9
    assert len(prediction.labels) > 0 and (prediction.labels == 0).all() and (prediction.scores > 0.9).all()
    predictor.cls_score.bias.data[0] = 30.0
    _, (prediction,) = heads(levels, torch.zeros(1, 3, 64, 64), None)
    assert len(prediction.labels) == 0 and prediction.masks.shape == (0, 64, 64)


def test_the_first_class_is_not_learned_as_background(scenes):
    """A classifier that says the first class of all regions is the better one where all objects are of it."""
    images, objects = scenes.take([0, 1])
    objects = ObjectBatch([scene._replace(labels=torch.zeros_like(scene.labels)) for scene in objects])
    model = detector("mask_rcnn")
    scores = model.heads.regions.box_predictor.cls_score
    torch.nn.init.zeros_(scores.weight)
    loss = []
    for favoured in (1, 2):
        scores.bias.data[:] = 0.0
        scores.bias.data[favoured] = 3.0
        loss.append(losses(model, images, objects).losses["loss_classifier"].item())
    assert loss[0] < loss[1] - 0.1


@pytest.mark.parametrize("name", MAKE)
def test_patches_whose_side_is_no_power_of_two(name):
    """torchvision takes 14 for 16: what is read of a box would lie elsewhere."""
    with pytest.raises(ValueError, match="power of two"):
        MAKE[name](create_vit("glyphs", img_size=112, patch_size=14), 3)
