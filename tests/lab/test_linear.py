"""The study of linear attention: what each student is told, that all begin alike, and what is measured."""

import pytest
import torch

from atbook.lab import linear
from atbook.lab import study as runner
from atbook.lab.linear import LINEAR
from atbook.lab.study import run_study
from atbook.records import read_file
from atfamily.linear_attention import EluPlusOne, Hedgehog, LinearAttention, LinearTransfer
from atlib import walk
from atlib.checkpoint import load_vit, save_weights
from atlib.objectives import unlabelled_loss
from atlib.pair import student_of
from tests import toy
from tests.helpers import randomise
from tests.toy import sources as sources  # a fixture


@pytest.fixture
def first_stages(sources):
    for name in ("fine-tuned, maps", "fine-tuned, outputs"):
        student = student_of(LINEAR.variant(name).build(sources))
        randomise(student, 7)
        save_weights(runner.built_on(LINEAR, sources.place, name, 0).weights, student)


def test_what_each_student_is_told(sources, first_stages):
    teacher, fine_tuned = load_vit(sources.place.teacher(0)), sources.fine_tuned().state_dict()
    for variant in LINEAR.variants:
        model, name = variant.build(sources), variant.name
        student = student_of(model)
        assert isinstance(student, LinearAttention)
        kind = EluPlusOne if name.startswith("elu") else Hedgehog
        assert all(isinstance(phi, kind) for both in student.features for phi in both)
        assert variant.twin == (name.rpartition(", ")[2].split()[0] if name.endswith("twin") else None)
        if "distilled" in name:
            assert isinstance(model, LinearTransfer) and variant.loss is not unlabelled_loss
            assert model.what == ("output" if "outputs" in name else "map")
            kept = teacher.state_dict()
            assert all(torch.equal(kept[key], x) for key, x in model.teacher.state_dict().items())
        elif name in ("fine-tuned, maps", "fine-tuned, outputs"):
            assert model.teacher is student.model and variant.loss is unlabelled_loss
            assert model.what == ("output" if "outputs" in name else "map")
            trained = {key for key, weight in student.named_parameters() if weight.requires_grad}
            assert trained and all(key.startswith("features.") for key in trained)
            assert all(torch.equal(fine_tuned[key], x) for key, x in student.model.state_dict().items())
        else:
            assert model is student and all(weight.requires_grad for weight in student.parameters())
            first = student.features[0][0]
            if name == "fine-tuned, all" or name == "scratch":
                assert torch.equal(first.weight, torch.eye(16).repeat(4, 1, 1))
            elif name.endswith("then all"):
                assert not torch.equal(first.weight, torch.eye(16).repeat(4, 1, 1)), "features were trained"


def test_students_from_scratch_begin_with_the_weights_of_any_other(sources):
    first = sources.student().state_dict()
    for variant in LINEAR.variants:
        if not variant.name.startswith("fine-tuned"):
            found = student_of(variant.build(sources)).model.state_dict()
            assert all(torch.equal(first[key], found[key]) for key in first)


@pytest.mark.parametrize("name", ["scratch", "distilled maps, routing twin"])
def test_entropies_are_those_of_the_maps_that_are_used(sources, name):
    variant = LINEAR.variant(name)
    model = variant.build(sources)
    images = toy.TOY.held_out("test", variant.twin)
    figures = linear._accuracy_and_entropy(model, images)
    batch = images.take(range(40))[0]
    student, shown = (batch[:, 0], batch[:, 1]) if variant.twin else (batch, batch)

    def entropy(layers):
        p = torch.stack([seen.map for seen in layers]).double()
        return -(p * p.log()).sum(-1).mean().item()

    with torch.no_grad():
        expected = entropy(student_of(model).walk(student).layers)
        assert figures["map_entropy"] == pytest.approx(expected, rel=1e-5)
        assert ("teacher_map_entropy" in figures) == bool(variant.twin)
        if variant.twin:
            of_teacher = entropy(walk(model.teacher, shown).layers)
            assert figures["teacher_map_entropy"] == pytest.approx(of_teacher, rel=1e-5)


def test_both_stages_leave_records_with_entropies(sources, monkeypatch):
    variants = tuple(
        runner.replace(LINEAR.variant(name), like=None, trials=())
        for name in ("fine-tuned, outputs", "fine-tuned, outputs, then all")
    )
    small = runner.replace(LINEAR, variants=variants, only=())
    monkeypatch.setattr(type(variants[0]), "choices", lambda self, scale: ({},))
    monkeypatch.setattr(linear, "LINEAR", small)
    toy.few_held_out(monkeypatch)
    runs = run_study(small, sources.place, seeds=1)
    assert read_file(sources.place.records("linear"))
    for record in runs:
        assert record.config["recipe"]["student"] == "LinearAttention"
        assert record.results["test_map_entropy"] > 0 and "test_right" in record.results
    assert "test_teacher_map_entropy" in runs[0].results
