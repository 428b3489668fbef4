"""What notebook 17 writes out, masked auto-encoding and the loss of distilled MAE, is what atlib and torch
compute, on other inputs than the notebook's; the shares that its sentences name are those of the teachers."""

import re

import pytest
import torch
import torch.nn.functional as F

from atbook.lab.scales import scales
from atbook.records import results_folder
from atlib import create_vit, walk
from atlib.checkpoint import load_vit
from atlib.train.pretrain import MaskedAutoencoder, patchify
from tests.book.test_taught import NOTEBOOKS, small_vit, taught

NAME = "17-before-there-are-labels"


@pytest.mark.parametrize("height, width, size", [(32, 32, 4), (24, 40, 8)])
def test_to_patches_is_patchify(height, width, size):
    images = torch.randn(3, 3, height, width)
    assert torch.equal(taught(NAME).to_patches(images, size), patchify(images, (size, size)))


def test_what_is_to_be_painted_has_mean_0_and_variance_1():
    targets = taught(NAME).to_paint(5 + 3 * torch.randn(2, 3, 16, 16), 4)
    assert torch.allclose(targets.mean(-1), torch.zeros(2, 16), atol=1e-5)
    assert torch.allclose(targets.var(-1), torch.ones(2, 16), atol=1e-4)


def test_random_masking_keeps_and_hides_each_patch_once():
    torch.manual_seed(0)
    patches = torch.arange(5 * 64.0).reshape(5, 64, 1)
    shown, kept, hidden = taught(NAME).random_masking(patches, 16)
    assert torch.equal(torch.cat([kept, hidden], dim=1).sort(1).values, torch.arange(64).expand(5, -1))
    assert torch.equal(shown[..., 0], patches[..., 0].gather(1, kept))
    assert not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("preset, size, ratio", [("glyphs", 8, 0.5), ("cifar", 4, 0.75)])
def test_mae_loss_by_hand_is_the_loss(preset, size, ratio):
    torch.manual_seed(2)
    mae = MaskedAutoencoder(create_vit(preset, depth=2), mask_ratio=ratio, decoder_depth=1)
    images = torch.randn(4, 3, 32, 32)
    torch.manual_seed(9)
    by_hand = taught(NAME).mae_loss_by_hand(mae, images, size)
    torch.manual_seed(9)
    assert torch.allclose(by_hand, mae(images), atol=1e-5)


def painter():
    torch.manual_seed(3)
    vit = create_vit("glyphs", patch_size=4, depth=2)
    model = taught(NAME).PaintInside(vit, visible=16)
    torch.nn.init.normal_(model.mask_token)
    return model


def test_painting_inside_is_the_loss_of_the_hidden_patches():
    """A painter that always paints zeros is left with the variance of what is hidden."""
    model = painter()
    torch.nn.init.zeros_(model.paint.weight)
    torch.nn.init.zeros_(model.paint.bias)
    assert model(torch.randn(4, 3, 32, 32)).item() == pytest.approx(47 / 48, rel=1e-4)


def test_painting_inside_never_shows_a_hidden_patch():
    """The loss has no gradient to a hidden patch but through its target, which is cut off here."""
    model, images = painter(), torch.randn(2, 3, 32, 32)
    target = taught(NAME).to_paint(images, 4)
    changed = images.clone().requires_grad_()
    forward = model.forward.__func__
    to_paint, forward.__globals__["to_paint"] = forward.__globals__["to_paint"], lambda *_: target
    try:
        torch.manual_seed(4)
        model(changed).backward()
    finally:
        forward.__globals__["to_paint"] = to_paint
    torch.manual_seed(4)
    order = torch.rand(2, 64).argsort(dim=1)
    reached = patchify(changed.grad.abs(), (4, 4)).sum(-1) > 0
    expected = torch.zeros(2, 64, dtype=torch.bool).scatter_(1, order[:, :16], True)
    assert torch.equal(reached, expected)


