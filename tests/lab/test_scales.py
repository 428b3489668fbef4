"""Scales: labels follow from the seed, held-out images do not, and all methods are tuned alike."""

from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from atlib.lab import study
from atlib.lab.scales import METHODS, SCALES, TUNING_SEED, CifarScale, grid, scales
from atlib.lab.study import CENTRAL, chosen, run_study, scale_of
from atlib.record import read_file
from atlib.train import recipe
from atlib.vit import Architecture
from tests import toy


def test_a_run_takes_its_labels_from_its_seed():
    of = {seed: toy.TOY.labelled(seed).pixels for seed in (0, 1, TUNING_SEED)}
    assert (
        not torch.equal(of[0], of[1])
        and not torch.equal(of[0], of[TUNING_SEED])
        and torch.equal(of[0], toy.TOY.labelled(0).pixels)
    )
    held_out = scales()["built-in"].held_out
    assert (len(held_out("validation")), len(held_out("test"))) == (2000, 4000)
    assert torch.equal(held_out("test").pixels[:40], toy.TOY.held_out("test").pixels), (
        "the same for every seed"
    )


def test_published_scales_tune_all_methods_alike():
    for name, scale in scales().items():
        assert (
            scale.name == name
            and set(scale.methods) <= set(METHODS)
            and set(scale.tuning) >= set(scale.methods)
        )
        assert len({len(scale.tuning[method]) for method in scale.methods}) == 1, (
            "the same number of recipes to choose from"
        )
        for method in scale.methods:
            assert len({tuple(sorted(trial.items(), key=str)) for trial in scale.tuning[method]}) == len(
                scale.tuning[method]
            )
            assert {scale.recipe(trial).steps for trial in scale.tuning[method]} == {scale.training.steps}, (
                "and the same number of steps"
            )
    assert tuple(scales()) == SCALES
    assert grid(lr=[1, 2], clip=[3]) == ({"lr": 1, "clip": 3}, {"lr": 2, "clip": 3})


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A CIFAR-10 of 60 images, and a scale without tuning on it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=list("abcdefghij"))}
    )
    for split, size in (("train", 50), ("test", 10)):
        images = [
            Image.fromarray(np.random.default_rng(i).integers(0, 255, (32, 32, 3), dtype=np.uint8))
            for i in range(size)
        ]
        datasets.Dataset.from_dict(
            {"img": images, "label": [i % 10 for i in range(size)]}, features
        ).to_parquet(tmp_path / f"{split}.parquet")
    methods = ("scratch", "copy")
    scale = CifarScale(
        "toy",
        Architecture("cifar-small", {"depth": 1}),
        methods,
        replace(recipe.MAE, **toy.SMALL),
        replace(recipe.STUDENT, **toy.SMALL),
        {method: ({},) for method in methods},
        labels=20,
        path=tmp_path,
        unlabelled=20,
        test_size=8,
    )
    monkeypatch.setattr(study, "scales", lambda data: {"toy": scale})
    return scale


def test_a_scale_without_choices_is_not_tuned(cifar, tmp_path):
    place = toy.place(tmp_path / "out")
    first, _ = run_study(CENTRAL, place, 1)
    written = {record.key for record in read_file(place.records("transfer"))}
    runs = {("run", method, 0, None) for method in ("copy", "scratch")}
    assert written == runs | {("teacher", "teacher", 0, None)}
    assert chosen(place, "copy") == 0 and scale_of(place) is cifar
    accuracy = first.results["test_accuracy"]
    assert accuracy * 8 == int(accuracy * 8), "eight test images"
    assert (
        len(cifar.held_out("validation")) == 5
        and cifar.labelled(0).augment is not None
        and cifar.held_out("test").augment is None
    )
