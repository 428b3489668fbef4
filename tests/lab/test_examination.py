"""Examinations: trained models, one seed at a time, measured once, with records of what was found."""

import pytest
from safetensors.torch import load_file

from atbook.lab import study
from atbook.lab.evals import Examination, run_examination
from atbook.lab.scales import Schooling
from atbook.lab.study import CENTRAL, Run, Study, Variant, by, run_study, scratch
from atbook.records import read_file
from atlib.evaluate import evaluate
from tests import toy
from tests.helpers import same

OTHER = Schooling("other", changes={"steps": 1})
STUDY = Study(
    "toy study",
    (
        Variant("scratch", scratch, "fine-tune"),
        Variant("copy other", by(), "fine-tune", schooling=OTHER),
        Variant("copy", by(), "fine-tune"),
    ),
)
MEASURED = []  # what `losses` was given


def losses(models, sources):
    """What is measured here: every model's loss, and how many models there were."""
    MEASURED.append((sources.seed, dict(models), sources))
    test = sources.scale.held_out("test")
    found = {name: {"test_loss": evaluate(model, test).loss} for name, model in models.items()}
    return found | {"all together": {"models": len(models)}}


EXAMINATION = Examination(
    "toy examination", losses, (STUDY,), ("scratch", "copy other"), seeds=2, only=("toy",)
)


def test_models_are_trained_first_and_measured_one_seed_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "scales", toy.known)
    toy.few_held_out(monkeypatch)
    place = toy.place(tmp_path)
    run_study(CENTRAL, place, 2, ["fine-tune"])
    records = run_examination(EXAMINATION, place, 2)
    found = {(one.method, one.seed): one for one in read_file(place.records("toy examination"))}
    names = ("all together", "copy other", "scratch")
    assert [(r.method, r.seed) for r in records] == [(name, seed) for name in names for seed in (0, 1)]
    assert [(seed, *models) for seed, models, _ in MEASURED] == [(n, "scratch", "copy other") for n in (0, 1)]
    for seed, models, sources in MEASURED:
        assert (sources.seed, sources.place) == (seed, place) and sources.scale is toy.TOY
        for name, model in models.items():
            assert not model.training
            measured, run = found[name, seed], Run(STUDY, place, name, seed)
            loss = pytest.approx(run.record().results["test_loss"], rel=1e-6)
            assert (measured.experiment, measured.results) == ("toy examination", {"test_loss": loss})
            assert same(load_file(run.weights), dict(getattr(model, "student", model).state_dict()))
    assert found["all together", 0].results == {"models": 2}
    of_study = {record.method for record in read_file(place.records("toy study"))}
    assert "copy" not in of_study, "the third variant was not asked for"
