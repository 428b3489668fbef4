"""Both losses of AttnDistill against matrices and loops; where gradients go; which pairs are refused and
which remedies let them in."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from atfamily.attndistill import AttnDistill, projector, row_squared_error
from atlib import create_vit
from atlib.attention import Seen, Unwalkable, walk
from atlib.maps import pool_heads, resample_class_attention
from atlib.train import make_optimizer, train
from atlib.train.recipe import Recipe
from tests import longhand
from tests.helpers import SMALL_VIT, Bomb, Seer, random_images, randomise, same, state_of

LABELS = torch.tensor([0, 3, 1])
IMAGES = random_images(3, 3, 32, 32, dtype=torch.float64)
PAIRS = {  # the teacher's options, the student's
    "alike": ({}, {}),
    "heads": ({"num_heads": 6}, {"num_heads": 2}),
    "width": ({"embed_dim": 36}, {}),
    "depth": ({"depth": 4}, {"depth": 2}),
    "smaller teacher": ({"embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 0}, {}),
    "patches": ({"patch_size": 4}, {}),
    "larger patches": ({"patch_size": 16, "embed_dim": 36, "num_heads": 4}, {}),
    "all": ({"patch_size": 4, "embed_dim": 40, "num_heads": 5, "depth": 2}, {"num_heads": 4}),
}


def pair_of(small_vit, kind="alike", **options):
    of_teacher, of_student = PAIRS[kind]
    pair = AttnDistill(
        small_vit(seed=1, **of_teacher),
        small_vit(seed=2, **of_student),
        resample="patch_size" in of_teacher,
        **options,
    )
    randomise(pair.projector, 3)
    return pair.double().train()


def class_token(weights, vit, images=IMAGES):
    """From matrices: the class token after the final norm (B, D), its attention in the last layer (B, H, N),
    and the logits."""
    patch = vit.patch_embed.patch_size[0]
    tokens, maps, _ = longhand.run_blocks(
        weights, longhand.embed(weights, images, patch), vit.blocks[0].attn.num_heads
    )
    token = longhand.layer_norm(tokens, weights["norm.weight"], weights["norm.bias"])[:, 0]
    logits = token @ weights["head.weight"].T + weights["head.bias"] if "head.weight" in weights else None
    return token, maps[-1][:, :, 0], logits


def merged(attention, temperature):
    """The product of all heads' attention, to the power 1 / T, rescaled."""
    product = 1.0
    for head in range(attention.shape[1]):
        product = product * attention[:, head] ** (1 / temperature)
    return product / product.sum(-1, keepdim=True)


def pooled(attention, pool):
    """Entry by entry the largest, smallest or mean weight of all heads, rescaled."""
    found = pool(torch.stack([attention[:, head] for head in range(attention.shape[1])]))
    return found / found.sum(-1, keepdim=True)


