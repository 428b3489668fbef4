"""PatchConvNet against the published code, its pool against a loop, and a ViT's class row in such a pool."""

import pytest
import torch
from safetensors.torch import load_file

from atfamily.patch_conv import AttentionPool, PatchConvNet, PoolTransfer
from atlib import walk
from atlib.maps import aggregate_heads
from examples import published_weights
from tests.helpers import ROOT, random_images, randomise
from tests.helpers import small_vit as vit

GOLDEN = ROOT / "tests" / "golden" / "patch_conv.safetensors"


def small(**options):
    """On the grid of `SMALL_VIT`, 4 x 4."""
    torch.manual_seed(3)
    sizes = {"num_classes": 5, "width": 16, "depth": 2, "patch_size": 8}
    return randomise(PatchConvNet(**sizes | options), 3)


@pytest.fixture
def images():
    return random_images(3, 3, 32, 32)


# --- The network


@pytest.mark.parametrize("name, pool", [("single", "attention"), ("multi", "per class")])
def test_equals_the_published_network(name, pool):
    golden = load_file(GOLDEN)
    start = f"{name}.weights."
    state = {key.removeprefix(start): x.double() for key, x in golden.items() if key.startswith(start)}
    model = PatchConvNet(5, width=16, depth=2, pool=pool).double().eval()
    model.load_state_dict(published_weights.patch_conv_net(state))
    look = model.look(golden["images"].double())
    torch.testing.assert_close(look.logits, golden[f"{name}.logits"], rtol=0, atol=1e-10)
    torch.testing.assert_close(look.map, golden[f"{name}.map"], rtol=0, atol=1e-10)
    assert torch.equal(model(golden["images"].double()), look.logits) and look.grid == (4, 4)


# --- Pools


def test_a_given_map_replaces_the_pools_own():
    pool = randomise(AttentionPool(8).double(), 4)
    patches = random_images(2, 6, 8, dtype=torch.float64)
    gathered, p = pool(patches)
    torch.testing.assert_close(pool(patches, p)[0], gathered)
    only = torch.zeros_like(p)
    only[..., 3] = 1  # the third patch, because the query is the first key
    other = patches.clone()
    other[:, [0, 1, 3, 4, 5]] += 1
    assert torch.equal(pool(patches, only)[0], pool(other, only)[0])
    pool(patches, only)[0].sum().backward()
    assert pool.q.weight.grad is None and pool.k.weight.grad is None


# --- A ViT's class row


def expected_row(teacher, images, temperature, tokens, layer=-1):
    """The merged class row, from the maps that `walk` hands back."""
    p = walk(teacher, images).layers[layer].map
    row = aggregate_heads(p, temperature)[:, :, :1, tokens]
    return row / row.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "pool, first, layer", [("attention", 0, -1), ("per class", 1, 0), ("average", 1, -1)]
)
def test_copy_puts_the_class_row_into_the_pool(images, pool, first, layer):
    teacher, student = vit().double(), small(pool=pool).double()
    pair = PoolTransfer(teacher, student, copy=True, temperature=2.0, layer=layer)
    images = images.double()
    row = expected_row(teacher, images, 2.0, range(first, 17), layer)
    look = pair.look(images)
    torch.testing.assert_close(look.map, row.expand_as(look.map), rtol=0, atol=1e-10)
    for training in (True, False):
        found = pair.train(training)(images)
        torch.testing.assert_close(found.logits, student.look(images, row).logits, rtol=0, atol=1e-10)
        assert found.transfer_loss == 0 and pair.needs_teacher
    assert (found.logits - student(images)).abs().max() > 1e-3, "the row is used"


def test_registers_are_left_out(images):
    teacher = vit(reg_tokens=2)
    row = PoolTransfer(teacher, small(), temperature=2.0).teacher_row(images)
    torch.testing.assert_close(row, expected_row(teacher, images, 2.0, [0, *range(3, 19)]))


@pytest.mark.parametrize("pool, first", [("attention", 0), ("per class", 1)])
def test_distill_is_a_divergence_by_hand(images, pool, first):
    teacher, student = vit().double(), small(pool=pool).double()
    pair, images = PoolTransfer(teacher, student).train(), images.double()
    p_t, p_s = expected_row(teacher, images, 10.0, range(first, 17)), student.look(images).map
    pairs = [(p_t[b, 0, 0], p_s[b, 0, i]) for b in range(3) for i in range(p_s.shape[2])]
    total = sum((p * (p / q).log()).sum() for p, q in pairs)
    found = pair(images)
    torch.testing.assert_close(found.transfer_loss, total / (3 * p_s.shape[2]), rtol=0, atol=1e-10)
    assert torch.equal(found.logits, student(images)) and not pair.needs_teacher
    found.transfer_loss.backward()
    assert student.pool.q.weight.grad.abs().max() > 0 and student.trunk[0][0].weight.grad.abs().max() > 0
    assert student.pool.proj.weight.grad is None and all(p.grad is None for p in teacher.parameters())
    assert pair.eval()(images).transfer_loss == 0


def test_another_grid_is_resampled_only_when_asked_for(images):
    teacher, student = vit(), small(patch_size=4)
    with pytest.raises(ValueError):
        PoolTransfer(teacher, student)
    row = PoolTransfer(teacher, student, resample=True).teacher_row(images)
    own = expected_row(teacher, images, 10.0, range(17))
    assert row.shape == (3, 1, 1, 65)
    torch.testing.assert_close(row.sum(-1), torch.ones(3, 1, 1))
    torch.testing.assert_close(row[..., 0], own[..., 0])  # the class token's own share stays
