"""Studies: variants that change one thing at a time, from the recipes the central experiment chose."""

import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch

from atlib import AttentionTransfer, experiment
from atlib.experiment import run_experiment
from atlib.plan import Plan
from atlib.record import read_record, write_record
from atlib.scales import TUNING_SEED, scales
from atlib.studies import AVERAGES, DISTILLATION, FAMILY, LAYERS, PAIRS, STUDIES
from atlib.study import STEPS_SHARE, Sources, Study, Variant, run_study
from tests import toy

EVERY = [(study, variant) for study in STUDIES.values() for variant in study.variants]


def distilled(weight, sources):
    return AttentionTransfer(sources.teacher(), sources.student(), Plan(how="distill"))


LR = tuple({"lr": lr} for lr in (1e-4, 1e-2, 1e-3))
STUDY = Study("toy study", "", "", (
    Variant("weight 7", partial(distilled, 7), "distill", {"transfer_weight": 7.0}),
    Variant("two heads, tuned", Sources.student, "distill", trials=LR, student={"num_heads": 2}, labels=8),
))


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A central experiment in which distill and fine-tune have been tuned; the second trial was the better one."""
    monkeypatch.setattr(experiment, "scales", toy.known)
    run_experiment(toy.place(tmp_path), 0, ["distill", "fine-tune"])
    for trial in range(2):
        path = tmp_path / "records" / "tuning" / f"distill-trial{trial}.json"
        write_record(path, replace(read_record(path), results={"validation_accuracy": 0.1 + 0.1 * trial, "validation_loss": 1.0}))
    return toy.place(tmp_path)


def test_a_study_starts_from_the_chosen_recipe(tuned, tmp_path):
    paths = run_study(STUDY, tuned, tmp_path / "study", seeds=2)
    assert [path.name for path in paths] == [f"{name}-seed{seed}.json" for name in ("weight-7", "two-heads,-tuned") for seed in (0, 1)]
    for path in paths[:2]:
        record = read_record(path)
        recipe = record.config["recipe"]
        assert (record.experiment, record.method) == ("toy study", "weight 7")
        assert (recipe["lr"], recipe["transfer_weight"]) == (toy.TRIALS[1]["lr"], 7.0)
        assert recipe["steps"] == max(1, round(STEPS_SHARE * 2)) and recipe["plan"]["how"] == "distill"
        assert set(record.results) == {"test_accuracy", "test_loss"}


def test_trials_are_chosen_on_the_validation_split_and_changes_are_recorded(tuned, tmp_path):
    run_experiment(tuned, 1, ["fine-tune"])  # what the study takes from the central experiment is there already
    toy.SPLITS.clear()
    run_study(STUDY, tuned, tmp_path / "study", seeds=1, methods=["two heads, tuned"])
    assert toy.SPLITS[:3] == ["validation"] * 3 and toy.SPLITS[3:] == ["test"]
    found = [read_record(tmp_path / "study" / "tuning" / f"two-heads,-tuned-trial{t}.json") for t in range(3)]
    assert all(record.seed == TUNING_SEED and "test_accuracy" not in record.results for record in found)
    for trial, record in enumerate(found):  # now the last one is the best
        path = tmp_path / "study" / "tuning" / f"two-heads,-tuned-trial{trial}.json"
        write_record(path, replace(record, results={"validation_accuracy": 0.1 * trial, "validation_loss": 1.0}))
    report = tmp_path / "study" / "two-heads,-tuned-seed0.json"
    report.unlink()
    run_study(STUDY, tuned, tmp_path / "study", seeds=1, methods=["two heads, tuned"])
    record = read_record(report)
    assert record.config["recipe"]["lr"] == LR[2]["lr"] and record.config["labels"] == 8
    assert record.config["student"]["overrides"] == {"num_heads": 2}


def test_running_again_does_nothing(tuned, tmp_path, monkeypatch):
    run_study(STUDY, tuned, tmp_path / "study", seeds=1)
    toy.forbid_training(monkeypatch)
    before = toy.files(tmp_path)
    run_study(STUDY, tuned, tmp_path / "study", seeds=1)
    assert toy.files(tmp_path) == before


def test_variants_can_travel_to_other_processes():
    assert [variant.name for _, variant in pickle.loads(pickle.dumps(EVERY))] == [variant.name for _, variant in EVERY]


def test_without_the_central_experiment_it_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "scales", toy.known)
    with pytest.raises(FileNotFoundError, match="distill is not tuned yet.*python -m atlib experiment transfer --scale toy"):
        run_study(STUDY, toy.place(tmp_path), tmp_path / "study", seeds=1)
    assert list(tmp_path.iterdir()) == []


def test_what_a_study_cannot_do_is_said_before_anything_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "scales", toy.known)
    place = toy.place(tmp_path)
    with pytest.raises(ValueError, match="made for the scale 'built-in' .* not for 'toy'"):
        run_study(AVERAGES, place, tmp_path, seeds=1)
    with pytest.raises(ValueError, match="unknown method 'copy Q'.*Did you mean .*'copy q'"):
        run_study(FAMILY, place, tmp_path, seeds=1, methods=["copy Q"])
    with pytest.raises(ValueError, match="starts from the recipe of 'copy-fine-tuned', which the scale 'cifar10-smoke' does not run"):
        monkeypatch.setattr(experiment, "scales", scales)
        run_study(FAMILY, place._replace(scale="cifar10-smoke"), tmp_path, seeds=1, methods=["copy fine-tuned"])
    assert list(tmp_path.iterdir()) == []


def test_names_are_distinct_and_recipes_valid():
    for study in STUDIES.values():
        names = [variant.name for variant in study.variants]
        assert len(set(names)) == len(names) and study.seeds >= 3
    for _, variant in EVERY:
        scale = scales()["built-in"]
        for trial in variant.trials or ({},):
            scale.recipe(variant.changes | trial)  # raises where a value cannot be meant
        assert variant.like in scale.tuning


def test_the_sweep_over_weights_has_every_weight_that_can_be_chosen():
    weights = {variant.changes["transfer_weight"] for variant in DISTILLATION.variants if variant.name.startswith("weight")}
    for scale in scales().values():
        assert {trial.get("transfer_weight", scale.training.transfer_weight) for trial in scale.tuning["distill"]} <= weights


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Toy models for every source, and the scale at hand."""
    monkeypatch.setattr(experiment, "scales", toy.known)
    place = toy.place(tmp_path)
    run_experiment(place, 1, ["fine-tune"])
    return lambda variant: Sources(place, replace(toy.TOY, student=replace_student(variant)), 0)


