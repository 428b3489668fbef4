"""The distillation token: its losses against the published code, what each head learns, maps beside it."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity, cross_entropy

from atfamily.distillation_token import (
    DistillationToken,
    both_heads,
    small_convnet,
    token_report,
    two_class_tokens_loss,
)
from atlib import AttentionTransfer, Plan, create_vit
from atlib.baselines import hard_distillation, soft_distillation
from atlib.data import UNLABELLED, Images, with_unlabelled
from atlib.objectives import task_loss
from atlib.recipe import Recipe
from atlib.train import student_loss
from tests.helpers import SMALL_VIT, Bomb, random_images, randomise

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "distillation_token.safetensors")
LABELS = torch.tensor([0, 3, 1])


def images_of(dtype=torch.float64, count=3):
    return random_images(count, 3, 32, 32, dtype=dtype)


def distilled(seed=2, **changes):
    return randomise(create_vit(SMALL_VIT | changes, distilled=True), seed).eval()


def convnet(seed=1):
    return randomise(small_convnet(5, (4, 6, 8)), seed).eval()


def pair_of(student=None, teacher=None, **options):
    student = distilled() if student is None else student
    pair = DistillationToken(convnet() if teacher is None else teacher, student, **options)
    return pair.double().train()


def two_heads(student, images):
    """Both predictions as timm itself gives them in its own mode of training."""
    twin = copy.deepcopy(student).train()
    twin.set_distilled_training(True)
    return twin(images)


# --- the losses


@pytest.mark.parametrize("kind, alpha", [("hard", 0.5), ("soft", 0.1)])
def test_the_losses_are_those_of_the_published_code(kind, alpha):
    """Its soft loss divides by batch and classes, the equation by the batch: a tenth, with ten classes."""
    of_class, of_token = (GOLDEN[name].clone().requires_grad_() for name in ("of_class", "of_token"))
    task = task_loss(of_class, GOLDEN["labels"], Recipe(label_smoothing=0.1))
    if kind == "hard":
        loss = (1 - alpha) * task + alpha * hard_distillation(of_token, GOLDEN["teacher"])
    else:
        loss = (1 - alpha) * task + alpha / 10 * soft_distillation(of_token, GOLDEN["teacher"], 3.0)
    loss.backward()
    assert loss.item() == pytest.approx(GOLDEN[f"{kind}.loss"].item(), abs=1e-12)
    for name, x in (("class", of_class), ("token", of_token)):
        assert (x.grad - GOLDEN[f"{kind}.{name}_gradient"]).abs().max() <= 1e-12


@pytest.mark.parametrize("hard", [True, False])
def test_each_head_learns_its_own(hard):
    """1/2 CE + 1/2 CE with the teacher's choice, (1 - 0.1) CE + 0.1 · 9 KL; and all gradients."""
    pair, images = pair_of(hard=hard), images_of()
    alpha = 0.5 if hard else 0.1
    recipe = Recipe(task_weight=1 - alpha, transfer_weight=alpha)
    student_loss(pair, images, LABELS, recipe).backward()
    twin = copy.deepcopy(pair.student).train()
    twin.zero_grad()
    twin.set_distilled_training(True)
    of_class, of_token = twin(images)
    with torch.no_grad():
        theirs = pair.teacher(images)
    if hard:
        other = cross_entropy(of_token, theirs.argmax(1))
    else:
        p_t, log_p_s = (theirs / 3).softmax(1), (of_token / 3).log_softmax(1)
        other = 9 * (p_t * (p_t.log() - log_p_s)).sum(1).mean()
    ((1 - alpha) * cross_entropy(of_class, LABELS, label_smoothing=0.1) + alpha * other).backward()
    for (name, p), (_, expected) in zip(pair.student.named_parameters(), twin.named_parameters()):
        assert (p.grad - expected.grad).abs().max() <= 1e-10, name
        assert expected.grad.abs().max() > 0, name


# --- what is run, what is trained, what is left


def test_evaluated_it_is_timms_own_forward():
    pair, images = pair_of().eval(), images_of()
    pair._teacher = (Bomb("the teacher"),)
    output = pair(images)
    assert torch.equal(output.logits, pair.student(images)) and output.transfer_loss.item() == 0
    heads = two_heads(pair.student, images)
    assert torch.equal(output.logits, sum(heads) / 2) and not pair.needs_teacher


