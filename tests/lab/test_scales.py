"""Scales: labels follow from the seed, held-out images do not, all methods are tuned alike; and teachers: the
pre-text, the world, the model and the recipe are those that were asked for."""

import argparse
import os
import pickle
import signal
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from atbook.lab import commands, study
from atbook.lab import scales as schooling
from atbook.lab.scales import (
    AXES,
    PHOTO_METHODS,
    RETRIEVAL,
    SCALES,
    START,
    TUNING_SEED,
    UNTIL_LEARNED,
    WORLD_METHODS,
    CifarScale,
    Schooling,
    TeacherFailed,
    colour,
    scales,
)
from atbook.lab.study import CENTRAL, Place, chosen, run_study, scale_of
from atbook.lab.tuning import Range, grid
from atbook.records import read_file, read_records
from atbook.worlds import glyphs, pretext
from atlib import create_vit
from atlib.checkpoint import load_vit, save_vit
from atlib.data import Images
from atlib.data.rng import seed_for
from atlib.train import recipe, train
from atlib.train.trainer import Preempted
from atlib.vit import Architecture
from tests import toy
from tests.data.test_pacs import write
from tests.helpers import random_images, same

RECIPE = replace(pretext.RETRIEVAL, steps=3, batch_size=8)


def test_a_run_takes_its_labels_from_its_seed():
    of = {seed: toy.TOY.labelled(seed).pixels for seed in (0, 1, TUNING_SEED)}
    assert not torch.equal(of[0], of[1]) and not torch.equal(of[0], of[TUNING_SEED])
    assert torch.equal(of[0], toy.TOY.labelled(0).pixels)
    held_out = scales()["find"].held_out
    assert (len(held_out("validation")), len(held_out("test"))) == (2000, 4000)
    assert torch.equal(held_out("test").pixels[:40], toy.TOY.held_out("test").pixels), "whatever the seed"


def test_one_range_is_searched_for_all_methods():
    for name in ("find", "match"):
        scale = scales()[name]
        assert scale.name == name and scale.methods == WORLD_METHODS
        for method in scale.methods:
            choices = scale.tuning[method]
            if (name, method) == ("match", "copy-message-twin"):  # near the common start nothing learns
                assert choices is UNTIL_LEARNED
                continue
            assert isinstance(choices, Range) and choices.axes.items() >= AXES.items()
            assert choices.start.items() >= START.items()
            assert set(choices.axes) - set(AXES) == ({"transfer_weight"} if "distill" in method else set())
            longer = 2 if method == "distill-long" else 1
            assert all(scale.recipe(trial).steps == longer * scale.training.steps for trial in choices)
    assert scales()["find"].world == glyphs.World()
    assert scales()["match"].world == glyphs.World(task="match")


def test_twins_come_with_training_and_held_out_images():
    scale = scales()["match"]
    twins = glyphs.generate("train", 20, 3, scale.world, "message")
    images = scale.labelled(3, 20, "message")
    assert torch.equal(images.pixels[:, 1], torch.from_numpy(twins.images))
    assert torch.equal(images.pixels[:, 0], scale.labelled(3, 20).pixels)
    assert torch.equal(images.targets, scale.labelled(3, 20).targets)
    held_out = scale.held_out("validation", "routing")
    assert torch.equal(held_out.pixels[:, 0], scale.held_out("validation").pixels)
    assert held_out.pixels.shape == (2000, 2, 3, 32, 32)


def test_a_teacher_that_has_not_learned_its_task_is_trained_longer_and_then_refused(monkeypatch, few):
    steps, left = [], [0.9, 0.5, 0.1]

    def learned(model, images, recipe, **options):
        steps.append(recipe.steps)
        return [{"unlearned": left.pop(0), "step": recipe.steps, "loss": 0.0}]

    monkeypatch.setattr(schooling, "train", learned)
    school = Schooling("strict", gate=0.2)
    _, _, history = school.make(RECIPE, 16, 0)
    assert steps == [3, 6, 12] and history[-1]["unlearned"] == 0.1
    left[:] = [0.9] * 4
    with pytest.raises(TeacherFailed, match="seed 7.*0.90.*0.2"):
        school.make(RECIPE, 16, 7)


