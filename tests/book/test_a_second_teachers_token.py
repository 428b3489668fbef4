"""What notebook 18 writes out, DeiT's two heads, its losses and a row with a token of the student's own, is
what timm and atlib compute, on other inputs than the notebook's."""

import pytest
import torch

from atbook.lab.papers import quoted
from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.maps import keep_own, place_tokens
from atlib.methods.distillation_token import DistillationToken, both_heads
from atlib.train import student_loss
from atlib.train.recipe import Recipe
from tests.book.test_taught import small_vit, taught
from tests.helpers import SMALL_VIT, random_maps, randomise

NAME = "18-a-second-teachers-token"


def distilled(seed: int, **changes):
    """A small ViT with a distillation token, whose weights all matter."""
    return randomise(create_vit(SMALL_VIT | changes, distilled=True), seed).eval()


@pytest.mark.parametrize("changes", [{}, {"depth": 2, "num_classes": 3}])
def test_two_heads_are_timms(changes):
    student, images = distilled(1, **changes), torch.randn(3, 3, 32, 32)
    of_class, of_token = taught(NAME).two_heads(student, images)
    expected = both_heads(student, student.norm(walk(student, images).tokens))
    assert torch.allclose(of_class, expected.of_class, atol=1e-4)
    assert torch.allclose(of_token, expected.of_token, atol=1e-4)
    assert torch.allclose((of_class + of_token) / 2, student(images), atol=1e-4)
    student.train().set_distilled_training(True)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(student(images), (of_class, of_token)))


@pytest.mark.parametrize("hard, alpha, tau", [(True, 0.5, 3.0), (False, 0.1, 3.0), (False, 0.7, 1.5)])
def test_the_losses_are_atlibs(hard, alpha, tau):
    student, images = distilled(2), torch.randn(4, 3, 32, 32)
    teacher = randomise(small_vit(3), 3)
    labels = torch.tensor([0, 4, 2, 2])
    with torch.no_grad():
        logits_and_labels = (*taught(NAME).two_heads(student, images), teacher(images), labels)
        by_hand = (
            taught(NAME).hard_loss(*logits_and_labels)
            if hard
            else taught(NAME).soft_loss(*logits_and_labels, tau, alpha)
        )
    pair = DistillationToken(teacher, student, hard=hard, temperature=tau).train()
    recipe = Recipe(label_smoothing=0, task_weight=1 - alpha, transfer_weight=alpha)
    assert by_hand.item() == pytest.approx(student_loss(pair, images, labels, recipe).item(), rel=1e-4)


@pytest.mark.parametrize("new", [0, 1, 4])
def test_a_row_with_an_own_token_is_a_row_of_the_map_that_is_used(new):
    p_t, p_s = random_maps(1, 1, 4, 4), random_maps(1, 1, 5, 5, seed=1)
    common = [i for i in range(5) if i != new]
    expected = keep_own(place_tokens(p_t, common, 5), p_s, [new], [new])
    for at, query in enumerate(common):
        row = taught(NAME).row_with_own(p_t[0, 0, at].tolist(), p_s[0, 0, query].tolist(), new)
        assert row == pytest.approx(expected[0, 0, query].tolist(), abs=1e-12)
        assert sum(row) == pytest.approx(1)


def test_a_copied_row_leaves_the_students_share_to_its_distillation_token():
    teacher, student, images = randomise(small_vit(4), 4), distilled(5), torch.randn(2, 3, 32, 32)
    pair = AttentionTransfer(teacher, student, Plan(unequal_prefix="own", mismatched=True)).eval()
    with torch.no_grad():
        theirs, own, used = (
            seen.layers[0].map for seen in (walk(teacher, images), walk(student, images), pair.walk(images))
        )
    for query in (0, 5):
        of_student = query if query == 0 else query + 1
        for image, head in ((0, 0), (1, 1)):
            row = taught(NAME).row_with_own(
                theirs[image, head, query].tolist(), own[image, head, of_student].tolist(), 1
            )
            assert row == pytest.approx(used[image, head, of_student].tolist(), abs=1e-5)
    assert torch.allclose(used[:, :, 1], own[:, :, 1], atol=1e-5)


def test_deits_figures_are_quoted_with_their_tables():
    table = quoted("distillation", "deit")
    assert table.value("nothing", "DeiT-B") == table.value("soft, class token", "DeiT-B") == 81.8
    disagree = quoted("disagreement", "deit")
    names = [str(row[0]) for row in disagree.rows]
    for row, name in enumerate(names):
        for column, other in enumerate(names):
            there = disagree.value(name, disagree.columns[column + 1])
            assert there == disagree.value(other, disagree.columns[row + 1])
