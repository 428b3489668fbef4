"""The study of finer classes than the labels: who learns from what, and how it is measured."""

import pytest
import torch

from atbook.lab.finer import FINER_STUDY, finer
from atbook.worlds import glyph_images, glyphs
from atlib import create_vit
from tests import toy


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