def test_what_is_left_unlearned():
    images = pretext.retrieval_images(glyphs.generate("validation", 50))
    constant = torch.nn.Linear(1, 192)
    constant.forward = lambda x: images.targets.mean(0).expand(len(x), -1)
    assert pretext.unlearned(constant, images) == pytest.approx(1, rel=1e-5)
    shapes = Images(images.pixels, torch.tensor([0, 1] * 25))
    constant.forward = lambda x: torch.tensor([[1.0, 0.0]]).expand(len(x), -1)
    assert pretext.unlearned(constant, shapes) == 0.5


def test_scales_of_photographs_tune_all_methods_alike():
    for name in ("cifar10-cpu", "pacs", "cifar10", "cifar10-toy"):
        scale = scales()[name]
        assert scale.name == name and set(scale.methods) <= set(PHOTO_METHODS)
        (number,) = {len(scale.tuning[method]) for method in scale.methods}
        for method in scale.methods:  # as many recipes to choose from, and the same number of steps
            trials = [scale.recipe(trial) for trial in scale.tuning[method]]
            assert len({str(trial) for trial in trials}) == number
            assert {trial.steps for trial in trials} == {scale.training.steps}
    assert tuple(scales()) == SCALES
    assert grid(lr=[1, 2], clip=[3]) == ({"lr": 1, "clip": 3}, {"lr": 2, "clip": 3})


def test_the_teachers_on_a_gpu_see_every_image_800_times_in_batches_of_one_size():
    scale = scales()["cifar10"]
    recipe = scale.pretraining
    assert recipe.steps * recipe.batch_size == 800 * 45_000 and 45_000 % recipe.batch_size == 0
    assert recipe.lr == pytest.approx(1.5e-4 * recipe.batch_size / 256) and recipe.betas == (0.9, 0.95)
    assert recipe.warmup == 40 / 800 and (recipe.mixed_precision, recipe.compile) == ("bf16", True)
    assert 2.65e6 < sum(weights.numel() for weights in scale.student.build().parameters()) < 2.75e6
    toy_scale = scales()["cifar10-toy"]
    assert set(toy_scale.methods) <= set(scale.methods) and toy_scale.tuning == scale.tuning


def write_cifar(path, size):
    draw = np.random.default_rng
    pictures = [Image.fromarray(draw(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)) for i in range(size)]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    columns = {"img": pictures, "label": [i % 10 for i in range(size)]}
    path.parent.mkdir(exist_ok=True)
    datasets.Dataset.from_dict(columns, features).to_parquet(path)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A CIFAR-10 of 60 images, and a scale without tuning on it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_cifar(tmp_path / "train.parquet", 50)
    write_cifar(tmp_path / "test.parquet", 10)
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


# --- Teachers that take longer than a call may last, and what they must be worth


def test_how_even_maps_are(small_vit):
    """Against maps that are written out, and against uniform ones."""
    vit, images = small_vit(), random_bytes(7)
    x = vit._pos_embed(vit.patch_embed(images.take(range(7))[0]))
    entropies = []
    for block in vit.blocks:
        q, k, _ = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, block.attn.num_heads, -1)).unbind(2)
        rows = (torch.einsum("bqhd,bkhd->bhqk", q, k) * block.attn.scale).softmax(-1).flatten(0, -2)
        entropies += [-sum(p * np.log(p) for p in row) for row in rows.tolist()]
        x = block(x)
    assert schooling.evenness(vit, images) == pytest.approx(np.mean(entropies) / np.log(17), rel=1e-4)
    for block in vit.blocks:
        block.attn.qkv.weight.data.zero_()
        block.attn.qkv.bias.data.zero_()
    assert schooling.evenness(vit, images) == pytest.approx(1)


def random_bytes(number):
    pixels = torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8)
    return Images(pixels, torch.zeros(number))


