"""Recipes are frozen values, checked when they are built, and in epochs become steps."""

from dataclasses import replace

import pytest
import torch

from atlib.recipe import Recipe
from atlib.train import make_optimizer

BAD = [
    {"steps": 0}, {"accumulate": 2.0}, {"accumulate": 129}, {"optimizer": "adamv"}, {"milestones": ()},
    {"milestones": (1.0,)}, {"weight_decay": 0.0, "weight_decay_end": 0.4}, {"lr": float("nan")},
    {"lr": float("inf")}, {"clip": 0}, {"warmup": 1.0}, {"label_smoothing": -0.1}, {"transfer_weight": -3},
    {"layer_decay": 1.1}, {"mixed_precision": "fp8"}, {"ema": 1.0}, {"cutmix": float("nan")},
    {"betas": (0.9, 1.0)}, {"betas": (0.9,)},
]  # fmt: skip


@pytest.mark.parametrize("change", BAD, ids=str)
def test_values_that_cannot_be_meant(change):
    with pytest.raises(ValueError):
        Recipe(**change)


IN_EPOCHS = Recipe(epochs=10, warmup_epochs=2.5, base_lr=1e-3, batch_size=64)


def test_a_recipe_in_epochs_becomes_one_in_steps():
    """100 images are two steps of 64 an epoch, and a fourth of 256 has a fourth of the rate."""
    found = IN_EPOCHS.on(100)
    assert found == Recipe(steps=20, warmup=0.25, lr=2.5e-4, batch_size=64)
    assert found.on(7) == found, "no number of images matters any more"
    assert replace(IN_EPOCHS, epochs=0.01, warmup_epochs=0).on(100).steps == 1, "at least one step"
    assert Recipe(epochs=3).on(128) == Recipe(steps=3), "each can be said by itself"


CHANGES = [
    ({"epochs": 5}, 10, 0.5, 2.5e-4), ({"warmup_epochs": 1}, 20, 0.1, 2.5e-4),
    ({"warmup": 0.2}, 20, 0.2, 2.5e-4), ({"base_lr": 4e-3}, 20, 0.25, 1e-3),
    ({"batch_size": 32}, 40, 0.25, 1.25e-4), ({"steps": 7}, 7, 0.25, 2.5e-4),
    ({"steps": 7, "warmup": 0.5}, 7, 0.5, 2.5e-4), ({"lr": 3e-3, "batch_size": 32}, 40, 0.25, 3e-3),
]  # fmt: skip


@pytest.mark.parametrize("values, steps, warmup, lr", CHANGES, ids=str)
def test_what_is_changed_in_a_recipe_in_epochs(values, steps, warmup, lr):
    found = IN_EPOCHS.changed(values).on(100)
    assert (found.steps, found.warmup, found.lr) == pytest.approx((steps, warmup, lr))


CONTRADICTIONS = [
    {"steps": 3, "epochs": 3}, {"lr": 1e-3, "base_lr": 1e-3}, {"warmup": 0.1, "warmup_epochs": 1},
    {"steps": 3, "warmup_epochs": 1}, {"epochs": 2}, {"warmup_epochs": -1},
]  # fmt: skip


@pytest.mark.parametrize("values", CONTRADICTIONS, ids=str)
def test_changes_that_contradict_each_other(values):
    with pytest.raises(ValueError):
        IN_EPOCHS.changed(values)


def test_a_rate_per_256_images_is_no_rate_of_an_optimiser():
    with pytest.raises(ValueError):
        make_optimizer(torch.nn.Linear(2, 2), IN_EPOCHS)
