"""The central experiment: tuned on validation images, reported on test images, repeatable, and resumed where
it stopped."""

import shutil
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from atlib import AttentionTransfer
from atlib.checkpoint import load_vit
from atlib.lab import study
from atlib.lab.scales import METHODS, TUNING_SEED, CifarScale, grid, scales
from atlib.lab.study import (
    Job,
    Place,
    build_student,
    chosen,
    make_teacher,
    run_each,
    run_experiment,
    scale_of,
)
from atlib.record import read_record, write_record
from atlib.train import recipe
from atlib.train.evaluate import evaluate
from atlib.train.pretrain import retrieval_model
from atlib.vit import Architecture
from tests import toy
from tests.helpers import mark, randomise, same, state_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole experiment, one seed: its folder, the paths it returned, and the splits it asked for, in
    order."""
    folder = tmp_path_factory.mktemp("experiment")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "scales", toy.known)
        toy.SPLITS.clear()
        paths = run_experiment(toy.place(folder), 1, list(METHODS))
    return folder, paths, list(toy.SPLITS)


@pytest.fixture(autouse=True)
def toy_scales(monkeypatch):
    monkeypatch.setattr(study, "scales", toy.known)


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished experiment to change."""
    shutil.copytree(finished[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_every_method_leaves_a_record(finished):
    folder, paths, _ = finished
    assert sorted(path.stem for path in paths) == sorted(f"{method}-seed0" for method in METHODS)
    for path in paths:
        record = read_record(path)
        assert record.experiment == "transfer" and f"{record.method}-seed{record.seed}" == path.stem
        assert (
            set(record.results) == {"test_accuracy", "test_loss"}
            and 0 <= record.results["test_accuracy"] <= 1
        )
        assert record.config["labels"] == 16 and record.config["student"] == {
            "name": "glyphs",
            "overrides": {},
        }
        assert (
            record.config["recipe"]["steps"] == 2 and record.history[-1]["step"] == 2 and record.seconds > 0
        )
    teachers = {"teacher-seed0", f"teacher-seed{TUNING_SEED}"}
    assert {path.stem for path in (folder / "records").glob("*.json")} == {
        path.stem for path in paths
    } | teachers
    assert read_record(folder / "records" / "teacher-seed0.json").results["pretraining_loss"] > 0


def test_every_method_has_the_same_number_of_trials(finished):
    folder, _, _ = finished
    names = {path.stem for path in (folder / "records" / "tuning").glob("*.json")}
    assert names == {f"{method}-trial{trial}" for method in METHODS for trial in range(2)}
    for name in names:
        record = read_record(folder / "records" / "tuning" / f"{name}.json")
        assert record.seed == TUNING_SEED and set(record.results) == {
            "validation_accuracy",
            "validation_loss",
        }
        assert record.config["recipe"]["lr"] == toy.TRIALS[int(name[-1])]["lr"]


def test_reported_runs_use_the_recipe_that_was_best_on_validation(finished):
    folder, paths, _ = finished
    for path in paths:
        record = read_record(path)
        scores = [
            read_record(folder / "records" / "tuning" / f"{record.method}-trial{t}.json").results[
                "validation_accuracy"
            ]
            for t in range(2)
        ]
        assert record.config["recipe"]["lr"] == toy.TRIALS[scores.index(max(scores))]["lr"]


def test_only_reported_runs_meet_test_images(finished):
    """Fine-tuning goes first: its trials, its run; then the trials of all others, then their runs."""
    others = len(METHODS) - 1
    assert finished[2] == ["validation"] * 2 + ["test"] + ["validation"] * 2 * others + ["test"] * others


def test_tuning_needs_no_test_image(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        toy.ToyScale,
        "held_out",
        lambda self, split: asked.append(split) or toy.glyph_images(toy.glyphs.generate(split, 40)),
    )
    assert run_experiment(toy.place(tmp_path), 0, ["copy"]) == []
    assert asked == ["validation", "validation"]
    assert not (tmp_path / "records" / "teacher-seed0.json").exists()


def test_the_best_trial_is_chosen_and_the_first_of_equals(copied):
    path = copied / "records" / "tuning"

    def score(*values):
        for trial, value in enumerate(values):
            record = read_record(path / f"copy-trial{trial}.json")
            # The loss says the opposite: it must not decide.
            write_record(
                path / f"copy-trial{trial}.json",
                replace(record, results={"validation_accuracy": value, "validation_loss": value}),
            )
        return chosen(toy.place(copied), "copy")

    assert (score(0.2, 0.3), score(0.3, 0.2), score(0.3, 0.3)) == (1, 0, 0)
    (path / "copy-trial1.json").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"copy is not tuned yet, .*copy-trial1.json does not exist: run `python -m atlib",
    ):
        chosen(toy.place(copied), "copy")


def test_running_again_does_nothing(copied, monkeypatch):
    toy.forbid_training(monkeypatch)
    before = toy.files(copied)
    assert len(before) > 20
    paths = run_experiment(toy.place(copied), 1, list(METHODS))
    assert toy.files(copied) == before and all(path.exists() for path in paths)


@pytest.mark.parametrize(
    "gone",
    ["records/copy-seed0.json", "records/tuning/distill-trial1.json", "work/fine-tune-seed0.safetensors"],
)
def test_what_is_missing_is_made_again_the_same_and_nothing_else(copied, gone):
    before = toy.files(copied)
    old = read_record(copied / gone) if gone.endswith(".json") else load_vit(copied / gone).state_dict()
    (copied / gone).unlink()
    run_experiment(toy.place(copied), 1, list(METHODS))
    after = toy.files(copied)
    changed = {name for name, content in after.items() if before[name] != content}
    students = {name for name in changed if name.startswith("work/transfer/")}
    assert gone in changed and changed - students <= {gone, "records/fine-tune-seed0.json"}
    assert all(before[name][1] == after[name][1] for name in students), "a student is written again, the same"
    if gone.endswith(".json"):
        new = read_record(copied / gone)
        assert (new.results, new.history, new.config) == (old.results, old.history, old.config)
    else:
        assert same(load_vit(copied / gone).state_dict(), old)


def test_an_interrupted_experiment_goes_on(finished, tmp_path, monkeypatch):
    train, left = study.train, [2]

    def interrupted(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return train(*arguments, **options)

    monkeypatch.setattr(study, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(toy.place(tmp_path), 1, ["scratch", "copy"])
    half = toy.files(tmp_path)
    assert len([name for name in half if "trial" in name]) == 2
    monkeypatch.setattr(study, "train", train)
    paths = run_experiment(toy.place(tmp_path), 1, ["scratch", "copy"])
    after = toy.files(tmp_path)
    assert all(after[name] == content for name, content in half.items())
    for path in paths:  # and comes to what an experiment comes to that was not interrupted
        assert read_record(path).results == read_record(finished[0] / "records" / path.name).results
    assert not [name for name in after if "tmp" in name]


def test_copy_fine_tuned_takes_its_own_seeds_fine_tuned_teacher(copied, monkeypatch):
    """In tuning: the chosen trial's; in a reported run: the reported run's."""
    taken, build = {}, study.build_student

    def spy(method, teacher, fine_tuned, architecture, seed):
        taken[seed] = (state_of(teacher), state_of(fine_tuned))
        return build(method, teacher, fine_tuned, architecture, seed)

    monkeypatch.setattr(study, "build_student", spy)
    for path in (copied / "records").rglob("copy-fine-tuned*.json"):
        path.unlink()
    run_experiment(toy.place(copied), 1, ["copy-fine-tuned"])
    best = chosen(toy.place(copied), "fine-tune")
    for seed, name in ((0, "fine-tune-seed0"), (TUNING_SEED, f"tuning-fine-tune-trial{best}")):
        assert same(
            taken[seed][0], load_vit(copied / "work" / f"teacher-seed{seed}.safetensors").state_dict()
        )
        assert same(taken[seed][1], load_vit(copied / "work" / f"{name}.safetensors").state_dict())


def test_unknown_names_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="unknown method 'copi'. Did you mean 'copy'"):
        run_experiment(toy.place(tmp_path), 1, ["scratch", "copi"])
    with pytest.raises(ValueError, match="unknown scale 'toi'. Did you mean 'toy'"):
        run_experiment(toy.place(tmp_path)._replace(scale="toi"), 1, ["scratch"])
    assert list(tmp_path.iterdir()) == []


def test_students_start_from_what_their_method_says():
    teacher, fine_tuned = randomise(retrieval_model(), 1), randomise(Architecture("glyphs").build(), 2)
    before = state_of(teacher)
    built = {
        method: build_student(method, teacher, fine_tuned, Architecture("glyphs"), 7) for method in METHODS
    }
    pairs = {method: student for method, student in built.items() if method not in ("scratch", "fine-tune")}
    assert all(isinstance(pair, AttentionTransfer) for pair in pairs.values())
    for pair in pairs.values():  # one seed, one initialisation, whatever the method
        assert same(pair.student.state_dict(), built["scratch"].state_dict())
    assert {method: pair.plan.how for method, pair in pairs.items()} == {
        "copy": "copy",
        "copy-q": "copy",
        "copy-untrained": "copy",
        "copy-fine-tuned": "copy",
        "distill": "distill",
    }
    assert {method: pair.plan.what for method, pair in pairs.items() if pair.plan.what != "map"} == {
        "copy-q": "q"
    }
    assert all(pair.layers == (0, 1, 2, 3) for pair in pairs.values())
    assert same(pairs["copy"].teacher.state_dict(), before) and same(
        pairs["distill"].teacher.state_dict(), before
    )
    assert same(pairs["copy-fine-tuned"].teacher.state_dict(), fine_tuned.state_dict())
    untrained = pairs["copy-untrained"].teacher.state_dict()
    for other in (before, built["scratch"].state_dict()):
        assert not torch.equal(untrained["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])
    tuned = built["fine-tune"]
    assert all(
        torch.equal(value, before[name])
        for name, value in tuned.state_dict().items()
        if not name.startswith("head")
    )
    assert tuned.head.out_features == 8 and all(p.requires_grad for p in tuned.parameters())
    assert same(teacher.state_dict(), before) and all(p.requires_grad for p in teacher.parameters()), (
        "the teacher is copied, not taken"
    )
    assert not same(
        build_student("scratch", teacher, None, Architecture("glyphs"), 8).state_dict(),
        built["scratch"].state_dict(),
    )
    with pytest.raises(ValueError, match="run the method 'fine-tune' first"):
        build_student("copy-fine-tuned", teacher, None, Architecture("glyphs"), 7)
    with pytest.raises(ValueError, match="unknown method 'copi'"):
        build_student("copi", teacher, None, Architecture("glyphs"), 7)


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
    paths = run_experiment(place, 1, list(cifar.methods))
    written = {str(path.relative_to(place.records)) for path in place.records.rglob("*")}
    assert written == {"copy-seed0.json", "scratch-seed0.json", "teacher-seed0.json"}
    assert chosen(place, "copy") == 0 and scale_of(place) is cifar
    accuracy = read_record(paths[0]).results["test_accuracy"]
    assert accuracy * 8 == int(accuracy * 8), "eight test images"
    assert (
        len(cifar.held_out("validation")) == 5
        and cifar.labelled(0).augment is not None
        and cifar.held_out("test").augment is None
    )


def test_a_teacher_is_kept_with_its_weights(tmp_path):
    make_teacher(toy.place(tmp_path), 3)
    teacher = load_vit(tmp_path / "work" / "teacher-seed3.safetensors")
    assert teacher.head.out_features == 192
    assert same(teacher.state_dict(), toy.TOY.make_teacher(3)[0].state_dict()), (
        "the same seed, the same teacher"
    )
    assert not same(teacher.state_dict(), toy.TOY.make_teacher(4)[0].state_dict())


def test_fine_tuned_weights_are_those_that_were_evaluated(finished):
    folder, _, _ = finished
    found = evaluate(load_vit(folder / "work" / "fine-tune-seed0.safetensors"), toy.TOY.held_out("test"))
    assert found.accuracy == read_record(folder / "records" / "fine-tune-seed0.json").results["test_accuracy"]


def test_jobs_have_names_for_their_files():
    assert (
        Job("copy", 3, None).name == "copy-seed3" and Job("copy", TUNING_SEED, 2).name == "tuning/copy-trial2"
    )
    assert Place("s", None, "r", "w").work == "w"


def test_runs_side_by_side_use_one_thread_each(tmp_path):
    run_each(mark, [(tmp_path, name) for name in "ab"], jobs=2)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "1", "b": "1"}


def test_the_first_failure_ends_it_all(tmp_path):
    with pytest.raises(ValueError, match="a bad one"):
        run_each(mark, [(tmp_path, "a"), (tmp_path, "bad"), (tmp_path, "b")], jobs=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
