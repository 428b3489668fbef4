"""Bad inputs of the methods of `atfamily` and of the baselines: each is refused."""

from functools import partial

import pytest
import torch
from timm.models.cait import Cait
from torch import nn

from atfamily import depth
from atfamily.attndistill import AttnDistill, pool_heads
from atfamily.binary_vit import BinaryViT, binary_deit
from atfamily.cait import CaitTransfer, walk_cait
from atfamily.contrast import Dino, MoCo
from atfamily.distillation_token import DistillationToken
from atfamily.distilled_mae import DistilledMae
from atfamily.grafit import Grafit
from atfamily.late_class import LateClassViT
from atfamily.layer_reserve import keep_first
from atfamily.locality import LocalityAttention, ShiftedPatches, localise_attention, shift_patches
from atfamily.patch_conv import ConvStem, PatchConvNet, PoolTransfer
from atfamily.resmlp import copy_static_maps, resmlp
from atfamily.seq2seq import Maps, walk_sequences
from atfamily.sequence_transfer import SequenceTransfer
from atfamily.similarity import CompRess, SimilarityDistillation
from atfamily.token_distillation import TokenDistillation
from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.attention import Seen, Unwalkable
from atlib.baselines import FeatureDistillation, LogitDistillation
from atlib.mae import MaskedAutoencoder
from tests.helpers import SMALL_VIT, random_images, random_maps, same, state_of
from tests.helpers import small_vit as vit
from tests.methods.test_seq2seq import SOURCE, TARGET
from tests.methods.test_seq2seq import small as small_sequences

IMAGES = random_images(3, 3, 32, 32)
BARE = {"class_token": False, "global_pool": "avg"}
EVA = partial(create_vit, "vit_small_patch16_dinov3", **SMALL_VIT)
SCALED = partial(create_vit, SMALL_VIT, init_values=0.1)
PYRAMID = {"img_size": 64, "depths": (1, 1, 2, 1), "heads": (1, 2, 2, 2), "mlp_ratios": (2, 2, 2, 4)}
PYRAMID |= {"reductions": (4, 2, 1, 1), "num_classes": 5, "widths": (8, 8, 16, 16)}


def convnet(**options):
    return PatchConvNet(**{"num_classes": 5, "width": 16, "depth": 2, "patch_size": 8} | options)


def cait():
    return Cait(**SMALL_VIT, depth_token_only=2).eval()


def distilled():
    return create_vit(SMALL_VIT, distilled=True)


def binary(**options):
    return binary_deit(**{"img_size": 32, "patch_size": 8, "width": 24, "depth": 1, "heads": 3} | options)


def gated():
    attn = vit().blocks[0].attn
    attn.gate = nn.Linear(24, 24)
    return LocalityAttention(attn)


