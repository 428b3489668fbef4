"""Recipes are frozen values, checked when they are built, and go into a record as JSON."""

import json
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from atlib.train import recipe as recipes
from atlib.train.recipe import Recipe


@pytest.mark.parametrize(
    "change, message",
    [
        ({"steps": 0}, "steps must be above 0"),
        ({"batch_size": -1}, "batch_size must be above 0"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"clip": 0}, "clip must be above 0"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1"),
        ({"warmup": -0.1}, "warmup must be"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1"),
        ({"min_lr": -1e-6}, "min_lr must not be negative"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"transfer_weight": -3}, "transfer_weight must not be negative"),
        ({"layer_decay": 0}, "layer_decay must be above 0 and at most 1, or None"),
        ({"layer_decay": 1.1}, "layer_decay must be"),
        ({"mixed_precision": "fp8"}, "choose 'no', 'bf16' or 'fp16'"),
        ({"accumulate": 0}, "accumulate must be a whole number, at least 1"),
        ({"accumulate": 2.0}, "accumulate must be a whole number"),
        ({"accumulate": 129}, "a step of 128 images has no more parts than that"),
        ({"repeats": 0}, "repeats must be a whole number"),
        ({"ema": 1.0}, "must be above 0 and below 1, or None"),
        ({"ema": 0.0}, "must be above 0 and below 1, or None"),
        ({"mixup": -0.1}, "mixup must not be negative"),
        ({"cutmix": float("nan")}, "cutmix must not be negative"),
        *(
            ({name: float("inf")}, f"{name} must be a finite number")
            for name in ("lr", "min_lr", "weight_decay", "task_weight", "transfer_weight", "clip", "mixup")
        ),
    ],
    ids=str,
)
def test_values_that_cannot_be_meant(change, message):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"Recipe\({name}={value!r}\): .*{message}"):
        Recipe(**change)
    with pytest.raises(ValueError, match=message):
        replace(recipes.STUDENT, **change)


def test_values_at_the_edge_are_allowed():
    edge = {
        "steps": 1,
        "warmup": 0,
        "label_smoothing": 0,
        "min_lr": 0,
        "weight_decay": 0,
        "transfer_weight": 0,
        "layer_decay": 1.0,
        "mixed_precision": "bf16",
        "clip": None,
        "accumulate": 128,
        "ema": 0.9999,
        "repeats": 3,
        "optimizer": "lamb",
    }
    assert edge.items() <= Recipe(**edge).describe().items()


def test_an_unknown_optimiser_names_the_close_ones():
    with pytest.raises(ValueError, match="unknown optimizer 'adamv'. Did you mean .*'adamw'"):
        Recipe(optimizer="adamv")


@pytest.mark.parametrize(
    "betas", [(2.0, 3.0), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan")), (0.9,), (0.9, 0.99, 0.999)], ids=str
)
def test_betas_that_no_optimiser_takes(betas):
    with pytest.raises(ValueError, match="betas=.*both must be at least 0 and below 1"):
        Recipe(betas=betas)


@pytest.mark.parametrize(
    "name, why", [("adahessian", "needs second derivatives"), ("adan", "takes 3 betas, and a recipe has 2")]
)
def test_an_optimiser_that_the_loop_cannot_use_is_refused_by_name(name, why):
    with pytest.raises(ValueError, match=f"optimizer='{name}' {why}.*list_optimizers.*'adamw'"):
        Recipe(optimizer=name)


def test_an_optimiser_that_fails_in_its_first_step_is_refused(monkeypatch):
    monkeypatch.setattr(
        torch.optim.Adadelta, "step", lambda self: (_ for _ in ()).throw(TypeError("a closure is missing"))
    )
    recipes.try_optimizer.cache_clear()
    with pytest.raises(
        ValueError,
        match="optimizer='adadelta': it cannot do a step .TypeError: a closure is missing.; take another",
    ):
        Recipe(optimizer="adadelta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="where CUDA is, they may work")
@pytest.mark.parametrize("name", ["bnbadamw", "fusedadamw"])
def test_an_optimiser_that_needs_cuda_is_refused_where_it_is_to_be_used(name):
    """Its recipe can be read everywhere: a finished run is evaluated on another machine."""
    recipe = Recipe(optimizer=name)
    with pytest.raises(ValueError, match=f"optimizer='{name}': it runs on CUDA only.*CUDA required.*'adamw'"):
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
    assert (
        Recipe().describe().items()
        >= {
            "optimizer": "adamw",
            "accumulate": 1,
            "ema": None,
            "mixup": 0.0,
            "cutmix": 0.0,
            "binary": False,
            "repeats": 1,
            "checkpoint_activations": False,
            "compile": False,
            "clip": 1.0,
        }.items()
    )


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
