"""Students made like their teachers, or unlike them in what was asked for and nothing else."""

import pytest
import timm
import torch
from timm.layers import Attention, LayerScale, SwiGLUPacked
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import DiffParallelScalingBlock, VisionTransformer
from torch import nn

from atlib import create_student, create_vit, walk
from atlib.attention import Instead, Unwalkable
from atlib.student import COMPONENTS, STANDARD, describe, differences
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
# What an Eva has and a VisionTransformer cannot have.
ONLY_EVA = {"positions", "grouped_queries"}


def teacher_of(name, **options):
    options = TEACHERS[name][0] | options
    if "_" not in name:
        return create_vit(SMALL | options)
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    return create_vit(name, **{"depth": 2, "embed_dim": 96, "num_heads": 3} | options)


def shapes(vit):
    return {name: value.shape for name, value in vit.state_dict().items() if not name.startswith("head")}


def single_changes(pairs):
    return [
        (name, component)
        for name, (_, own) in TEACHERS.items()
        for component in sorted(own)
        if pairs(name, component)
    ]


@pytest.mark.parametrize("name", TEACHERS)
def test_a_native_student_is_the_teacher_freshly_initialised(name):
    teacher = randomise(teacher_of(name))
    student = create_student(teacher, 7)
    assert type(student) is type(teacher)
    assert shapes(student) == shapes(teacher)
    assert describe(student) == describe(teacher) and differences(teacher, student) == {}
    for key, value in student.state_dict().items():
        # biases of zero and scales of one start the same for everybody, but randomise() left none in the
        # teacher
        assert key.startswith("head") or not torch.equal(value, teacher.state_dict()[key]), key
    images = random_images(2, 3, *teacher.patch_embed.img_size)
    student.eval()
    assert student(images).shape == (2, 7)
    torch.testing.assert_close(walk(student, images).logits, student(images))
    replace = {
        i: Instead(q=seen.q, k=seen.k, scale=seen.scale)
        for i, seen in enumerate(walk(teacher.eval(), images, stop_after=1).layers)
    }
    assert walk(student, images, replace=replace).logits.shape == (2, 7)


@pytest.mark.parametrize("name", TEACHERS)
def test_the_computation_is_the_teachers_too(name):
    """With the teacher's weights the student computes the teacher's features: activations, eps and poolings
    came along."""
    teacher = randomise(teacher_of(name, num_classes=6)).eval()
    student = create_student(teacher, 6).eval()
    student.load_state_dict(teacher.state_dict())
    images = random_images(2, 3, *teacher.patch_embed.img_size)
    torch.testing.assert_close(student(images), teacher(images), rtol=0, atol=0)


@pytest.mark.parametrize("name", TEACHERS)
def test_components_are_read_off_the_modules(name):
    found = describe(teacher_of(name))
    assert tuple(found) == COMPONENTS == tuple(STANDARD)
    assert {component for component in COMPONENTS if found[component] != STANDARD[component]} == TEACHERS[
        name
    ][1]


def test_descriptions():
    dino = describe(teacher_of("vit_small_patch14_reg4_dinov2"))
    assert (dino["layer_scale"], dino["registers"], dino["positions"]) == (
        "attention and MLP",
        4,
        "learned for patches",
    )
    clip = describe(teacher_of("vit_base_patch16_clip_quickgelu_224"))
    assert (clip["pre_norm"], clip["activation"], clip["norm"]) == (True, "QuickGELU", "LayerNorm 1e-05")
    assert describe(teacher_of("vit_base_patch16_siglip_224"))["pooling"] == "map, no class token"
    assert describe(create_vit(SMALL, act_layer="gelu_tanh"))["activation"] != "GELU"
    eva = describe(teacher_of("eva02_tiny_patch14_224"))
    assert (eva["positions"], eva["mlp"], eva["qkv_bias"]) == ("learned and rotary (Cat)", "gated", "q v")
    assert describe(create_vit("glyphs")) == dict(STANDARD)


@pytest.mark.parametrize("name", TEACHERS)
def test_a_standard_student_has_the_teachers_size(name):
    teacher = teacher_of(name)
    student = create_student(teacher, 7, native=False)
    assert type(student) is VisionTransformer
    assert describe(student) == dict(STANDARD)
    assert set(differences(teacher, student)) == TEACHERS[name][1]
    for of in (
        lambda vit: vit.patch_embed.grid_size,
        lambda vit: vit.embed_dim,
        lambda vit: len(vit.blocks),
        lambda vit: vit.blocks[0].attn.num_heads,
        lambda vit: vit.blocks[0].mlp.fc2.in_features,
        lambda vit: vit.blocks[0].attn.scale,
    ):
        assert of(student) == of(teacher)
    assert student(random_images(1, 3, *teacher.patch_embed.img_size)).shape == (1, 7)


