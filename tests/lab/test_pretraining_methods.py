"""The study of pre-training methods: what makes each teacher, and what its students get."""

import math
from dataclasses import replace

import pytest

from atbook.lab import study as runner
from atbook.lab.pretraining_methods import METHODS, PAINTABLE, PRETRAINING_METHODS, PRETRAINING_METHODS_MATCH
from atbook.lab.study import Sources
from atbook.records import read_file
from atbook.worlds import glyphs
from atfamily.contrast import Dino, MoCo
from atlib import AttentionTransfer
from atlib.checkpoint import load_vit
from atlib.data.sampler import ShardSpec
from atlib.train.pretrain import MaskedAutoencoder
from atlib.vit import Architecture
from tests import toy
from tests.helpers import same

STUDIES = {"find": PRETRAINING_METHODS, "match": PRETRAINING_METHODS_MATCH}
KINDS = {"mae": MaskedAutoencoder, "moco": MoCo, "dino": Dino}


@pytest.fixture(autouse=True)
def toy_scales(monkeypatch):
    monkeypatch.setattr(runner, "scales", toy.known)


@pytest.mark.parametrize("task", STUDIES)
def test_the_tables_rows_and_worlds(task):
    study = STUDIES[task]
    cells = [(variant.differs["teacher"], variant.differs["method"]) for variant in study.variants]
    teachers = (
        (*METHODS, "retrieval") if task == "match" else METHODS
    )  # a world in which no maps help says nothing
    every = [(teacher, how) for teacher in teachers for how in ("fine-tune", "copy", "distill")]
    assert cells == [("none", "scratch"), ("untrained", "copy"), ("untrained", "distill"), *every]
    assert study.only == (task,) and PAINTABLE[task].offset == 4 and PAINTABLE[task].task == task
    assert {variant.world for variant in study.variants} == {PAINTABLE[task]}
    assert {schooling.world for schooling in study.teachers} == {PAINTABLE[task]}
    steps = {schooling.name: schooling.changes["steps"] for schooling in study.teachers}
    assert steps.pop("paintable-match-retrieval", 3000) == 3000 and {*steps.values()} == {2000}
    assert len({str(variant.trials) for variant in study.variants}) == 1


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


def test_views_keep_the_hue():
    """Match asks for it: channels are changed together."""
    images = PRETRAINING_METHODS_MATCH.teachers[1].images
    drawn = glyphs.generate("unlabelled", 4, 0, PAINTABLE["match"])
    grey = drawn._replace(images=drawn.images.mean(1, keepdims=True).repeat(3, 1).astype("uint8"))
    (batch,) = images(grey).epoch(ShardSpec(0, 0, 4))
    assert batch.images.shape == (4, 2, 3, 32, 32)
    assert (batch.images[:, :, 0] - batch.images[:, :, 2]).abs().max() < 0.05
