"""The study of finer classes than the labels: who learns from what, and how it is measured."""

import pytest
import torch

from atbook.lab import study as runner
from atbook.lab.finer import FINER_STUDY, NEIGHBOURS, finer, loss_of_views
from atbook.lab.study import Sources, run_study
from atbook.records import read_file
from atbook.worlds import glyph_images, glyphs
from atfamily.grafit import Grafit, grafit_loss, snca_loss
from atfamily.measures.probes import features
from atlib import AttentionTransfer, create_vit
from atlib.checkpoint import load_vit
from atlib.train.objectives import student_loss
from atlib.train.recipe import Recipe
from atlib.vit import Architecture
from tests import toy
from tests.helpers import randomise


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "scales", toy.known)
    place = toy.place(tmp_path)
    toy.untrained_models(place)
    scale = runner.replace(toy.TOY, student=Architecture("glyphs", {"num_classes": 4}))
    return Sources(place, scale, 0)


def test_nobody_is_told_more_than_coarse_labels(sources):
    fine = toy.TOY.labelled(0).targets
    for variant in FINER_STUDY.variants:
        targets = variant.images(toy.TOY, 0).targets
        assert torch.equal(targets if targets.ndim == 1 else targets[:, 0], fine // 2)
        assert variant.student == {"num_classes": 4} and variant.measure.figure == "map"
        by_number = variant.loss in (grafit_loss, snca_loss)
        assert by_number == (targets.ndim == 2) == ("SNCA" in variant.name or "Grafit" in variant.name)
        assert variant.changes == ({"transfer_weight": 1.0} if variant.loss is grafit_loss else {})


def test_what_each_is_made_of(sources):
    teacher = load_vit(sources.place.teacher(0))
    for variant in FINER_STUDY.variants:
        model = variant.build(sources)
        trunk = model.trunk if isinstance(model, Grafit) else model
        assert isinstance(trunk, AttentionTransfer) == ("copy" in variant.name)
        if isinstance(model, Grafit):
            assert len(model.memory) == toy.TOY.labels
        if isinstance(trunk, AttentionTransfer):
            assert trunk.plan.how == "copy"
            assert torch.equal(trunk.teacher.pos_embed, teacher.pos_embed)
        elif variant.name == "fine-tune":
            assert torch.equal(trunk.pos_embed, teacher.pos_embed) and trunk.num_classes == 4


def test_the_routing_twin_is_seen_by_its_teacher_alone(sources):
    twin, plain = (FINER_STUDY.variant(name) for name in ("copy, routing twin", "copy"))
    assert twin.twin == "routing" and plain.twin is None
    of_both, own = twin.images(toy.TOY, 0).pixels, plain.images(toy.TOY, 0).pixels
    assert torch.equal(of_both[:, 0], own) and not torch.equal(of_both[:, 1], own)


def test_the_control_sees_views(sources):
    vit = randomise(create_vit("glyphs", num_classes=4)).eval()
    images, labels = glyph_images(glyphs.generate("test", 6, 0)).take(range(6))
    losses = [loss_of_views(vit, images, labels // 2, Recipe()).item() for _ in range(2)]
    assert losses[0] != losses[1] and student_loss(vit, images, labels // 2, Recipe()).item() not in losses


def test_the_measure_by_hand(monkeypatch):
    """With features that are the shape's own, all is found; with those of the coarse class, half of it."""
    images = glyph_images(glyphs.generate("test", 200, 0))
    shapes = torch.nn.functional.one_hot(images.targets, 8).float()
    rough = torch.nn.functional.one_hot(images.targets // 2, 4).float()
    noise = 1e-3 * torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    for x, knows in ((shapes, True), (torch.cat([rough, rough], 1) + noise, False)):
        monkeypatch.setattr("atbook.lab.finer.features", lambda model, images, x=x: x)
        figures = finer(create_vit("glyphs"), images)
        assert figures["coarse_knn"] == 1
        if knows:
            assert all(value == pytest.approx(1) for value in figures.values())
        else:
            assert 0.4 < figures["map"] < 0.7 and figures["knn"] < 0.7
            assert figures["map_oracle"] == pytest.approx(figures["map"], abs=1e-3)


def test_known_classes_bound_the_measure_from_above():
    vit = randomise(create_vit("glyphs", num_classes=4)).eval()
    images = glyph_images(glyphs.generate("test", 300, 0))
    figures = finer(vit, images)
    assert figures["map"] <= figures["map_oracle"] and figures["map_conditional"] <= figures["map_oracle"]
    assert features(vit, images).shape == (300, 64) and NEIGHBOURS == 10


@pytest.mark.parametrize("name", ["copy, routing twin", "Grafit, copy"])
def test_a_run_leaves_a_record(sources, monkeypatch, name):
    variant = runner.replace(FINER_STUDY.variant(name), like=None)
    monkeypatch.setattr(type(variant), "choices", lambda self, scale: ({},))
    small = runner.replace(FINER_STUDY, variants=(variant,), only=())
    run_study(small, sources.place, seeds=1)
    (record,) = read_file(sources.place.records("finer"))
    assert 0 < record.results["test_map"] <= record.results["test_map_oracle"] <= 1
    assert (record.config["recipe"].get("student") == "Grafit") == (name == "Grafit, copy")
