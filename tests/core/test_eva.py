"""timm's Eva family: `walk` computes what the model computes, and q and k are those after rotation by
position."""

import inspect
import math

import pytest
import timm
import torch
from timm.models.eva import Eva

from atlib import create_vit, walk
from atlib.attention import Instead, sample_drop_path
from tests.helpers import (
    DROPS,
    OLD_TIMM,
    SMALL_VIT,
    Adapted,
    assert_same_logits,
    mine,
    random_images,
    randomise,
    set_fused,
)

ROPE = {"use_rot_pos_emb": True}
OPTIONS = {
    "no rotation": {},
    "rotation": ROPE | {"ref_feat_shape": (4, 4)},
    "rotation only": ROPE | {"use_abs_pos_emb": False},
    "no biases": ROPE | {"qkv_bias": False},
    "three projections": ROPE | {"qkv_fused": False},
    "three projections without biases": ROPE | {"qkv_fused": False, "qkv_bias": False},
    "plain attention with rotation": (
        ROPE | {"attn_type": "rope", "rope_grid_indexing": "xy", "rope_grid_offset": 1.0}
    ),
    "plain attention, three projections": ROPE | {"attn_type": "rope", "qkv_fused": False},
    "a rotation per layer": (
        ROPE | {"rope_type": "mixed", "rope_temperature": 10.0, "attn_type": "rope", "no_embed_class": True}
    ),
    "DINOv3": (
        ROPE
        | {
            "rope_type": "dinov3",
            "rope_temperature": 100,
            "rope_rotate_half": True,
            "use_abs_pos_emb": False,
            "num_reg_tokens": 4,
            "qkv_bias": False,
            "init_values": 0.3,
            "use_fc_norm": False,
            "dynamic_img_size": True,
        }
    ),
    "registers, no class token": ROPE | {"class_token": False, "num_reg_tokens": 2, "init_values": 0.3},
    "gated MLP": ROPE | {"swiglu_mlp": True, "mlp_ratio": 8 / 3},
    "gated MLP with a norm, norm inside attention": (
        ROPE | {"swiglu_mlp": True, "scale_mlp": True, "scale_attn_inner": True}
    ),
    "aligned gated MLP": ROPE | {"swiglu_mlp": True, "swiglu_align_to": 8},
    "class-token pooling": ROPE | {"global_pool": "token"},
    "attention-pool head, norm before the blocks": (
        ROPE | {"global_pool": "map", "use_pre_transformer_norm": True}
    ),
    "no norm after the blocks": ROPE | {"use_post_transformer_norm": False, "use_fc_norm": False},
    # What only later versions of timm have:
    "query-key norm": ROPE | {"qk_norm": True},
    "shared keys and values": (
        ROPE | {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 1, "qk_norm": True}
    ),
    "layer scale on attention only": ROPE | {"init_values": 0.3, "attn_only_layer_scale": True},
    "one rotation for both axes": ROPE | {"rope_type": "mrope", "rope_mrope_section": (0, 2, 2)},
}
# Depth and image size are cut: what makes a model what it is stays as published.
NAMES = {
    "vit_small_patch16_dinov3": {"depth": 2, "img_size": 96},
    "vit_small_plus_patch16_dinov3": {"depth": 2, "img_size": 96},
    "eva02_tiny_patch14_224": {"depth": 3, "img_size": 112},
    "eva02_small_patch14_224": {"depth": 2, "img_size": 112},
    "eva02_base_patch16_clip_224": {"depth": 1, "img_size": 112},
    "vit_medium_patch16_rope_reg1_gap_256": {"depth": 2, "img_size": 96},
    "vit_small_patch16_rope_224": {"depth": 2, "img_size": 96},
    "vit_small_patch16_rope_mixed_ape_224": {"depth": 2, "img_size": 96},
    "vit_pe_core_tiny_patch16_384": {"depth": 2, "img_size": 96},
    "vit_base_patch16_sapiens2": {"depth": 1, "img_size": 96, "num_kv_heads": 6},
}


def eva(**options):
    """A small Eva with random weights of a size at which every part matters; skipped where this timm lacks an
    option."""
    missing = set(options) - set(inspect.signature(Eva).parameters)
    if missing:
        pytest.skip(f"this timm's Eva has no {', '.join(sorted(missing))}")
    if OLD_TIMM and options.get("rope_type") == "mixed":
        pytest.skip("this timm's Eva rotates by mixed angles in float32 alone")
    return randomise(Eva(**SMALL_VIT | options)).eval()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("option", OPTIONS)
