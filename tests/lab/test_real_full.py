"""The study of a published teacher on all labels: what its variants are given, with a small teacher."""

from dataclasses import replace

import pytest
import torch

from atbook.lab import real, study
from atbook.lab.real_full import REAL_FULL
from atbook.lab.study import Place, Run, Sources, trained
from atlib.attention import walk
from atlib.vit import Architecture
from tests.helpers import randomise
from tests.lab.test_real import SIDE, SMALL, TOY

STUDENT = {"embed_dim": 24, "img_size": SIDE, "patch_size": 16, "depth": 12, "num_heads": 2}


@pytest.fixture(autouse=True)
def small_teacher(monkeypatch):
    architecture = Architecture({**SMALL, "embed_dim": 24}, {"num_classes": 0})
    vit = randomise(architecture.build().eval())
    monkeypatch.setattr(real, "teacher_of", lambda place, image_size: vit)
    monkeypatch.setattr(real, "ARCHITECTURE", architecture)
    toy = replace(TOY, student=Architecture(STUDENT, {"num_classes": 4}), padding=3)
    monkeypatch.setattr(study, "scales", lambda data=None: {toy.name: toy})
    return vit, toy


@pytest.mark.parametrize("variant", REAL_FULL.variants, ids=lambda variant: variant.name)
def test_every_variant_trains(tmp_path, variant):
    fixed = replace(variant, trials=({"lr": 1e-3},), changes={"steps": 2})
    place = Place(TOY.name, None, tmp_path / "results", tmp_path / "work")
    run = Run(replace(REAL_FULL, variants=(fixed,)), place, variant.name, 0)
    trained(run)
    results = run.record().results
    others = {"copy": "blank", "distill": "blank", "copy, blank image": "photograph"}
    assert 0 <= results["test_accuracy"] <= 1
    if variant.name in others:
        assert f"test_{others[variant.name]}_accuracy" in results


def test_training_images_are_shifted_by_no_more_than_the_padding(small_teacher):
    _, toy = small_teacher
    images = toy.labelled(0)
    changed = images.augment(images.pixels, torch.arange(8) + 17)
    views = {
        (down, across, flipped): torch.roll(
            images.pixels.flip(-1) if flipped else images.pixels, (down, across), (2, 3)
        )
        for down in range(-3, 4)
        for across in range(-3, 4)
        for flipped in (False, True)
    }
    for index in range(8):
        inside = [
            key
            for key, view in views.items()
            if torch.equal(view[index, :, 3:-3, 3:-3], changed[index, :, 3:-3, 3:-3])
        ]
        assert len(inside) == 1
    assert not torch.equal(changed, images.pixels)


def test_a_reader_reads_the_class_token(small_teacher):
    teacher, toy = small_teacher
    sources = Sources(Place(toy.name, None, None, None), toy, 0)
    reader = REAL_FULL.variant("linear reader of features").build(sources)
    images, _ = toy.labelled(0).take(range(8))
    with torch.no_grad():
        reader.linear.weight.normal_()
        said = walk(teacher, images).logits
        expected = (said - said.mean(0)) / said.std(0) @ reader.linear.weight.T
        torch.testing.assert_close(reader(images), expected, rtol=1e-3, atol=1e-3)