# --- images without labels


def test_images_without_labels(glyphs64):
    some, more = glyphs64.select(range(10)), glyphs64.select(range(10, 64))
    images = with_unlabelled(some, more)
    assert len(images) == 64 and torch.equal(images.pixels, glyphs64.pixels)
    assert torch.equal(images.targets[:10], glyphs64.targets[:10]) and images.classes == glyphs64.classes
    assert set(images.targets[10:].tolist()) == {UNLABELLED}
    assert torch.equal(more.targets, glyphs64.targets[10:]), "those given stay as they are"
    with pytest.raises(ValueError):
        with_unlabelled(some, Images(more.pixels, more.targets, std=0.5))
    with pytest.raises(ValueError):
        with_unlabelled(Images(some.pixels, some.targets.float()), more)


@pytest.mark.parametrize("binary", [False, True])
def test_the_task_is_the_mean_over_the_labelled(binary):
    logits, recipe = GOLDEN["of_class"].clone().requires_grad_(), Recipe(binary=binary)
    labels = GOLDEN["labels"].clone()
    whole = task_loss(logits, labels, recipe)
    labels[[0, 2, 5]] = UNLABELLED
    found = task_loss(logits, labels, recipe)
    assert torch.equal(found, task_loss(logits[[1, 3, 4]], labels[[1, 3, 4]], recipe)) and found != whole
    (gradient,) = torch.autograd.grad(found, logits)
    assert (gradient[[0, 2, 5]] == 0).all() and (gradient[[1, 3, 4]] != 0).any()
    nothing = task_loss(logits, torch.full_like(labels, UNLABELLED), recipe)
    (gradient,) = torch.autograd.grad(nothing, logits)
    assert nothing.item() == 0 and (gradient == 0).all(), "not NaN"
    with pytest.raises(ValueError, match="parts"):  # whose means are of unequally many
        two_class_tokens_loss(lambda images: (logits, logits), None, labels, Recipe(accumulate=2))


# --- maps beside the token


def beside(small_vit, how, **plan):
    student = distilled()
    plan = Plan(how=how, mismatched=True, **({"unequal_prefix": "own"} | plan))
    return student, AttentionTransfer(small_vit(seed=3), student, plan)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_maps_and_token_add_up(small_vit, how):
    student, maps = beside(small_vit, how)
    pair, images = pair_of(student, maps=maps, maps_weight=2.0), images_of()
    seen, map_loss = maps.walk_with_loss(images)
    heads = both_heads(student, student.norm(seen.tokens))
    with torch.no_grad():
        theirs = pair.teacher(images)
    found = pair(images)
    assert torch.equal(found.logits, heads.of_class)
    expected = cross_entropy(heads.of_token, theirs.argmax(1)) + 2 * map_loss
    assert found.transfer_loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert (map_loss > 0) == (how == "distill")
    alone = both_heads(student, student.forward_features(images)).of_class
    assert ((found.logits - alone).abs().max() > 1e-3) == (how == "copy")


# --- two class tokens, and what becomes of two tokens


def test_a_report_by_hand():
    student, teacher, images = distilled().double(), convnet().double(), images_of(count=7)
    found = token_report(student.train(), teacher.train(), images, batch=3)
    assert student.training and teacher.training, "both are left as they were"
    student.eval(), teacher.eval()
    with torch.no_grad():
        tokens = student._pos_embed(student.patch_embed(images))
        expected = []
        for block in student.blocks:
            tokens = block(tokens)
            expected.append(cosine_similarity(tokens[:, 0], tokens[:, 1], dim=1).mean())
        tokens = student.norm(tokens)
        expected.append(cosine_similarity(tokens[:, 0], tokens[:, 1], dim=1).mean())
        of_class, of_token = (logits.argmax(1).tolist() for logits in two_heads(student, images))
        theirs, together = teacher(images).argmax(1).tolist(), student(images).argmax(1).tolist()
    assert (found.cosine - torch.stack(expected)).abs().max() <= 1e-12 and found.cosine.shape == (4,)

    def share(left, right):
        return pytest.approx(sum(a == b for a, b in zip(left, right)) / 7)

    assert found.heads == share(of_class, of_token) and found.together == share(together, theirs)
    assert found.of_class == share(of_class, theirs) and found.of_token == share(of_token, theirs)
