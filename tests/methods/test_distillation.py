"""Feature and logit distillation against formulas written out; what is left after training."""

import pytest
import torch

from atfamily.attndistill import AttnDistill
from atfamily.token_distillation import TokenDistillation
from atlib.baselines import FeatureDistillation, LogitDistillation, hard_distillation, soft_distillation
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


# --- the losses


@pytest.mark.parametrize(
    "teacher, layers, pairs",
    [
        ({}, [0, 2], [(0, 0), (2, 2)]),
        ({"embed_dim": 36, "depth": 5}, {0: 1, 2: 4}, [(0, 1), (2, 4)]),
        ({"depth": 2}, {1: 0, 2: 1}, [(1, 0), (2, 1)]),
    ],
    ids=str,
)
def test_features_by_hand(small_vit, teacher, layers, pairs):
    """Mean squared differences after each block, summed; a linear map only where the widths differ."""
    teacher, student = models(small_vit, **teacher)
    pair, images = FeatureDistillation(teacher, student, layers).train(), images_of()
    of_teacher, of_student, logits = [], [], []
    for vit, kept in ((teacher, of_teacher), (student, of_student)):
        for block in vit.blocks:
            block.register_forward_hook(lambda _, __, tokens, kept=kept: kept.append(tokens.detach()))
        with torch.no_grad():
            logits.append(vit(images))
    maps = [torch.eye(24, dtype=torch.float64)] * len(pairs), [torch.zeros(24)] * len(pairs)
    if pair.projectors is not None:
        maps = zip(*((each.weight.detach().T, each.bias.detach()) for each in pair.projectors))
    expected = sum(
        ((of_student[own] @ weight + bias - of_teacher[other]) ** 2).mean()
        for (own, other), weight, bias in zip(pairs, *maps)
    )
    assert (pair.projectors is None) == (teacher.embed_dim == 24)
    found = pair(images)
    torch.testing.assert_close(found.transfer_loss.detach(), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.logits, logits[1])
    found.transfer_loss.backward()
    learns = [p for name, p in pair.named_parameters() if name.startswith("projectors")]
    assert all(p.grad.abs().max() > 0 for p in learns) and pair.student is student
    assert not any(p.grad is not None for p in teacher.parameters())


@pytest.mark.parametrize("stored", [False, True])
def test_tokens_by_hand(small_vit, stored):
    """Each token of the teacher, less its mean and over its deviation, against the student's linear map."""
    teacher, student = models(small_vit, embed_dim=36, depth=2)
    images = images_of()
    with torch.no_grad():
        theirs, own = (vit.forward_features(images) for vit in (teacher, student))
    given = {"tokens": lambda asked: theirs + 0.0 * asked.sum()} if stored else {}
    pair = TokenDistillation(teacher, student, **given).double().train()
    weight, bias = (part.detach() for part in (pair.projector.weight, pair.projector.bias))
    spread = (theirs.var(-1, correction=0, keepdim=True) + 1e-5) ** 0.5
    scaled = (theirs - theirs.mean(-1, keepdim=True)) / spread
    expected = ((own @ weight.T + bias - scaled) ** 2).mean()
    found = pair(images)
    torch.testing.assert_close(found.transfer_loss.detach(), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.logits, student(images))
    found.transfer_loss.backward()
    learns = {name for name, p in pair.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert {"projector.weight", "projector.bias", "student.norm.weight", "student.cls_token"} <= learns
    assert not any(p.grad is not None for p in teacher.parameters()) and not pair.needs_teacher
    assert pair.eval()(images).transfer_loss == 0


@pytest.mark.parametrize("hard", [False, True])
def test_logits_are_compared_by_the_losses_of_predictions(small_vit, hard):
    """`tests/core/test_losses.py` holds those against loops."""
    teacher, student = models(small_vit, embed_dim=36, depth=2)
    theirs, own = (vit(images_of()).detach() for vit in (teacher, student))
    assert (theirs.argmax(1) != own.argmax(1)).any()
    found = LogitDistillation(teacher, student, temperature=2.5, hard=hard).train()(images_of())
    expected = hard_distillation(own, theirs) if hard else soft_distillation(own, theirs, 2.5)
    torch.testing.assert_close(found.transfer_loss.detach(), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.logits, own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_teachers_logits_in_half_precision_are_shares_that_sum_to_one(dtype):
    """In that precision they do not, and a divergence came out below 0."""
    theirs = (5 * random_images(8, 100, dtype=torch.float32)).to(dtype)
    for own in (theirs.float(), theirs):
        assert soft_distillation(own, theirs, 3.0) == 0
    own = random_images(8, 100, seed=1, dtype=torch.float32)
    exact = soft_distillation(own.double(), theirs.double(), 3.0).float()
    torch.testing.assert_close(soft_distillation(own, theirs, 3.0), exact)


# --- what is run, what is trained, what is left


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_evaluated_the_student_is_alone(small_vit, kind):
    pair = kind(*models(small_vit)).eval()
    pair._teacher, pair.projector = (Bomb("the teacher"),), Bomb("the projector")
    output = pair(images_of())
    assert torch.equal(output.logits, pair.student(images_of()))
    assert output.transfer_loss.item() == 0 and not pair.needs_teacher
