"""Examinations: trained models, one seed at a time, measured once, with records of what was found."""

import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from atlib import AttentionTransfer, Plan
from atlib.checkpoint import load_vit
from atlib.lab import evals, study
from atlib.lab.evals import Examination, model_of, run_examination, study_records
from atlib.lab.scales import Schooling
from atlib.lab.study import Place, Study, Variant, by, run_experiment, run_study, scratch
from atlib.record import read_record
from atlib.train.evaluate import evaluate
from tests import toy
from tests.helpers import same

OTHER = Schooling("other", changes={"steps": 1})
STUDY = Study(
    "toy study",
    "",
    "",
    (
        Variant("scratch", scratch, "fine-tune"),
        Variant("copy other", by(schooling=OTHER), "fine-tune"),
        Variant("copy", by(), "fine-tune"),
    ),
    teachers=(OTHER,),
)
MEASURED = []


def losses(models, sources):
    """What is measured here: every model's loss, and how many models there were; it remembers what it was
    given."""
    MEASURED.append((sources.seed, dict(models), sources))
    test = sources.scale.held_out("test")
    found = {name: {"test_loss": evaluate(model, test).loss} for name, model in models.items()}
    return found | {"all together": {"models": len(models)}}


EXAMINATION = Examination(
    "toy examination", "", "", STUDY, ("scratch", "copy other"), losses, seeds=2, only="toy"
)


@pytest.fixture(autouse=True)
def toy_scales(monkeypatch):
    monkeypatch.setattr(study, "scales", toy.known)
    MEASURED.clear()


def place_in(folder):
    return Place("toy", None, folder / "results" / "transfer" / "toy", folder / "work")


@pytest.fixture(scope="module")
def central(tmp_path_factory):
    """A central experiment with fine-tuned teachers of seeds 0 and 1."""
    folder = tmp_path_factory.mktemp("central")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "scales", toy.known)
        run_experiment(place_in(folder), 2, ["fine-tune"])
    return folder


@pytest.fixture
def place(central, tmp_path):
    """A copy of it to work with, in `tmp_path`."""
    shutil.copytree(central, tmp_path, dirs_exist_ok=True)
    return place_in(tmp_path)


@pytest.fixture
def records(tmp_path):
    return tmp_path / "results" / "toy examination" / "toy"


def test_models_are_trained_first_and_measured_one_seed_at_a_time(place, records, tmp_path):
    paths = run_examination(EXAMINATION, place, records, 2)
    assert [path.name for path in paths] == [
        f"{name}-seed{seed}.json" for name in ("all-together", "copy-other", "scratch") for seed in (0, 1)
    ]
    assert [(seed, list(models)) for seed, models, _ in MEASURED] == [
        (0, ["scratch", "copy other"]),
        (1, ["scratch", "copy other"]),
    ]
    of_study = study_records(STUDY, place)
    assert of_study == tmp_path / "results" / "toy study" / "toy"
    for seed, models, sources in MEASURED:
        assert (sources.seed, sources.place) == (seed, place) and sources.scale is toy.TOY
        for name, model in models.items():
            assert not model.training
            file = f"{name.replace(' ', '-')}-seed{seed}"
            measured, trained = read_record(records / f"{file}.json"), read_record(of_study / f"{file}.json")
            assert (measured.experiment, measured.method, measured.seed) == ("toy examination", name, seed)
            assert (
                measured.results == {"test_loss": pytest.approx(trained.results["test_loss"], rel=1e-6)}
                and measured.history == []
            )
            assert same(
                load_file(tmp_path / "work" / "toy study" / f"{file}.safetensors"),
                dict(getattr(model, "student", model).state_dict()),
            )
    assert read_record(records / "all-together-seed0.json").results == {"models": 2}
    assert not list(of_study.glob("copy-seed*")), "the third variant was not asked for"


def test_a_seed_with_a_record_is_not_measured_again(place, records, monkeypatch):
    run_examination(EXAMINATION, place, records, 1)
    before = toy.files(records)
    run_examination(EXAMINATION, place, records, 2)
    assert [seed for seed, *_ in MEASURED] == [0, 1]
    assert {name: content for name, content in toy.files(records).items() if "seed0" in name} == before
    toy.forbid_training(monkeypatch)
    monkeypatch.setattr(evals, "trained", None)  # not even a model is loaded
    assert len(run_examination(EXAMINATION, place, records, 2)) == 6 and len(MEASURED) == 2


def test_kept_models_are_measured_without_training(place, records, monkeypatch):
    run_study(STUDY, place, study_records(STUDY, place), 1)
    toy.forbid_training(monkeypatch)
    run_examination(EXAMINATION, place, records, 1)
    ((_, models, _),) = MEASURED
    assert isinstance(models["copy other"], AttentionTransfer) and models["copy other"].plan == Plan()
    assert same(
        models["copy other"].teacher.state_dict(),
        load_vit(place.work / "teacher-other-seed0.safetensors").state_dict(),
    )


def test_only_some_methods(place, records):
    paths = run_examination(EXAMINATION, place, records, 1, ["copy"])
    assert [path.name for path in paths] == ["all-together-seed0.json", "copy-seed0.json"]
    assert [list(models) for _, models, _ in MEASURED] == [["copy"]]


def test_a_trained_model_comes_back_ready_to_be_used(place, monkeypatch):
    first = model_of(STUDY, place, "scratch", 1)
    toy.forbid_training(monkeypatch)
    again = model_of(STUDY, place, "scratch", 1)
    assert not first.training and not again.training and same(first.state_dict(), again.state_dict())
    with pytest.raises(ValueError, match="unknown method 'scrach'. Did you mean 'scratch'"):
        model_of(STUDY, place, "scrach", 1)


@pytest.mark.parametrize(
    "scale, methods, message",
    [
        ("built-in", None, "toy examination is made for the scale 'toy', not for 'built-in'"),
        ("toy", ["scratch", "copi"], "unknown method 'copi'. Did you mean 'copy'"),
    ],
)
def test_what_it_cannot_do_is_said_before_anything_is_run(tmp_path, scale, methods, message):
    place = place_in(tmp_path)._replace(scale=scale)
    with pytest.raises(ValueError, match=message):
        run_examination(EXAMINATION, place, tmp_path / "out", 1, methods)
    assert list(tmp_path.iterdir()) == []


def test_without_the_central_experiment_it_says_what_to_run(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="fine-tune is not tuned yet.*python -m atlib experiment transfer --scale toy"
    ):
        run_examination(EXAMINATION, place_in(tmp_path), tmp_path / "out", 1)


def test_a_failed_measurement_leaves_no_record(place, records):
    def fails(models, sources):
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        run_examination(replace(EXAMINATION, measure=fails), place, records, 1)
    assert not list(records.glob("*")) and model_of(STUDY, place, "scratch", 0) is not None
    assert len(run_examination(EXAMINATION, place, records, 1)) == 3


def test_a_model_that_is_measured_alone_can_be_added_later(place, records):
    alone = replace(EXAMINATION, alone=True)
    run_examination(alone, place, records, 1, ["scratch"])
    before = (records / "scratch-seed0.json").stat().st_mtime_ns
    MEASURED.clear()
    run_examination(alone, place, records, 1)
    assert [list(models) for _, models, _ in MEASURED] == [["copy other"]]
    assert (records / "scratch-seed0.json").stat().st_mtime_ns == before and (
        records / "copy-other-seed0.json"
    ).exists()
