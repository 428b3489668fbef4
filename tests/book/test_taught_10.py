"""What notebook 10 writes out, soft, hard and feature distillation, is what atlib computes, on other inputs
than the notebook's."""

import pytest
import torch
import torch.nn.functional as F

from atlib import walk
from atlib.losses import feature_mse, hard_distillation, soft_distillation
from atlib.methods.distillation import LogitDistillation
from atlib.train import student_loss
from atlib.train.recipe import Recipe
from tests.book.test_taught import small_vit as vit
from tests.book.test_taught import taught

NAME = "10-is-it-just-distillation"


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
def test_soft_and_hard(tau):
    z_s, z_t = 5 * torch.randn(2, 7, 11, dtype=torch.float64)
    soft = soft_distillation(z_s, z_t, tau).item()
    assert taught(NAME).soft_by_hand(z_s, z_t, tau) == pytest.approx(soft, rel=1e-10)
    assert taught(NAME).hard_by_hand(z_s, z_t) == pytest.approx(hard_distillation(z_s, z_t).item(), rel=1e-10)


def test_cross_entropy_survives_large_logits():
    z = torch.tensor([[1000.0, 999.0, 0.0], [-1000.0, -999.0, -998.0]])
    labels = torch.tensor([1, 2])
    expected = F.cross_entropy(z, labels).item()
    assert taught(NAME).cross_entropy_by_hand(z, labels) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("hard, task, transfer", [(False, 0.9, 0.1), (True, 0.5, 0.5)])
def test_deits_formulas_are_the_training_loss(hard, task, transfer):
    teacher, student, images, labels = vit(1), vit(2), torch.randn(6, 3, 32, 32), torch.arange(6) % 5
    pair = LogitDistillation(teacher, student, hard=hard).train()
    recipe = Recipe(label_smoothing=0.0, task_weight=task, transfer_weight=transfer)
    found = student_loss(pair, images, labels, recipe)
    formula = taught(NAME).deit_hard if hard else taught(NAME).deit_soft
    assert formula(student(images), teacher(images), labels).item() == pytest.approx(found.item(), rel=1e-5)


def test_features():
    images, by_hand = torch.randn(3, 3, 32, 32), taught(NAME)
    with torch.no_grad():
        one, other = vit(3), vit(4)
        streams = [by_hand.streams_by_hand(each, images) for each in (one, other)]
        for own, walked in zip(streams[0], walk(one, images).stream, strict=True):
            assert torch.allclose(own, walked, atol=1e-5)
        expected = feature_mse(walk(one, images).stream, walk(other, images).stream)
    assert by_hand.feature_mse_by_hand(*streams) == pytest.approx(expected.item(), rel=1e-5)
