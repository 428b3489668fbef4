"""CaiT walked against timm's own, talking heads one by one, and copied or distilled maps written out."""

import pytest
import torch
from timm.models.cait import Cait
from torch.nn.functional import cross_entropy

from atfamily.cait import CaitTransfer, walk_cait
from atlib import walk
from atlib.attention import Seen
from tests.helpers import SMALL_VIT, random_images, randomise, same, state_of

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
    "options", [{"global_pool": "avg", "num_heads": 1}, {"depth_token_only": 3, "qkv_bias": False}], ids=str
)
def test_walk_equals_timm(options):
    cait = small_cait(**options).double()
    expected, found = cait(IMAGES), walk_cait(cait, IMAGES)
    assert expected.std() > 0.05 and (found.logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert len(found.layers) == 3 and len(found.class_layers) == options.get("depth_token_only", 2)


def test_maps_are_those_between_the_two_mixings():
    cait = small_cait().double()
    found, x = walk_cait(cait, IMAGES), cait.patch_embed(IMAGES) + cait.pos_embed
    for block, seen in zip(cait.blocks, found.layers):
        expected = logits_of(block.attn, block.norm1(x)).softmax(-1)
        assert seen.map.shape == (3, 3, 16, 16) and (seen.map - expected).abs().max() <= 1e-12
        x = block(x)


def test_its_own_attention_in_its_place_changes_nothing():
    cait = small_cait().double()
    plain = walk_cait(cait, IMAGES)
    own, own_class = dict(enumerate(plain.layers)), dict(enumerate(plain.class_layers))
    assert torch.equal(walk_cait(cait, IMAGES, replace=own, replace_class=own_class).logits, plain.logits)
    maps = ({i: Seen(None, None, None, 1.0, x.map) for i, x in layers.items()} for layers in (own, own_class))
    found = walk_cait(cait, IMAGES, replace=next(maps), replace_class=next(maps))
    assert (found.logits - plain.logits).abs().max() <= 1e-12


# --- Transfer


def teacher_maps(pair):
    return [seen.map for seen in walk(pair.teacher, IMAGES, head=False).layers]


def among_patches(p):
    """A map without the class token's row and column, rows rescaled."""
    return p[:, :, 1:, 1:] / p[:, :, 1:, 1:].sum(-1, keepdim=True)


def test_the_loss_is_a_loop_over_rows(pair_of):
    pair = pair_of(patches="distill", class_rows="distill")
    maps, own = teacher_maps(pair), walk_cait(pair.student, IMAGES)
    expected = 0.0
    for p_t, seen in zip(maps, own.layers):
        p_t, p_s = among_patches(p_t), seen.map
        rows = [(b, h, i) for b in range(3) for h in range(3) for i in range(16)]
        expected = expected - sum((p_t[row] * p_s[row].log()).sum() for row in rows) / len(rows)
    for p_t, seen in zip(maps[1:], own.class_layers):
        rows = [(b, h, 0) for b in range(3) for h in range(3)]
        expected = expected - sum((p_t[row] * seen.map[row].log()).sum() for row in rows) / len(rows)
    found = pair(IMAGES)
    assert found.transfer_loss.item() == pytest.approx(expected.item(), rel=1e-10) and expected > 1
    assert (found.logits - pair.student(IMAGES)).abs().max() <= 1e-12


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("part", ["patches", "class_rows"])
def test_where_gradients_go(pair_of, part, how):
    """What is copied teaches the student's q, k and first mixing nothing; what is distilled teaches them."""
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
        assert (pair.student.blocks[0].attn.qkv.weight.grad != 0).any()
