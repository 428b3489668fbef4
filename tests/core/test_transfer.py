"""A teacher-student step against the same step from plain matrices; where gradients go; what a pair is made
of."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from atlib import AttentionTransfer, Plan, create_vit
from tests import longhand
from tests.helpers import mine, random_images, same, state_of, tiny

SUBSETS = [None, (0, 1, 2), (0,), (2,), (0, 2), range(1, 3)]
CLASS_TOKEN, AVERAGE = {}, {"global_pool": "avg", "class_token": False}
LABELS = torch.tensor([0, 3, 1])


def pair_of(small_vit, plan, teacher=None, **options):
    teacher = small_vit(seed=1, **(options if teacher is None else teacher))
    return AttentionTransfer(teacher, small_vit(seed=2, **options), plan)


def gradients(weights, value):
    value.backward()
    return {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()}


@pytest.mark.parametrize("layers", SUBSETS, ids=str)
@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("options", [CLASS_TOKEN, AVERAGE], ids=["class token", "average"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "dense"])
def test_equals_the_longhand(small_vit, how, layers, options, fused):
    pair = pair_of(small_vit, Plan(how=how, layers=layers), **options).double()
    for block in (*pair.student.blocks, *pair.teacher.blocks):
        block.attn.fused_attn = fused
    images = random_images(3, 3, 32, 32, dtype=torch.float64)
    weights = {name: value.clone().requires_grad_() for name, value in pair.student.state_dict().items()}
    expected, loss = longhand.transfer(
        pair.teacher.state_dict(), weights, images, 3, how, range(3) if layers is None else layers
    )
    expected_gradients = gradients(weights, longhand.cross_entropy(expected, LABELS) + 3 * loss)

    for mode in (False, True):  # no dropout here, so training and evaluation are the same
        found = pair.train(mode)(images)
        assert (found.logits - expected).abs().max() <= 1e-10
        assert found.transfer_loss.shape == () and abs(found.transfer_loss.item() - loss.item()) <= 1e-10
    pair.zero_grad()
    found_gradients = gradients(
        dict(pair.student.named_parameters()), cross_entropy(found.logits, LABELS) + 3 * found.transfer_loss
    )
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in found_gradients.items():
        assert (gradient - expected_gradients[name]).abs().max() <= 1e-10, name


def test_a_wider_teacher_teaches_a_narrow_student(small_vit):
    for how in ("copy", "distill"):
        pair = pair_of(small_vit, Plan(how=how), teacher={"embed_dim": 60, "num_classes": 2}).double()
        images = random_images(3, 3, 32, 32, dtype=torch.float64)
        logits, loss = longhand.transfer(
            pair.teacher.state_dict(), pair.student.state_dict(), images, 3, how, range(3)
        )
        found = pair(images)
        assert (found.logits - logits).abs().max() <= 1e-10 and abs(
            found.transfer_loss.item() - loss.item()
        ) <= 1e-10


def test_copied_maps_send_no_gradient_to_queries_and_keys(small_vit):
    pair = pair_of(small_vit, Plan(how="copy", layers=[0, 2]))
    output = pair(random_images(3, 3, 32, 32))
    assert output.transfer_loss.item() == 0
    (cross_entropy(output.logits, LABELS) + 3 * output.transfer_loss).backward()
    for layer, block in enumerate(pair.student.blocks):
        for gradient in (block.attn.qkv.weight.grad, block.attn.qkv.bias.grad):
            assert (gradient[:48] == 0).all() == (layer != 1)
            assert (gradient[48:] != 0).any()


def test_the_teachers_maps_are_constants_whatever_its_owner_does(small_vit):
    for how in ("copy", "distill"):
        pair = pair_of(small_vit, Plan(how=how))
        pair.teacher.requires_grad_(True)
        images = random_images(3, 3, 32, 32).requires_grad_()
        assert not any(
            tensor.requires_grad for seen in pair.teacher_layers(images) for tensor in (seen.q, seen.k)
        )
        output = pair(images)
        (cross_entropy(output.logits, LABELS) + output.transfer_loss).backward()
        assert all(p.grad is None for p in pair.teacher.parameters()) and images.grad.any()


def test_the_teacher_is_no_part_of_the_module(small_vit):
    pair = pair_of(small_vit, Plan())
    of_teacher = {id(p) for p in pair.teacher.parameters()}
    assert not any(id(p) in of_teacher for p in pair.parameters())
    assert not any(module is part for module in pair.modules() for part in pair.teacher.modules())
    assert list(pair.state_dict()) == [f"student.{name}" for name in pair.student.state_dict()]


def test_the_teacher_is_asked_in_eval_mode(small_vit):
    teacher, student = small_vit(seed=1, proj_drop_rate=0.5), small_vit(seed=2)
    pair, images = AttentionTransfer(teacher.eval(), student, Plan()), random_images(2, 3, 32, 32)
    expected = pair.eval()(images).logits
    pair.train()
    assert not teacher.training and pair.student.training
    teacher.train()
    teacher.blocks[1].eval()
    modes = [part.training for part in teacher.modules()]
    assert torch.equal(pair(images).logits, expected)
    assert [part.training for part in teacher.modules()] == modes


def test_the_teacher_follows_to_another_dtype(small_vit):
    pair = pair_of(small_vit, Plan())
    assert all(p.dtype == torch.float64 for p in pair.double().teacher.parameters())
    assert pair(random_images(2, 3, 32, 32, dtype=torch.float64)).logits.dtype == torch.float64
    assert all(p.dtype == torch.float32 for p in pair.to(torch.float32).teacher.parameters())


def test_views_are_no_pairs_of_images(small_vit):
    pair = pair_of(small_vit, Plan())
    for views in (1, 3):
        with pytest.raises(ValueError, match=rf"\(2, {views}, 3, 32, 32\)"):
            pair(random_images(2, views, 3, 32, 32))


def test_common_tokens_are_those_of_the_size_that_both_are_built_for():
    """Larger images have more tokens: a part of them would be compared, and be taken for all."""
    sized = {"dynamic_img_size": True, "reg_tokens": 2}
    pair = AttentionTransfer(tiny(1, **sized), tiny(2, **sized), Plan(how="distill", unequal_prefix="drop"))
    AttentionTransfer(tiny(1, **sized), tiny(2), Plan(how="distill", unequal_prefix="drop", mismatched=True))
    other = AttentionTransfer(
        tiny(1, **sized),
        tiny(2, dynamic_img_size=True),
        Plan(how="distill", unequal_prefix="drop", mismatched=True),
    )
    assert pair(random_images(2, 3, 64, 64)).transfer_loss > 0, "nothing is left out between equals"
    assert other(random_images(2, 3, 32, 32)).transfer_loss > 0
    with pytest.raises(ValueError, match="67 tokens, and the pair was built for 19"):
        other(random_images(2, 3, 64, 64))


def test_a_deep_copy_stands_alone(small_vit):
    pair, images = pair_of(small_vit, Plan()), random_images(2, 3, 32, 32)
    twin = copy.deepcopy(pair)
    expected = pair(images).logits
    assert torch.equal(twin(images).logits, expected)
    for parameter in (*pair.student.parameters(), *pair.teacher.parameters()):
        parameter.data.zero_()
    assert torch.equal(twin(images).logits, expected)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_the_teacher_stays_whole_and_can_teach_again(small_vit, how):
    """A pair of its first layers changes nothing in it; another type moves all of it; it teaches a second
    student."""
    teacher, images = small_vit(seed=1), random_images(2, 3, 32, 32)
    before, logits = state_of(teacher), teacher(images)
    pair = AttentionTransfer(teacher, small_vit(seed=2), Plan(how=how, layers=[0, 1])).train()
    pair(images)
    assert pair.teacher is teacher and len(teacher.blocks) == 3
    assert same(state_of(teacher), before) and torch.equal(pair.teacher(images), logits)
    pair.double()
    assert {p.dtype for p in teacher.parameters()} == {torch.float64}
    torch.testing.assert_close(teacher(images.double()).float(), logits)
    again = AttentionTransfer(pair.teacher, small_vit(seed=3).double(), Plan(how="distill")).train()
    assert again(images.double()).transfer_loss > 0


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


RATES = (0.0, 0.25, 0.5)  # what timm makes of drop_path_rate=0.5 at depth 3


def drawn(batch, always):
    """Drop-path factors in the order in which they are drawn; timm's own modules draw nothing at rate 0."""
    kept = {}
    for layer, rate in enumerate(RATES):
        for branch in (0, 1):
            one = torch.ones(batch, 1, 1, dtype=torch.float64)
            kept[layer, branch] = (one.bernoulli_(1 - rate) / (1 - rate) if always or rate else one).flatten()
    return kept


