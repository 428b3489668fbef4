"""Teachers: the pre-text, the world, the model and the recipe are those that were asked for, and the seed
decides the rest."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from atlib import create_vit
from atlib.checkpoint import load_vit, save_vit
from atlib.data import Images, glyphs
from atlib.lab.scales import RETRIEVAL, Schooling, colour
from atlib.train import pretrain, train
from atlib.train import recipe as recipes
from atlib.vit import Architecture
from tests import toy
from tests.helpers import random_images, same

RECIPE = replace(recipes.RETRIEVAL, steps=3, batch_size=8)
INVERTED = glyphs.World(rendering="inverted")


def longhand(seed, images, outputs, loss, recipe=RECIPE, **model):
    """A teacher made step by step, from nothing of `schooling`."""
    torch.manual_seed(seed)
    vit = create_vit("glyphs", num_classes=outputs, **model)
    history = train(vit, images, recipe, loss=loss, seed=seed, progress=None)
    return vit, history


def test_the_central_teacher_is_what_it_always_was():
    """Bit for bit: the committed records and weights come from this way of making one."""
    drawn = glyphs.generate("unlabelled", 16, 5)
    clean = torch.tensor(drawn.clean.reshape(16, 192).astype(np.float32)) / 255
    expected, past = longhand(
        5,
        Images(torch.tensor(drawn.images), clean),
        192,
        lambda model, images, targets, recipe: torch.nn.functional.mse_loss(model(images), targets),
    )
    found, architecture, history = replace(toy.TOY, pretraining=RECIPE).make_teacher(5)
    assert same(found.state_dict(), expected.state_dict()) and history == past
    assert architecture == Architecture("glyphs", {"num_classes": 192})
    again, other = (RETRIEVAL.make(RECIPE, 16, seed)[0].state_dict() for seed in (5, 6))
    assert same(again, expected.state_dict()) and not torch.equal(other["head.weight"], again["head.weight"])


def test_the_colour_teacher_learns_the_hue_and_nothing_about_shapes():
    drawn = glyphs.generate("unlabelled", 30, 2)
    images = pretrain.colour_images(drawn)
    assert images.targets.tolist() == drawn.hue.tolist() and images.classes == glyphs.HUES
    assert torch.equal(images.pixels, torch.from_numpy(drawn.images))
    expected, past = longhand(
        2,
        Images(torch.tensor(drawn.images[:16]), torch.tensor(drawn.hue[:16])),
        6,
        lambda model, images, hues, recipe: -model(images).log_softmax(1)[range(len(hues)), hues].mean(),
    )
    found, architecture, history = colour("colour").make(RECIPE, 16, 2)
    assert architecture.overrides == {"num_classes": 6}
    for left, right in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)  # another formula of the same loss
    assert history[-1]["loss"] == pytest.approx(past[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_colour_loss_by_hand(smoothing):
    model, images, hues = (
        create_vit("glyphs", depth=1, num_classes=6),
        random_images(5, 3, 32, 32),
        torch.tensor([0, 5, 2, 2, 4]),
    )
    log_p = model(images).log_softmax(1)
    expected = (
        -sum((1 - smoothing) * row[hue] + smoothing / 6 * row.sum() for row, hue in zip(log_p, hues)) / 5
    )
    recipe = replace(recipes.RETRIEVAL, label_smoothing=smoothing)
    assert pretrain.colour_loss(model, images, hues, recipe).item() == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_the_world_is_the_one_that_was_asked_for():
    seen = []

    def images(drawn):
        seen.append(drawn)
        return pretrain.retrieval_images(drawn)

    Schooling("other", images=images, world=INVERTED).make(RECIPE, 12, 3)
    (drawn,) = seen
    for found, expected in zip(drawn, glyphs.generate("unlabelled", 12, 3, INVERTED), strict=True):
        assert np.array_equal(found, expected)
    assert not np.array_equal(drawn.images, glyphs.generate("unlabelled", 12, 3).images)
    assert RETRIEVAL.world == glyphs.World()


@pytest.mark.parametrize(
    "model",
    [{"reg_tokens": 2}, {"init_values": 0.1}, {"embed_dim": 32}, {"pre_norm": True}, {"global_pool": "avg"}],
    ids=str,
)
def test_the_architecture_builds_the_model(tmp_path, model):
    vit, architecture, _ = Schooling("other", model=model).make(replace(RECIPE, steps=1), 8, 0)
    assert architecture == Architecture("glyphs", {**model, "num_classes": 192})
    found = load_vit(save_vit(tmp_path / "teacher.safetensors", vit, architecture))
    assert same(found.state_dict(), vit.state_dict())


def test_changes_go_to_the_recipe_and_leave_it_alone():
    _, _, history = Schooling("short", changes={"steps": 2, "lr": 1e-4}).make(RECIPE, 24, 0)
    assert history[-1]["step"] == 2 and len(history) == 1 and RECIPE.steps == 3
    expected, _ = longhand(
        0,
        pretrain.retrieval_images(glyphs.generate("unlabelled", 24, 0)),
        192,
        pretrain.retrieval_loss,
        replace(RECIPE, steps=2, lr=1e-4),
    )
    assert same(
        Schooling("short", changes={"steps": 2, "lr": 1e-4}).make(RECIPE, 24, 0)[0].state_dict(),
        expected.state_dict(),
    )


def test_values_that_cannot_be_meant_are_refused_before_training(monkeypatch):
    toy.forbid_training(monkeypatch)
    with pytest.raises(ValueError, match="steps must be above 0"):
        Schooling("none", changes={"steps": 0}).make(RECIPE, 8, 0)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        RETRIEVAL.make(RECIPE, 0, 0)


def test_a_schooling_travels_to_other_processes():
    other = pickle.loads(pickle.dumps(colour("colour", changes={"steps": 7})))
    assert (other.name, other.outputs, other.loss, dict(other.changes)) == (
        "colour",
        6,
        pretrain.colour_loss,
        {"steps": 7},
    )
