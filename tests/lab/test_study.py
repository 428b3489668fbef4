"""Studies: tuned on validation images, reported on test images, repeatable, resumed where they stopped."""

import shutil
import signal
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from atbook.lab import scales as schooling
from atbook.lab import study as runner
from atbook.lab.scales import CENTRAL_METHODS, TUNING_SEED, Schooling
from atbook.lab.study import (
    CENTRAL,
    Run,
    Sources,
    Study,
    Variant,
    built_on,
    by,
    chosen,
    fine_tuning,
    make_teacher,
    run_each,
    run_study,
    scratch,
    trained,
)
from atbook.lab.tuning import Range
from atbook.records import add_record, read_file
from atbook.worlds import glyphs
from atlib import AttentionTransfer
from atlib.checkpoint import load_vit
from atlib.evaluate import evaluate
from atlib.plan import Plan
from tests import toy
from tests.helpers import alive, forkserver, made_once, mark, same, until, wait


def distilled(sources):
    return AttentionTransfer(sources.teacher(), sources.student(), Plan(how="distill"))


def two_classes(scale, seed):
    images = scale.labelled(seed)
    return images.select((images.targets < 2).nonzero().flatten())


LR = tuple({"lr": lr} for lr in (1e-4, 1e-2, 1e-3))
INVERTED = Schooling("inverted", world=glyphs.World(rendering="inverted"), changes={"steps": 1})
STUDY = Study(
    "toy study",
    (
        Variant("weight 7", distilled, "distill", {"transfer_weight": 7.0}),
        Variant("tuned", Sources.student, "distill", trials=LR, student={"num_heads": 2}, labels=8),
    ),
)
TAUGHT = Study(
    "toy teachers",
    (
        Variant("copy", by(), "distill", schooling=INVERTED),
        Variant("two classes", scratch, "distill", images=two_classes),
        Variant("inverted", scratch, "distill", world=INVERTED.world),
    ),
)


@pytest.fixture(autouse=True)
def toy_scales(monkeypatch):
    monkeypatch.setattr(runner, "scales", toy.known)
    toy.few_held_out(monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The whole central experiment, one seed: its place, and the records it returned."""

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "scales", toy.known)
            toy.few_held_out(patch)
            return run_study(CENTRAL, toy.place(folder), 1)

    folder, records = made_once(tmp_path_factory, "experiment", make)
    return toy.place(folder), records


@pytest.fixture
def place(finished, tmp_path):
    """A copy of it to work with, in `tmp_path`; of distill the second trial was the better one."""
    shutil.copytree(finished[0].work.parent, tmp_path, dirs_exist_ok=True)
    place = toy.place(tmp_path)
    score(place, CENTRAL, "distill", 0.1, 0.2)
    record = Run(CENTRAL, place, "distill", 0).record()  # as if it had been run with the better one
    config = record.config | {"recipe": record.config["recipe"] | toy.TRIALS[1]}
    add_record(place.records(CENTRAL.name), replace(record, config=config))
    return place


def found(place, study=CENTRAL):
    return {record.key: record for record in read_file(place.records(study.name))}


def score(place, study, method, *values):
    """Give a method's trials other accuracies; the loss says the opposite, and must not decide."""
    for trial, value in enumerate(values):
        record = Run(study, place, method, TUNING_SEED, trial).record()
        results = {"validation_accuracy": value, "validation_loss": value}
        add_record(place.records(study.name), replace(record, results=results))


def forget(place, study, *keys):
    """Take the records with these keys out of their file."""
    path = place.records(study.name)
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line, record in zip(lines, read_file(path), strict=True) if record.key not in keys]
    assert len(kept) == len(lines) - len(keys)
    path.write_bytes(b"".join(kept))


# --- The central experiment


