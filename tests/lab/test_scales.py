"""Scales: labels follow from the seed; teachers: pre-text, world, model and recipe that were asked for."""

import os
import signal
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from atbook.lab import scales as schooling
from atbook.lab import study
from atbook.lab.pacs import DOMAINS, load_pacs
from atbook.lab.scales import COLOUR, RETRIEVAL, TUNING_SEED, Schooling, TeacherFailed, scales
from atbook.lab.study import CENTRAL, Place, run_study
from atbook.records import read_file, read_records
from atbook.worlds import glyphs, pretext
from atlib import create_vit
from atlib.checkpoint import load_vit
from atlib.data import Images
from atlib.loading import seed_for
from atlib.recipe import Recipe
from atlib.train import Preempted, train
from atlib.vit import Architecture
from tests import toy
from tests.helpers import random_images, same, shared

RECIPE = replace(pretext.RETRIEVAL, steps=3, batch_size=8)


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
    write_cifar(tmp_path / "train.parquet", 50)
    write_cifar(tmp_path / "test.parquet", 10)
    real = scales(tmp_path)["cifar10-cpu"]
    recipes = {part: replace(getattr(real, part), **toy.SMALL) for part in ("pretraining", "training")}
    sizes = {"labels": 20, "unlabelled": 20, "held_out_sizes": {"validation": None, "test": 8}}
    scale = replace(real, name="toy", student=Architecture("cifar-small", {"depth": 1}), **recipes, **sizes)
    monkeypatch.setattr(study, "scales", lambda data: {"toy": scale})
    return scale


# --- Teachers that take longer than a call may last, and what they must be worth


def test_a_teacher_that_was_stopped_goes_on_with_the_same_bits(cifar, tmp_path, monkeypatch):
    long = replace(cifar, pretraining=replace(schooling.MAE, steps=6, batch_size=8), keep_every=100)
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
    tuning, worth = dict.fromkeys(methods, toy.TRIALS), schooling.Worth(0.05, evenness)
    scale = replace(cifar, methods=methods, tuning=tuning, worth=worth)
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
    teachers = [r.key for r in read_file(place.records("transfer")) if r.kind == "teacher"]
    assert teachers == [("teacher", "teacher", TUNING_SEED, None)]


# --- PACS: students see photographs only, every other domain is for reporting alone


def test_a_run_reports_every_domain_and_a_trial_only_validation_photographs(tmp_path, monkeypatch):
    domains = ["photo"] * 20 + ["art_painting"] * 10 + ["cartoon"] * 10 + ["sketch"] * 10
    write(tmp_path / "data" / "pacs" / "train.parquet", domains)
    write_cifar(tmp_path / "data" / "cifar10" / "train.parquet", 20)
    methods, short = ("scratch", "copy"), Recipe(**toy.SMALL)
    made = replace(
        scales(tmp_path / "data")["pacs"],
        methods=methods,
        pretraining=short,
        training=short,
        tuning=dict.fromkeys(methods, toy.TRIALS),
    )
    monkeypatch.setattr(study, "scales", lambda data=None: {"pacs": made})
    place = Place("pacs", tmp_path / "data", tmp_path / "results", tmp_path / "work")
    for record in run_study(CENTRAL, place, 1):
        accuracies = {name for name in record.results if name.endswith("accuracy")}
        elsewhere = {f"test_{domain}_accuracy" for domain in ("art_painting", "cartoon", "sketch")}
        assert accuracies == {"test_accuracy"} | elsewhere
    trials = read_records("transfer", "pacs", "trial", place.results)
    assert len(trials) == 4
    for record in trials:
        assert set(record.results) == {"validation_accuracy", "validation_loss"}


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

    def squared_error(model, images, targets, recipe):
        return torch.nn.functional.mse_loss(model(images), targets)

    expected, past = longhand(5, Images(torch.tensor(drawn.images), clean), 192, squared_error)
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
    expected, _ = longhand(2, images.select(range(16)), 6, pretext.colour_loss)
    found, architecture, _ = COLOUR.make(RECIPE, 16, 2)
    assert architecture.overrides == {"num_classes": 6} and same(found.state_dict(), expected.state_dict())


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_colour_loss_by_hand(smoothing):
    model, images = create_vit("glyphs", depth=1, num_classes=6), random_images(5, 3, 32, 32)
    hues = torch.tensor([0, 5, 2, 2, 4])
    log_p = model(images).log_softmax(1)
    expected = -sum((1 - smoothing) * row[hue] + smoothing / 6 * row.sum() for row, hue in zip(log_p, hues))
    smoothed = replace(pretext.RETRIEVAL, label_smoothing=smoothing)
    loss = pretext.colour_loss(model, images, hues, smoothed)
    assert loss.item() == pytest.approx(expected.item() / 5, rel=1e-5)


# --- PACS: its domains and this book's splits, on files made here and on the real set where it is


CLASSES = ["dog", "elephant", "giraffe"]
COUNTS = {"photo": 20, "art_painting": 30, "cartoon": 40, "sketch": 10}


def rows_in(images):
    return images.pixels[:, 0, 0, 0].tolist()


def write(path, domains):
    """A file in the hub's format; the pixels of every image say its row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = range(len(domains))
    pictures = [Image.fromarray(np.full((8, 6, 3), row, dtype=np.uint8)) for row in rows]
    columns = {"image": pictures, "domain": domains, "label": [row % 3 for row in rows]}
    kinds = datasets.Image(), datasets.Value("string"), datasets.ClassLabel(names=CLASSES)
    datasets.Dataset.from_dict(columns, datasets.Features(dict(zip(columns, kinds)))).to_parquet(path)
    return path


@pytest.fixture
def mixed(tmp_path):
    """100 rows, the domains mixed; the domain of every row."""
    counted = [domain for domain, count in COUNTS.items() for _ in range(count)]
    domains = np.random.default_rng(1).permutation(counted).tolist()
    return write(tmp_path / "train-00000-of-00001.parquet", domains), domains


def test_a_domain_is_all_and_only_its_images(mixed):
    path, domains = mixed
    for domain in COUNTS:
        images = load_pacs([domain], path, split="all")
        assert rows_in(images) == [row for row in range(100) if domains[row] == domain]
        assert images.targets.tolist() == [row % 3 for row in rows_in(images)]
        assert images.classes == tuple(CLASSES)


def test_splits_are_parts_of_every_domain_without_overlap(mixed):
    path, domains = mixed
    parts = {one: rows_in(load_pacs(DOMAINS, path, split=one)) for one in ("train", "validation", "test")}
    assert sorted(sum(parts.values(), [])) == list(range(100))
    for domain, count in COUNTS.items():
        sizes = {split: sum(domains[row] == domain for row in rows) for split, rows in parts.items()}
        assert sizes == {"train": count * 7 // 10, "validation": count // 10, "test": count * 2 // 10}
        for split, rows in parts.items():  # a domain's split does not depend on which others are loaded
            of_domain = rows_in(load_pacs([domain], path, split=split))
            assert of_domain == [row for row in rows if domains[row] == domain]


def test_real_pacs():
    """The counts of the published set: 9,991 images."""
    folder = shared("data", "pacs96")
    (path,) = folder.glob("*.parquet")
    assert datasets.load_dataset("parquet", data_files=str(path))["train"].num_rows == 9991
    images = load_pacs(["photo"], folder, split="test", size=20, image_size=48)
    assert images.pixels.shape == (20, 3, 48, 48) and images.pixels.float().std() > 40
    assert images.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