ONE, LOCAL = vit(), localise_attention(vit())
NOTHING = Seen(None, None, None, 1.0)
BAD = {
    "contrast": [
        lambda: MoCo(vit(), momentum=1.1),
        lambda: MoCo(vit(), temperature=-0.2),
        lambda: Dino(vit(), student_temperature=-0.1),
        lambda: SimilarityDistillation(vit(), vit(), student_temperature=-0.2),
        lambda: CompRess(vit(), vit(), temperature=-0.04),
        lambda: Grafit(AttentionTransfer(vit(1), vit(), Plan(how="distill")), torch.clone, 24),
    ],
    "attndistill": [
        *(
            lambda teacher=teacher, student=student: AttnDistill(vit(**teacher), vit(**student))
            for teacher, student in (({"patch_size": 4}, {}), ({"reg_tokens": 4}, {}), (BARE, {}), ({}, BARE))
        ),
        lambda: AttnDistill(vit(), LOCAL), lambda: AttnDistill(LOCAL, vit()),
        lambda: pool_heads(torch.full((1, 2, 3, 3), 1 / 3), "median"),
    ],
    "binary": [
        lambda: binary(img_size=33),
        *(lambda changes=changes: BinaryViT(**PYRAMID | changes) for changes in (
            {"class_token": True}, {"reductions": (3, 2, 1, 1)}, {"img_size": 40},
        )),
    ],
    "cait": [
        lambda: walk_cait(cait(), IMAGES, replace={3: NOTHING}),
        lambda: walk_cait(cait(), IMAGES, replace_class={2: NOTHING}),
        *(
            lambda teacher=teacher, options=options: CaitTransfer(vit(**teacher), cait(), **options)
            for teacher, options in (
                ({"num_heads": 6}, {"patches": "copy"}), ({"patch_size": 4}, {"class_rows": "copy"}),
                ({"depth": 4}, {"patches": "copy"}), (BARE, {"class_rows": "distill"}),
                ({}, {"patches": "copy", "layers": {0: 0, 3: 0}}), ({"depth": 1}, {"class_rows": "copy"}),
                ({}, {"patches": "copies"}), ({}, {}), ({}, {"class_rows": "copy", "layers": {0: 0}}),
            )
        ),
    ],
    "depth": [
        lambda: depth.frozen_factors(vit(), depth.layer_scale(vit(depth=2))),
        lambda: depth.frozen_factors(vit(), depth.rezero(vit())),
        *(lambda scale=scale, model=model: scale(model())
          for scale, model in ((depth.rezero, SCALED), (depth.t_fixup, EVA))),
        lambda: depth.branch_ratios(vit().train(), IMAGES),
    ],
    "distillation": [
        lambda: TokenDistillation(vit(reg_tokens=2), vit(2)).train()(IMAGES),
        *(
            lambda teacher=teacher, options=options: FeatureDistillation(vit(**teacher), vit(2), **options)
            for teacher, options in (
                ({"depth": 4}, {}), ({"reg_tokens": 1}, {}), ({}, {"layers": []}), ({}, {"layers": {0: 3}}),
            )
        ),
        lambda: LogitDistillation(vit(num_classes=7), vit(2)).train()(IMAGES),
        lambda: AttnDistill(ONE, ONE),
    ],
    "distilled mae": [
        lambda: DistilledMae(vit(patch_size=4), MaskedAutoencoder(vit())),
        lambda: DistilledMae(vit(reg_tokens=2), MaskedAutoencoder(vit())),
        lambda: DistilledMae(vit(num_heads=4), MaskedAutoencoder(vit()), mix_heads=False),
    ],
    "distillation token": [
        lambda: DistillationToken(vit(), distilled(), maps=AttentionTransfer(
            vit(), distilled(), Plan(how="distill", unequal_prefix="own", mismatched=True))),
        lambda: DistillationToken(vit(num_classes=7), distilled()).train()(IMAGES),
    ],
    "late class token": [
        lambda: LateClassViT(-1, **SMALL_VIT), lambda: LateClassViT(3, **SMALL_VIT),
        lambda: LateClassViT(1, **SMALL_VIT, reg_tokens=2), lambda: LateClassViT(1, **SMALL_VIT, **BARE),
    ],
    "locality": [
        lambda: ShiftedPatches(30, 8), lambda: ShiftedPatches(32, 8, dynamic_img_pad=True),
        lambda: ShiftedPatches(32, 8)(torch.zeros(1, 3, 16, 64)),
        lambda: shift_patches(vit(dynamic_img_size=True)), lambda: localise_attention(LOCAL), gated,
    ],
    "patch conv": [
        lambda: ConvStem(12, 12), lambda: convnet(pool="maximum"),
        lambda: PoolTransfer(vit(**BARE), convnet()), lambda: PoolTransfer(vit(), convnet(pool="average")),
        lambda: PoolTransfer(LOCAL, convnet()),
    ],
    "resmlp": [
        lambda: resmlp(mixing="attention"), lambda: resmlp(pooling="token"), lambda: resmlp(30, 8),
        lambda: copy_static_maps(resmlp(32, 8, 8, 3, 5), list(random_maps(2, 16, 16).float())),
    ],
    "sequences": [
        *(
            lambda source=source, target=target, maps=maps: walk_sequences(
                small_sequences(), source, target, replace=Maps(**maps)
            )
            for source, target, maps in (
                (SOURCE, TARGET[:1], {}), (SOURCE.flip(1), TARGET, {}),
                (SOURCE, TARGET, {"cross": {2: random_maps(3, 1, 5, 6)}}),
            )
        ),
        lambda: walk_sequences(small_sequences(static=True), SOURCE, TARGET,
                               replace=Maps(encoder={0: random_maps(3, 4, 6, 6)})),
        *(lambda how=how: SequenceTransfer(small_sequences(1), small_sequences(), **how)
          for how in ({}, {"cross": "copied"})),
        lambda: SequenceTransfer(small_sequences(), small_sequences(heads=1), cross="copy"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=f"{kind}-{row}") for kind, calls in BAD.items() for row, call in enumerate(calls)],
)
def test_values(call):
    with pytest.raises(ValueError) as refused:
        call()
    assert not isinstance(refused.value, Unwalkable)


@pytest.mark.parametrize(
    "call",
    [
        lambda: walk_cait(type("Own", (Cait,), {})(**SMALL_VIT), IMAGES),
        lambda: walk(cait(), IMAGES),
        lambda: walk(BinaryViT(**PYRAMID), random_images(1, 3, 64, 64)),
        lambda: walk(resmlp(32, 8, 8, 1, 5), IMAGES),
        lambda: depth.rezero(nn.Linear(2, 2)),
        lambda: PoolTransfer(convnet(), convnet()),
    ],
)
def test_models_that_cannot_be_walked(call):
    with pytest.raises(Unwalkable):
        call()


@pytest.mark.parametrize("changes, number", [({}, 4), ({"depth": 2}, 1), ({"reg_tokens": 1}, 1)])
def test_layers_that_cannot_be_kept(changes, number):
    fresh = vit(2, **changes)
    before = state_of(fresh)
    with pytest.raises(ValueError):
        keep_first(vit(), fresh, number)
    assert same(before, fresh.state_dict())
