"""The sweep over distillation's weight and layers: one thing changed at a time, from the recipe the central experiment chose."""

from dataclasses import replace

import pytest

from atlib import experiment, sweep
from atlib.experiment import run_experiment
from atlib.record import read_record, write_record
from atlib.scales import scales
from atlib.sweep import run_sweep, variants
from tests import toy


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A central experiment in which distill has been tuned; the second trial was the better one."""
    monkeypatch.setattr(experiment, "scales", toy.known)
    run_experiment(toy.place(tmp_path), 0, ["distill"])
    for trial in range(2):
        path = tmp_path / "records" / "tuning" / f"distill-trial{trial}.json"
        write_record(path, replace(read_record(path), results={"validation_accuracy": 0.1 + 0.1 * trial, "validation_loss": 1.0}))
    monkeypatch.setattr(sweep, "variants", lambda depth: [variants(depth)[0], variants(depth)[-1]])
    return toy.place(tmp_path)


def test_one_thing_is_changed_at_a_time():
    every = variants(4)
    assert len({variant.name for variant in every}) == len(every)
    assert all(variant.plan.how == "distill" and variant.plan.what == "map" for variant in every)
    weights = [variant for variant in every if variant.name.startswith("weight")]
    assert all(variant.plan.layers is None for variant in weights)
    values = [variant.changes["transfer_weight"] for variant in weights]
    assert values == sorted(set(values)) and all(variant.name == f"weight {value:g}" for variant, value in zip(weights, values))
    layers = {variant.name: variant.plan.layers for variant in every if variant not in weights}
    assert layers == {"first half": (0, 1), "last half": (2, 3), "last layer": (3,)}
    assert all(not variant.changes for variant in every if variant not in weights), "choices of layers keep the chosen recipe"
    for scale in scales().values():  # whatever weight was chosen, the sweep has it with all layers, to compare the layers with
        assert {trial.get("transfer_weight", scale.training.transfer_weight) for trial in scale.tuning["distill"]} <= set(values)


def test_a_sweep_starts_from_the_chosen_recipe(tuned, tmp_path):
    paths = run_sweep(tuned, tmp_path / "sweep", seeds=1)
    records = [read_record(path) for path in paths]
    assert [record.method for record in records] == [variants(4)[0].name, variants(4)[-1].name]
    for record, variant, layers in zip(records, (variants(4)[0], variants(4)[-1]), ([0, 1, 2, 3], [3])):
        recipe = record.config["recipe"]
        assert record.experiment == "distillation" and recipe["lr"] == toy.TRIALS[1]["lr"]
        assert recipe["transfer_weight"] == variant.changes.get("transfer_weight", toy.TOY.training.transfer_weight) and recipe["layers"] == layers
        assert recipe["steps"] == round(sweep.STEPS_SHARE * 2) and set(record.results) == {"test_accuracy", "test_loss"}


def test_running_again_does_nothing(tuned, tmp_path, monkeypatch):
    run_sweep(tuned, tmp_path / "sweep", seeds=1)
    toy.forbid_training(monkeypatch)
    before = toy.files(tmp_path)
    run_sweep(tuned, tmp_path / "sweep", seeds=1)
    assert toy.files(tmp_path) == before


def test_without_the_central_experiment_it_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "scales", toy.known)
    with pytest.raises(FileNotFoundError, match="distill is not tuned yet.*python -m atlib experiment transfer --scale toy"):
        run_sweep(toy.place(tmp_path), tmp_path / "sweep", seeds=1)
    assert list(tmp_path.iterdir()) == []