def test_equals_the_model_with_every_option(option, fused):
    vit = set_fused(eva(**OPTIONS[option]), fused)
    assert_same_logits(vit, random_images(4, 3, 32, 32))
    assert_same_logits(vit.double(), random_images(4, 3, 32, 32, dtype=torch.float64), tolerance=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_equals_published_models(name):
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    vit = randomise(create_vit(name, num_classes=10, **NAMES[name])).eval()
    images = random_images(1, 3, *vit.patch_embed.img_size)
    with torch.no_grad():
        for fused in (True, False):
            assert_same_logits(set_fused(vit, fused), images)
        assert_same_logits(vit.train(), images)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "option", ["rotation", "a rotation per layer", "DINOv3", "gated MLP with a norm, norm inside attention"]
)
def test_equals_the_model_in_training_with_all_kinds_of_dropout(option, checkpointing):
    """Same seed, same result; patches are dropped together with their rotations."""
    vit = eva(**OPTIONS[option], **DROPS).train()
    vit.set_grad_checkpointing(checkpointing)
    images = random_images(8, 3, 32, 32)
    assert_same_logits(vit, images)
    assert not torch.equal(walk(vit, images).logits, walk(vit, images).logits)


def test_equals_the_model_with_moving_coordinates_in_training():
    vit = eva(
        **ROPE,
        rope_type="dinov3",
        rope_temperature=100,
        rope_rotate_half=True,
        rope_shift_coords=0.5,
        rope_rescale_coords=2.0,
    ).train()
    images = random_images(2, 3, 32, 32)
    assert_same_logits(vit, images)
    assert not torch.equal(walk(vit, images).logits, walk(vit, images).logits)


def test_equals_the_model_at_another_image_size():
    vit = eva(**OPTIONS["DINOv3"])
    assert_same_logits(vit, random_images(2, 3, 48, 24))
    assert walk(vit, random_images(2, 3, 48, 24)).layers[0].map.shape[-1] == 6 * 3 + 5


@pytest.mark.parametrize(
    "option", ["rotation", "three projections", "a rotation per layer", "shared keys and values"]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_the_models(option, checkpointing):
    vit, images = (
        eva(**OPTIONS[option], drop_path_rate=0.3).train(),
        random_images(4, 3, 32, 32).requires_grad_(),
    )

    def gradients(run):
        torch.manual_seed(1)
        vit.zero_grad()
        images.grad = None
        run().square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in vit.named_parameters()} | {
            "images": images.grad.clone()
        }

    expected = gradients(lambda: vit(images))
    vit.set_grad_checkpointing(checkpointing)
    found = gradients(lambda: walk(vit, images).logits)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(gradient.abs().max() > 0 for gradient in found.values())


@pytest.mark.parametrize("option", ["rotation", "three projections"])
def test_equals_the_model_under_autocast(option):
    vit, images = eva(**OPTIONS[option]), random_images(4, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = vit(images), walk(vit, images)
    assert {part.dtype for seen in found.layers for part in (seen.q, seen.k, seen.v)} == {torch.bfloat16}
    torch.testing.assert_close(found.logits, expected)


def rotated(part, angles, pairs):
    """Every pair of coordinates as a complex number, turned by its angle. part: (B, H, P, d); angles: (P,
    d/2); pairs: two lists of places."""
    first, second = pairs
    turned = torch.complex(part[..., first], part[..., second]) * torch.polar(torch.ones_like(angles), angles)
    result = torch.empty_like(part)
    result[..., first], result[..., second] = turned.real, turned.imag
    return result


def axial_angles():
    """EVA-02 (arXiv 2303.11331): half of the pairs turn with the row, half with the column, at frequencies
    10000^-m/M."""
    frequencies = torch.tensor([10000.0 ** -(m / 2) for m in range(2)], dtype=torch.float64)
    place = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)).double()
    return torch.cat([place[:, :1] * frequencies, place[:, 1:] * frequencies], 1)


