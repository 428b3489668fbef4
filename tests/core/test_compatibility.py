"""Teachers and students that do not fit: what is refused, and which option lifts the refusal."""

import pytest
import torch

from atlib import AttentionTransfer, Plan, create_student
from atlib.compatibility import pair_up
from tests.helpers import random_images

HOW = ["copy", "distill"]


def pair_of(small_vit, plan, teacher=None, **options):
    return AttentionTransfer(
        small_vit(seed=1, **(options | (teacher or {}))), small_vit(seed=2, **options), plan
    )


def refusal(small_vit, plan, teacher=None, **options):
    """What is said when this pair is built."""
    with pytest.raises(ValueError) as caught:
        pair_of(small_vit, plan, teacher, **options)
    return str(caught.value)


# --- what differs, the remedy that is named, and that the remedy works


# what is named, the teacher's other size, and the option that lifts the refusal; q, k and v have none
REMEDIES = {
    "depth: teacher 4, student 3": ({"depth": 4}, {"layers": {0: 3}}),
    "heads: teacher 4, student 3": ({"num_heads": 4}, {"unequal_heads": "aggregate"}),
    "head width: teacher 12, student 8": ({"embed_dim": 36}, {}),
    "patch grid: teacher (8, 8), student (4, 4)": ({"patch_size": 4}, {"unequal_grid": "resample"}),
    "prefix tokens: teacher 3, student 1": ({"reg_tokens": 2}, {"unequal_prefix": "drop"}),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("named", REMEDIES)
def test_every_difference_has_its_remedy(small_vit, named, how):
    teacher, remedy = REMEDIES[named]
    if remedy:
        said = refusal(small_vit, Plan(how=how), teacher)
        assert [other for other in REMEDIES if other in said] == [named]
    for what in "qkv":
        assert named in refusal(small_vit, Plan(what=what, how=how), teacher) or "layers" in remedy
    output = pair_of(small_vit, Plan(how=how, **remedy), teacher)(random_images(2, 3, 32, 32))
    assert output.logits.isfinite().all() and output.transfer_loss.isfinite()


def test_images_of_another_size_need_the_same_patches(small_vit):
    """The teacher's are resized: what must agree is the grid, here 8 x 8 and 4 x 4."""
    assert "patch grid" in refusal(small_vit, Plan(), {"img_size": 64})
    for plan, sizes in (
        (Plan(), {"img_size": 64, "patch_size": 16}),
        (Plan(unequal_grid="resample"), {"img_size": 64}),
    ):
        pair = pair_of(small_vit, plan, sizes)
        logits, _ = pair.eval()(torch.randn(2, 3, 32, 32))
        assert pair.for_teacher(torch.randn(2, 3, 32, 32)).shape[-2:] == (64, 64) and logits.isfinite().all()


def test_a_copying_student_has_no_tokens_that_its_teacher_lacks(small_vit):
    assert "prefix" in refusal(small_vit, Plan(unequal_prefix="drop"), {"reg_tokens": 0}, reg_tokens=2)
    pair_of(small_vit, Plan(how="distill", unequal_prefix="drop"), {"reg_tokens": 0}, reg_tokens=2)
    assert "'own'" in refusal(small_vit, Plan(), {"reg_tokens": 0}, reg_tokens=2)
    assert "'own'" not in refusal(small_vit, Plan(), {"reg_tokens": 2}), "the student has none of its own"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("lacks", ["teacher", "student"])
def test_a_class_tokens_row_needs_class_tokens(small_vit, how, lacks):
    without = {"class_token": False, "global_pool": "avg", "reg_tokens": 1}
    options = {"teacher": {"global_pool": "avg"}, "student": {"global_pool": "avg"}, lacks: without}
    plan = Plan(how=how, rows="class", unequal_prefix="own", mismatched=True)
    with pytest.raises(ValueError):
        pair_up(small_vit(seed=1, **options["teacher"]), small_vit(seed=2, **options["student"]), plan)


def test_which_rows_and_which_tokens_are_its_own(small_vit):
    teacher, student, plain = small_vit(reg_tokens=1), small_vit(reg_tokens=3), small_vit()

    def found(student, **options):
        pairing = pair_up(teacher, student, Plan(how="distill", **options))
        return pairing.own_keys, pairing.queries

    patches = tuple(range(4, 20))
    assert found(student, unequal_prefix="own") == ((1, 2, 3), (0, *patches))
    assert found(student, unequal_prefix="own", rows="patches") == ((1, 2, 3), patches)
    assert found(student, unequal_prefix="own", rows="class") == ((1, 2, 3), (0,))
    assert found(student, unequal_prefix="drop", rows="patches") == ((), tuple(range(1, 17)))
    assert found(plain, unequal_prefix="own") == found(plain, unequal_prefix="drop") == ((), None)
    assert found(plain, unequal_prefix="own", rows="class") == ((), (0,))


def test_a_class_token_is_no_register(small_vit):
    """As many prefix tokens, of another kind: not the same tokens."""
    teacher = {"class_token": False, "global_pool": "avg", "reg_tokens": 1}
    student = {"class_token": True, "global_pool": "avg", "reg_tokens": 0}
    assert "(0, 0, 1)), student 1" in refusal(small_vit, Plan(mismatched=True), teacher, **student)
    pair = pair_of(small_vit, Plan(how="distill", mismatched=True, unequal_prefix="drop"), teacher, **student)
    assert (
        pair.pairing.common_prefix == 0
        and pair.pairing.teacher_tokens == pair.pairing.student_tokens == tuple(range(1, 17))
    )


# --- native components


COMPONENTS = {
    "layer_scale": ({"init_values": 0.1}, ("attention and MLP", "none")),
    "qk_norm": ({"qk_norm": True}, (True, False)),
    "pre_norm": ({"pre_norm": True}, (True, False)),
    "activation": ({"act_layer": torch.nn.ReLU}, ("ReLU", "GELU")),
    "pooling": ({"global_pool": "avg"}, ("avg, norm after it", "token")),
}


@pytest.mark.parametrize("name", COMPONENTS)
def test_mismatched_components_are_asked_for(small_vit, name):
    options, both = COMPONENTS[name]
    assert name in refusal(small_vit, Plan(), options)
    assert pair_of(small_vit, Plan(mismatched=True), options).mismatched == {name: both}
    teacher = small_vit(seed=1, **options)
    native = AttentionTransfer(teacher, create_student(teacher, 7), Plan(how="distill"))
    assert native.mismatched == {} and native(random_images(2, 3, 32, 32)).logits.shape == (2, 7)


# --- what a pairing says


def test_what_a_pairing_says(small_vit):
    teacher, student = small_vit(depth=5, reg_tokens=2, patch_size=4, num_heads=4), small_vit()
    plan = Plan(layers={2: 0, 0: 4}, unequal_heads="average", unequal_grid="resample", unequal_prefix="drop")
    found = pair_up(teacher, student, plan)
    assert found.layers == ((0, 4), (2, 0)) and found.heads_differ and found.widths_differ
    assert found.components == {"registers": (2, 0)}
    assert (found.teacher_grid, found.student_grid, found.common_prefix) == ((8, 8), (4, 4), 1)
    assert found.teacher_tokens == (0, *range(3, 67)) and found.student_tokens is None


def test_a_distillation_token_is_no_register(small_vit):
    """Both ViTs have two prefix tokens, of different roles."""
    from timm.models.deit import VisionTransformerDistilled

    torch.manual_seed(0)
    teacher = VisionTransformerDistilled(
        img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=5, weight_init=""
    )
    student = small_vit(seed=2, reg_tokens=1)
    with pytest.raises(ValueError):
        AttentionTransfer(teacher, student, Plan(mismatched=True))
    pair = AttentionTransfer(teacher, student, Plan(how="distill", unequal_prefix="drop", mismatched=True))
    assert (
        pair.pairing.common_prefix == 1
        and len(pair.pairing.teacher_tokens) == len(pair.pairing.student_tokens) == 17
    )
    assert pair(torch.randn(2, 3, 32, 32)).transfer_loss > 0
