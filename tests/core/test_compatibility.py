"""Teachers and students that do not fit: what is refused, and which option lifts the refusal."""

import pytest
import torch

from atlib import AttentionTransfer, Plan
from atlib.compatibility import pair_up, sizes_of
from tests.helpers import random_images

AVERAGE = {"global_pool": "avg"}
NO_CLASS = AVERAGE | {"class_token": False, "reg_tokens": 1}
REGISTERS = {"reg_tokens": 2}
DISTILL, COPY = Plan(how="distill"), Plan()
# The teacher, the student; plans that are refused, and plans that are not.
PAIRS = {
    "depth": ({"depth": 4}, {}, [COPY, Plan(what="q")], [Plan(layers={0: 3}), Plan(what="v", layers={0: 3})]),
    "heads": ({"num_heads": 4}, {}, [COPY, Plan(what="k")], [Plan(unequal_heads="aggregate")]),
    "head width": ({"embed_dim": 36}, {}, [Plan(what="q"), Plan(what="v", how="distill")], [COPY, DISTILL]),
    "patch grid": ({"patch_size": 4}, {}, [COPY, Plan(what="q")], [Plan(unequal_grid="resample")]),
    "finer image": ({"img_size": 64}, {}, [COPY], [Plan(unequal_grid="resample")]),
    "as many patches": ({"img_size": 64, "patch_size": 16}, {}, [], [COPY, DISTILL]),
    "registers": (REGISTERS, {}, [COPY, DISTILL, Plan(what="q")], [Plan(unequal_prefix="drop")]),
    "tokens of its own": (
        {},
        REGISTERS,
        [COPY, Plan(unequal_prefix="drop")],  # a copied map says where each of the student's tokens looks
        [Plan(unequal_prefix="own"), Plan(how="distill", unequal_prefix="drop")],
    ),
    "a class token is no register": (
        NO_CLASS,
        AVERAGE,
        [Plan(mismatched=True), Plan(rows="class", unequal_prefix="own", mismatched=True)],
        [Plan(how="distill", unequal_prefix="drop", mismatched=True)],
    ),
    "nor a distillation token": (
        {"distilled": True},
        {"reg_tokens": 1},
        [Plan(mismatched=True)],
        [Plan(how="distill", unequal_prefix="drop", mismatched=True)],
    ),
    **{
        name: (options, {}, [COPY, DISTILL], [Plan(mismatched=True)])
        for name, options in {
            "layer scale": {"init_values": 0.1},
            "query-key norm": {"qk_norm": True},
            "pre-norm": {"pre_norm": True},
            "activation": {"act_layer": torch.nn.ReLU},
            "pooling": {"global_pool": "avg"},
        }.items()
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_and_what_is_done_about_it(small_vit, name):
    of_teacher, of_student, refused, fitting = PAIRS[name]
    teacher, student = small_vit(seed=1, **of_teacher), small_vit(seed=2, **of_student)
    for plan in refused:
        with pytest.raises(ValueError):
            pair_up(teacher, student, plan)
    for plan in fitting:
        output = AttentionTransfer(teacher, student, plan)(random_images(2, 3, 32, 32))
        assert output.logits.isfinite().all() and (output.transfer_loss > 0) == (plan.how == "distill")


def test_of_another_token_none_is_common(small_vit):
    plan = Plan(how="distill", unequal_prefix="drop", mismatched=True)
    for teacher, student, common in ((NO_CLASS, AVERAGE, 0), ({"distilled": True}, {"reg_tokens": 1}, 1)):
        found = pair_up(small_vit(**teacher), small_vit(**student), plan)
        assert found.common_prefix == common
        first = 1 if student is AVERAGE else 2
        assert found.student_tokens == (*range(common), *range(first, first + 16))


@pytest.mark.parametrize("name", ["cls_token", "cls", "class_embedding"])
def test_a_class_token_is_known_by_its_name(small_vit, name):
    vit = small_vit(reg_tokens=2)

    class Own(torch.nn.Module):
        image_size = (32, 32)

        def __init__(self):
            super().__init__()
            self.body, self.registers = vit, torch.nn.Parameter(vit.reg_token.detach())
            setattr(self, name, torch.nn.Parameter(vit.cls_token.detach()))
            del self.body.reg_token, self.body.cls_token

        def forward(self, images):
            self.body.cls_token, self.body.reg_token = 1 * getattr(self, name), 1 * self.registers
            return self.body(images)

    assert sizes_of(Own()).prefix_kinds == (1, 0, 2)
