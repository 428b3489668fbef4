"""A teacher-student step against plain matrices; where gradients go; what a pair is made of."""

import pytest
import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from atlib import AttentionTransfer, Plan
from atlib.attention import sample_drop_path
from tests import longhand
from tests.helpers import mine, random_images, tiny

LABELS = torch.tensor([0, 3, 1])


def pair_of(small_vit, plan, teacher=None, **options):
    teacher = small_vit(seed=1, **(options if teacher is None else teacher))
    return AttentionTransfer(teacher, small_vit(seed=2, **options), plan)


def test_common_tokens_are_those_of_the_size_that_both_are_built_for():
    """Larger images have more tokens: a part of them would be compared, and be taken for all."""
    plan = Plan(how="distill", unequal_prefix="drop", mismatched=True)
    teacher = tiny(1, dynamic_img_size=True, reg_tokens=2)
    pair = AttentionTransfer(teacher, tiny(2, dynamic_img_size=True), plan)
    assert pair(random_images(2, 3, 32, 32)).transfer_loss > 0
    with pytest.raises(ValueError):
        pair(random_images(2, 3, 64, 64))
    alike = AttentionTransfer(teacher, tiny(2, dynamic_img_size=True, reg_tokens=2), plan)
    assert alike(random_images(2, 3, 64, 64)).transfer_loss > 0, "nothing is left out between equals"


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_teacher_goes_on_being_trained_by_its_owner(small_vit, how):
    teacher, images = small_vit(seed=1, proj_drop_rate=0.5).train(), random_images(3, 3, 32, 32)
    teacher.blocks[0].requires_grad_(False)
    before = {name: (p.requires_grad, None) for name, p in teacher.named_parameters()}
    pair = AttentionTransfer(teacher, small_vit(seed=2), Plan(how=how))
    output = pair(images)
    (cross_entropy(output.logits, LABELS) + output.transfer_loss).backward()
    assert {name: (p.requires_grad, p.grad) for name, p in teacher.named_parameters()} == before
    assert all(part.training for part in teacher.modules())
    cross_entropy(teacher(images), LABELS).backward()
    assert all((p.grad is not None) == p.requires_grad for p in teacher.parameters())


def test_evaluation_runs_the_student_alone_after_distill(small_vit):
    """Without gradients, in eval mode; `walk_with_loss` still says the loss."""
    pair, images = pair_of(small_vit, Plan(how="distill")), random_images(2, 3, 32, 32)
    asked = pair.eval()(images)
    mine(pair.teacher, after=-1)
    with torch.no_grad():
        found = pair(images)
    assert torch.equal(found.logits, asked.logits) and found.transfer_loss.isnan() and asked.transfer_loss > 0
    with torch.no_grad(), pytest.raises(AssertionError):
        pair.walk_with_loss(images)


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("share", [True, False])
def test_teacher_and_student_drop_the_same_paths_in_training(small_vit, how, share):
    """Factors in the order in which they are drawn; timm's own modules draw nothing at rate 0."""
    plan = Plan(how=how, share_drop_path=share)
    pair = pair_of(small_vit, plan, teacher={}, drop_path_rate=0.5).double().train()
    images = random_images(8, 3, 32, 32, dtype=torch.float64)
    torch.manual_seed(5)
    masks = {}
    for layer, rate in enumerate((0.0, 0.25, 0.5)):  # what timm makes of 0.5 at depth 3
        for branch in (0, 1):
            one = torch.ones(8, 1, 1, dtype=torch.float64)
            drawn = one.bernoulli_(1 - rate) / (1 - rate) if share or rate else one
            masks[layer, branch] = drawn.flatten()
    weights = pair.teacher.state_dict(), pair.student.state_dict()
    pairs = {layer: layer for layer in range(3)}
    options = {"masks": masks, "teacher_masks": masks if share else None}
    logits, loss = longhand.family(*weights, images, "map", how, pairs, **options)
    torch.manual_seed(5)
    found = pair(images)
    assert any((mask == 0).any() for mask in masks.values())
    assert (found.logits - logits).abs().max() <= 1e-10
    assert abs(found.transfer_loss.item() - loss.item()) <= 1e-10


@pytest.mark.parametrize("teacher, layers", [({"depth": 4}, {2: 2}), ({}, {0: 2})], ids=str)
def test_paths_are_shared_between_equals_alone(small_vit, teacher, layers):
    pair = pair_of(small_vit, Plan(how="distill", layers=layers), teacher, drop_path_rate=0.5)
    images = random_images(8, 3, 32, 32)
    masks = sample_drop_path(pair.student, images)
    (found,), (expected,) = pair.teacher_layers(images, masks), pair.teacher_layers(images)
    assert torch.equal(found.q, expected.q) and pair.train()(images).transfer_loss > 0


def test_a_student_in_ddp_is_refused_and_the_pair_in_ddp_is_not(small_vit, tmp_path):
    """minimind#853: its gradients would never be averaged, without a word."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        images, plan = random_images(1, 3, 32, 32), Plan(how="distill")
        pair = AttentionTransfer(small_vit(), small_vit(), plan)
        wrapped = DistributedDataParallel(pair.student)
        with pytest.raises(ValueError):
            AttentionTransfer(small_vit(), wrapped.module, plan)(images)
        with pytest.raises(ValueError):
            pair(images)
        with torch.no_grad():
            pair(images)
        for other in (plan, Plan(), Plan(what="q", how="distill", layers=[0])):
            of_pair = DistributedDataParallel(AttentionTransfer(small_vit(), small_vit(), other))
            for _ in range(2):  # a weight that was left out of the first step is noticed in the second
                sum(part.sum() for part in of_pair(images)).backward()
    finally:
        distributed.destroy_process_group()
