"""Recipes are frozen values, checked when they are built, and go into a record as JSON."""

import json
import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from atlib.train import recipe as recipes
from atlib.train.recipe import Recipe


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"batch_size": -1},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"clip": 0},
        {"warmup": 1.0},
        {"warmup": -0.1},
        {"label_smoothing": 1.0},
        {"min_lr": -1e-6},
        {"weight_decay": -0.1},
        {"transfer_weight": -3},
        {"layer_decay": 0},
        {"layer_decay": 1.1},
        {"mixed_precision": "fp8"},
        {"accumulate": 0},
        {"accumulate": 2.0},
        {"accumulate": 129},
        {"repeats": 0},
        {"ema": 1.0},
        {"ema": 0.0},
        {"mixup": -0.1},
        {"cutmix": float("nan")},
        {"betas": (2.0, 3.0)},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"betas": (0.9, float("nan"))},
        {"betas": (0.9,)},
        {"betas": (0.9, 0.99, 0.999)},
        *(
            {name: float("inf")}
            for name in ("lr", "min_lr", "weight_decay", "task_weight", "transfer_weight", "clip", "mixup")
        ),
    ],
    ids=str,
)
def test_values_that_cannot_be_meant(change):
    ((name, value),) = change.items()
    named = re.escape(f"Recipe({name}={value!r}): ")
    with pytest.raises(ValueError, match=named):
        Recipe(**change)
    with pytest.raises(ValueError, match=named):
        replace(recipes.STUDENT, **change)


def test_values_at_the_edge_are_allowed():
    edge = dict(steps=1, warmup=0, label_smoothing=0, min_lr=0, weight_decay=0, transfer_weight=0, clip=None)
    edge |= dict(layer_decay=1.0, mixed_precision="bf16", accumulate=128, ema=0.9999, repeats=3)
    assert (edge | {"optimizer": "lamb"}).items() <= Recipe(**edge, optimizer="lamb").describe().items()


@pytest.mark.parametrize(
    "name, why", [("adamv", "'adamw'"), ("adahessian", "second derivatives"), ("adan", "3 betas")]
)
def test_an_optimiser_that_the_loop_cannot_use_is_refused_by_name(name, why):
    with pytest.raises(ValueError, match=f"'{name}'.*{why}"):
        Recipe(optimizer=name)


def test_an_optimiser_that_fails_in_its_first_step_is_refused(monkeypatch):
    monkeypatch.setattr(
        torch.optim.Adadelta, "step", lambda self: (_ for _ in ()).throw(TypeError("a closure is missing"))
    )
    recipes.try_optimizer.cache_clear()
    with pytest.raises(ValueError, match="'adadelta'.*TypeError: a closure is missing"):
        Recipe(optimizer="adadelta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="where CUDA is, they may work")
@pytest.mark.parametrize("name", ["bnbadamw", "fusedadamw"])
def test_an_optimiser_that_needs_cuda_is_refused_where_it_is_to_be_used(name):
    """Its recipe can be read everywhere: a finished run is evaluated on another machine."""
    recipe = Recipe(optimizer=name)
    with pytest.raises(ValueError, match=f"'{name}'.*CUDA"):
        recipe.require_optimizer()


def test_trying_an_optimiser_draws_no_random_number():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    recipes.try_optimizer.cache_clear()
    for name in ("kron", "sgd", "lion", "muon"):
        Recipe(optimizer=name)
    assert torch.equal(torch.rand(2), expected)


def test_what_a_recipe_can_ask_for_besides_is_off_by_default():
    """The recipes of the recorded runs do not name these."""
    off = dict(optimizer="adamw", accumulate=1, ema=None, mixup=0.0, cutmix=0.0, binary=False, repeats=1)
    assert Recipe() == Recipe(**off, checkpoint_activations=False, compile=False, clip=1.0)


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
