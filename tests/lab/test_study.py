"""Studies: variants that change one thing at a time, from the recipes the central experiment chose."""

import pickle
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from atlib import AttentionTransfer
from atlib.checkpoint import load_vit
from atlib.data import glyphs
from atlib.lab import scales as schooling
from atlib.lab import study as experiment
from atlib.lab.scales import TUNING_SEED, Schooling, scales
from atlib.lab.studies import AVERAGES, DISTILLATION, FAMILY, LAYERS, PAIRS, STUDIES
from atlib.lab.study import Run, Sources, Study, Variant, by, run_experiment, run_study, scratch, trained
from atlib.plan import Plan
from atlib.record import read_record, write_record
from atlib.student import describe
from atlib.train.evaluate import evaluate
from atlib.vit import Architecture
from tests import toy
from tests.helpers import same

EVERY = [(study, variant) for study in STUDIES.values() for variant in study.variants]


def distilled(weight, sources):
    return AttentionTransfer(sources.teacher(), sources.student(), Plan(how="distill"))


LR = tuple({"lr": lr} for lr in (1e-4, 1e-2, 1e-3))
STUDY = Study(
    "toy study",
    "",
    "",
    (
        Variant("weight 7", partial(distilled, 7), "distill", {"transfer_weight": 7.0}),
        Variant(
            "two heads, tuned", Sources.student, "distill", trials=LR, student={"num_heads": 2}, labels=8
        ),
    ),
)


INVERTED = Schooling("inverted", world=glyphs.World(rendering="inverted"), changes={"steps": 1})


def two_classes(scale, seed):
    images = scale.labelled(seed)
    return images.select((images.targets < 2).nonzero().flatten())


TAUGHT = Study(
    "toy teachers",
    "",
    "",
    (
        Variant("copy", by(schooling=INVERTED), "distill"),
        Variant("two classes", scratch, "distill", images=two_classes),
    ),
    teachers=(INVERTED,),
)


@pytest.fixture(autouse=True)
def toy_scales(monkeypatch):
    monkeypatch.setattr(experiment, "scales", toy.known)


@pytest.fixture(scope="module")
def central(tmp_path_factory):
    """A central experiment in which distill and fine-tune have been tuned; the second trial was the better
    one. Seeds 0 and 1 have their models."""
    folder = tmp_path_factory.mktemp("central")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "scales", toy.known)
        run_experiment(toy.place(folder), 0, ["distill"])
        run_experiment(toy.place(folder), 2, ["fine-tune"])
    for trial in range(2):
        path = folder / "records" / "tuning" / f"distill-trial{trial}.json"
        write_record(
            path,
            replace(
                read_record(path), results={"validation_accuracy": 0.1 + 0.1 * trial, "validation_loss": 1.0}
            ),
        )
    return folder


@pytest.fixture
def tuned(central, tmp_path):
    """A copy of it to work with, in `tmp_path`."""
    shutil.copytree(central, tmp_path, dirs_exist_ok=True)
    return toy.place(tmp_path)


def test_a_study_starts_from_the_chosen_recipe(tuned, tmp_path):
    paths = run_study(STUDY, tuned, tmp_path / "study", seeds=2)
    assert [path.name for path in paths] == [
        f"{name}-seed{seed}.json" for name in ("weight-7", "two-heads,-tuned") for seed in (0, 1)
    ]
    for path in paths[:2]:
        record = read_record(path)
        recipe = record.config["recipe"]
        assert (record.experiment, record.method) == ("toy study", "weight 7")
        assert (recipe["lr"], recipe["transfer_weight"]) == (toy.TRIALS[1]["lr"], 7.0)
        assert recipe["steps"] == max(1, round(0.4 * 2)) and recipe["plan"]["how"] == "distill"
        assert set(record.results) == {"test_accuracy", "test_loss"}


