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


# the teacher's other size, what is said of it, and the option that lifts the refusal
REMEDIES = {
    "depth": ({"depth": 4}, "depth: teacher 4, student 3", {"layers": {0: 3}}),
    "heads": ({"num_heads": 4}, "heads: teacher 4, student 3", {"unequal_heads": "aggregate"}),
    "grid": ({"patch_size": 4}, "patch grid: teacher (8, 8), student (4, 4)", {"unequal_grid": "resample"}),
    "registers": ({"reg_tokens": 2}, "prefix tokens: teacher 3, student 1", {"unequal_prefix": "drop"}),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", REMEDIES)
def test_every_difference_has_its_remedy(small_vit, kind, how):
    teacher, message, remedy = REMEDIES[kind]
    said = refusal(small_vit, Plan(how=how), teacher)
    assert message in said and next(iter(remedy)) in said
    assert [other for other, (_, name, _) in REMEDIES.items() if name in said] == [kind]
    output = pair_of(small_vit, Plan(how=how, **remedy), teacher)(random_images(2, 3, 32, 32))
    assert output.logits.isfinite().all() and output.transfer_loss.isfinite()


@pytest.mark.parametrize("kind", REMEDIES)
def test_a_remedy_for_something_else_does_not_help(small_vit, kind):
    others = {
        name: value
        for other in REMEDIES
        if other != kind
        for name, value in REMEDIES[other][2].items()
        if kind != "depth" or name != "layers"
    }
    assert REMEDIES[kind][1] in refusal(small_vit, Plan(**others), REMEDIES[kind][0])


@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize(
    "teacher, message",
    [
        ({"num_heads": 4}, "heads: teacher 4, student 3"),
        ({"embed_dim": 36}, "head width: teacher 12, student 8"),
        ({"patch_size": 4}, "patch grid: teacher (8, 8), student (4, 4)"),
        ({"reg_tokens": 2}, "prefix tokens: teacher 3, student 1"),
    ],
    ids=str,
)
def test_q_k_and_v_need_more_in_common_than_maps(small_vit, what, teacher, message):
    for how in HOW:
        said = refusal(small_vit, Plan(what=what, how=how), teacher)
        assert message in said and "what='map'" in said


def test_maps_do_not_mind_the_width(small_vit):
    for how in HOW:
        pair = pair_of(small_vit, Plan(how=how), {"embed_dim": 36})
        assert pair.pairing.widths_differ and not pair.pairing.heads_differ


def test_images_of_another_size_need_the_same_patches(small_vit):
    """The teacher's are resized: what must agree is the grid, here 8 x 8 and 4 x 4."""
    assert "patch grid: teacher (8, 8), student (4, 4)" in refusal(small_vit, Plan(), {"img_size": 64})
    for plan, sizes in (
        (Plan(), {"img_size": 64, "patch_size": 16}),
        (Plan(unequal_grid="resample"), {"img_size": 64}),
    ):
        pair = pair_of(small_vit, plan, sizes)
        logits, _ = pair.eval()(torch.randn(2, 3, 32, 32))
        assert pair.for_teacher(torch.randn(2, 3, 32, 32)).shape[-2:] == (64, 64) and logits.isfinite().all()


@pytest.mark.parametrize("teacher, student", [(16, 32), (32, 16), (32, 8)])
def test_a_grid_of_one_patch_cannot_be_resampled(small_vit, teacher, student):
    grids = [(32 // patch,) * 2 for patch in (teacher, student)]
    message = refusal(small_vit, Plan(unequal_grid="resample"), {"patch_size": teacher}, patch_size=student)
    assert f"patch grid: teacher {grids[0]}, student {grids[1]}" in message


def test_a_copying_student_has_no_tokens_that_its_teacher_lacks(small_vit):
    message = refusal(small_vit, Plan(unequal_prefix="drop"), {"reg_tokens": 0}, reg_tokens=2)
    assert "prefix tokens: teacher 1, student 3" in message and "how='distill'" in message
    assert "unequal_prefix='own'" in message
    pair_of(small_vit, Plan(how="distill", unequal_prefix="drop"), {"reg_tokens": 0}, reg_tokens=2)
    assert "'own'" in refusal(small_vit, Plan(), {"reg_tokens": 0}, reg_tokens=2)
    assert "'own'" not in refusal(small_vit, Plan(), {"reg_tokens": 2}), "the student has none of its own"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("lacks", ["teacher", "student"])
def test_a_class_tokens_row_needs_class_tokens(small_vit, how, lacks):
    without = {"class_token": False, "global_pool": "avg", "reg_tokens": 1}
    options = {"teacher": {"global_pool": "avg"}, "student": {"global_pool": "avg"}, lacks: without}
    plan = Plan(how=how, rows="class", unequal_prefix="own", mismatched=True)
    of_both = "teacher 0, student 1" if lacks == "teacher" else "teacher 1, student 0"
    with pytest.raises(ValueError, match=f"class tokens: {of_both}"):
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


def test_everything_is_named_at_once(small_vit):
    message = refusal(
        small_vit,
        Plan(),
        {name: value for teacher, _, _ in REMEDIES.values() for name, value in teacher.items()}
        | {"init_values": 0.1},
    )
    for _, part, _ in REMEDIES.values():
        assert part in message
    assert LAYER_SCALE in message


# --- layers and heads that do not exist


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": [1, 3]}, "layer 3"),
        ({"layers": {0: 3}}, "teacher's layer 3"),
        ({"heads": [1, 3]}, "head 3 of layer 0"),
        ({"heads": {1: [0], 2: [5]}}, "head 5 of layer 2"),
        ({"layers": [0, 1], "heads": {2: [0]}}, "[2]"),
        ({"layers": {1: 2}, "heads": {2: [0]}}, "[2]"),
        ({"layers": [1], "average": "layers"}, "average='layers'"),
    ],
    ids=str,
)
def test_layers_and_heads_that_do_not_exist(small_vit, how, options, message):
    assert message in refusal(small_vit, Plan(how=how, **options))


# --- native components


LAYER_SCALE = "layer_scale: teacher attention and MLP, student none"
COMPONENTS = {
    "layer_scale": ({"init_values": 0.1}, LAYER_SCALE),
    "qk_norm": ({"qk_norm": True}, "qk_norm: teacher True, student False"),
    "pre_norm": ({"pre_norm": True}, "pre_norm: teacher True, student False"),
    "activation": ({"act_layer": torch.nn.ReLU}, "activation: teacher ReLU, student GELU"),
    "pooling": ({"global_pool": "avg"}, "pooling: teacher avg"),
}


@pytest.mark.parametrize("name", COMPONENTS)
def test_mismatched_components_are_asked_for(small_vit, name):
    options, message = COMPONENTS[name]
    said = refusal(small_vit, Plan(), options)
    assert f"({message}" in said
    assert "atlib.create_student(teacher, num_classes)" in said and "Plan(mismatched=True)" in said
    pair = pair_of(small_vit, Plan(mismatched=True), options)
    assert list(pair.mismatched) == [name] and len(pair.mismatched[name]) == 2


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_native_student_fits(small_vit, name):
    teacher = small_vit(seed=1, **COMPONENTS[name][0])
    pair = AttentionTransfer(teacher, create_student(teacher, 7), Plan(how="distill"))
    assert pair.mismatched == {} and pair(random_images(2, 3, 32, 32)).logits.shape == (2, 7)


def test_nothing_is_mismatched_in_a_plain_pair(small_vit):
    """Sizes that have remedies of their own are no components."""
    assert pair_of(small_vit, Plan()).mismatched == {}
    assert pair_of(small_vit, Plan(layers={0: 1}), {"depth": 4, "embed_dim": 36}).mismatched == {}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(unequal_prefix="drop"),
        Plan(how="distill", unequal_prefix="drop"),
        Plan(unequal_prefix="drop", mismatched=True),
    ],
    ids=str,
)
def test_dropped_registers_are_a_mismatch_all_the_same(small_vit, plan):
    """The plan may drop their rows and columns without asking for more; the student lacks what its teacher
    has either way."""
    assert pair_of(small_vit, plan, {"reg_tokens": 2}).mismatched == {"registers": (2, 0)}


def test_dropping_registers_asks_for_no_other_mismatch(small_vit):
    said = refusal(small_vit, Plan(unequal_prefix="drop"), {"reg_tokens": 2, "init_values": 0.1})
    assert LAYER_SCALE in said and "registers" not in said


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
    with pytest.raises(ValueError, match=r"2 .*\(1, 1, 0\).* 2 .*\(1, 0, 1\)"):
        AttentionTransfer(teacher, student, Plan(mismatched=True))
    pair = AttentionTransfer(teacher, student, Plan(how="distill", unequal_prefix="drop", mismatched=True))
    assert (
        pair.pairing.common_prefix == 1
        and len(pair.pairing.teacher_tokens) == len(pair.pairing.student_tokens) == 17
    )
    assert pair(torch.randn(2, 3, 32, 32)).transfer_loss > 0