def dinov3_angles():
    """DINOv3 (arXiv 2508.10104): patch centres from -1 to 1, full turns over periods 100^(2m/M)."""
    periods = torch.tensor([100.0 ** (2 * m / 4) for m in range(2)], dtype=torch.float64)
    centres = (torch.arange(4.0, dtype=torch.float64) + 0.5) / 4 * 2 - 1
    place = torch.cartesian_prod(centres, centres)
    return 2 * math.pi * torch.cat([place[:, :1] / periods, place[:, 1:] / periods], 1)


@pytest.mark.parametrize(
    "option, angles, pairs",
    [
        ("rotation", axial_angles, ([0, 2, 4, 6], [1, 3, 5, 7])),
        ("DINOv3", dinov3_angles, ([0, 1, 2, 3], [4, 5, 6, 7])),
    ],
)
def test_queries_and_keys_are_rotated_for_patches_only(option, angles, pairs):
    vit = eva(**OPTIONS[option]).double()
    images = random_images(2, 3, 32, 32, dtype=torch.float64)
    seen, prefix = walk(vit, images).layers[0], vit.num_prefix_tokens
    assert prefix == (5 if option == "DINOv3" else 1)
    x = vit.blocks[0].norm1(vit._pos_embed(vit.patch_embed(images))[0])
    weight, attn = vit.blocks[0].attn.qkv.weight, vit.blocks[0].attn
    for row, found in ((0, seen.q), (1, seen.k)):
        plain = x @ weight[24 * row : 24 * (row + 1)].T
        if row == 0 and attn.q_bias is not None:
            plain = plain + attn.q_bias
        plain = plain.unflatten(-1, (3, 8)).transpose(1, 2)
        torch.testing.assert_close(found[:, :, :prefix], plain[:, :, :prefix])
        # timm computes the angles in float32
        torch.testing.assert_close(
            found[:, :, prefix:], rotated(plain[:, :, prefix:], angles(), pairs), rtol=1e-5, atol=1e-5
        )
        assert (found - plain)[:, :, prefix + 1 :].abs().max() > 0.1


@pytest.mark.parametrize(
    "option", ["rotation", "DINOv3", "a rotation per layer", "plain attention with rotation"]
)
def test_logits_of_equal_patches_depend_on_their_distance_only(option):
    """Where every patch looks the same and has no position of its own, z differs by the difference of places
    alone."""
    vit = eva(**OPTIONS[option] | {"use_abs_pos_emb": False, "no_embed_class": False}).double()
    seen = walk(vit, torch.ones(1, 3, 32, 32, dtype=torch.float64)).layers[0]
    prefix = vit.num_prefix_tokens
    # heads, row, column, row, column
    z = seen.scores[0, :, prefix:, prefix:].unflatten(2, (4, 4)).unflatten(1, (4, 4))
    # Moving both patches by one row, one column, or both leaves z as it is.
    torch.testing.assert_close(z[:, 1:, :, 1:, :], z[:, :-1, :, :-1, :], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z[:, :, 1:, :, 1:], z[:, :, :-1, :, :-1], rtol=1e-5, atol=1e-5)
    assert (z[:, 1:, :, 0] - z[:, :-1, :, 0]).abs().max() > 0.01, "moving one of them does not"


@pytest.mark.parametrize(
    "option", ["rotation", "three projections", "a rotation per layer", "DINOv3", "shared keys and values"]
)
def test_own_values_change_nothing(option):
    """Replacements are taken as they are: not normalised and not rotated once more."""
    vit, images = eva(**OPTIONS[option]).double(), random_images(2, 3, 32, 32, dtype=torch.float64)
    plain = walk(vit, images)
    for layer, seen in enumerate(plain.layers):
        for parts in (["q"], ["k"], ["v"], ["q", "k"], ["q", "v"], ["map"], ["map", "v"]):
            for heads in (None, [2, 0]):
                own = {
                    part: getattr(seen, part) if heads is None else getattr(seen, part)[:, heads]
                    for part in parts
                }
                found = walk(vit, images, replace={layer: Instead(**own, heads=heads)})
                assert (found.logits - plain.logits).abs().max() <= 1e-11