@pytest.mark.parametrize("how", ["copy", "distill"])
@pytest.mark.parametrize("share", [True, False])
def test_teacher_and_student_drop_the_same_paths_in_training(small_vit, how, share):
    plan = Plan(how=how, share_drop_path=share)
    pair = pair_of(small_vit, plan, teacher={}, drop_path_rate=0.5).double().train()
    images = random_images(8, 3, 32, 32, dtype=torch.float64)
    torch.manual_seed(5)
    masks = drawn(8, always=share)
    assert any((mask == 0).any() for mask in masks.values())
    logits, loss = longhand.transfer(
        pair.teacher.state_dict(),
        pair.student.state_dict(),
        images,
        3,
        how,
        range(3),
        masks,
        teacher_masks=masks if share else None,
    )
    torch.manual_seed(5)
    found = pair(images)
    assert (found.logits - logits).abs().max() <= 1e-10 and abs(
        found.transfer_loss.item() - loss.item()
    ) <= 1e-10


def test_equal_weights_reach_the_entropy_only_with_shared_paths(small_vit):
    """With the teacher's own weights the student's maps are the teacher's exactly where both drop the
    same."""
    images = random_images(8, 3, 32, 32)
    losses = {}
    for share in (True, False):
        pair = AttentionTransfer(
            small_vit(), small_vit(drop_path_rate=0.6), Plan(how="distill", share_drop_path=share)
        ).train()
        torch.manual_seed(5)
        output = pair(images)
        output.transfer_loss.backward()
        losses[share] = max(p.grad.abs().max().item() for p in pair.parameters() if p.grad is not None)
    assert losses[True] <= 1e-6 < 1e-3 < losses[False]  # a gradient of zero: the loss is at its minimum