def reference(pair, weights, of_projector, pool=None):
    """Logits, alignment and divergence, from two dicts of weights and those of the projector."""
    with torch.no_grad():
        token_t, attention_t, _ = class_token(pair.teacher.state_dict(), pair.teacher)
        grids = pair.teacher.patch_embed.grid_size, pair.student.patch_embed.grid_size
        if grids[0] != grids[1]:
            attention_t = resample_class_attention(attention_t, *grids).clamp(min=1e-5)
        p_t = merged(attention_t, pair.temperature) if pool is None else pooled(attention_t, pool)
    token, attention, logits = class_token(weights, pair.student)
    x = token
    last = 2 * (len(pair.projector) // 2) - 2
    for layer in range(0, last + 1, 2):
        x = x @ of_projector[f"{layer}.weight"].T + of_projector[f"{layer}.bias"]
        x = x if layer == last else longhand.gelu(x)
    x = longhand.layer_norm(x, of_projector[f"{last + 1}.weight"], of_projector[f"{last + 1}.bias"])
    p_s = merged(attention, pair.temperature) if pool is None else pooled(attention, pool)
    alignment, divergence = 0.0, 0.0
    B, width = token_t.shape
    for b in range(B):
        alignment = alignment + sum((x[b, i] - token_t[b, i]) ** 2 for i in range(width)) / (B * width)
        divergence = (
            divergence + sum(p_t[b, j] * (p_t[b, j] / p_s[b, j]).log() for j in range(p_t.shape[1])) / B
        )
    return logits, alignment, divergence


@pytest.mark.parametrize("kind", PAIRS)
def test_equals_matrices_and_loops(small_vit, kind):
    pair = pair_of(small_vit, kind, temperature=4.0, attention_weight=0.7)
    weights, of_projector = (
        {name: value.clone().requires_grad_() for name, value in module.state_dict().items()}
        for module in (pair.student, pair.projector)
    )
    logits, alignment, divergence = reference(pair, weights, of_projector)
    (cross_entropy(logits, LABELS) + alignment + 0.7 * divergence).backward()

    losses = pair.losses(IMAGES)
    assert losses.alignment.item() == pytest.approx(alignment.item(), rel=1e-10)
    assert losses.divergence.item() == pytest.approx(divergence.item(), rel=1e-8) and divergence > 1e-3
    found = pair(IMAGES)
    assert (found.logits - logits).abs().max() <= 1e-10 and found.transfer_loss.shape == ()
    assert found.transfer_loss.item() == pytest.approx((alignment + 0.7 * divergence).item(), rel=1e-10)
    (cross_entropy(found.logits, LABELS) + found.transfer_loss).backward()
    for module, expected in ((pair.student, weights), (pair.projector, of_projector)):
        for name, parameter in module.named_parameters():
            assert (parameter.grad - expected[name].grad).abs().max() <= 1e-10, name
            assert (parameter.grad != 0).any(), name


POOLS = {"max": lambda x: x.max(0).values, "min": lambda x: x.min(0).values, "mean": lambda x: x.mean(0)}


@pytest.mark.parametrize("how", POOLS)
def test_other_ways_to_merge_heads(small_vit, how):
    pair = pair_of(small_vit, merge=partial(pool_heads, how=how))
    expected = reference(pair, pair.student.state_dict(), pair.projector.state_dict(), POOLS[how])
    for mine, theirs in zip(pair.losses(IMAGES), expected):
        assert (mine - theirs).abs().max() <= 1e-10
    plain = pair_of(small_vit).losses(IMAGES)
    assert (plain.divergence - expected[2]).abs() > 1e-3 and plain.alignment.item() == pytest.approx(
        expected[1].item()
    )


def test_a_squared_error_of_rows(small_vit):
    pair = pair_of(small_vit, compare=row_squared_error)
    models = (pair.student, pair.teacher)
    rows = [merged(class_token(vit.state_dict(), vit)[1], pair.temperature) for vit in models]
    by_loops = sum((own - other) ** 2 for p_s, p_t in zip(*rows) for own, other in zip(p_s, p_t)) / len(
        IMAGES
    )
    assert pair.losses(IMAGES).divergence.item() == pytest.approx(by_loops.item(), rel=1e-10)
    assert by_loops > 1e-5


def test_shares_are_weighted_by_the_lengths_of_values(small_vit):
    """Head by head, before heads are merged, in both models."""
    pair = pair_of(small_vit, by_value=True)
    rows = []
    for vit in (pair.student, pair.teacher):
        layer = walk(vit, IMAGES).layers[-1]
        weighted = layer.map[:, :, 0] * layer.v.square().sum(-1).sqrt()
        rows.append(merged(weighted / weighted.sum(-1, keepdim=True), pair.temperature))
    p_s, p_t = rows
    expected = (p_t * (p_t / p_s).log()).sum(-1).mean()
    assert pair.losses(IMAGES).divergence.item() == pytest.approx(expected.item(), rel=1e-8)
    plain = pair_of(small_vit).losses(IMAGES).divergence
    assert (plain - expected).abs() > 1e-4


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_another_projector(small_vit, layers):
    pair = pair_of(small_vit, projector_layers=layers)
    linear = [layer for layer in pair.projector if isinstance(layer, torch.nn.Linear)]
    assert len(linear) == layers and linear[0].in_features == linear[-1].out_features == 24
    assert [layer.out_features for layer in linear[:-1]] == [48, 24, 48, 24, 48, 24, 48][: layers - 1]
    expected = reference(pair, pair.student.state_dict(), pair.projector.state_dict())
    assert (pair.losses(IMAGES).alignment - expected[1]).abs() <= 1e-10


def test_the_published_settings_are_the_defaults(small_vit):
    pair = pair_of(small_vit)
    assert (pair.temperature, pair.attention_weight) == (10.0, 0.1)
    _, alignment, divergence = reference(pair, pair.student.state_dict(), pair.projector.state_dict())
    assert pair(IMAGES).transfer_loss.item() == pytest.approx(
        (alignment + 0.1 * divergence).item(), rel=1e-10
    )


def test_the_projector_has_the_published_widths(small_vit):
    pair = AttnDistill(small_vit(embed_dim=36), small_vit())
    linear = [
        (layer.in_features, layer.out_features)
        for layer in pair.projector
        if isinstance(layer, torch.nn.Linear)
    ]
    assert linear == [(24, 48), (48, 24), (24, 48), (48, 36)]
    assert (
        projector(24, 7, 36)[4].out_features
        == AttnDistill(small_vit(embed_dim=36), small_vit(), hidden_width=7).projector[4].out_features
        == 7
    )


def test_no_divergence_from_itself(small_vit):
    teacher, student = small_vit(seed=1), small_vit(seed=1)
    pair = AttnDistill(teacher, student).double().train()
    losses = pair.losses(IMAGES)
    assert abs(losses.divergence.item()) <= 1e-12
    losses.divergence.backward()
    assert all(
        parameter.grad is None or parameter.grad.abs().max() <= 1e-12 for parameter in student.parameters()
    )
    pair.projector = torch.nn.Identity()
    assert pair.losses(IMAGES).alignment.item() <= 1e-20


def test_attention_beyond_underflow(small_vit):
    """A student so sharp that most of its class attention is 0 in float32: loss and gradients stay finite,
    and equal float64's."""
    found = []
    for dtype in (torch.float32, torch.float64):
        pair = pair_of(small_vit).to(dtype)
        with torch.no_grad():
            pair.student.blocks[-1].attn.qkv.weight[:48] *= 12
        losses = pair.losses(IMAGES.to(dtype))
        losses.divergence.backward()
        found.append((losses.divergence, pair.student.blocks[-1].attn.qkv.weight.grad))
    torch.testing.assert_close(found[0][0].double(), found[1][0], rtol=1e-3, atol=0)
    torch.testing.assert_close(
        found[0][1].double(), found[1][1], rtol=1e-2, atol=1e-3 * found[1][1].abs().max().item()
    )


def test_the_teacher_learns_nothing(small_vit):
    pair = pair_of(small_vit)
    before = state_of(pair.teacher)
    pair.teacher.train()
    pair.losses(IMAGES)
    output = pair(IMAGES)
    (cross_entropy(output.logits, LABELS) + output.transfer_loss).backward()
    assert pair.teacher.training and same(before, pair.teacher.state_dict())
    assert all(p.grad is None for p in pair.teacher.parameters())
    assert {name.split(".")[0] for name, _ in pair.named_parameters()} == {"student", "projector"}


def test_the_teachers_head_is_not_run(small_vit):
    pair = pair_of(small_vit)
    expected = pair(IMAGES).transfer_loss
    pair.teacher.head = pair.teacher.fc_norm = Bomb("the teacher's head")
    assert torch.equal(pair(IMAGES).transfer_loss, expected)


def test_only_the_class_tokens_row_of_a_map_is_made(small_vit):
    pair = pair_of(small_vit, "patches")
    with Seer() as seer:
        pair(IMAGES).transfer_loss.backward()
    assert {(3, 3, 1, 65), (3, 3, 1, 17)} <= seer.shapes
    assert not [shape for shape in seer.shapes if shape[-2:] in ((65, 65), (17, 17), (64, 64), (16, 16))]


def test_the_step_runs_under_autocast(small_vit):
    pair = AttnDistill(small_vit(seed=1), small_vit(seed=2)).train()
    expected = pair(IMAGES.float()).transfer_loss
    with torch.autocast("cpu", torch.bfloat16):
        found = pair(IMAGES.float()).transfer_loss
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=0.05)
    found.backward()


