"""CaiT walked against timm's own, talking heads against logits mixed one by one, and what is copied or
distilled from a ViT against maps written out."""

import pytest
import torch
from timm.models.cait import Cait
from torch.nn.functional import cross_entropy

from atfamily.cait import CaitTransfer, talking_heads, walk_cait
from atlib import walk
from atlib.attention import Seen
from tests.helpers import SMALL_VIT, mine, random_images, randomise, same, state_of

SMALL = {**SMALL_VIT, "depth_token_only": 2}
IMAGES = random_images(3, 3, 32, 32, dtype=torch.float64)
LABELS = torch.tensor([0, 3, 1])
BOTH = ("copy", "distill")


def small_cait(seed=0, **changes):
    """Random weights of a size at which every part matters; gammas among them, which timm starts at 1e-4."""
    cait = randomise(Cait(**SMALL | changes), seed).eval()
    with torch.no_grad():
        for block in (*cait.blocks, *cait.blocks_token_only):
            block.gamma_1.uniform_(0.5, 1.5)
            block.gamma_2.uniform_(0.5, 1.5)
    return cait


@pytest.fixture
def pair_of(small_vit):
    def build(teacher=(), **options):
        return CaitTransfer(small_vit(seed=1, **dict(teacher)), small_cait(2), **options).double().train()

    return build