@pytest.mark.parametrize("student_heads, teacher_heads", [(3, 12), (4, 4), (6, 2)])
def test_distilled_mae_loss_is_a_convolution_over_heads_and_a_squared_error(student_heads, teacher_heads):
    torch.manual_seed(1)
    z_s, z_t = torch.randn(2, student_heads, 7, 7), torch.randn(2, teacher_heads, 7, 7)
    M = torch.randn(teacher_heads, student_heads)
    expected = F.mse_loss(F.conv2d(z_s, M[:, :, None, None]), z_t)
    assert taught(NAME).distilled_mae_loss(z_s, z_t, M).item() == pytest.approx(expected.item(), rel=1e-5)


def test_row_means_are_what_softmax_ignores():
    z = 5 * torch.randn(2, 3, 9, 9, dtype=torch.float64)
    without = taught(NAME).without_row_means(z)
    assert without.mean(-1).abs().max() < 1e-12 and (z - without).std(-1).max() < 1e-12
    assert torch.allclose(without.softmax(-1), z.softmax(-1), atol=1e-12)


def test_the_bias_of_k_changes_row_means_and_nothing_else():
    vit, images = small_vit(6), torch.randn(2, 3, 32, 32)
    torch.nn.init.normal_(vit.blocks[1].attn.qkv.bias)
    with torch.no_grad():
        before = walk(vit, images)
        vit.blocks[1].attn.qkv.bias.view(3, -1)[1].zero_()
        after = walk(vit, images)
    assert torch.allclose(before.layers[1].map, after.layers[1].map, atol=1e-5)
    assert torch.allclose(before.logits, after.logits, atol=1e-4)
    z, z_after = (seen.q @ seen.k.mT * seen.scale for seen in (before.layers[1], after.layers[1]))
    assert (z - z_after).abs().max() > 0.1
    assert (z - z_after).std(-1).max() < 1e-5


@torch.no_grad()
def errors(world):
    """The squared errors of logits by layer: whole, and without row means; and the last layer's own parts."""
    teacher = load_vit(results_folder() / "transfer" / world / "teacher-seed0.safetensors").eval()
    images, _ = scales()[world].held_out("test").take(range(200))
    torch.manual_seed(0)
    student = create_vit("glyphs").eval()
    errors_of = []
    for own, target in zip(walk(student, images).layers, walk(teacher, images).layers, strict=True):
        z_s, z_t = (seen.q @ seen.k.mT * seen.scale for seen in (own, target))
        centred = z_t - z_t.mean(-1, keepdim=True)
        gap = z_t - z_s
        visible = (gap - gap.mean(-1, keepdim=True)).square().mean()
        errors_of.append((gap.square().mean().item(), visible.item(), (z_t - centred).square().mean().item()))
    return errors_of


def test_the_shares_that_the_sentences_name():
    """With one rounding of the last digit: the threads of a machine sum in another order."""
    page = (NOTEBOOKS / f"{NAME}.md").read_text(encoding="utf-8")
    numbers = (
        r"the invisible part is (\d+) to (\d+) % .* it is (\d+) % and (\d+) % .* and (\d+) % and (\d+) %"
    )
    low, high, *of_match = map(int, re.search(numbers, page).groups())
    find, match = errors("find"), errors("match")
    shares = {
        name: [100 * (1 - seen / whole) for whole, seen, _ in errors_of]
        for name, errors_of in (("find", find), ("match", match))
    }
    assert [low, high] == pytest.approx([min(shares["find"]), max(shares["find"])], abs=0.6)
    assert of_match == pytest.approx(shares["match"], abs=0.6)
    assert f"they are {low} to {high} % of" in page
    assert f"and {of_match[3]} % in the last layer of Match's" in page
    perfect, untrained = re.search(
        r"a squared error of ([\d.]+), where an untrained one has ([\d.]+)", page
    ).groups()
    assert float(perfect) == pytest.approx(find[3][2], abs=0.006)
    assert float(untrained) == pytest.approx(find[3][0], abs=0.006)