def replace_student(variant):
    return toy.TOY.student._replace(overrides={**toy.TOY.student.overrides, **variant.student})


@pytest.mark.parametrize("study, variant", EVERY, ids=[f"{study.name} {variant.name}" for study, variant in EVERY])
def test_every_variant_is_built_and_trains_one_step(sources, study, variant, monkeypatch):
    if "cell" in variant.name:  # the toy's 16 unlabelled images do not mark every cell
        monkeypatch.setattr(Sources, "unlabelled", lambda self: toy.glyph_images(toy.glyphs.generate("unlabelled", 200)))
    model = variant.build(sources(variant)).train()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    output = model(images)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    assert logits.shape == (4, 8) and logits.isfinite().all()
    logits.sum().backward()
    student = getattr(model, "student", model)
    for name, value in variant.student.items():
        found = {"num_heads": student.blocks[0].attn.num_heads, "depth": len(student.blocks), "embed_dim": student.embed_dim,
                 "patch_size": student.patch_embed.patch_size[0]}[name]
        assert found == value


def test_plans_are_what_their_names_say(sources):
    def plan(study, name):
        variant = study.variant(name)
        return variant.build(sources(variant)).plan

    assert plan(DISTILLATION, "first half").layers == (0, 1) and plan(DISTILLATION, "last layer").layers == (3,)
    assert plan(LAYERS, "copy first 3").layers == (0, 1, 2) and plan(LAYERS, "distill last 3").layers == (1, 2, 3)
    assert plan(LAYERS, "distill heads 2").heads == (0, 1) and plan(LAYERS, "distill heads 2").how == "distill"
    assert (plan(FAMILY, "copy k").what, plan(FAMILY, "distill v").what, plan(FAMILY, "distill v").how) == ("k", "v", "distill")
    assert plan(AVERAGES, "copy mean of queries").average == "queries"
    assert plan(PAIRS, "two heads, distill learn").unequal_heads == "learn"
    assert plan(PAIRS, "shallow, copy last layers").layers == ((0, 2), (1, 3))


def test_mix_and_match_starts_from_the_other_teachers_weights(sources):
    variant = FAMILY.variant("copy into another teacher's weights")
    model = variant.build(sources(variant))
    weights = [vit.blocks[0].mlp.fc1.weight for vit in (model.student, sources(variant).another_teacher(), sources(variant).teacher())]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert all(parameter.requires_grad for parameter in model.student.parameters()) and model.student.head.out_features == 8
