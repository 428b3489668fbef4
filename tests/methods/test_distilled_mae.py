"""Distilled MAE: the published code's loss and gradients, and attention among visible patches by hand."""

import pytest
import torch
from safetensors.torch import load_file

from atfamily.distilled_mae import (
    DistilledHiddenMae,
    DistilledMae,
    centred_squared_error,
    cross_entropy_of_maps,
    distilled_mae_loss,
    squared_error,
)
from atlib import create_vit
from atlib.losses import noted
from atlib.mae import MaskedAutoencoder
from atlib.recipe import Recipe
from tests.helpers import ROOT, SMALL_VIT, random_images, randomise

IMAGES = random_images(3, 3, 32, 32, dtype=torch.float64)
ORDER = torch.rand(3, 16, generator=torch.Generator().manual_seed(5)).argsort(1)


@pytest.fixture
def build(small_vit):
    """A randomised pair in float64, with changes to both sides' arguments (16 patches, 4 visible)."""

    def built(teacher=None, student=None, **options):
        vit = small_vit(1, **(student or {}))
        mae = randomise(MaskedAutoencoder(vit, decoder_width=16, decoder_heads=2, decoder_depth=1), 3)
        model = DistilledMae(small_vit(2, **(teacher or {})), mae, **options)
        return randomise(model, 4).double()

    return built


# --- The published code


@pytest.fixture(scope="module")
def golden():
    return load_file(ROOT / "tests" / "golden" / "distilled_mae.safetensors")


@pytest.fixture
def published(golden):
    """Student, as an auto-encoder, and teacher of the published code's run."""
    vits = []
    for who, width, heads in (("student", 12, 3), ("teacher", 16, 4)):
        shape = {"img_size": 16, "patch_size": 4, "depth": 2, "num_classes": 0}
        vit = create_vit(shape | {"embed_dim": width, "num_heads": heads})
        part = {n.removeprefix(f"{who}."): w for n, w in golden.items() if n.startswith(who)}
        assert vit.load_state_dict(part)
        vits.append(vit)
    student, teacher = vits
    return MaskedAutoencoder(student, decoder_width=8, decoder_heads=2, decoder_depth=1), teacher


@pytest.mark.parametrize("name, layers", [("2", None), ("2", [1]), ("12", [0, 1])])
@pytest.mark.parametrize(
    "kind, adapters, prefix, key",
    [
        (DistilledMae, "mixing", "", lambda layer: f"mixing.adapter{layer}.weight"),
        (DistilledHiddenMae, "widening", "hidden_", lambda layer: f"widening.adapter{layer + 1}"),
    ],
    ids=["maps", "hidden states"],
)
def test_loss_and_gradients_are_those_of_the_published_code(
    golden, published, name, layers, kind, adapters, prefix, key
):
    mae, teacher = published
    model = kind(teacher, mae, layers=layers).double()
    with torch.no_grad():
        for (layer, _), adapter in zip(model.layers, getattr(model, adapters), strict=True):
            adapter.weight.copy_(golden[key(layer)])
    found = model(golden["images"].double(), golden["order"]).transfer_loss
    found.backward()
    assert abs(found - golden[f"{prefix}loss{name}"]).item() <= 1e-10
    for part, weight in {
        "qkv": mae.vit.blocks[1].attn.qkv.weight,
        "cls_token": mae.vit.cls_token,
        adapters: getattr(model, adapters)[-1].weight,
    }.items():
        expected = golden[f"{prefix}grad{name}.{part}"]
        assert (weight.grad - expected).abs().max() <= 1e-10 and expected.abs().max() > 1e-3, part


# --- By hand