def test_every_method_leaves_a_record(finished):
    place, records = finished
    assert [(r.kind, r.method, r.seed) for r in records] == [("run", method, 0) for method in CENTRAL_METHODS]
    for record in records:
        assert record.experiment == "transfer" and record.seconds > 0
        assert set(record.results) == {"test_accuracy", "test_loss", "test_right"}
        assert record.config["labels"] == 16
        assert record.config["recipe"]["steps"] == 2 == record.history[-1]["step"]
    teachers = {("teacher", "teacher", seed, None) for seed in (0, TUNING_SEED)}
    trials = {("trial", method, TUNING_SEED, trial) for method in CENTRAL_METHODS for trial in range(2)}
    assert set(found(place)) == {record.key for record in records} | teachers | trials
    assert found(place)["teacher", "teacher", 0, None].results["pretraining_loss"] > 0


def test_the_best_trial_is_chosen_and_the_first_of_equals(place):
    for values, best in (((0.2, 0.3), 1), ((0.3, 0.2), 0), ((0.3, 0.3), 0)):
        score(place, CENTRAL, "copy", *values)
        assert chosen(place, "copy") == best
    forget(place, CENTRAL, ("trial", "copy", TUNING_SEED, 1))
    with pytest.raises(FileNotFoundError, match="copy .*toy.jsonl .* 1 .* experiment transfer --scale toy`"):
        chosen(place, "copy")


def test_a_teacher_of_fewer_images_is_not_taken_for_one_of_more(place, monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "scales", lambda data=None: {"toy": replace(toy.TOY, unlabelled=48)})
    before = toy.files(tmp_path)
    with pytest.raises(ValueError, match="seed 0, learned from 16 images, not 48: move .*teacher-seed0"):
        make_teacher(place, 0)
    assert toy.files(tmp_path) == before


@pytest.mark.parametrize("gone", [("run", "copy", 0, None), ("trial", "distill", TUNING_SEED, 1), None])
def test_what_is_missing_is_made_again_the_same_and_nothing_else(finished, tmp_path, gone):
    shutil.copytree(finished[0].work.parent, tmp_path, dirs_exist_ok=True)
    place = toy.place(tmp_path)
    before, weights = found(place), toy.files(place.work)
    if gone:
        forget(place, CENTRAL, gone)
    else:
        fine_tuning(place, 0).weights.unlink()
        forget(place, CENTRAL, ("run", "copy-fine-tuned", 0, None))
    run_study(CENTRAL, place, 1)
    after = found(place)
    assert set(after) == set(before)
    for key, record in after.items():
        old = before[key]
        assert (record.results, record.history, record.config) == (old.results, old.history, old.config)
        assert record == old or key == gone or key[1] == "copy-fine-tuned"
    now = toy.files(place.work)
    assert now.keys() == weights.keys() and all(now[name][1] == weights[name][1] for name in now)


