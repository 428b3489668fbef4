"""Students made like their teachers, or unlike them in what was asked for and nothing else."""

import pytest
import timm
import torch
from timm.layers import LayerScale, SwiGLUPacked
from torch import nn

from atlib import AttentionTransfer, Plan, create_student, create_vit
from atlib.student import COMPONENTS, STANDARD, describe, differences
from atrun.derived_plan import derive_plan
from tests.helpers import SMALL_VIT, random_images, randomise

SMALL = SMALL_VIT | {"depth": 2}
# Depth, width and image size are cut: what makes a model what it is stays as published. With each, what is
# not standard in it.
TEACHERS = {
    "deit_tiny_patch16_224": ({"img_size": 64}, set()),
    "deit_tiny_distilled_patch16_224": ({"img_size": 64}, {"pooling"}),
    "deit3_small_patch16_224": ({"img_size": 64}, {"layer_scale", "positions"}),
    "vit_small_patch14_reg4_dinov2": ({"img_size": 56}, {"layer_scale", "registers", "positions"}),
    "vit_base_patch16_clip_quickgelu_224": ({"img_size": 64}, {"pre_norm", "activation", "norm"}),
    "beitv2-like": ({"global_pool": "avg", "init_values": 0.1}, {"pooling", "layer_scale"}),
    "beit3_base_patch16_224": ({"img_size": 64}, {"pooling", "norm"}),
    "vit_base_patch16_siglip_224": ({"img_size": 64}, {"pooling"}),
    "vit_medium_patch16_gap_256": ({"img_size": 64}, {"pooling", "layer_scale", "qkv_bias"}),
    "query-key norm": ({"qk_norm": True}, {"qk_norm"}),
    "gated MLP": (
        {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 5.34},
        {"mlp", "activation"},
    ),
    "no projection biases": ({"proj_bias": False, "pos_embed": "none"}, {"qkv_bias", "positions"}),
    "vit_small_patch16_dinov3": (
        {"img_size": 64},
        {"layer_scale", "registers", "pooling", "positions", "norm", "qkv_bias"},
    ),
    "vit_small_plus_patch16_dinov3": (
        {"img_size": 64},
        {"layer_scale", "registers", "pooling", "positions", "norm", "qkv_bias", "mlp", "activation"},
    ),
    "eva02_tiny_patch14_224": ({"img_size": 56}, {"pooling", "positions", "mlp", "activation", "qkv_bias"}),
    "eva02_base_patch16_clip_224": ({"img_size": 64}, {"positions", "mlp", "activation", "norm", "qkv_bias"}),
    "vit_medium_patch16_rope_reg1_gap_256": (
        {"img_size": 64},
        {"layer_scale", "registers", "pooling", "positions", "qkv_bias"},
    ),
    "vit_small_patch16_rope_mixed_ape_224": ({"img_size": 64}, {"layer_scale", "positions"}),
    "vit_pe_spatial_tiny_patch16_512": ({"img_size": 64}, {"pre_norm", "pooling", "positions", "norm"}),
    "vit_pe_core_tiny_patch16_384": ({"img_size": 64}, {"pre_norm", "pooling", "positions", "norm"}),
    "vit_base_patch16_sapiens2": (
        {"img_size": 64, "num_kv_heads": 2, "num_heads": 4, "num_classes": 3},
        {"layer_scale", "registers", "positions", "norm", "mlp", "activation", "qk_norm", "grouped_queries"},
    ),
}


def teacher_of(name, **options):
    options = TEACHERS[name][0] | options
    if "_" not in name:
        return create_vit(SMALL | options)
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    return create_vit(name, **{"depth": 2, "embed_dim": 96, "num_heads": 3} | options)