def logits_by_hand(vit, images, order, visible, heads):
    """Attention logits of every layer, (B, heads, N, N) each, image by image, with timm's own blocks."""
    per_image = []
    for image, places in zip(images, order.tolist()):
        tokens = vit._pos_embed(vit.patch_embed(image[None]))
        prefix = vit.num_prefix_tokens
        x = tokens[:, [*range(prefix), *(prefix + place for place in places[:visible])]]
        layers = []
        for block in vit.blocks:
            q, k, _ = block.attn.qkv(block.norm1(x))[0].chunk(3, -1)
            d = q.shape[-1] // heads
            parts = [slice(head * d, (head + 1) * d) for head in range(heads)]
            layers.append(torch.stack([q[:, part] @ k[:, part].T / d**0.5 for part in parts]))
            x = block(x)
        per_image.append(layers)
    return [torch.stack(of_layer) for of_layer in zip(*per_image)]


def squares(z_s, z_t):
    return ((z_s - z_t) ** 2).sum() / z_s.numel()


def squares_about_row_means(z_s, z_t):
    return squares(z_s - z_s.mean(-1, keepdim=True), z_t - z_t.mean(-1, keepdim=True))


def entropy_across(z_s, z_t):
    p_t, p_s = z_t.exp() / z_t.exp().sum(-1, keepdim=True), z_s.exp() / z_s.exp().sum(-1, keepdim=True)
    return -(p_t * p_s.log()).sum() / z_s[..., 0].numel()


MATCHES = {
    squared_error: squares,
    centred_squared_error: squares_about_row_means,
    cross_entropy_of_maps: entropy_across,
}
REGISTERS = {"reg_tokens": 2}
NO_TOKEN = {"class_token": False, "global_pool": "avg"}
TWO_OF_DEPTH_TWO = {"depth": 2, "num_heads": 2}


@pytest.mark.parametrize("match", MATCHES)
@pytest.mark.parametrize(
    "both, teacher, layers, pairs",
    [
        ({}, TWO_OF_DEPTH_TWO, None, ((2, 1),)),
        (REGISTERS, TWO_OF_DEPTH_TWO, {0: 1, 2: 0}, ((0, 1), (2, 0))),
        (NO_TOKEN, {}, [1], ((1, 1),)),
    ],
    ids=str,
)
def test_attention_among_visible_patches_by_hand(build, match, both, teacher, layers, pairs):
    model = build(both | teacher, both, layers=layers, match=match)
    assert model.layers == pairs
    heads = (SMALL_VIT | teacher)["num_heads"]
    ours = logits_by_hand(model.student.vit, IMAGES, ORDER, 4, 3)
    theirs = logits_by_hand(model.teacher, IMAGES, ORDER, 4, heads)
    expected = 0
    for (of_student, of_teacher), mix in zip(pairs, model.mixing, strict=True):
        M = mix.weight[:, :, 0, 0]
        assert M.shape == (heads, 3) and mix.bias is None
        mixed = sum(M[:, g, None, None] * ours[of_student][:, g, None] for g in range(3))
        expected = expected + MATCHES[match](mixed, theirs[of_teacher])
    assert abs(model(IMAGES, ORDER).transfer_loss - expected).item() <= 1e-10


def test_without_mixing_head_is_compared_with_head(build):
    model = build(mix_heads=False)
    assert [*model.mixing.parameters()] == []
    both = [logits_by_hand(vit, IMAGES, ORDER, 4, 3)[2] for vit in (model.student.vit, model.teacher)]
    assert abs(model(IMAGES, ORDER).transfer_loss - squares(*both)).item() <= 1e-10


def test_the_weight_is_the_recipes(build):
    model = build()
    torch.manual_seed(3)
    reconstruction, transfer_loss = model(IMAGES)
    torch.manual_seed(3)
    with noted() as parts:
        found = distilled_mae_loss(model, IMAGES, torch.zeros(3), Recipe(transfer_weight=0.1))
    assert abs(found - reconstruction - 0.1 * transfer_loss).item() <= 1e-12
    assert parts == {"reconstruction": reconstruction, "transfer_loss": transfer_loss}
