"""Recipes are frozen values, checked when they are built, and go into a record as JSON."""

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from atlib import recipes
from atlib.recipes import Recipe


@pytest.mark.parametrize("change, message", [
    ({"steps": 0}, "steps must be above 0"), ({"batch_size": -1}, "batch_size must be above 0"), ({"lr": 0.0}, "lr must be above 0"),
    ({"clip": 0}, "clip must be above 0"), ({"lr": float("nan")}, "lr must be above 0"),
    ({"warmup": 1.0}, "warmup must be at least 0 and below 1"), ({"warmup": -0.1}, "warmup must be"),
    ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1"),
    ({"min_lr": -1e-6}, "min_lr must not be negative"), ({"weight_decay": -0.1}, "weight_decay must not be negative"),
    ({"transfer_weight": -3}, "transfer_weight must not be negative"),
    ({"layer_decay": 0}, "layer_decay must be above 0 and at most 1, or None"), ({"layer_decay": 1.1}, "layer_decay must be"),
    ({"mixed_precision": "fp8"}, "choose 'no', 'bf16' or 'fp16'"),
    ({"accumulate": 0}, "accumulate must be a whole number, at least 1"), ({"accumulate": 2.0}, "accumulate must be a whole number"),
    ({"accumulate": 129}, "a step of 128 images has no more parts than that"), ({"repeats": 0}, "repeats must be a whole number"),
    ({"ema": 1.0}, "must be above 0 and below 1, or None"), ({"ema": 0.0}, "must be above 0 and below 1, or None"),
    ({"mixup": -0.1}, "mixup must not be negative"), ({"cutmix": float("nan")}, "cutmix must not be negative"),
], ids=str)
def test_values_that_cannot_be_meant(change, message):
    (name, value), = change.items()
    with pytest.raises(ValueError, match=rf"Recipe\({name}={value!r}\): .*{message}"):
        Recipe(**change)
    with pytest.raises(ValueError, match=message):
        replace(recipes.STUDENT, **change)


def test_values_at_the_edge_are_allowed():
    edge = {"steps": 1, "warmup": 0, "label_smoothing": 0, "min_lr": 0, "weight_decay": 0, "transfer_weight": 0, "layer_decay": 1.0,
            "mixed_precision": "bf16", "clip": None, "accumulate": 128, "ema": 0.9999, "repeats": 3, "optimizer": "lamb"}
    assert edge.items() <= Recipe(**edge).describe().items()


def test_an_unknown_optimiser_names_the_close_ones():
    with pytest.raises(ValueError, match="unknown optimizer 'adamv'. Did you mean .*'adamw'"):
        Recipe(optimizer="adamv")


def test_what_a_recipe_can_ask_for_besides_is_off_by_default():
    """The recipes of the recorded runs do not name these."""
    assert Recipe().describe().items() >= {"optimizer": "adamw", "accumulate": 1, "ema": None, "mixup": 0.0, "cutmix": 0.0, "binary": False, "repeats": 1,
                                           "checkpoint_activations": False, "compile": False, "clip": 1.0}.items()


def test_recipes_are_frozen():
    with pytest.raises(FrozenInstanceError):
        recipes.STUDENT.lr = 1.0


def test_a_description_is_json_and_builds_the_same_recipe():
    recipe = Recipe(steps=7, layer_decay=0.75, betas=(0.8, 0.95))
    described = json.loads(json.dumps(recipe.describe()))
    assert set(described) == {field.name for field in fields(Recipe)} and described["betas"] == [0.8, 0.95]
    assert Recipe(**{**described, "betas": tuple(described["betas"])}) == recipe


def test_regression_recipes_smooth_no_labels():
    assert recipes.RETRIEVAL.label_smoothing == recipes.MAE.label_smoothing == 0
    assert recipes.MAE.betas == (0.9, 0.95), "He et al. 2022 (arXiv 2111.06377), appendix A"
