"""timm's Eva family: `walk` computes what the model computes, and q and k are those after rotation by
position."""

import inspect

import pytest
import torch
from timm.models.eva import Eva

from atlib import walk
from atlib.attention import Instead
from tests.helpers import OLD_TIMM, SMALL_VIT, Adapted, random_images, randomise

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


def eva(**options):
    """A small Eva with random weights of a size at which every part matters; skipped where this timm lacks an
    option."""
    missing = set(options) - set(inspect.signature(Eva).parameters)
    if missing:
        pytest.skip(f"this timm's Eva has no {', '.join(sorted(missing))}")
    if OLD_TIMM and options.get("rope_type") == "mixed":
        pytest.skip("this timm's Eva rotates by mixed angles in float32 alone")
    return randomise(Eva(**SMALL_VIT | options)).eval()


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