@pytest.mark.parametrize("option", ["DINOv3", "a rotation per layer", "shared keys and values"])
@pytest.mark.parametrize("kind", ["rotary", "plain"])
def test_copy_from_a_rotary_teacher_uses_its_maps(option, kind, small_vit):
    teacher, images = eva(**OPTIONS[option]).double(), random_images(2, 3, 32, 32, dtype=torch.float64)
    layers = walk(teacher, images).layers
    registers = teacher.num_prefix_tokens - 1
    student = (
        eva(**OPTIONS[option]) if kind == "rotary" else small_vit(seed=3, reg_tokens=registers)
    ).double()
    randomise(student, seed=3)
    by_parts = walk(
        student,
        images,
        replace={i: Instead(q=seen.q, k=seen.k, scale=seen.scale) for i, seen in enumerate(layers)},
    )
    by_map = walk(student, images, replace={i: Instead(map=seen.map) for i, seen in enumerate(layers)})
    torch.testing.assert_close(by_parts.logits, by_map.logits, rtol=1e-10, atol=1e-10)
    assert (by_map.logits - walk(student, images).logits).abs().max() > 0.01


@pytest.mark.parametrize("option", ["rotation", "three projections", "no biases"])
def test_stop_after_computes_no_values_and_nothing_later(option):
    vit, images = eva(**OPTIONS[option]), random_images(2, 3, 32, 32)
    expected = walk(vit, images)
    attn = vit.blocks[1].attn
    with torch.no_grad():
        (attn.v_proj.weight if attn.qkv is None else attn.qkv.weight[48:]).fill_(torch.nan)
    found = walk(mine(vit, after=1), images, stop_after=1)
    assert found.logits is None and found.layers[1].v is None and len(found.stream) == 1
    torch.testing.assert_close(
        (found.layers[1].q, found.layers[1].k), (expected.layers[1].q, expected.layers[1].k)
    )
    torch.testing.assert_close(found.layers[0].v, expected.layers[0].v)


@pytest.mark.parametrize("option", ["rotation", "three projections", "shared keys and values"])
def test_what_is_replaced_is_not_computed(option):
    vit, images = eva(**OPTIONS[option]), random_images(2, 3, 32, 32)
    q, k = torch.randn(2, 2, 3, 17, 8)
    replace = {1: Instead(q=q, k=k, scale=0.4)}
    expected = walk(vit, images, replace=replace).logits
    attn = vit.blocks[1].attn
    with torch.no_grad():
        for weight in (
            [attn.q_proj.weight, attn.k_proj.weight] if attn.qkv is None else [attn.qkv.weight[:48]]
        ):
            weight.fill_(torch.nan)
    assert torch.equal(walk(vit, images, replace=replace).logits, expected)


def test_shared_drop_path_masks():
    vit, images = eva(**ROPE, init_values=0.3, drop_path_rate=0.5).train(), random_images(2, 3, 32, 32)
    masks = sample_drop_path(vit, images)
    assert len(masks) == 3
    torch.testing.assert_close(
        walk(vit, images, drop_path=masks).logits, walk(vit, images, drop_path=masks).logits
    )
    nothing = [(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1))] * 3
    torch.testing.assert_close(
        walk(vit, images, drop_path=nothing).tokens, vit._pos_embed(vit.patch_embed(images))[0]
    )
    everything = [(torch.ones(2, 1, 1), torch.ones(2, 1, 1))] * 3
    torch.testing.assert_close(walk(vit, images, drop_path=everything).logits, vit.eval()(images))


@pytest.mark.parametrize("autocast", [False, True])
def test_biases_added_apart_and_adapted_projections(autocast):
    """EVA calls its joint projection in these two cases, so that an adapter in its place takes part."""
    apart, without = eva(**ROPE), eva(**ROPE, qkv_bias=False)
    for vit in (apart, without):
        for block in vit.blocks:
            block.attn.qkv_bias_separate = True
        adapted = Adapted(24, 72, bias=False)
        adapted.load_state_dict(vit.blocks[1].attn.qkv.state_dict())
        vit.blocks[1].attn.qkv = adapted
        images = random_images(2, 3, 32, 32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, plain = vit(images), walk(vit, images)
            torch.testing.assert_close(plain.logits, expected)
            for part in ("q", "k", "v", "map"):
                found = walk(
                    vit,
                    images,
                    replace={i: Instead(**{part: getattr(plain.layers[i], part)}) for i in (0, 1)},
                )
                torch.testing.assert_close(
                    found.logits, expected, **({"rtol": 0.05, "atol": 0.05} if autocast else {})
                )