def test_in_less_precision_the_losses_keep_float32(small_vit):
    """Attention logits are summed over heads: rounded to bf16 under autocast they would lose what the
    divergence is made of."""
    pair = pair_of(small_vit).float()
    seen = Seen(*torch.randn(2, 1, 3, 17, 8), None, 0.3)
    expected = pair._class_scores(pair.student, seen)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(pair._class_scores(pair.student, seen), expected)
    found = pair.bfloat16()(IMAGES.bfloat16()).transfer_loss
    found.backward()
    assert found.dtype == torch.float32 and found.isfinite()


# Registers and grids


@pytest.mark.parametrize("of_teacher, of_student", [(4, 0), (0, 2), (3, 1)])
def test_other_prefix_tokens_are_dropped_when_asked(small_vit, of_teacher, of_student):
    """The expected attention: that of the class token to itself and the patches alone, rescaled, in each
    head."""
    options = [{"reg_tokens": count} for count in (of_teacher, of_student)]
    teacher, student = small_vit(seed=1, **options[0]), small_vit(seed=2, **options[1])
    pair = AttnDistill(teacher, student, drop_prefix=True, temperature=2.0).double().train()
    found, kept = pair.losses(IMAGES).divergence, []
    for vit, registers in ((pair.teacher, of_teacher), (pair.student, of_student)):
        x = vit._pos_embed(vit.patch_embed(IMAGES))
        for block in vit.blocks[:-1]:
            x = block(x)
        attn = vit.blocks[-1].attn
        q, k, _ = attn.qkv(vit.blocks[-1].norm1(x)).reshape(3, x.shape[1], 3, 3, 8).permute(2, 0, 3, 1, 4)
        p = (q[:, :, 0, None] * k).sum(-1).div(8**0.5).softmax(-1)  # (B, H, N)
        p = torch.cat([p[..., :1], p[..., 1 + registers :]], -1)
        kept.append(merged(p / p.sum(-1, keepdim=True), 2.0))
    expected = (kept[0] * (kept[0] / kept[1]).log()).sum(-1).mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-10)