@pytest.mark.parametrize("name", TEACHERS)
def test_the_computation_is_the_teachers_too(name):
    """With the teacher's weights the student computes the teacher's features: activations, eps and poolings
    came along."""
    teacher = randomise(teacher_of(name, num_classes=6)).eval()
    student = create_student(teacher, 6).eval()
    student.load_state_dict(teacher.state_dict())
    images = random_images(2, 3, *teacher.patch_embed.img_size)
    torch.testing.assert_close(student(images), teacher(images), rtol=0, atol=0)
    assert type(student) is type(teacher) and differences(teacher, student) == {}
    found = describe(teacher)
    assert {component for component in COMPONENTS if found[component] != STANDARD[component]} == (
        TEACHERS[name][1]
    )


def test_a_student_starts_as_timms_constructor_starts_it():
    """Same seed, same weights as timm builds by that name; layer scale at its published start, not at the
    teacher's trained values."""
    for name in ("vit_small_patch14_reg4_dinov2", "deit3_small_patch16_224", "vit_small_patch16_dinov3"):
        teacher = randomise(teacher_of(name))
        torch.manual_seed(5)
        expected = teacher_of(name, num_classes=7).state_dict()
        torch.manual_seed(5)
        found = create_student(teacher, 7).state_dict()
        assert found.keys() == expected.keys()
        if "init_values" in vars(LayerScale(1)):  # later versions of timm note where layer scale started
            assert all(torch.equal(found[key], expected[key]) for key in found)


def test_models_of_other_libraries_differ_in_what_can_be_told():
    hf = pytest.importorskip("transformers")
    sizes = {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    plain, scaled = (
        hf.ViTModel(hf.ViTConfig(**sizes)),
        hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**sizes, num_register_tokens=2)),
    )
    vit = create_vit(SMALL)
    assert differences(plain, vit) == {}
    assert differences(scaled, vit) == {"layer_scale": ("some", "none"), "registers": (2, 0)}
    assert differences(create_vit(SMALL, init_values=0.1, reg_tokens=2), scaled) == {}


@pytest.mark.parametrize(
    "asked, expected",
    [
        ({"depth": 2, "embed_dim": 16}, (2, 16, 2)),  # heads 8 wide, as the teacher's
        ({"embed_dim": 21}, (4, 21, 3)),  # no multiple of 8: as many heads as the teacher
        ({"size": "half"}, (2, 12, 1)),
        ({"size": "half", "depth": 3}, (3, 12, 1)),
        ({"size": "tiny"}, (4, 192, 3)),
        ({"size": "small", "depth": 1}, (1, 384, 6)),
        ({}, (4, 24, 3)),
    ],
)
def test_a_smaller_student_has_the_teachers_components_and_a_derived_plan(asked, expected):
    teacher = create_vit(SMALL, depth=4, num_heads=3, init_values=1e-5, qk_norm=True)
    student = create_student(teacher, 7, **asked)
    assert (len(student.blocks), student.embed_dim, student.blocks[0].attn.num_heads) == expected
    assert differences(teacher, student) == {} and student.num_classes == 7
    plan = derive_plan(teacher, student)
    pair = AttentionTransfer(teacher, student, plan).train()
    last = {1: ((0, 3),), 2: ((0, 1), (1, 3)), 3: ((0, 1), (1, 2)), 4: ((0, 0), (1, 1), (2, 2))}
    assert pair.pairing.layers == last[expected[0]], "three quarters, spread over the teacher's layers"
    assert plan.unequal_heads == (None if expected[2] == 3 else "aggregate")
    images = random_images(2, 3, *teacher.patch_embed.img_size)
    assert pair(images).transfer_loss > 0 and pair(images).logits.shape == (2, 7)


def test_a_derived_plan_resamples_other_patches_and_copies_all_layers():
    teacher, student = create_vit(SMALL, depth=2), create_vit(SMALL, depth=2, patch_size=4)
    plan = derive_plan(teacher, student, "copy")
    assert plan == Plan(how="copy", unequal_grid="resample")
    assert AttentionTransfer(teacher, student, plan).pairing.layers == ((0, 0), (1, 1))
