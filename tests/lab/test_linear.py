"""The study of linear attention: all students begin alike, and what is measured."""

import pytest
import torch

from atbook.lab import linear
from atbook.lab.linear import LINEAR
from atlib import walk
from atlib.pair import student_of
from tests import toy
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
