"""Pairs: the student looks at one image, its teacher at another, in training and in evaluation."""

import numpy as np
import pytest
import torch

from atbook.lab.other_images import other_of_class
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import World, generate
from atlib import AttentionTransfer, Plan, walk
from atlib.attention import Instead
from atlib.data import Images, crop_and_flip, pair
from atlib.evaluate import evaluate, predict
from atlib.recipe import Recipe
from atlib.train import train
from tests.helpers import randomise, same, tiny

WORLD = World(task="match")
SCENES = glyph_images(generate("train", 40, 0, WORLD))
TWINS = glyph_images(generate("train", 40, 0, WORLD, "routing"))
RECIPE = Recipe(steps=3, batch_size=16, lr=1e-3)


def couple(how="copy", what="map"):
    return AttentionTransfer(randomise(tiny(1), 1), randomise(tiny(2), 2), Plan(what, how))


@pytest.mark.parametrize("what", ["map", "q", "k", "v"])
def test_what_is_copied_comes_from_the_other_image(what):
    """Against a walk of the student into which the teacher's tensors of the twin are put by hand."""
    one = couple(what=what).eval()
    seen = walk(one.teacher, TWINS.take(range(8))[0], values=True).layers
    fields = {"map": lambda s: {"q": s.q, "k": s.k}}.get(what, lambda s: {what: getattr(s, what)})
    replace_ = {layer: Instead(**fields(s)) for layer, s in enumerate(seen)}
    expected = walk(one.student, SCENES.take(range(8))[0], replace=replace_).logits
    found = one(pair(SCENES, TWINS).take(range(8))[0]).logits
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert (found - one(SCENES.take(range(8))[0]).logits).abs().max() > 1e-4


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_the_image_itself_as_its_twin_changes_nothing(how):
    alone, paired = couple(how), couple(how)
    train(alone, SCENES.with_augment(crop_and_flip()), RECIPE, progress=None, cpu=True)
    train(paired, pair(SCENES.with_augment(crop_and_flip()), SCENES), RECIPE, progress=None, cpu=True)
    assert same(alone.student.state_dict(), paired.student.state_dict())
    assert evaluate(paired, pair(SCENES, SCENES)) == evaluate(alone, SCENES)


def test_distilling_pulls_to_the_maps_of_the_other_image():
    one = couple("distill").eval()
    images, twins = (images_of.take(range(8))[0] for images_of in (SCENES, TWINS))
    own, target = (walk(vit, x).layers for vit, x in ((one.student, images), (one.teacher, twins)))
    expected = sum(-(t.map * s.map.log()).sum(-1).mean() for s, t in zip(own, target, strict=True))
    found = one(torch.stack([images, twins], 1)).transfer_loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_evaluation_shows_the_teacher_the_twin_too():
    one = couple()
    alone, paired = predict(one, SCENES), predict(one, pair(SCENES, TWINS), batch_size=7)
    assert paired.shape == alone.shape and (paired - alone).abs().max() > 1e-4


@pytest.mark.parametrize("same_class", [True, False])
def test_another_photograph_of_the_same_or_another_class(same_class):
    labels = torch.tensor([0, 1, 2] * 30)
    pixels = torch.arange(90, dtype=torch.uint8).reshape(90, 1, 1, 1).expand(90, 3, 4, 4)
    images = Images(pixels, labels)
    others = other_of_class(images, same_class, 3)
    chosen = others.pixels[:, 0, 0, 0].long()  # an image's pixels are its number
    assert ((labels[chosen] == labels) == same_class).all() and (chosen != torch.arange(90)).all()
    assert torch.equal(chosen, other_of_class(images, same_class, 3).pixels[:, 0, 0, 0].long())
    assert not torch.equal(chosen, other_of_class(images, same_class, 4).pixels[:, 0, 0, 0].long())
    if not same_class:
        counts = np.bincount((labels[chosen] - labels).remainder(3), minlength=3)
        assert counts[0] == 0 and counts[1:].min() > 25, "both other classes"