def test_a_teacher_that_was_stopped_goes_on_with_the_same_bits(cifar, tmp_path, monkeypatch):
    long = replace(cifar, pretraining=replace(recipe.MAE, steps=6, batch_size=8), keep_every=100)
    monkeypatch.setattr(study, "scales", lambda data: {"toy": long})
    whole, stopped = (toy.place(tmp_path / name) for name in ("whole", "stopped"))
    study.make_teacher(whole, 0)
    plain = schooling.train

    def stop_at_three(*given, **options):
        def log(entry):
            if entry["step"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        return plain(*given, **options, log=log)

    monkeypatch.setattr(schooling, "train", stop_at_three)
    with pytest.raises(Preempted):
        study.make_teacher(stopped, 0)
    assert not stopped.teacher(0).exists() and not read_file(stopped.records("transfer"))
    folder = stopped.teacher(0).with_suffix("")
    assert float((folder / "seconds").read_text()) > 0
    (folder / "seconds").write_text("1000.0")
    monkeypatch.setattr(schooling, "train", plain)
    study.make_teacher(stopped, 0)
    assert same(load_vit(stopped.teacher(0)).state_dict(), load_vit(whole.teacher(0)).state_dict())
    (record,), (expected,) = (read_file(place.records("transfer")) for place in (stopped, whole))
    assert record.history == expected.history and record.results == expected.results
    assert 0.5 < record.results["evenness"] == record.history[-1]["evenness"] <= 1
    assert record.seconds > 1000 > expected.seconds, "what the call before took is counted"


@pytest.mark.parametrize(
    "fine_tuned, evenness, passes", [(0.46, 1.1, True), (0.44, 1.1, False), (0.9, 0.01, False)]
)
def test_a_teacher_must_be_worth_something_before_students_are_compared(
    cifar, tmp_path, monkeypatch, fine_tuned, evenness, passes
):
    """Its students are not really trained: what they would reach is given."""
    methods, taught = ("copy", "scratch", "fine-tune"), []
    scale = replace(
        cifar,
        methods=methods,
        tuning={method: toy.TRIALS for method in methods},
        worth=schooling.Worth(0.05, evenness),
    )
    monkeypatch.setattr(study, "scales", lambda data: {"toy": scale})

    def teach(student, images, recipe, seed, sets, name, *how):
        taught.append(name)
        (split,) = sets
        best = {"scratch": 0.4, "fine-tune": fine_tuned}.get(name.split(",")[0], 1.0)
        return {f"{split}_accuracy": best - (recipe.lr != toy.TRIALS[1]["lr"]) * 0.1}, [{}]

    monkeypatch.setattr(study, "teach", teach)
    place = toy.place(tmp_path / "out")
    ends = {f"{method}, trial {trial}" for method in methods[1:] for trial in (0, 1)}
    if passes:
        assert len(run_study(CENTRAL, place, 1)) == 3
        assert set(taught[:4]) == ends and len(taught) == 6 + 3
        return
    for _ in range(2):  # called again, it says the same from its records, and trains nothing
        with pytest.raises(TeacherFailed, match="seed 100 .* longer pre-training") as failed:
            run_study(CENTRAL, place, 1)
        assert f"{100 * (fine_tuned - 0.4):+.1f} points" in str(failed.value)
    assert set(taught) == ends and len(taught) == 4
    assert {r.key for r in read_file(place.records("transfer")) if r.kind == "teacher"} == {
        ("teacher", "teacher", TUNING_SEED, None)
    }


def test_the_command_says_how_a_teacher_ended(monkeypatch, capsys):
    for error, code in ((TeacherFailed("it is worth nothing"), 1), (Preempted("there"), 75)):

        def stop(given, error=error):
            raise error

        monkeypatch.setattr(commands, "_run_experiment", stop)
        asked = argparse.Namespace(all=False, name="transfer")
        assert commands.experiment_command(asked) == code and str(error) in capsys.readouterr().err


# --- PACS: students see photographs only, every other domain is for reporting alone


@pytest.fixture
def pacs(tmp_path, monkeypatch):
    """A small PACS and a small CIFAR-10 in a folder, and the scale that reads them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    domains = ["photo"] * 20 + ["art_painting"] * 10 + ["cartoon"] * 10 + ["sketch"] * 10
    write(tmp_path / "data" / "pacs" / "train.parquet", domains)
    write_cifar(tmp_path / "data" / "cifar10" / "train.parquet", 20)
    made = scales(tmp_path / "data")["pacs"]
    made = replace(
        made,
        methods=("scratch", "copy"),
        pretraining=replace(recipe.STUDENT, **toy.SMALL),
        training=replace(recipe.STUDENT, **toy.SMALL),
        tuning={method: toy.TRIALS for method in ("scratch", "copy")},
    )
    monkeypatch.setattr(study, "scales", lambda data=None: {"pacs": made})
    return made


def test_students_see_photographs_only(pacs):
    photographs = [pacs.labelled(0), pacs.held_out("validation"), pacs.held_out("test")]
    # `write` puts the row's number into the pixels.
    rows = [images.pixels[:, 0, 0, 0].tolist() for images in photographs]
    assert sorted(sum(rows, [])) == list(range(20)) and [len(part) for part in rows] == [14, 2, 4]
    assert photographs[0].augment is not None and photographs[1].augment is None
    assert pacs.labelled(0).pixels.equal(pacs.labelled(3).pixels)
    assert photographs[0].pixels.shape[1:] == (3, 32, 32)


def test_the_other_domains_are_for_reporting_alone(pacs):
    assert pacs.elsewhere("validation") == {}
    elsewhere = pacs.elsewhere("test")
    assert {name: images.pixels[:, 0, 0, 0].tolist() for name, images in elsewhere.items()} == {
        "art_painting": list(range(20, 30)),
        "cartoon": list(range(30, 40)),
        "sketch": list(range(40, 50)),
    }


def test_a_run_reports_every_domain_and_a_trial_only_validation_photographs(pacs, tmp_path):
    place = Place("pacs", tmp_path / "data", tmp_path / "results", tmp_path / "work")
    for record in run_study(CENTRAL, place, 1):
        accuracies = {name for name in record.results if name.endswith("accuracy")}
        elsewhere = {f"test_{domain}_accuracy" for domain in ("art_painting", "cartoon", "sketch")}
        assert accuracies == {"test_accuracy"} | elsewhere
    trials = read_records("transfer", "pacs", "trial", place.results)
    assert len(trials) == 4
    for record in trials:
        assert set(record.results) == {"validation_accuracy", "validation_loss"}


def test_the_teacher_is_the_students_architecture_with_ten_classes(pacs):
    teacher, architecture, history = pacs.make_teacher(0)
    student = pacs.student.build()
    assert teacher.head.out_features == 10 and student.head.out_features == 7 and history[-1]["step"] == 2
    assert [p.shape for p in teacher.blocks.parameters()] == [p.shape for p in student.blocks.parameters()]
    assert architecture.build().pos_embed.shape == student.pos_embed.shape == (1, 17, 64)


# --- Teachers: the seed decides the rest


@pytest.fixture
def few(monkeypatch):
    toy.few_held_out(monkeypatch)


def longhand(seed, images, outputs, loss, recipe=RECIPE, **model):
    """A teacher made step by step, from nothing of `schooling`."""
    torch.manual_seed(seed_for(seed, "teacher"))
    vit = create_vit("glyphs", num_classes=outputs, **model)
    order = seed_for(seed, "teacher order")
    history = train(vit, images, recipe, loss=loss, seed=order, progress=None)
    return vit, history


def test_the_central_teacher_is_what_it_always_was(few):
    """Bit for bit: the committed records and weights come from this way of making one."""
    drawn = glyphs.generate("unlabelled", 16, 5)
    clean = torch.tensor(drawn.clean.reshape(16, 192).astype(np.float32)) / 255
    expected, past = longhand(
        5,
        Images(torch.tensor(drawn.images), clean),
        192,
        lambda model, images, targets, recipe: torch.nn.functional.mse_loss(model(images), targets),
    )
    found, architecture, history = replace(toy.TOY, pretraining=RECIPE).make_teacher(5)
    assert same(found.state_dict(), expected.state_dict())
    assert [{k: v for k, v in entry.items() if k != "unlearned"} for entry in history] == past
    assert architecture == Architecture("glyphs", {"num_classes": 192})
    again, other = (RETRIEVAL.make(RECIPE, 16, seed)[0].state_dict() for seed in (5, 6))
    assert same(again, expected.state_dict()) and not torch.equal(other["head.weight"], again["head.weight"])


def test_the_colour_teacher_learns_the_hue_and_nothing_about_shapes(few):
    drawn = glyphs.generate("unlabelled", 30, 2)
    images = pretext.colour_images(drawn)
    assert images.targets.tolist() == drawn.hue.tolist() and images.classes == glyphs.HUES
    assert torch.equal(images.pixels, torch.from_numpy(drawn.images))
    expected, past = longhand(
        2,
        Images(torch.tensor(drawn.images[:16]), torch.tensor(drawn.hue[:16])),
        6,
        lambda model, images, hues, recipe: -model(images).log_softmax(1)[range(len(hues)), hues].mean(),
    )
    found, architecture, history = colour("colour").make(RECIPE, 16, 2)
    assert architecture.overrides == {"num_classes": 6}
    for left, right in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)  # another formula of the same loss
    assert history[-1]["loss"] == pytest.approx(past[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_colour_loss_by_hand(smoothing):
    model, images, hues = (
        create_vit("glyphs", depth=1, num_classes=6),
        random_images(5, 3, 32, 32),
        torch.tensor([0, 5, 2, 2, 4]),
    )
    log_p = model(images).log_softmax(1)
    expected = (
        -sum((1 - smoothing) * row[hue] + smoothing / 6 * row.sum() for row, hue in zip(log_p, hues)) / 5
    )
    smoothed = replace(pretext.RETRIEVAL, label_smoothing=smoothing)
    assert pretext.colour_loss(model, images, hues, smoothed).item() == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_the_world_is_the_one_that_was_asked_for():
    seen = []

    def images(drawn):
        seen.append(drawn)
        return pretext.retrieval_images(drawn)

    Schooling("other", images=images, world=glyphs.World(rendering="inverted")).make(RECIPE, 12, 3)
    drawn, held_out = seen
    assert len(held_out.images) == 2000, "what is left unlearned is measured on validation images"
    for found, expected in zip(
        drawn, glyphs.generate("unlabelled", 12, 3, glyphs.World(rendering="inverted")), strict=True
    ):
        assert np.array_equal(found, expected)
    assert not np.array_equal(drawn.images, glyphs.generate("unlabelled", 12, 3).images)
    assert RETRIEVAL.world == glyphs.World()


def test_a_schooling_without_a_world_takes_its_scales():
    match = glyphs.World(task="match")
    assert Schooling("deeper", world=None).within(match).world == match
    assert Schooling("offset", world=glyphs.World(offset=4)).within(match).world == glyphs.World(offset=4)
    with pytest.raises(ValueError, match="deeper.*within"):
        Schooling("deeper", world=None).make(RECIPE, 12, 0)


@pytest.mark.parametrize(
    "model",
    [{"reg_tokens": 2}, {"init_values": 0.1}, {"embed_dim": 32}, {"pre_norm": True}, {"global_pool": "avg"}],
    ids=str,
)
def test_the_architecture_builds_the_model(tmp_path, few, model):
    vit, architecture, _ = Schooling("other", model=model).make(replace(RECIPE, steps=1), 8, 0)
    assert architecture == Architecture("glyphs", {**model, "num_classes": 192})
    found = load_vit(save_vit(tmp_path / "teacher.safetensors", vit, architecture))
    assert same(found.state_dict(), vit.state_dict())


def test_changes_go_to_the_recipe_and_leave_it_alone(few):
    _, _, history = Schooling("short", changes={"steps": 2, "lr": 1e-4}).make(RECIPE, 24, 0)
    assert history[-1]["step"] == 2 and len(history) == 1 and RECIPE.steps == 3
    expected, _ = longhand(
        0,
        pretext.retrieval_images(glyphs.generate("unlabelled", 24, 0)),
        192,
        pretext.retrieval_loss,
        replace(RECIPE, steps=2, lr=1e-4),
    )
    assert same(
        Schooling("short", changes={"steps": 2, "lr": 1e-4}).make(RECIPE, 24, 0)[0].state_dict(),
        expected.state_dict(),
    )


def test_values_that_cannot_be_meant_are_refused_before_training(monkeypatch, few):
    toy.forbid_training(monkeypatch)
    with pytest.raises(ValueError, match="steps=0"):
        Schooling("none", changes={"steps": 0}).make(RECIPE, 8, 0)
    with pytest.raises(ValueError, match="size .* 0"):
        RETRIEVAL.make(RECIPE, 0, 0)


def test_a_schooling_travels_to_other_processes():
    other = pickle.loads(pickle.dumps(colour("colour", changes={"steps": 7})))
    assert (other.name, other.outputs, other.loss, dict(other.changes)) == (
        "colour",
        6,
        pretext.colour_loss,
        {"steps": 7},
    )