def test_trials_are_chosen_on_the_validation_split_and_changes_are_recorded(tuned, tmp_path):
    toy.SPLITS.clear()
    run_study(STUDY, tuned, tmp_path / "study", seeds=1, methods=["two heads, tuned"])
    assert toy.SPLITS[:3] == ["validation"] * 3 and toy.SPLITS[3:] == ["test"]
    found = [read_record(tmp_path / "study" / "tuning" / f"two-heads,-tuned-trial{t}.json") for t in range(3)]
    assert all(record.seed == TUNING_SEED and "test_accuracy" not in record.results for record in found)
    for trial, record in enumerate(found):  # now the last one is the best
        path = tmp_path / "study" / "tuning" / f"two-heads,-tuned-trial{trial}.json"
        write_record(
            path, replace(record, results={"validation_accuracy": 0.1 * trial, "validation_loss": 1.0})
        )
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
    assert [variant.name for _, variant in pickle.loads(pickle.dumps(EVERY))] == [
        variant.name for _, variant in EVERY
    ]


def test_without_the_central_experiment_it_says_what_to_run(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="distill is not tuned yet.*python -m atlib experiment transfer --scale toy"
    ):
        run_study(STUDY, toy.place(tmp_path), tmp_path / "study", seeds=1)
    assert list(tmp_path.iterdir()) == []


def test_what_a_study_cannot_do_is_said_before_anything_is_run(tmp_path, monkeypatch):
    place = toy.place(tmp_path)
    with pytest.raises(ValueError, match="made for the scale 'built-in' .* not for 'toy'"):
        run_study(AVERAGES, place, tmp_path, seeds=1)
    with pytest.raises(ValueError, match="unknown method 'copy Q'.*Did you mean .*'copy q'"):
        run_study(FAMILY, place, tmp_path, seeds=1, methods=["copy Q"])
    unknown = Study("strange", "", "", (Variant("one", scratch, "copy-x"),))
    with pytest.raises(
        ValueError, match="starts from the recipe of 'copy-x', which the scale 'toy' does not run"
    ):
        run_study(unknown, place, tmp_path, seeds=1)
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
    weights = {
        variant.changes["transfer_weight"]
        for variant in DISTILLATION.variants
        if variant.name.startswith("weight")
    }
    for scale in scales().values():
        assert {
            trial.get("transfer_weight", scale.training.transfer_weight) for trial in scale.tuning["distill"]
        } <= weights


# --- weights that are kept, and teachers of the study's own


def test_kept_weights_give_the_recorded_figures(tuned, tmp_path, monkeypatch):
    run_study(STUDY, tuned, tmp_path / "study", seeds=1)
    kept = tmp_path / "work" / "toy study"
    assert {path.name for path in kept.iterdir()} == {
        "weight-7-seed0.safetensors",
        "two-heads,-tuned-seed0.safetensors",
    }, "none of the trials"
    toy.forbid_training(monkeypatch)
    before = toy.files(tmp_path)
    for variant in STUDY.variants:
        run = Run(STUDY, tuned, tmp_path / "study", variant.name, 0)
        model, results = trained(run), read_record(run.path).results
        found = evaluate(model, toy.TOY.held_out("test"))
        assert found.accuracy == results["test_accuracy"] and found.loss == pytest.approx(
            results["test_loss"], rel=1e-6
        )
        assert same(load_file(run.weights), dict(getattr(model, "student", model).state_dict())), (
            "the student alone"
        )
    assert toy.files(tmp_path) == before


def test_a_record_without_weights_is_left_as_it_is(tuned, tmp_path, monkeypatch):
    run = Run(STUDY, tuned, tmp_path / "study", "weight 7", 0)
    trained(run)
    weights, record = load_file(run.weights), toy.files(tmp_path / "study")
    run.weights.unlink()
    trained(run)
    assert toy.files(tmp_path / "study") == record and same(load_file(run.weights), weights)
    run.weights.unlink()
    toy.forbid_training(monkeypatch)
    run_study(
        STUDY, tuned, tmp_path / "study", seeds=1, methods=["weight 7"]
    )  # a study wants records, and they are there
    assert not run.weights.exists()


def test_weights_without_a_record_are_trained_again(tuned, tmp_path):
    run = Run(STUDY, tuned, tmp_path / "study", "weight 7", 0)
    trained(run)
    old, weights = read_record(run.path), load_file(run.weights)
    run.path.unlink()
    trained(run)
    new = read_record(run.path)
    assert (new.results, new.history, new.config) == (old.results, old.history, old.config) and same(
        load_file(run.weights), weights
    )