def test_equal_prefix_tokens_all_count(small_vit):
    pair = AttnDistill(
        small_vit(seed=1, reg_tokens=2, patch_size=16), small_vit(seed=2, reg_tokens=2), resample=True
    ).double()
    token, p = pair.teacher_targets(IMAGES)
    assert token.shape == (3, 24) and p.shape == (3, 19)
    torch.testing.assert_close(p.sum(-1), torch.ones(3, dtype=torch.float64))


def test_a_teacher_whose_attention_vanishes_between_patches(small_vit):
    """Interpolation and its clamp make zeros; their logarithms must not reach the loss."""
    pair = pair_of(small_vit, "patches")
    with torch.no_grad():
        pair.teacher.blocks[-1].attn.qkv.weight[:48] *= 30
    output = pair(IMAGES).transfer_loss
    output.backward()
    assert output.isfinite() and all(p.grad.isfinite().all() for p in pair.projector.parameters())


def test_a_teacher_of_today(small_vit):
    """Eva blocks with rotated q and k, and registers that the student has not."""
    teacher = randomise(create_vit("vit_small_patch16_dinov3", **SMALL_VIT | {"depth": 2, "num_classes": 0}))
    assert teacher.num_prefix_tokens == 5
    pair = AttnDistill(teacher, small_vit(seed=2), drop_prefix=True).double().train()
    output = pair(IMAGES)
    output.transfer_loss.backward()
    assert output.transfer_loss > 0
    token, _ = pair.teacher_targets(IMAGES)
    torch.testing.assert_close(token, teacher.forward_features(IMAGES)[:, 0])


# What is refused


@pytest.mark.parametrize(
    "named, teacher, student",
    [
        (r"\(8, 8\).*\(4, 4\).*resample=True", {"patch_size": 4}, {}),
        ("5.*1.*drop_prefix=True", {"reg_tokens": 4}, {}),
        ("resample=.*drop_prefix=", {"reg_tokens": 4, "patch_size": 4}, {}),
        (r"patch grid: .*\(8, 8\).*\(4, 4\)", {"img_size": 64}, {}),
        ("teacher .*class token", {"class_token": False, "global_pool": "avg"}, {}),
        ("student .*class token", {}, {"class_token": False, "global_pool": "avg"}),
    ],
)
def test_pairs_that_need_a_remedy_say_which(small_vit, named, teacher, student):
    with pytest.raises(ValueError, match=named):
        AttnDistill(small_vit(**teacher), small_vit(**student))


def test_models_that_cannot_be_walked(small_vit):
    for pair in ((torch.nn.Linear(2, 2), small_vit()), (small_vit(), torch.nn.Linear(2, 2))):
        with pytest.raises(Unwalkable, match="Linear"):
            AttnDistill(*pair)


WRONG = [
    ("temperature", 0),
    ("temperature", math.nan),
    ("attention_weight", -0.1),
    ("hidden_width", 0),
    ("projector_layers", 0),
]


@pytest.mark.parametrize("name, value", [*WRONG, ("attention_weight", math.inf)])
def test_settings_that_cannot_be_meant(small_vit, name, value):
    teacher = small_vit()
    with pytest.raises(ValueError, match=f"{name}={value}: "):
        AttnDistill(teacher, small_vit(), **{name: value})
    assert all(p.requires_grad for p in teacher.parameters()), "a refused pair leaves the teacher as it was"


def test_images_of_another_size(small_vit):
    pair = AttnDistill(
        small_vit(patch_size=4, dynamic_img_size=True), small_vit(dynamic_img_size=True), resample=True
    ).train()
    with pytest.raises(ValueError, match="grid_from=.* 64 .*257 "):
        pair(random_images(2, 3, 64, 64))


# Training


def test_the_projector_is_trained_too_and_no_label_is_used(small_vit, glyphs64):
    recipe = Recipe(steps=6, batch_size=16, lr=3e-3, task_weight=0.0, transfer_weight=1.0)
    student = create_vit(SMALL_VIT | {"depth": 2, "num_classes": 8})
    pair = AttnDistill(small_vit(seed=1, num_classes=8), student)
    listed = [id(p) for group in make_optimizer(pair, recipe).param_groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in pair.parameters())
    before, head = state_of(pair.projector), state_of(student.head)
    history = train(pair, glyphs64, recipe, progress=None, cpu=True)
    assert all((value != before[name]).any() for name, value in pair.projector.state_dict().items())
    ratio = student.head.weight.detach() / head["weight"]
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=1e-3)  # weight decay alone
    assert history[-1]["loss"] < history[0]["loss"]
