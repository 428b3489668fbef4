"""PACS as a scale: the teacher learns CIFAR-10, students see photographs only, every other domain is for
reporting alone."""

from dataclasses import replace

import datasets
import numpy as np
import pytest
from PIL import Image

from atlib.lab import study
from atlib.lab.scales import PacsScale, scales
from atlib.lab.study import CENTRAL, Place, run_study
from atlib.record import read_records
from atlib.train import recipe
from tests import toy
from tests.data.test_pacs import write

METHODS = ("scratch", "copy")


@pytest.fixture
def scale(tmp_path, monkeypatch):
    """A small PACS and a small CIFAR-10 in a folder, and the scale that reads them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    domains = ["photo"] * 20 + ["art_painting"] * 10 + ["cartoon"] * 10 + ["sketch"] * 10
    write(tmp_path / "data" / "pacs" / "train.parquet", domains)
    pictures = [
        Image.fromarray(np.random.default_rng(row).integers(0, 256, (32, 32, 3), dtype=np.uint8))
        for row in range(20)
    ]
    columns = {"img": pictures, "label": [row % 10 for row in range(20)]}
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    (tmp_path / "data" / "cifar10").mkdir()
    datasets.Dataset.from_dict(columns, features).to_parquet(tmp_path / "data" / "cifar10" / "train.parquet")
    made = scales(tmp_path / "data")["pacs"]
    made = replace(
        made,
        methods=METHODS,
        pretraining=replace(recipe.STUDENT, **toy.SMALL),
        training=replace(recipe.STUDENT, **toy.SMALL),
        tuning={method: toy.TRIALS for method in METHODS},
    )
    monkeypatch.setattr(study, "scales", lambda data=None: {"pacs": made})
    return made


def test_students_see_photographs_only(scale):
    photographs = [scale.labelled(0), scale.held_out("validation"), scale.held_out("test")]
    rows = [
        images.pixels[:, 0, 0, 0].tolist() for images in photographs
    ]  # `write` puts the row's number into the pixels
    assert sorted(sum(rows, [])) == list(range(20)) and [len(part) for part in rows] == [14, 2, 4]
    assert photographs[0].augment is not None and photographs[1].augment is None
    assert scale.labelled(0).pixels.equal(scale.labelled(3).pixels) and photographs[0].pixels.shape[1:] == (
        3,
        32,
        32,
    )


def test_the_other_domains_are_for_reporting_alone(scale):
    assert scale.elsewhere("validation") == {}
    elsewhere = scale.elsewhere("test")
    assert {name: images.pixels[:, 0, 0, 0].tolist() for name, images in elsewhere.items()} == {
        "art_painting": list(range(20, 30)),
        "cartoon": list(range(30, 40)),
        "sketch": list(range(40, 50)),
    }


def test_a_run_reports_every_domain_and_a_trial_only_validation_photographs(scale, tmp_path):
    place = Place("pacs", tmp_path / "data", tmp_path / "results", tmp_path / "work")
    for record in run_study(CENTRAL, place, 1):
        accuracies = {name for name in record.results if name.endswith("accuracy")}
        assert accuracies == {
            "test_accuracy",
            "test_art_painting_accuracy",
            "test_cartoon_accuracy",
            "test_sketch_accuracy",
        }
    trials = read_records("transfer", "pacs", "trial", place.results)
    assert len(trials) == 4
    for record in trials:
        assert set(record.results) == {"validation_accuracy", "validation_loss"}


def test_the_teacher_is_the_students_architecture_with_ten_classes(scale):
    teacher, architecture, history = scale.make_teacher(0)
    student = scale.student.build()
    assert teacher.head.out_features == 10 and student.head.out_features == 7 and history[-1]["step"] == 2
    assert [p.shape for p in teacher.blocks.parameters()] == [p.shape for p in student.blocks.parameters()]
    assert architecture.build().pos_embed.shape == student.pos_embed.shape == (1, 17, 64)


def test_every_method_has_the_same_recipe():
    pacs = scales()["pacs"]
    assert isinstance(pacs, PacsScale) and len({str(trials) for trials in pacs.tuning.values()}) == 1
    assert set(pacs.tuning) == set(pacs.methods) and all(
        pacs.recipe(trial) for trials in pacs.tuning.values() for trial in trials
    )
