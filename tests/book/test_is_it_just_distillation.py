"""What chapter 8 writes out, soft, hard and feature distillation, is what atlib computes, on other inputs
than the notebook's; and its relabelled teacher is the teacher at other sizes too."""

import pytest
import torch

from atlib import walk
from atlib.baselines import LogitDistillation, feature_mse, hard_distillation, soft_distillation
from atlib.recipe import Recipe
from atlib.train import student_loss
from tests.book.test_taught import small_vit as vit
from tests.book.test_taught import taught

NAME = "08-is-it-just-distillation"


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
def test_the_transfer_losses_alone(tau):
    z_s, z_t = 5 * torch.randn(2, 7, 11, dtype=torch.float64)
    labels = z_t.argmax(-1)
    soft = taught(NAME).deit_soft(z_s, z_t, labels, tau, alpha=1.0)
    assert soft == pytest.approx(soft_distillation(z_s, z_t, tau).item(), rel=1e-10)
    # where the teacher is right, its top class is the label once more
    hard = taught(NAME).deit_hard(z_s, z_t, labels)
    assert hard == pytest.approx(hard_distillation(z_s, z_t).item(), rel=1e-10)


@pytest.mark.parametrize("hard, task, transfer", [(False, 0.9, 0.1), (True, 0.5, 0.5)])
def test_deits_formulas_are_the_training_loss(hard, task, transfer):
    teacher, student, images, labels = vit(1), vit(2), torch.randn(6, 3, 32, 32), torch.arange(6) % 5
    pair = LogitDistillation(teacher, student, hard=hard).train()
    recipe = Recipe(label_smoothing=0.0, task_weight=task, transfer_weight=transfer)
    loss = student_loss(pair, images, labels, recipe)
    formula = taught(NAME).deit_hard if hard else taught(NAME).deit_soft
    assert formula(student(images), teacher(images), labels).item() == pytest.approx(loss.item(), rel=1e-5)


def test_features():
    images, by_hand = torch.randn(3, 3, 32, 32), taught(NAME)
    with torch.no_grad():
        one, other = vit(3), vit(4)
        streams = [by_hand.streams_by_hand(model, images) for model in (one, other)]
        for own, walked in zip(streams[0], walk(one, images).stream, strict=True):
            assert torch.allclose(own, walked, atol=1e-5)
        expected = feature_mse(walk(one, images).stream, walk(other, images).stream)
    assert by_hand.feature_mse_by_hand(*streams) == pytest.approx(expected.item(), rel=1e-5)
