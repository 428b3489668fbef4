"""The study of Find with photographs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from atbook.lab.mosaics import MOSAICS
from atbook.lab.scales import scales
from atbook.lab.study import Place, Sources, teach
from atlib.checkpoint import save_vit
from tests.worlds.test_mosaics import POOL


@pytest.fixture
def sources(tmp_path, monkeypatch):
    scale = replace(scales()["mosaics"], labels=16, unlabelled=16)
    monkeypatch.setattr(type(scale), "_photographs", lambda self, split: POOL)
    drawn = type(scale).drawn
    few = lambda self, split, size, *rest: drawn(self, split, min(size, 40), *rest)  # noqa: E731
    monkeypatch.setattr(type(scale), "drawn", few)
    place = Place("mosaics", None, tmp_path, tmp_path)
    torch.manual_seed(1)
    save_vit(place.teacher(0), scale.student.build(), scale.student)
    return Sources(place, scale, 0)


# One of those that are built alike: of the many copies, the one whose teacher sees a blank image.
BUILT = {str(variant.build): variant for variant in MOSAICS.variants}


@pytest.mark.parametrize("variant", BUILT.values(), ids=lambda variant: variant.name)
def test_every_variant_trains_a_step(sources, variant):
    model = variant.build(sources)
    recipe = replace(variant.base(sources.scale, sources.place), steps=1, batch_size=8)
    images = sources.scale.labelled(0, twin=variant.twin)
    sets = {"test": sources.scale._images("test", 40, 0, variant.twin)}
    results, history = teach(model, images, recipe, 0, sets, variant.name)
    assert 0 <= results["test_accuracy"] <= 1 and history[-1]["loss"] > 0


def test_the_oracle_reads_the_framed_photograph(sources):
    drawn = sources.scale.drawn("train", 16, 0)
    pair = MOSAICS.variant("oracle").build(sources)
    images, labels = sources.scale.labelled(0).take(range(16))
    assert torch.equal(labels, drawn.labels)
    expected = torch.eye(10).repeat(16, 1, 1)
    expected[:, 0] = one_hot(drawn.cells + 1, 10)
    for seen in pair.eval().walk(images).layers:
        assert torch.equal(seen.map, expected[:, None].expand_as(seen.map))


def test_teacher_and_students_have_photographs_of_their_own(monkeypatch):
    monkeypatch.setattr("atbook.lab.scales._cifar10", lambda *arguments: POOL)
    scale = scales(Path("no folder"))["mosaics"]
    of_teacher, of_students = (scale._photographs(split).pixels for split in ("unlabelled", "train"))
    assert torch.equal(torch.cat([of_teacher, of_students]), POOL.pixels) and len(of_teacher) == 333