def test_a_teacher_of_the_study_is_made_once(tuned, tmp_path, monkeypatch):
    made, train = [], schooling.train
    monkeypatch.setattr(
        schooling,
        "train",
        lambda model, *arguments, **options: made.append(model) or train(model, *arguments, **options),
    )
    paths = run_study(TAUGHT, tuned, tmp_path / "study", seeds=1)
    weights = tmp_path / "work" / "teacher-inverted-seed0.safetensors"
    record = read_record(tmp_path / "study" / "teachers" / "inverted-seed0.json")
    assert (record.experiment, record.method, record.seed, record.config["recipe"]["steps"]) == (
        "toy teachers",
        "teacher inverted",
        0,
        1,
    )
    assert (
        set(record.results) == {"pretraining_loss"}
        and record.results["pretraining_loss"] == record.history[-1]["loss"]
    )
    expected = INVERTED.make(toy.TOY.pretraining, toy.TOY.unlabelled, 0)[0].state_dict()
    assert same(load_vit(weights).state_dict(), expected) and len(made) == 2
    model = trained(Run(TAUGHT, tuned, tmp_path / "study", "copy", 0))
    assert same(model.teacher.state_dict(), expected), "the study's teacher, not the central one"

    paths[0].unlink()
    run_study(TAUGHT, tuned, tmp_path / "study", seeds=1)
    assert paths[0].exists() and len(made) == 2, "it is there already"
    weights.unlink()
    run_study(TAUGHT, tuned, tmp_path / "study", seeds=1)
    assert len(made) == 3 and same(load_vit(weights).state_dict(), expected)


def test_images_of_its_own(tuned, tmp_path, monkeypatch):
    given, train = [], experiment.train
    monkeypatch.setattr(
        experiment,
        "train",
        lambda model, images, *rest, **options: (
            given.append(images) or train(model, images, *rest, **options)
        ),
    )
    trained(Run(TAUGHT, tuned, tmp_path / "study", "two classes", 0))
    drawn = glyphs.generate("train", 16, 0)
    assert given[0].targets.tolist() == [label for label in drawn.shape.tolist() if label < 2]
    trained(Run(STUDY, tuned, tmp_path / "study", "two heads, tuned", TUNING_SEED, trial=0))
    assert given[1].targets.tolist() == glyphs.generate("train", 8, TUNING_SEED).shape.tolist(), (
        "as many labels as the variant says"
    )


# --- the book's studies


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Untrained models for every source of every study."""
    place = toy.place(tmp_path_factory.mktemp("models"))
    toy.untrained_models(
        place, {each.name: each for study in STUDIES.values() for each in study.teachers}.values()
    )
    return place


@pytest.fixture
def sources(models):
    """What a variant is built from, at the toy scale."""
    return lambda variant: Sources(models, replace(toy.TOY, student=replace_student(variant)), 0)


def replace_student(variant):
    return toy.TOY.student._replace(overrides={**toy.TOY.student.overrides, **variant.student})


def built(student):
    """What a student is built of, by the names of timm's constructor."""
    layer_scale = getattr(student.blocks[0].ls1, "gamma", None)
    return {
        "num_heads": student.blocks[0].attn.num_heads,
        "depth": len(student.blocks),
        "embed_dim": student.embed_dim,
        "patch_size": student.patch_embed.patch_size[0],
        "init_values": None if layer_scale is None else pytest.approx(layer_scale[0].item()),
        "reg_tokens": describe(student)["registers"],
        "pre_norm": describe(student)["pre_norm"],
        "global_pool": student.global_pool,
    }


@pytest.mark.parametrize(
    "study, variant", EVERY, ids=[f"{study.name} {variant.name}" for study, variant in EVERY]
)
def test_every_variant_is_built_and_trains_one_step(sources, study, variant, monkeypatch):
    if "cell" in variant.name:  # the toy's 16 unlabelled images do not mark every cell
        monkeypatch.setattr(
            Sources, "unlabelled", lambda self: toy.glyph_images(toy.glyphs.generate("unlabelled", 200))
        )
    schooled, asked = Sources.schooled, []
    monkeypatch.setattr(
        Sources, "schooled", lambda self, schooling: asked.append(schooling) or schooled(self, schooling)
    )
    model = variant.build(sources(variant)).train()
    assert {each.name for each in asked} <= {each.name for each in study.teachers}, (
        "the study makes the teachers that it needs"
    )
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    output = model(images)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    assert logits.shape == (4, 8) and logits.isfinite().all()
    logits.sum().backward()
    student = getattr(model, "student", model)
    for name, value in variant.student.items():
        assert built(student)[name] == value


