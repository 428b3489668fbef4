"""Studies of one thing each: controls, finer classes than the labels, augmentation, linear attention."""

import copy

import pytest
import torch

from atbook.lab import linear
from atbook.lab.as_pictures import as_pictures
from atbook.lab.augmented import rand_augment, three_augment
from atbook.lab.controls import CONTROLS
from atbook.lab.finer import FINER_STUDY, finer
from atbook.lab.linear import LINEAR
from atbook.worlds import glyph_images, glyphs
from atfamily.measures.controls import maps_of
from atlib import create_vit, walk
from atlib.baselines import LogitDistillation
from atlib.pair import student_of
from tests import toy
from tests.helpers import randomise
from tests.toy import sources as sources  # a fixture


@pytest.mark.parametrize("split, size", [("train", 16), ("test", 40)])
def test_the_oracle_reads_the_named_glyph_and_every_patch_itself(sources, split, size):
    pair = CONTROLS.variant("oracle").build(sources)
    drawn = glyphs.generate(split, size, 0, sources.scale.world)
    images, _ = glyphs.glyph_images(drawn).take(range(size))
    for p in (seen.map for seen in pair.eval().walk(images).layers):
        assert p.shape == (size, 4, 17, 17)
        for image, cell in enumerate(drawn.cell):
            expected = torch.eye(17)
            expected[0] = torch.nn.functional.one_hot(torch.tensor(cell + 1), 17)
            assert torch.equal(p[image], expected.expand(4, -1, -1))


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_jigsaw_moves_the_patches_of_the_teachers_maps_and_nothing_else(sources, how):
    pair = CONTROLS.variant(f"{how}, jigsaw").build(sources)
    assert (pair.plan.what, pair.plan.how) == ("map", how)
    images, _ = sources.scale.labelled(0).take(range(6))
    plain = maps_of(sources.teacher())(images)
    moved = {layer: seen.given for layer, seen in enumerate(pair.teacher_layers(images))}
    assert moved.keys() == plain.keys()
    for layer, p in moved.items():
        assert torch.equal(p[:, :, 0, 0], plain[layer][:, :, 0, 0]), "the class token stays"
        assert (p - plain[layer]).abs().max() > 1e-3
        for rows in (p, p.mT):  # the same numbers, elsewhere
            same = rows.flatten(2).sort(-1).values - plain[layer].flatten(2).sort(-1).values
            assert same.abs().max() == 0


@pytest.mark.parametrize("steps", [500, 800])
def test_answers_are_the_only_labels(sources, steps):
    variant = CONTROLS.variant(f"answers, {steps} steps")
    model = variant.build(sources)
    assert isinstance(model, LogitDistillation) and model.hard and variant.needs == ("fine-tuned",)
    recipe = variant.base(sources.scale, sources.place)
    assert (recipe.steps, recipe.task_weight, recipe.transfer_weight) == (steps, 0.0, 1.0)
    images = variant.images(sources.scale, 0)
    assert len(images) == 16 + 16 and (images.targets[16:] < 0).all()
    inputs, _ = images.take(range(8))
    logits, loss = model.train()(inputs)
    with torch.no_grad():
        labels = model.teacher(inputs).argmax(1)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels))


# --- Finer classes than the labels: who learns from what, and how it is measured


def test_nobody_is_told_more_than_coarse_labels():
    fine = toy.TOY.labelled(0).targets
    for variant in FINER_STUDY.variants:
        targets = variant.images(toy.TOY, 0).targets
        classes = variant.student["num_classes"]
        assert torch.equal(targets if targets.ndim == 1 else targets[:, 0], fine // (8 // classes))


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


# --- Augmentation: what is changed, what is left


DRAWN = glyphs.generate("train", 300)
SCENES, SEEDS = torch.from_numpy(DRAWN.images), torch.arange(300) * 7919


def mark_found(images):
    return (glyphs.marked_cell(images).numpy() == DRAWN.cell).mean()


@pytest.mark.parametrize("make", [three_augment, rand_augment])
def test_the_mark_stays_where_it_is(make):
    changed = as_pictures(make())(SCENES, SEEDS)
    different = (changed != SCENES).flatten(1).any(1)
    assert mark_found(changed) >= 0.99 and different.float().mean() > 0.5


def test_one_of_two_operations_a_picture():
    """Grey pictures have three equal channels; blurred ones have the same means, but less noise."""
    changed = as_pictures(three_augment())(SCENES, SEEDS).float()
    grey = (changed == changed.mean(1, keepdim=True)).flatten(1).all(1)
    assert 110 < grey.sum() < 190
    blurred, before = changed[~grey], SCENES[~grey].float()
    assert (blurred.mean((2, 3)) - before.mean((2, 3))).abs().max() < 3
    assert (blurred.flatten(1).std(1) < before.flatten(1).std(1) + 0.1).all(), "levels are whole"


# --- Linear attention: all students begin alike, and what is measured


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


def test_updates_of_low_rank_begin_at_nothing_and_move_q_k_v_and_the_projection_alone(sources, monkeypatch):
    """W + 2 · up · down for each of q, k and v, of rank 8; nothing else has a gradient."""
    before = LINEAR.variant("fine-tuned, all").build(sources)
    monkeypatch.setattr(type(sources), "model_of", lambda *names: copy.deepcopy(before))
    model = LINEAR.variant("fine-tuned, outputs, then low rank").build(sources)
    images = toy.TOY.held_out("test").take(range(8))[0]
    assert torch.equal(model(images), before(images))
    learned = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    kinds = {name.split(".blocks.")[1][2:] for name in learned}
    parts = [f"attn.{linear}.parametrizations.weight.0" for linear in ("qkv", "proj")]
    assert kinds == {f"{part}.{side}" for part in parts for side in ("up", "down")}
    tuned, plain = model.model.blocks[0].attn, before.model.blocks[0].attn
    for layer, was, count in ((tuned.qkv, plain.qkv, 3), (tuned.proj, plain.proj, 1)):
        update = layer.parametrizations.weight[0]
        randomise(update)
        products = [2 * up @ down for up, down in zip(update.up, update.down)]
        assert len(products) == count and update.up.shape[-1] == 8
        torch.testing.assert_close(layer.weight, was.weight + torch.cat(products))