def logits_of(attn, x):
    """Talking heads up to the softmax, head by head: x (B, N, D) to mixed logits (B, H, N, N)."""
    B, N, D = x.shape
    H = attn.num_heads
    q, k, _ = (x @ attn.qkv.weight.T + attn.qkv.bias).reshape(B, N, 3, H, D // H).permute(2, 0, 3, 1, 4)
    z = [q[:, g] @ k[:, g].transpose(1, 2) / (D // H) ** 0.5 for g in range(H)]
    mixed = [sum(attn.proj_l.weight[h, g] * z[g] for g in range(H)) + attn.proj_l.bias[h] for h in range(H)]
    return torch.stack(mixed, 1)


# --- The walk


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"global_pool": "avg"},
        {"depth_token_only": 1},
        {"depth_token_only": 3, "qkv_bias": False},
        {"num_heads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_walk_equals_timm(options, kind, tolerance):
    cait, images = small_cait(**options).to(kind), IMAGES.to(kind)
    expected, found = cait(images), walk_cait(cait, images)
    assert expected.std() > 0.05 and (found.logits - expected).abs().max() <= tolerance * expected.abs().max()
    assert len(found.layers) == 3 and len(found.class_layers) == options.get("depth_token_only", 2)


def test_talking_heads_are_one_wide_head_each():
    q, k, mixing = (
        random_images(*shape, seed=seed, dtype=torch.float64)
        for seed, shape in enumerate([(2, 4, 9, 5)] * 2 + [(4, 4)])
    )
    wide_q, wide_k = talking_heads(q, k, mixing)
    assert wide_q.shape == wide_k.shape == (2, 4, 9, 20)
    expected = torch.einsum("hg,bgij->bhij", mixing, q @ k.mT)
    assert (wide_q @ wide_k.mT - expected).abs().max() <= 1e-12
    assert not torch.allclose(wide_q @ wide_k.mT, torch.einsum("gh,bgij->bhij", mixing, q @ k.mT)), (
        "L, not its transpose"
    )


def test_maps_are_those_between_the_two_mixings():
    cait = small_cait().double()
    found, x = walk_cait(cait, IMAGES), cait.patch_embed(IMAGES) + cait.pos_embed
    for block, seen in zip(cait.blocks, found.layers):
        expected = logits_of(block.attn, block.norm1(x)).softmax(-1)
        assert seen.map.shape == (3, 3, 16, 16) and (seen.map - expected).abs().max() <= 1e-12
        assert not torch.allclose(seen.scores, logits_of(block.attn, block.norm1(x))), (
            "they differ by proj_l's bias"
        )
        x = block(x)
        shares = block.attn.proj_w(seen.map.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        assert (shares.sum(-1) - 1).abs().max() > 0.1, "after the second mixing they are no maps"


def test_its_own_attention_in_its_place_changes_nothing():
    cait = small_cait().double()
    plain = walk_cait(cait, IMAGES)
    own, own_class = dict(enumerate(plain.layers)), dict(enumerate(plain.class_layers))
    assert torch.equal(walk_cait(cait, IMAGES, replace=own, replace_class=own_class).logits, plain.logits)
    maps = (
        {i: Seen(None, None, None, 1.0, seen.map) for i, seen in layers.items()}
        for layers in (own, own_class)
    )
    found = walk_cait(cait, IMAGES, replace=next(maps), replace_class=next(maps))
    assert (found.logits - plain.logits).abs().max() <= 1e-12
    others = {1: Seen(None, None, None, 1.0, torch.eye(16).double().expand(3, 3, 16, 16))}
    assert not torch.allclose(walk_cait(cait, IMAGES, replace=others).logits, plain.logits)


# --- Transfer


def teacher_maps(pair):
    return [seen.map for seen in walk(pair.teacher, IMAGES, head=False).layers]


def among_patches(p):
    """A map without the class token's row and column, rows rescaled."""
    return p[:, :, 1:, 1:] / p[:, :, 1:, 1:].sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "patches, class_rows", [("distill", None), (None, "distill"), ("distill", "distill")]
)
def test_the_loss_is_a_loop_over_rows(pair_of, patches, class_rows):
    pair = pair_of(patches=patches, class_rows=class_rows)
    maps, own = teacher_maps(pair), walk_cait(pair.student, IMAGES)
    expected = 0.0
    if patches:
        for p_t, seen in zip(maps, own.layers):
            p_t, p_s = among_patches(p_t), seen.map
            by_row = [
                -(p_t[b, h, i] * p_s[b, h, i].log()).sum()
                for b in range(3)
                for h in range(3)
                for i in range(16)
            ]
            expected = expected + sum(by_row) / len(by_row)
    if class_rows:
        for p_t, seen in zip(maps[1:], own.class_layers):
            by_row = [-(p_t[b, h, 0] * seen.map[b, h, 0].log()).sum() for b in range(3) for h in range(3)]
            expected = expected + sum(by_row) / len(by_row)
    found = pair(IMAGES)
    assert found.transfer_loss.item() == pytest.approx(expected.item(), rel=1e-10) and expected > 1
    assert (found.logits - pair.student(IMAGES)).abs().max() <= 1e-12
    grads = [
        torch.autograd.grad(loss, [p for p in pair.student.parameters()], allow_unused=True)
        for loss in (found.transfer_loss, expected)
    ]
    for (name, _), one, other in zip(pair.student.named_parameters(), *grads):
        assert (one is None) == (other is None), name
        assert one is None or (one - other).abs().max() <= 1e-10, name


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("part", ["patches", "class_rows"])
def test_where_gradients_go(pair_of, part, how):
    """What is copied teaches the student's q, k and first mixing nothing; what is distilled teaches them, and
    the other part is the student's own."""
    pair = pair_of(**{part: how})
    before = state_of(pair.teacher)
    output = pair(IMAGES)
    (cross_entropy(output.logits, LABELS) + output.transfer_loss).backward()
    assert all(p.grad is None for p in pair.teacher.parameters())
    assert same(before, pair.teacher.state_dict())
    for block in pair.student.blocks:
        q_and_k, v = block.attn.qkv.weight.grad[:48], block.attn.qkv.weight.grad[48:]
        copied = part == "patches" and how == "copy"
        assert bool((q_and_k == 0).all()) == (block.attn.proj_l.weight.grad is None) == copied
        assert (v != 0).any() and (block.attn.proj_w.weight.grad != 0).any()
    for block in pair.student.blocks_token_only:
        copied = part == "class_rows" and how == "copy"
        assert (block.attn.q.weight.grad is None) == (block.attn.k.weight.grad is None) == copied
        assert (block.attn.v.weight.grad != 0).any()
    loss = pair(IMAGES).transfer_loss
    if part == "class_rows" and how == "distill":
        pair.zero_grad()
        loss.backward()
        assert (pair.student.blocks[0].attn.qkv.weight.grad != 0).any(), (
            "the rows depend on the patches' features"
        )


def test_the_teacher_hands_over_q_and_k_and_is_run_no_further(pair_of):
    """No map of it is written out, and of its last layer nothing after q and k is computed."""
    pair = pair_of(patches="distill", class_rows="distill")
    mine(pair.teacher, after=2)
    target, class_target = pair.teacher_layers(IMAGES)
    assert all(seen.q.shape == seen.k.shape == (3, 3, 16, 8) for seen in target.values())
    assert all((seen.q.shape[2], seen.k.shape[2]) == (1, 17) for seen in class_target.values())
    assert all(seen.v is seen.given is None for seen in (*target.values(), *class_target.values()))