def goes_with_the_mlp(name, component):
    """An Eva cannot choose the activation of a gated MLP."""
    return component == "activation" and name.startswith(
        ("eva", "vit_small_plus", "vit_base_patch16_sapiens2")
    )


@pytest.mark.parametrize("name, component", single_changes(lambda *pair: not goes_with_the_mlp(*pair)))
def test_dropping_one_component_changes_that_one(name, component):
    teacher = teacher_of(name)
    student = create_student(teacher, 7, drop=(component,)).eval()
    changed = (
        {component, "activation"}
        if goes_with_the_mlp(name, "activation") and component == "mlp"
        else {component}
    )
    found = differences(teacher, student)
    assert set(found) == changed
    assert all(of_student == STANDARD[one] for one, (_, of_student) in found.items())
    images = random_images(2, 3, *teacher.patch_embed.img_size)
    torch.testing.assert_close(walk(student, images).logits, student(images))


@pytest.mark.parametrize(
    "name, component",
    single_changes(
        lambda name, component: name.split("_")[0] not in ("eva02",) and component not in ONLY_EVA
    ),
)
def test_adding_one_component_changes_that_one(name, component):
    teacher = teacher_of(name)
    if isinstance(teacher, Eva) and (component, describe(teacher)[component]) in (
        ("qkv_bias", "q v"),
        ("layer_scale", "attention"),
        ("pooling", "map"),
    ):
        with pytest.raises(ValueError, match=f"VisionTransformer .*{component}"):
            create_student(teacher, 7, native=False, add=(component,))
        return
    student = create_student(teacher, 7, native=False, add=[component]).eval()
    now = describe(student)
    assert {one for one in COMPONENTS if now[one] != STANDARD[one]} == {component}
    assert now[component] == describe(teacher)[component]
    images = random_images(2, 3, *teacher.patch_embed.img_size)
    torch.testing.assert_close(walk(student, images).logits, student(images))


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "eva02_tiny_patch14_224"])
def test_rotary_positions_cannot_be_added_to_a_standard_vit(name):
    with pytest.raises(ValueError, match="positions.*native=True"):
        create_student(teacher_of(name), 7, native=False, add=("positions",))


def test_dropping_everything_gives_a_standard_vit():
    for name, (_, own) in TEACHERS.items():
        student = create_student(teacher_of(name), 7, drop=own)
        assert describe(student) == dict(STANDARD), name


def test_adding_everything_gives_the_teachers_architecture():
    teacher = teacher_of("vit_small_patch14_reg4_dinov2")
    student = create_student(teacher, 7, native=False, add=TEACHERS["vit_small_patch14_reg4_dinov2"][1])
    assert shapes(student) == shapes(teacher)


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


def test_layer_scale_starts_where_it_is_told():
    teacher = randomise(teacher_of("vit_small_patch14_reg4_dinov2"))
    assert create_student(teacher, 7, layer_scale_init=0.25).blocks[1].ls2.gamma.unique().tolist() == [0.25]
    for block in teacher.blocks:
        for scale in (block.ls1, block.ls2):
            vars(scale).pop("init_values", None)  # as in timm versions that do not note it
    assert create_student(teacher, 7).blocks[0].ls1.gamma.unique().tolist() == [pytest.approx(1e-5)]
    with pytest.raises(ValueError, match="layer_scale_init=0.1"):
        create_student(teacher, 7, drop=("layer_scale",), layer_scale_init=0.1)
    with pytest.raises(ValueError, match="layer_scale_init=0.0"):  # timm would build none
        create_student(teacher, 7, layer_scale_init=0.0)
    by_name = timm.create_model("vit_base_patch16_rpn_224", img_size=32, depth=1)
    with pytest.raises(ValueError, match="layer_scale_init=0.5"):
        create_student(by_name, 7, layer_scale_init=0.5)


def test_drop_path_is_the_students_own_matter():
    teacher = create_vit(SMALL, drop_path_rate=0.3, drop_rate=0.5, attn_drop_rate=0.5)
    student = create_student(teacher, 7, drop_path_rate=0.2)
    assert student.blocks[1].drop_path1.drop_prob == pytest.approx(0.2)
    assert student.head_drop.p == 0 and student.blocks[0].attn.attn_drop.p == 0
    assert isinstance(create_student(teacher, 7).blocks[1].drop_path1, nn.Identity)


