"""The study of binary students: what a teacher's maps are worth where a map can only say yes or no."""

from functools import partial

from torch import nn

from atbook.lab.scales import AXES, START, WEIGHTS
from atbook.lab.study import Sources, Variant, study
from atbook.lab.tuning import Ladder, Range
from atfamily.binary_vit import BinaryViT, binary_deit
from atlib.attention_transfer import AttentionTransfer
from atlib.baselines import LogitDistillation
from atlib.plan import Plan


def _binary(rounded: bool, sources: Sources, **options) -> BinaryViT:
    """A binary ViT of the students' sizes, which reads from a class token, as the teacher does. Without
    pooling branches: on a grid of 4 x 4 these would be a second routing."""
    vit = sources.scale.student.build()
    sources.seed_student()
    return binary_deit(
        vit.patch_embed.img_size[0],
        vit.patch_embed.patch_size[0],
        vit.num_classes,
        vit.embed_dim,
        len(vit.blocks),
        vit.blocks[0].attn.num_heads,
        binary_maps=rounded,
        **{"class_token": True, "branches": (), **options},
    )


def _with_maps(how: str, rounded: bool, sources: Sources) -> nn.Module:
    return AttentionTransfer(sources.teacher(), _binary(rounded, sources), Plan(how=how, mismatched=True))


def _with_predictions(rounded: bool, sources: Sources) -> nn.Module:
    """As BinaryViT is trained: the teacher's predictions as they are, and no labels."""
    return LogitDistillation(sources.fine_tuned(), _binary(rounded, sources), temperature=1.0)


# The paper's steps within one stage, for students with one-bit maps and labels alone. Students of the other
# variants have the class token and factors.
LADDER = {
    "class token": {"scaled": False},
    "mean of patches": {"class_token": False, "scaled": False},
    "mean and branches": {"class_token": False, "scaled": False, "branches": (3,)},
    "mean, branches and factors": {"class_token": False, "branches": (3,)},
}

# Every student has a rate of its own, and with distilled maps a weight too: whether they do harm, as the
# paper says, must not depend on a weight that was chosen for other students.
_RATE = Ladder("lr", (2e-3, 4e-3, 8e-3))
_RATE_AND_WEIGHT = Range({"lr": AXES["lr"], **WEIGHTS}, {"lr": START["lr"], "transfer_weight": 3.0}, {})


# What the maps of a student are, rounded or not: 0 or a share, or a softmax as in any ViT; everything else is
# bits in both.
MAPS = {"one-bit": True, "full": False}

BITS = study(
    "bits",
    *(
        Variant(f"nothing, {maps} maps", partial(_binary, rounded), "scratch", trials=_RATE)
        for maps, rounded in MAPS.items()
    ),
    Variant(
        "predictions, one-bit maps",
        partial(_with_predictions, True),
        "scratch",
        {"task_weight": 0.0, "transfer_weight": 1.0},
        _RATE,
        needs=("fine-tuned",),
    ),
    *(
        Variant(
            f"distilled maps, {maps} maps",
            partial(_with_maps, "distill", rounded),
            "distill",
            trials=_RATE_AND_WEIGHT,
        )
        for maps, rounded in MAPS.items()
    ),
    *(
        Variant(f"copied maps, {maps} maps", partial(_with_maps, "copy", rounded), trials=_RATE)
        for maps, rounded in MAPS.items()
    ),
    *(
        Variant(f"ladder, {rung}", partial(_binary, True, **options), "scratch", trials=_RATE)
        for rung, options in LADDER.items()
    ),
)
