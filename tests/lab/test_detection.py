"""The study of where things are: variants are what their names say, and at toy size it runs as others do."""

from dataclasses import replace

import pytest

from atbook.lab import scales as schooling
from atbook.lab import study as runner
from atbook.lab.detection import DETECTION
from atbook.lab.scales import LABELLED_SCENES, PAINTED_SCENES, TUNING_SEED, scales
from atbook.lab.study import Place, Sources, make_teacher, run_study, scratch
from atbook.records import read_file
from atfamily.detection.detector import Detector
from atfamily.detection.segment import Segmenter
from atlib.checkpoint import load_vit, save_vit
from atlib.recipe import Recipe
from atlib.vit import Architecture
from tests import toy
from tests.helpers import randomise, same, without_head

SMALL = {"steps": 2, "batch_size": 4}
REAL = scales()["scenes"]
TOY = replace(
    REAL,
    pretraining=replace(REAL.pretraining, **SMALL),
    training=replace(REAL.training, **SMALL),
    labels=8,
    unlabelled=8,
    held_out_sizes={"validation": 4, "test": 6},
)


@pytest.fixture(autouse=True)
def toy_scale(monkeypatch):
    monkeypatch.setattr(runner, "scales", lambda data=None: {"scenes": TOY, "toy": toy.TOY})
    monkeypatch.setattr(schooling, "PAINTED_SCENES", replace(PAINTED_SCENES, validation=4))


def place_in(folder):
    return Place("scenes", None, folder / "results", folder / "work")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Untrained teachers where the study's are looked for."""
    place = place_in(tmp_path_factory.mktemp("teachers"))
    paths = ((place.teacher(0), 0), (place.teacher(0, LABELLED_SCENES), 8))
    for number, (path, classes) in enumerate(paths, start=1):
        architecture = Architecture("scenes", {"num_classes": classes})
        save_vit(path, randomise(architecture.build(), number), architecture)
    return Sources(place, TOY, 0)


# --- What is built


@pytest.mark.parametrize("variant", DETECTION.variants, ids=lambda variant: variant.name)
def test_a_variant_is_what_its_name_says(variant, sources):
    name, _, how = variant.name.partition(", ")
    how, _, of = how.partition(" from ")
    model = variant.build(sources._replace(schooling=variant.schooling))
    vit, student = model.backbone.vit, model.backbone.student
    assert type(model) is (Segmenter if name.startswith("segment") else Detector)
    path = sources.place.teacher(0, LABELLED_SCENES if of == "supervised" else None)
    of_teacher = without_head(load_vit(path).state_dict())
    if how in ("copy", "distill"):
        assert (vit.plan.what, vit.plan.how) == ("map", how)
        assert same(without_head(vit.teacher.state_dict()), of_teacher) == (of != "untrained")
    fresh = how in ("scratch", "copy", "distill")
    expected = without_head(scratch(sources).state_dict()) if fresh else of_teacher
    assert same(without_head(student.state_dict()), expected)
    trained = {name for name, weights in model.named_parameters() if weights.requires_grad}
    assert any(name.startswith("backbone") for name in trained) == (how != "frozen")
    assert any(not name.startswith("backbone") for name in trained)


# --- Teachers and images of scenes


def test_teachers_of_scenes(tmp_path):
    """The auto-encoder's ViT, which has no classifier; and a classifier of the largest object."""
    place = place_in(tmp_path)
    make_teacher(place, 0)
    make_teacher(place, 0, DETECTION, OF_LABELS)
    painter, classifier = load_vit(place.teacher(0)), load_vit(place.teacher(0, LABELLED_SCENES))
    assert painter.num_classes == 0 and classifier.num_classes == 8
    (of_painter,), (of_classifier,) = (read_file(place.records(name)) for name in ("transfer", "detection"))
    assert of_painter.results["unlearned"] == of_painter.history[-1]["unlearned"] > 0.5
    assert 0 <= of_classifier.results["unlearned"] <= 1
    assert of_classifier.config["recipe"]["label_smoothing"] == Recipe().label_smoothing


# --- A small study, from its teachers to its table


METHODS = ("fcos, copy from supervised", "segment, frozen")
SHORT = [replace(v, changes={}, trials=v.trials[:2]) for v in map(DETECTION.variant, METHODS)]
OF_LABELS = replace(LABELLED_SCENES, validation=4)
STUDY = replace(DETECTION, variants=(replace(SHORT[0], schooling=OF_LABELS), SHORT[1]))


def test_every_run_and_trial_leaves_a_record_with_its_figures(tmp_path):
    place = place_in(tmp_path)
    records = run_study(STUDY, place, 1)
    assert [record.method for record in records] == list(METHODS)
    boxes = {f"test_{name}" for name in ("ap", "ap50", "ap75", "small", "medium", "large")}
    sizes = {name for name in boxes if name.endswith(("small", "medium", "large"))}  # some have no object
    for record, expected in zip(records, (boxes, {"test_iou"}), strict=True):
        assert expected - sizes <= set(record.results) <= expected
        assert all(0 <= value <= 1 for value in record.results.values())
    trials = [record for record in read_file(place.records("detection")) if record.kind == "trial"]
    assert {(record.method, record.trial) for record in trials} == {(m, t) for m in METHODS for t in (0, 1)}
    for record in trials:
        figure = "iou" if record.method == METHODS[1] else "ap"
        assert record.seed == TUNING_SEED and f"validation_{figure}" in record.results
        assert not any(name.startswith("test") for name in record.results)
