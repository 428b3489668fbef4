"""Feature and logit distillation against formulas written out; DeiT's weights; what is trained and what is
left after training."""

import math

import pytest
import torch

from atfamily.attndistill import AttnDistill
from atfamily.token_distillation import TokenDistillation
from atlib.baselines import FeatureDistillation, LogitDistillation
from tests import longhand
from tests.helpers import Bomb, random_images

KINDS = {
    "features": FeatureDistillation,
    "soft": LogitDistillation,
    "hard": lambda teacher, student: LogitDistillation(teacher, student, hard=True),
    "class token": AttnDistill,
    "tokens": TokenDistillation,
}


def images_of(dtype=torch.float64):
    return random_images(3, 3, 32, 32, dtype=dtype)


def models(small_vit, **teacher):
    return small_vit(seed=1, **teacher).double(), small_vit(seed=2).double()


def softmax(row):
    powers = [math.exp(value - max(row)) for value in row]
    return [power / sum(powers) for power in powers]


def cross_entropy(rows, labels):
    return sum(-math.log(softmax(row)[label]) for row, label in zip(rows, labels)) / len(rows)


def divergence(rows, others, temperature):
    """Σ p_t log(p_t / p_s) of predictions softened by the temperature, mean over the batch."""
    total = 0.0
    for row, other in zip(rows, others):
        p_s, p_t = (softmax([value / temperature for value in logits]) for logits in (row, other))
        total += sum(t * math.log(t / s) for s, t in zip(p_s, p_t))
    return total / len(rows)


def logits_of(*vits):
    with torch.no_grad():
        return [longhand.layers(vit.state_dict(), images_of(), 3)[0].tolist() for vit in vits]


# --- the losses


def test_features_by_hand(small_vit):
    """Squared differences of the tokens after each block, mean over all entries, summed over layers."""
    pair, images = FeatureDistillation(*models(small_vit), layers=[0, 2]).train(), images_of()
    logits, own = longhand.layers(pair.student.state_dict(), images, 3)
    _, target = longhand.layers(pair.teacher.state_dict(), images, 3)
    loss = sum(((own[layer]["stream"] - target[layer]["stream"]) ** 2).mean() for layer in (0, 2))
    found = pair(images)
    assert (
        (found.logits - logits).abs().max() <= 1e-10
        and (found.transfer_loss - loss).abs() <= 1e-10
        and loss > 0.1
    )


@pytest.mark.parametrize(
    "teacher, layers, pairs",
    [
        ({"embed_dim": 36, "depth": 5}, {0: 1, 2: 4}, [(0, 1), (2, 4)]),
        ({"depth": 2}, {1: 0, 2: 1}, [(1, 0), (2, 1)]),
    ],
    ids=str,
)
def test_features_of_another_width_or_depth_by_hand(small_vit, teacher, layers, pairs):
    """A linear map of the student's tokens for each pair of layers, only where the widths differ."""
    teacher, student = models(small_vit, **teacher)
    pair, images = FeatureDistillation(teacher, student, layers).train(), images_of()
    of_teacher, of_student = ([], [])
    for vit, kept in ((teacher, of_teacher), (student, of_student)):
        for block in vit.blocks:
            block.register_forward_hook(lambda _, __, tokens, kept=kept: kept.append(tokens.detach()))
        with torch.no_grad():
            vit(images)
    maps = [torch.eye(24, dtype=torch.float64)] * len(pairs), [torch.zeros(24)] * len(pairs)
    if pair.projectors is not None:
        maps = zip(*((each.weight.detach().T, each.bias.detach()) for each in pair.projectors))
    expected = sum(
        ((of_student[own] @ weight + bias - of_teacher[other]) ** 2).mean()
        for (own, other), weight, bias in zip(pairs, *maps)
    )
    assert (pair.projectors is None) == (teacher.embed_dim == 24)
    loss = pair(images).transfer_loss
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-9, atol=0)
    loss.backward()
    learns = [p for name, p in pair.named_parameters() if name.startswith("projectors")]
    assert all(p.grad.abs().max() > 0 for p in learns) and pair.student is student
    assert not any(p.grad is not None for p in teacher.parameters())


@pytest.mark.parametrize("stored", [False, True])
def test_tokens_by_hand(small_vit, stored):
    """Each token of a wider and shallower teacher, less its mean and over its deviation, against the linear
    map of the student's; and what gets a gradient."""
    teacher, student = models(small_vit, embed_dim=36, depth=2)
    images = images_of()
    with torch.no_grad():
        theirs, own = (vit.forward_features(images) for vit in (teacher, student))
    given = {"tokens": lambda asked: theirs + 0.0 * asked.sum()} if stored else {}
    pair = TokenDistillation(teacher, student, **given).double().train()
    weight, bias = (part.detach() for part in (pair.projector.weight, pair.projector.bias))
    scaled = (theirs - theirs.mean(-1, keepdim=True)) / (
        theirs.var(-1, correction=0, keepdim=True) + 1e-5
    ) ** 0.5
    expected = ((own @ weight.T + bias - scaled) ** 2).mean()
    found = pair(images)
    torch.testing.assert_close(found.transfer_loss.detach(), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.logits, student(images))
    found.transfer_loss.backward()
    learns = {name for name, p in pair.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert {"projector.weight", "projector.bias", "student.norm.weight", "student.cls_token"} <= learns
    assert not any(p.grad is not None for p in teacher.parameters()) and not pair.needs_teacher
    assert pair.eval()(images).transfer_loss == 0


def test_soft_logits_by_hand(small_vit):
    teacher, student = models(small_vit, embed_dim=36, depth=2)
    of_teacher, of_student = logits_of(teacher, student)
    found = LogitDistillation(teacher, student, temperature=3.0).train()(images_of())
    expected = 9 * divergence(of_student, of_teacher, 3.0)
    assert found.transfer_loss.item() == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(found.logits, torch.tensor(of_student, dtype=torch.float64))


def test_hard_logits_by_hand(small_vit):
    teacher, student = models(small_vit)
    of_teacher, of_student = logits_of(teacher, student)
    top = [row.index(max(row)) for row in of_teacher]
    assert top != [row.index(max(row)) for row in of_student], "teacher and student must disagree"
    found = LogitDistillation(teacher, student, hard=True).train()(images_of())
    assert found.transfer_loss.item() == pytest.approx(cross_entropy(of_student, top), rel=1e-9)


# --- what is run, what is trained, what is left


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_evaluated_the_student_is_alone(small_vit, kind):
    pair = kind(*models(small_vit)).eval()
    pair._teacher, pair.projector = (Bomb("the teacher"),), Bomb("the projector")
    output = pair(images_of())
    assert (
        torch.equal(output.logits, pair.student(images_of()))
        and output.transfer_loss.item() == 0
        and not pair.needs_teacher
    )