def test_in_evaluation_no_path_is_dropped(small_vit):
    images = random_images(4, 3, 32, 32)
    outputs = [
        pair_of(small_vit, Plan(how="distill", share_drop_path=share), drop_path_rate=rate).eval()(images)
        for share in (True, False)
        for rate in (0.0, 0.6)
    ]
    assert all(
        torch.equal(output.logits, outputs[0].logits)
        and torch.equal(output.transfer_loss, outputs[0].transfer_loss)
        for output in outputs
    )


@settings(derandomize=True, deadline=None, max_examples=50)
@given(layers=st.lists(st.integers(0, 11), min_size=1, unique=True))
def test_plans_bring_layers_to_one_form(layers):
    plan = Plan(layers=layers)
    assert plan.layers == tuple(sorted(layers)) == plan.layers_of(12)
    assert plan == Plan(layers=iter(reversed(layers))) and hash(plan) == hash(Plan(layers=set(layers)))


def test_plans_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().how = "distill"
    assert Plan().layers is None and Plan().layers_of(4) == (0, 1, 2, 3)


def test_one_model_cannot_teach_itself(small_vit):
    vit = small_vit()
    with pytest.raises(ValueError, match="same object"):
        AttentionTransfer(vit, vit, Plan())


def test_a_refused_pair_leaves_the_teacher_as_it_was(small_vit):
    teacher = small_vit(depth=4).train()
    weights = state_of(teacher)
    with pytest.raises(ValueError):
        AttentionTransfer(teacher, small_vit(), Plan())
    assert (
        teacher.training
        and all(p.requires_grad for p in teacher.parameters())
        and same(state_of(teacher), weights)
    )


def test_after_distill_the_student_is_a_plain_timm_model(small_vit):
    pair = pair_of(small_vit, Plan(how="distill"))
    assert not pair.needs_teacher and pair_of(small_vit, Plan(how="copy")).needs_teacher
    images = random_images(2, 3, 32, 32)
    plain = create_vit(
        {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
    )
    plain.load_state_dict(pair.student.state_dict(), strict=True)
    torch.testing.assert_close(plain.eval()(images), pair.eval()(images).logits)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_walk_with_its_loss_is_what_forward_computes(small_vit, how):
    pair, images = pair_of(small_vit, Plan(how=how)).train(), random_images(2, 3, 32, 32)
    seen, loss = pair.walk_with_loss(images)
    output = pair(images)
    assert torch.equal(seen.logits, output.logits) and torch.equal(loss, output.transfer_loss)
    assert torch.equal(pair.student.forward_head(pair.student.norm(seen.tokens)), output.logits)
    assert (loss > 0) == (how == "distill")


def test_a_student_that_is_replaced_later_is_refused(small_vit):
    pair = AttentionTransfer(small_vit(), small_vit(), Plan(how="distill"))
    pair.student = small_vit()
    with pytest.raises(ValueError, match="replaced"):
        pair(random_images(1, 3, 32, 32))


def test_a_student_in_ddp_is_refused_and_the_pair_in_ddp_is_not(small_vit, tmp_path):
    """minimind#853: its gradients would never be averaged, without a word."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        images = random_images(1, 3, 32, 32)
        inside = small_vit()
        wrapped = DistributedDataParallel(inside)
        for student in (inside, wrapped.module):
            with pytest.raises(ValueError, match="wrap the pair"):
                AttentionTransfer(small_vit(), student, Plan(how="distill"))(images)
        later = AttentionTransfer(small_vit(), small_vit(), Plan(how="distill"))
        wrapped = DistributedDataParallel(later.student)
        with pytest.raises(ValueError, match="wrap the pair"):
            later(images)
        with torch.no_grad():
            later(images)
        of_pair = DistributedDataParallel(AttentionTransfer(small_vit(), small_vit(), Plan(how="distill")))
        for _ in range(2):
            sum(part.sum() for part in of_pair(images)).backward()
        of_pair.module(images)
    finally:
        distributed.destroy_process_group()


def test_a_pair_shows_its_teacher_and_its_plan(small_vit):
    shown = repr(pair_of(small_vit, Plan(how="distill", layers=range(2))))
    assert "teacher=VisionTransformer, Plan(what='map', how='distill', layers=(0, 1)" in shown