def test_an_interrupted_study_goes_on(finished, tmp_path, monkeypatch):
    train, left = runner.train, [2]

    def interrupted(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return train(*arguments, **options)

    place = toy.place(tmp_path)
    monkeypatch.setattr(runner, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(CENTRAL, place, 1, ["scratch", "copy"])
    half = found(place)
    assert sum(kind == "trial" for kind, *_ in half) == 2
    monkeypatch.setattr(runner, "train", train)
    for record in run_study(CENTRAL, place, 1, ["scratch", "copy"]):
        assert record.results == found(finished[0])[record.key].results, "as if it had not been interrupted"
    assert half.items() <= found(place).items()
    assert not [name for name in toy.files(tmp_path) if "tmp" in name]


# --- A study that starts from it


def test_trials_of_a_study_are_chosen_on_the_validation_split(place):
    toy.SPLITS.clear()
    run_study(STUDY, place, 1, ["tuned"])
    assert toy.SPLITS == ["validation"] * 3 + ["test"]
    score(place, STUDY, "tuned", 0.0, 0.1, 0.2)  # now the last one is the best
    forget(place, STUDY, ("run", "tuned", 0, None))
    (record,) = run_study(STUDY, place, 1, ["tuned"])
    assert record.config["recipe"]["lr"] == LR[2]["lr"] and record.config["labels"] == 8
    assert record.config["student"]["overrides"] == {"num_heads": 2}


# --- Weights that are kept, teachers and images of the study's own


def test_kept_weights_give_the_recorded_figures(place, tmp_path, monkeypatch):
    run_study(STUDY, place, 1)
    kept = {path.name for path in (place.work / "toy study").iterdir()}
    assert kept == {"weight-7-seed0.safetensors", "tuned-seed0.safetensors"}, "none of the trials"
    toy.forbid_training(monkeypatch)
    before = toy.files(tmp_path)
    for study, method in ((STUDY, "weight 7"), (STUDY, "tuned"), (CENTRAL, "fine-tune"), (CENTRAL, "copy")):
        run = Run(study, place, method, 0)
        model, results = trained(run), run.record().results
        again = evaluate(model, toy.TOY.held_out("test"))
        assert again.accuracy == results["test_accuracy"]
        assert again.loss == pytest.approx(results["test_loss"], rel=1e-6)
        student = getattr(model, "student", model)
        assert same(load_file(run.weights), dict(student.state_dict())), "the student alone"
    assert toy.files(tmp_path) == before


def test_records_and_weights_are_made_again_when_either_is_asked_for(place, monkeypatch):
    run = Run(STUDY, place, "weight 7", 0)
    trained(run)
    weights, record = load_file(run.weights), run.record()
    run.weights.unlink()
    trained(run)
    assert run.record() == record and same(load_file(run.weights), weights)
    forget(place, STUDY, run.key)
    trained(run)
    again = run.record()
    assert (again.results, again.history, again.config) == (record.results, record.history, record.config)
    run.weights.unlink()
    toy.forbid_training(monkeypatch)
    assert run_study(STUDY, place, 1, ["weight 7"]) == [again], "a study wants records, and they are there"
    assert not run.weights.exists()


def test_a_teacher_of_the_study_is_made_once(place, monkeypatch):
    made, train = [], schooling.train
    monkeypatch.setattr(schooling, "train", lambda *of, **options: made.append(of) or train(*of, **options))
    run_study(TAUGHT, place, 1)
    record = found(place, TAUGHT)["teacher", "teacher inverted", 0, None]
    assert record.experiment == "toy teachers" and record.config["recipe"]["steps"] == 1
    last = record.history[-1]
    assert record.results == {"pretraining_loss": last["loss"], "unlearned": last["unlearned"]}
    expected = INVERTED.make(toy.TOY.pretraining, toy.TOY.unlabelled, 0)[0].state_dict()
    weights = place.teacher(0, INVERTED)
    assert same(load_vit(weights).state_dict(), expected) and len(made) == 2
    model = trained(Run(TAUGHT, place, "copy", 0))
    assert same(model.teacher.state_dict(), expected), "the study's teacher, not the central one"
    forget(place, TAUGHT, ("run", "copy", 0, None))
    assert len(run_study(TAUGHT, place, 1)) == 3 and len(made) == 2, "it is there already"
    weights.unlink()
    run_study(TAUGHT, place, 1)
    assert len(made) == 2, "whose students are all recorded is not made again"
    forget(place, TAUGHT, ("run", "copy", 0, None))
    run_study(TAUGHT, place, 1)
    assert len(made) == 3 and same(load_vit(weights).state_dict(), expected)


def squared_loss(model, images, labels, recipe):
    return model(images).square().mean()


def head_of(sources):
    """A student that starts with the head of what the variant "first" has trained."""
    student = sources.student()
    student.head.load_state_dict(sources.model_of(BUILT_ON, "first").head.state_dict())
    return student.requires_grad_(True)


BUILT_ON = Study(
    "toy built on",
    (
        Variant("second", head_of, "distill", trials=LR[:2], needs=("first",)),
        Variant("first", scratch, "distill", trials=LR[:2], loss=squared_loss),
    ),
)


def test_a_variant_that_others_are_built_on_is_run_first(place, monkeypatch):
    """Tuned, then trained; the weights of its trials are kept, because trials of others start from them."""
    order, make, load = [], runner.make_run, runner.load_weights
    monkeypatch.setattr(runner, "make_run", lambda run: order.append((run.method, run.seed)) or make(run))
    asked = []
    monkeypatch.setattr(runner, "load_weights", lambda path, vit: asked.append(path.name) or load(path, vit))
    (record,) = run_study(BUILT_ON, place, 1, ["second"])
    assert record.method == "second"
    names = [method for method, _ in order]
    assert names == ["first"] * 3 + ["second"] * 3
    best = f"first-trial{chosen(place, 'first', BUILT_ON)}"
    assert [name.split(".")[0] for name in asked if name.startswith("first")] == [best, best, "first-seed0"]
    kept = {path.stem for path in (place.work / BUILT_ON.name).iterdir()}
    assert kept == {"first-trial0", "first-trial1", "first-seed0", "second-seed0"}
    built_on(BUILT_ON, place, "first", 0).weights.unlink()  # thrown away with the work folder
    forget(place, BUILT_ON, ("run", "second", 0, None))
    order.clear()
    (again,) = run_study(BUILT_ON, place, 1, ["second"])
    assert [method for method, _ in order] == ["first", "second"] and again.results == record.results


# --- Side by side


def test_runs_side_by_side_leave_all_their_records(finished, tmp_path):
    """Two processes write into one file, one thread each."""
    forkserver()
    run_each(mark, [(tmp_path, name) for name in "ab"], jobs=2)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "1", "b": "1"}
    record, path = finished[1][0], tmp_path / "records.jsonl"
    run_each(add_record, [(path, replace(record, seed=seed)) for seed in range(40)], jobs=2)
    assert sorted(read_file(path), key=lambda r: r.seed) == [replace(record, seed=seed) for seed in range(40)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_first_failure_ends_it_all(tmp_path, jobs):
    forkserver()
    names = ["a", "bad", *(f"later {n}" for n in range(200))]
    with pytest.raises(ValueError, match="a bad one"):
        run_each(mark, [(tmp_path, name) for name in names], jobs)
    assert 1 <= len(list(tmp_path.iterdir())) < 20


def test_workers_end_with_their_parent(tmp_path):
    """SIGTERM ends the command alone: its workers must not wait for ever."""
    parent = forkserver().Process(target=run_each, args=(wait, [(tmp_path, 100)], 2))
    parent.start()
    assert until(lambda: any(tmp_path.iterdir()))
    (worker,) = (int(path.name) for path in tmp_path.iterdir())
    assert alive(worker) and worker != parent.pid
    parent.terminate()
    assert until(lambda: not alive(worker)) and parent.exitcode == -signal.SIGTERM


def test_a_range_is_searched_and_not_tried_whole(tmp_path, monkeypatch):
    axes = {"lr": (1e-4, 1e-3, 1e-2, 1e-1), "weight_decay": (0.0, 0.1, 0.3)}
    wide = Range(axes, {"lr": 1e-3, "weight_decay": 0.1}, {})
    methods = ("scratch", "scratch-2")  # the second starts from what the first has chosen
    scale = replace(toy.TOY, tuning={"scratch": wide}, methods=methods)
    monkeypatch.setattr(runner, "scales", lambda data=None: {"toy": scale})
    run_study(CENTRAL, toy.place(tmp_path), 1)
    trials = {key[3]: record for key, record in found(toy.place(tmp_path)).items() if key[0] == "trial"}
    assert 5 <= len(trials) < len(wide)
    scores = {index: record.results["validation_accuracy"] for index, record in trials.items()}
    assert wide.open(scores) == [] and {4, 1, 7, 3, 5} <= trials.keys()
    best = wide[max(sorted(scores), key=scores.get)]
    runs = {key[1]: record for key, record in found(toy.place(tmp_path)).items() if key[0] == "run"}
    assert tuple(runs) == methods and runs["scratch"].results != runs["scratch-2"].results
    for record in runs.values():
        recipe = record.config["recipe"]
        assert (recipe["lr"], recipe["weight_decay"]) == tuple(best.values())
