"""The study of linear attention: all students begin alike, and what is measured."""

import copy

import pytest
import torch

from atbook.lab import linear
from atbook.lab.linear import LINEAR
from atlib import walk
from atlib.pair import student_of
from tests import toy
from tests.helpers import randomise
from tests.toy import sources as sources  # a fixture


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
