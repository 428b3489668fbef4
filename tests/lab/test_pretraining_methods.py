"""The study of pre-training methods: what makes each teacher, and what its students get."""

import math
from dataclasses import replace

import pytest

from atbook.lab import study as runner
from atbook.lab.pretraining_methods import METHODS, PRETRAINING_METHODS
from atbook.lab.study import Sources
from atbook.records import read_file
from atfamily.contrast import Dino, MoCo
from atlib import AttentionTransfer
from atlib.checkpoint import load_vit
from atlib.mae import MaskedAutoencoder
from atlib.vit import Architecture
from tests import toy
from tests.helpers import same

KINDS = {"mae": MaskedAutoencoder, "moco": MoCo, "dino": Dino}


@pytest.fixture(autouse=True)
def toy_scales(monkeypatch):
    monkeypatch.setattr(runner, "scales", toy.known)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A teacher made in two steps: place, schooling and record."""
    toy.few_held_out(monkeypatch)
    place = toy.place(tmp_path)

    def make(schooling):
        short = replace(schooling, changes={**schooling.changes, "steps": 2})
        runner.make_teacher(place, 0, PRETRAINING_METHODS, short)
        (record,) = read_file(place.records(PRETRAINING_METHODS.name))
        return place, short, record

    return make


@pytest.mark.parametrize("method, schooling", [*zip(METHODS, PRETRAINING_METHODS.teachers, strict=True)])
def test_a_teacher_is_made_kept_and_its_maps_are_measured(made, method, schooling):
    vit = Architecture("glyphs", {**schooling.model, "num_classes": schooling.outputs}).build()
    assert isinstance(schooling.around(vit, None), KINDS.get(method, type(vit)))
    place, schooling, record = made(schooling)
    assert record.method == f"teacher paintable-find-{method}" and record.config["recipe"]["steps"] == 2
    assert 0 < record.results["evenness"] <= 1 and 0 <= record.results["unlearned"] < 2
    assert math.isfinite(record.results["pretraining_loss"])
    kept = load_vit(place.teacher(0, schooling))
    fine_tuned, copied, distilled = (
        variant.build(Sources(place, toy.TOY, 0))
        for variant in PRETRAINING_METHODS.variants
        if variant.differs["teacher"] == method
    )
    assert same(fine_tuned.blocks.state_dict(), kept.blocks.state_dict())
    for pair, how in ((copied, "copy"), (distilled, "distill")):
        assert isinstance(pair, AttentionTransfer) and pair.plan.how == how
        assert same(pair.teacher.blocks.state_dict(), kept.blocks.state_dict())