@pytest.mark.parametrize("hidden", [24, 31, 50, 61, 96, 97])
def test_every_width_of_the_mlp_is_met(hidden):
    teacher = create_vit(SMALL, mlp_ratio=(hidden + 0.5) / 24)
    assert teacher.blocks[0].mlp.fc1.out_features == hidden
    assert create_student(teacher, 7).blocks[0].mlp.fc1.out_features == hidden


def test_the_distilled_deit():
    teacher = teacher_of("deit_tiny_distilled_patch16_224")
    assert type(create_student(teacher, 7)) is VisionTransformerDistilled
    assert type(create_student(teacher, 7, drop=("pooling",))) is VisionTransformer
    assert create_student(teacher, 7, native=False, add=("pooling",)).num_prefix_tokens == 2


DINOV2, EVA02 = "vit_small_patch14_reg4_dinov2", "eva02_tiny_patch14_224"


@pytest.mark.parametrize(
    "name, options, named",
    [
        (DINOV2, {"drop": ("layerscale",)}, "drop 'layerscale'.*'layer_scale'"),
        (DINOV2, {"native": False, "add": ("register",)}, "add 'register'.*'registers'"),
        (DINOV2, {"drop": "registers"}, "drop='registers'"),
        (DINOV2, {"native": False, "drop": ("registers",)}, "native=False"),
        (DINOV2, {"add": ("registers",)}, "native=True"),
        (DINOV2, {"drop": ("pre_norm",)}, r"pre_norm .*\(False\).*registers"),
        (DINOV2, {"native": False, "add": ("qk_norm",)}, "qk_norm"),
        (DINOV2, {"native": False, "layer_scale_init": 0.1}, "layer_scale_init=0.1"),
        (EVA02, {"drop": ("activation",)}, "activation .* mlp"),
    ],
    ids=str,
)
def test_contradictory_choices(name, options, named):
    with pytest.raises(ValueError, match=named):
        create_student(teacher_of(name), 7, **options)


def test_a_teacher_that_does_not_pool():
    teacher = create_vit(SMALL, num_classes=0, global_pool="")
    with pytest.raises(ValueError, match=r"drop=\('pooling',\)"):
        create_student(teacher, 7)
    assert create_student(teacher, 7, drop=("pooling",))(random_images(1, 3, 32, 32)).shape == (1, 7)


def test_what_cannot_be_read_off_is_refused_and_not_dropped():
    unnamed = create_vit("vit_tiny_r_s16_p8_224", depth=2)
    assert describe(create_student(unnamed, 7)) == describe(unnamed), "it is built by its timm name"
    del unnamed.pretrained_cfg
    with pytest.raises(ValueError, match="HybridEmbed.*no timm name"):
        create_student(unnamed, 7)
    mixed = create_vit(SMALL)
    mixed.blocks[1].mlp.act = nn.ReLU()
    with pytest.raises(ValueError, match=r"1.mlp.act: .*ReLU\(\)"):
        create_student(mixed, 7)
    odd = create_vit(SMALL)
    odd.blocks[1].norm1 = nn.LayerNorm(24, bias=False)
    with pytest.raises(ValueError, match=r"blocks.1.norm1.bias: .*\(24,\)"):
        create_student(odd, 7)
    with pytest.raises(ValueError, match="blocks.0.extra"):
        more = create_vit(SMALL)
        more.blocks[0].extra = nn.Parameter(torch.zeros(3))
        create_student(more, 7)


def test_gated_attention_is_refused():
    vit = create_vit(SMALL)
    if not hasattr(vit.blocks[0].attn, "gate"):
        pytest.skip("this timm has no gated attention")
    vit.blocks[1].attn = Attention(24, num_heads=3, qkv_bias=True, gated=True)
    with pytest.raises(ValueError, match="1.attn.gate.weight"):
        create_student(vit, 7)


def test_what_cannot_be_walked_is_not_described():
    for ask in (
        describe,
        lambda vit: create_student(vit, 7),
        lambda vit: differences(vit, create_vit(SMALL)),
    ):
        with pytest.raises(Unwalkable, match="DiffParallelScalingBlock"):
            ask(create_vit(SMALL, block_fn=DiffParallelScalingBlock))