def test_plans_are_what_their_names_say(sources):
    def plan(study, name):
        variant = study.variant(name)
        return variant.build(sources(variant)).plan

    assert plan(DISTILLATION, "first half").layers == (0, 1) and plan(DISTILLATION, "last layer").layers == (
        3,
    )
    assert plan(LAYERS, "copy first 3").layers == (0, 1, 2) and plan(LAYERS, "distill last 3").layers == (
        1,
        2,
        3,
    )
    assert (
        plan(LAYERS, "distill heads 2").heads == (0, 1) and plan(LAYERS, "distill heads 2").how == "distill"
    )
    assert (plan(FAMILY, "copy k").what, plan(FAMILY, "distill v").what, plan(FAMILY, "distill v").how) == (
        "k",
        "v",
        "distill",
    )
    assert plan(AVERAGES, "copy mean of queries").average == "queries"
    assert plan(PAIRS, "two heads, distill learn").unequal_heads == "learn"
    assert plan(PAIRS, "shallow, copy last layers").layers == ((0, 2), (1, 3))


def test_mix_and_match_starts_from_the_other_teachers_weights(sources):
    variant = FAMILY.variant("copy into another teacher's weights")
    model = variant.build(sources(variant))
    weights = [
        vit.blocks[0].mlp.fc1.weight
        for vit in (model.student, sources(variant).another_teacher(), sources(variant).teacher())
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert (
        all(parameter.requires_grad for parameter in model.student.parameters())
        and model.student.head.out_features == 8
    )


def test_only_the_models_that_variants_need_are_made(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr("atlib.lab.study.make_teacher", lambda place, seed: made.append(("teacher", seed)))
    monkeypatch.setattr(
        "atlib.lab.study.make_fine_tuned", lambda place, seed: made.append(("fine-tuned", seed))
    )
    monkeypatch.setattr("atlib.lab.study.chosen", lambda place, method: 0)
    from atlib.lab.study import make_models

    def wanted(*names):
        made.clear()
        make_models(
            FAMILY, [FAMILY.variant(name) for name in names], toy.place(tmp_path), tmp_path, [0, 1], 1
        )
        return made

    assert wanted("copy") == [("teacher", 0), ("teacher", 1)]
    assert wanted("copy into another teacher's weights") == [
        ("teacher", 0),
        ("teacher", 1),
        ("teacher", TUNING_SEED),
    ]
    assert wanted("soft predictions") == [
        ("teacher", 0),
        ("teacher", 1),
        ("fine-tuned", 0),
        ("fine-tuned", 1),
    ]


def test_variants_name_the_models_that_they_are_built_from(tmp_path):
    place = toy.place(tmp_path)
    toy.untrained_models(place, [schooling for study in STUDIES.values() for schooling in study.teachers])
    for study, variant in EVERY:
        asked = set()

        class TrainRequest(Sources):
            def fine_tuned(self):
                asked.add("fine-tuned")
                return super().fine_tuned()

            def another_teacher(self):
                asked.add("another teacher")
                return super().another_teacher()

        student = Architecture("glyphs", variant.student)
        variant.build(TrainRequest(place, replace(toy.TOY, student=student, unlabelled=400), 0))
        assert asked == set(variant.needs), (study.name, variant.name)


def test_a_scale_with_one_recipe_a_method_tunes_no_study(tmp_path):
    one = replace(toy.TOY, tuning={method: ({"lr": 3e-3},) for method in toy.TOY.tuning}, study_share=1.0)
    toy.untrained_models(toy.place(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "scales", lambda data=None: {"toy": one})
        run_study(STUDY, toy.place(tmp_path), tmp_path / "study", seeds=1, methods=["two heads, tuned"])
    assert not (tmp_path / "study" / "tuning").exists()
    recipe = read_record(tmp_path / "study" / "two-heads,-tuned-seed0.json").config["recipe"]
    assert (recipe["lr"], recipe["steps"]) == (3e-3, one.training.steps)
