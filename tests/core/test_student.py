"""Students made like their teachers, or unlike them in what was asked for and nothing else."""

import pytest
import timm
import torch
from timm.layers import LayerScale

from atlib import AttentionTransfer, Plan, create_student, create_vit
from atlib.checkpoint import load_vit, save_vit
from atlib.student import STANDARD, describe, differences
from atlib.vit import Architecture
from atrun.derived_plan import derive_plan
from tests.helpers import SMALL_VIT, random_images, randomise, same, state_of

SMALL = SMALL_VIT | {"depth": 2}
# Depth, width and image size are cut, the rest stays as published. With each: what is not standard in it.
TEACHERS = {
    "deit_tiny_distilled_patch16_224": "pooling",
    "vit_small_patch14_reg4_dinov2": "layer_scale registers positions",
    "vit_base_patch16_clip_quickgelu_224": "pre_norm activation norm",
    "beit3_base_patch16_224": "pooling norm",
    "vit_base_patch16_siglip_224": "pooling",
    "vit_medium_patch16_gap_256": "pooling layer_scale qkv_bias",
    "vit_small_plus_patch16_dinov3": ("layer_scale registers pooling positions norm qkv_bias mlp activation"),
    "eva02_base_patch16_clip_224": "positions mlp activation norm qkv_bias",
    "vit_pe_core_tiny_patch16_384": "pre_norm pooling positions norm",
    "vit_base_patch16_sapiens2": (
        "layer_scale registers positions norm mlp activation qk_norm grouped_queries"
    ),
}
CUT = {"img_size": 56, "depth": 2, "embed_dim": 96, "num_heads": 3, "num_classes": 6}


@pytest.mark.parametrize("name", TEACHERS)
def test_a_student_computes_what_its_teacher_computes(name):
    """With the teacher's weights it computes the teacher's features; same seed, same start as timm's."""
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    sizes = CUT | {"img_size": 56 if "patch14" in name else 64}
    sizes |= {"num_kv_heads": 2, "num_heads": 4} if "sapiens2" in name else {}
    torch.manual_seed(5)
    teacher = create_vit(name, **sizes)
    started = state_of(teacher)
    torch.manual_seed(5)
    student = create_student(randomise(teacher), 6)
    if "init_values" in vars(LayerScale(1)):  # later versions of timm note where layer scale started
        assert same(student.state_dict(), started)
    student.load_state_dict(teacher.state_dict())
    images = random_images(2, 3, *teacher.patch_embed.img_size)
    assert torch.equal(student.eval()(images), teacher.eval()(images))
    assert type(student) is type(teacher) and differences(teacher, student) == {}
    found = describe(teacher)
    assert {part for part in STANDARD if found[part] != STANDARD[part]} == {*TEACHERS[name].split()}


def test_a_teacher_that_was_read_from_a_file_says_how_it_was_built(tmp_path):
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "init_values": 0.1}
    architecture = Architecture("vit_tiny_patch16_224", sizes)
    teacher = load_vit(save_vit(tmp_path / "vit.safetensors", architecture.build(), architecture))
    assert differences(teacher, create_student(teacher, 6)) == {}


def test_models_of_other_libraries_differ_in_what_can_be_told():
    hf = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = hf.Dinov2WithRegistersConfig(**sizes, patch_size=8, num_register_tokens=2)
    scaled, vit = hf.Dinov2WithRegistersModel(config), create_vit(SMALL)
    assert differences(hf.ViTModel(hf.ViTConfig(**sizes, patch_size=8)), vit) == {}
    assert differences(scaled, vit) == {"layer_scale": ("some", "none"), "registers": (2, 0)}
    assert differences(create_vit(SMALL, init_values=0.1, reg_tokens=2), scaled) == {}


@pytest.mark.parametrize(
    "asked, expected",
    [
        ({"depth": 2, "embed_dim": 16}, (2, 16, 2)),  # heads 8 wide, as the teacher's
        ({"embed_dim": 21}, (4, 21, 3)),  # no multiple of 8: as many heads as the teacher
        ({"size": "half"}, (2, 12, 1)),
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
    finer = create_vit(SMALL, patch_size=4)
    assert derive_plan(create_vit(SMALL), finer, "copy") == Plan(how="copy", unequal_grid="resample")
