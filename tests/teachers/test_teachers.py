"""A teacher read from a file in any published layout is the model that was written; what does not fit is
named."""

import argparse
import json
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.layers import Mlp, resample_abs_pos_embed
from timm.models.vision_transformer import DiffParallelScalingBlock, VisionTransformer

from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.attention import Unwalkable
from atlib.checkpoint import load_vit, save_bundle, save_vit
from atlib.student import create_student
from atlib.vit import Architecture
from atrun.teachers import description, load
from atrun.teachers.build import resized_positions
from atrun.teachers.load import Teacher, load_teacher, report
from examples.flip_to_timm import FLIP, to_timm
from tests.helpers import random_images, randomise, same
from tests.teacher_layouts import clip_of, decoder, encoder_of, flax_of, sine_positions


def vit_of(seed=0, **changes):
    """A ViT-S of two layers on 64 pixels: 16 patches, 6 heads of width 64."""
    config = {"img_size": 64, "embed_dim": 384, "depth": 2, "num_heads": 6, "num_classes": 7} | changes
    return randomise(create_vit(config), seed).eval()


def written(tmp_path, state):
    """A file with these weights, as `torch.save` writes it."""
    torch.save(state, tmp_path / "teacher.pth")
    return tmp_path / "teacher.pth"


def with_sines(vit):
    vit.pos_embed.data = sine_positions(4, vit.embed_dim)
    return vit


def assert_same_teacher(found, vit):
    """Bit for bit the same maps and the same residual stream, on 64 pixels."""
    images = random_images(2, 3, 64, 64)
    with torch.no_grad():
        expected, seen = walk(vit, images, head=False), walk(found, images, head=False)
    assert len(seen.layers) == len(expected.layers)
    for one, other in zip(seen.layers, expected.layers):
        assert one.q.shape == other.q.shape and torch.equal(one.map, other.map)
    assert torch.equal(seen.tokens, expected.tokens)
    assert not found.training and found.num_classes == 0


def under(prefix, state):
    return {prefix + name: value for name, value in state.items()}


def moco_of(vit):
    """A checkpoint of moco-v3's main_moco.py."""
    state = under("module.base_encoder.", encoder_of(vit))
    state |= {f"module.momentum_encoder.{name}": value + 1 for name, value in encoder_of(vit).items()}
    base = ("base_encoder.head.0.weight", "base_encoder.head.1.running_mean")
    for extra in (*base, "momentum_encoder.head.0.weight", "predictor.0.weight"):
        state[f"module.{extra}"] = torch.zeros(3)
    return {"epoch": 300, "arch": "vit_small", "state_dict": state, "optimizer": {}, "scaler": {}}


DINO_HEAD = {"head.mlp.0.weight": torch.zeros(3), "head.last_layer.weight_g": torch.zeros(3)}


def dino_of(vit):
    """A full checkpoint of main_dino.py: the student is wrapped, the teacher is not, and both have a head."""
    student = {f"module.backbone.{name}": value + 1 for name, value in encoder_of(vit).items()}
    models = {
        "student": student | under("module.", DINO_HEAD),
        "teacher": under("backbone.", encoder_of(vit)) | DINO_HEAD,
    }
    about = {
        "args": argparse.Namespace(arch="vit_tiny"),
        "epoch": 100,
        "dino_loss": {"center": torch.zeros(1, 3)},
    }
    return models | about


def deit3_of(vit):
    state = vit.state_dict().items()
    return {"model": {re.sub(r"ls([12])\.gamma", r"gamma_\1", name): value for name, value in state}}


HEAD = ["head.weight", "head.bias"]


LAYOUTS = {  # name: the ViT, what its publisher's file holds, what is said of it, names that are not used
    "MAE's encoder": (
        lambda: with_sines(vit_of()),
        lambda vit: {"model": encoder_of(vit)},
        "timm's names",
        [],
    ),
    "MAE with decoder": (
        lambda: with_sines(vit_of(embed_dim=384, num_heads=6, depth=1)),
        lambda vit: {"model": encoder_of(vit) | decoder(), "epoch": 1, "args": argparse.Namespace(lr=1.0)},
        "MAE pre-training",
        list(decoder()),
    ),
    "MAE fine-tuned": (
        lambda: vit_of(global_pool="avg"),
        lambda vit: {"model": vit.state_dict()},
        "fine-tuned MAE",
        HEAD,
    ),
    "MoCo-v3": (
        lambda: with_sines(vit_of(embed_dim=768, num_heads=12, depth=1)),
        moco_of,
        "MoCo-v3 pre-training",
        None,
    ),
    "MoCo-v3's ViT-S": (
        lambda: with_sines(vit_of(embed_dim=384, num_heads=12, depth=1)),
        moco_of,
        "MoCo-v3 pre-training",
        None,
    ),
    "MoCo-v3's linear classifier": (
        lambda: with_sines(vit_of()),
        lambda vit: {"state_dict": under("module.", vit.state_dict()), "best_acc1": torch.tensor(76.7)},
        "DataParallel",
        ["module.head.weight", "module.head.bias"],
    ),
    "DINO": (vit_of, encoder_of, "timm's names", []),
    "DINO, full": (
        vit_of,
        dino_of,
        "DINO, a backbone, in its entry 'teacher' (beside student, args, epoch, dino_loss)",
        ["head.mlp.0.weight", "head.last_layer.weight_g"],
    ),
    "DINO's student": (
        vit_of,
        lambda vit: {"student": under("module.", under("backbone.", encoder_of(vit)) | DINO_HEAD)},
        "DINO, the student's backbone",
        ["module.head.mlp.0.weight", "module.head.last_layer.weight_g"],
    ),
    "DeiT": (vit_of, lambda vit: {"model": vit.state_dict()}, "timm's names", HEAD),
    "DeiT, distilled": (
        lambda: randomise(
            create_vit("deit_tiny_distilled_patch16_224", img_size=64, depth=2, num_classes=7)
        ).eval(),
        lambda vit: {"model": vit.state_dict()},
        "distillation token",
        [*HEAD, "head_dist.weight", "head_dist.bias"],
    ),
    "DeiT III": (lambda: vit_of(no_embed_class=True, init_values=1e-4), deit3_of, "DeiT III", HEAD),
    "DINOv2": (
        lambda: vit_of(init_values=1e-5),
        lambda vit: encoder_of(vit) | {"mask_token": torch.zeros(1, 384)},
        "DINOv2",
        ["mask_token"],
    ),
    "no class token": (
        lambda: vit_of(class_token=False, global_pool="avg", fc_norm=False),
        encoder_of,
        "timm's names",
        [],
    ),
    "registers": (lambda: vit_of(reg_tokens=4), encoder_of, "timm's names", []),
    "normalised queries, no bias": (
        lambda: vit_of(qk_norm=True, qkv_bias=False),
        encoder_of,
        "timm's names",
        [],
    ),
    "of another program": (
        vit_of,
        lambda vit: under("vit.", vit.state_dict()),
        "a ViT under 'vit.'",
        ["vit.head.weight", "vit.head.bias"],
    ),
}


# Of these codes some have 6 heads at width 384, and some 12.
ASKED = ("MAE's encoder", "MAE with decoder", "MoCo-v3's linear classifier", "no class token")


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts(tmp_path, name):
    build, publish, said, unused = LAYOUTS[name]
    vit = build()
    content = publish(vit)
    told = {"heads": vit.blocks[0].attn.num_heads} if name in ASKED else {}
    if told:
        with pytest.raises(ValueError, match="width 384 .*give heads="):
            load_teacher(written(tmp_path, content))
    found = load_teacher(written(tmp_path, content), **told)
    assert_same_teacher(found.vit, vit)
    assert said in found.source and not found.missing and found.resized is None
    container = next((key for key in ("teacher", "model", "state_dict", "student") if key in content), None)
    inside = content[container] if container else content
    if unused is None:  # MoCo-v3: everything but the base encoder, and its head
        unused = [key for key in inside if not key.startswith("module.base_encoder.") or ".head." in key]
    assert sorted(found.unused) == sorted(unused)
    assert found.used == len(encoder_of(vit)) == len(inside) - len(unused)
    rebuilt = Architecture(**json.loads(json.dumps(found.architecture._asdict()))).build()
    rebuilt.load_state_dict(found.vit.state_dict())
    assert_same_teacher(rebuilt.eval(), vit)


def test_dinov2_registers_have_no_position(tmp_path):
    """DINOv2's prepare_tokens_with_masks: class token and patches get positions, then registers are put
    between them."""
    vit = vit_of(init_values=1e-5)
    state = encoder_of(vit) | {"mask_token": torch.zeros(1, 384), "register_tokens": torch.randn(1, 4, 384)}
    found = load_teacher(written(tmp_path, state))
    images = random_images(2, 3, 64, 64)
    projection = (state[f"patch_embed.proj.{kind}"] for kind in ("weight", "bias"))
    patches = torch.nn.functional.conv2d(images, *projection, stride=16).flatten(2).mT
    x = torch.cat([state["cls_token"].expand(2, -1, -1), patches], 1) + state["pos_embed"]
    x = torch.cat([x[:, :1], state["register_tokens"].expand(2, -1, -1), x[:, 1:]], 1)
    torch.testing.assert_close(found.vit._pos_embed(found.vit.patch_embed(images)), x)
    assert found.vit.num_prefix_tokens == 5
    assert found.unused == ["mask_token"] and found.used == len(state) - 1
    within = load_teacher(written(tmp_path, {f"backbone.{name}": value for name, value in state.items()}))
    assert torch.equal(within.vit.forward_features(images), found.vit.forward_features(images))


def test_flip_converted():
    """FLIP's parameters by their names in JAX, long hand, against the ViT that they were written from."""
    vit = with_sines(vit_of(**FLIP))
    state = to_timm({name.replace("/", "."): array for name, array in flax_of(vit).items()})
    assert same(state, vit.state_dict())


def test_clip_must_be_named(tmp_path):
    name = "vit_xsmall_patch16_clip_224.tinyclip_yfcc15m"
    vit = randomise(create_vit(name, num_classes=0)).eval()
    path = written(tmp_path, clip_of(vit))
    with pytest.raises(ValueError, match="pth: .*CLIP.*architecture="):
        load_teacher(path)
    found = load_teacher(path, architecture=name)
    assert same(found.vit.state_dict(), vit.state_dict())
    assert sorted(found.unused) == [
        "logit_scale",
        "token_embedding.weight",
        "transformer.resblocks.0.ln_1.weight",
        "visual.proj",
    ]


def test_safetensors_of_timm(tmp_path):
    vit = vit_of()
    save_file(vit.state_dict(), tmp_path / "model.safetensors")
    found = load_teacher(str(tmp_path / "model.safetensors"))
    assert_same_teacher(found.vit, vit)
    taken = ["6 heads, usual at width 384", "LayerNorm with ε 1e-06", "GELU", "a square grid of patches"]
    assert found.assumed == taken


@pytest.mark.parametrize(
    "architecture",
    [
        Architecture("glyphs", {"num_heads": 2, "depth": 2}),
        Architecture("vit_tiny_patch16_224", {"img_size": [64, 32], "depth": 1}),
        Architecture("eva02_tiny_patch14_224", {"img_size": 56, "depth": 1}),
    ],
    ids=lambda one: one.name,
)
def test_files_of_atlib_know_their_architecture(tmp_path, architecture):
    """Also what no weight shows: heads, a grid that is not square, an Eva."""
    vit = randomise(architecture.build()).eval()
    found = load_teacher(save_vit(tmp_path / "vit.safetensors", vit, architecture))
    assert type(found.vit) is type(vit) and same(found.vit.state_dict(), encoder_of(vit))
    assert sorted(found.unused) == sorted(name for name in vit.state_dict() if name.startswith("head"))
    assert found.source == "written by atlib.checkpoint.save_vit" and not found.assumed
    images = random_images(1, 3, *vit.patch_embed.img_size)
    assert torch.equal(walk(found.vit, images).layers[0].map, walk(vit, images).layers[0].map)
    again = load_vit(save_vit(tmp_path / "again.safetensors", found.vit, found.architecture))
    assert same(again.state_dict(), found.vit.state_dict())


def test_bundles_are_refused_with_the_way_out(tmp_path):
    glyphs = Architecture("glyphs", {"depth": 1})
    pair = AttentionTransfer(glyphs.build(), glyphs.build(), Plan())
    with pytest.raises(ValueError, match="bundle.safetensors .*load_bundle.*save_vit"):
        load_teacher(save_bundle(tmp_path / "bundle.safetensors", pair, glyphs, glyphs))


def test_a_teacher_from_a_file_teaches(tmp_path):
    teacher = load_teacher(written(tmp_path, {"model": encoder_of(vit_of())}), image_size=32).vit
    pair = AttentionTransfer(teacher, create_student(teacher, 5), Plan(how="distill")).train()
    logits, loss = pair(random_images(2, 3, 32, 32))
    (logits.sum() + loss).backward()
    assert logits.shape == (2, 5) and loss > 0
    assert all(parameter.grad is None for parameter in teacher.parameters())


def resized_by_pillow(positions, prefix, side_from, side_to):
    """Bicubic with antialiasing, one channel at a time."""
    grid = positions[0, prefix:].reshape(side_from, side_from, -1).numpy()
    channels = [Image.fromarray(grid[:, :, i].copy(), "F") for i in range(grid.shape[2])]
    resized = [channel.resize((side_to, side_to), Image.Resampling.BICUBIC) for channel in channels]
    patches = torch.from_numpy(np.stack([np.asarray(channel) for channel in resized], -1))
    return torch.cat([positions[:, :prefix], patches.reshape(1, side_to**2, -1)], 1)


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
@pytest.mark.parametrize(
    "changes, prefix", [({}, 1), ({"no_embed_class": True}, 0), ({"reg_tokens": 4}, 5)], ids=str
)
@pytest.mark.parametrize("side", [2, 4, 7])
def test_positions_follow_the_image_size(tmp_path, changes, prefix, side):
    vit = vit_of(**changes)
    found = load_teacher(written(tmp_path, encoder_of(vit)), image_size=16 * side, heads=6)
    assert found.vit.patch_embed.grid_size == (side, side)
    expected = resized_by_pillow(vit.pos_embed.data, prefix, 4, side)
    torch.testing.assert_close(found.vit.pos_embed.data, expected, rtol=0, atol=2e-6)
    assert found.resized is None if side == 4 else f"4 x 4 to {side} x {side}" in found.resized
    others = {name: value for name, value in encoder_of(vit).items() if name != "pos_embed"}
    assert same({name: found.vit.state_dict()[name] for name in others}, others)


@pytest.mark.parametrize("side, sides", [(64, (32, 128)), ((32, 128), (64, 64)), ((128, 32), (32, 128))])
def test_a_grid_of_as_many_patches_is_another_grid(tmp_path, side, sides):
    """timm#2737: timm 1.0.20 left the positions of 2 x 8 patches as they were for 4 x 4."""
    config = {"img_size": side, "patch_size": 16, "embed_dim": 32, "depth": 1, "num_heads": 2}
    vit = randomise(create_vit({**config, "num_classes": 0}))
    grid_from, grid_to = vit.patch_embed.grid_size, tuple(each // 16 for each in sides)
    found = resized_positions(vit.pos_embed.data, 1, grid_from, grid_to)
    grid = vit.pos_embed.data[:, 1:].unflatten(1, grid_from).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(grid, grid_to, mode="bicubic", antialias=True)
    torch.testing.assert_close(found[:, 1:].mT.unflatten(2, grid_to), expected)
    assert torch.equal(found[:, :1], vit.pos_embed[:, :1]) and not torch.equal(found, vit.pos_embed)
    if sides == (64, 64):
        file = save_vit(tmp_path / "vit.safetensors", vit, Architecture({**config, "num_classes": 0}))
        read = load_teacher(file, image_size=64, quiet=True)
        assert torch.equal(read.vit.pos_embed, found)
        assert read.resized == "positions resized bicubically from 2 x 8 to 4 x 4 patches"


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"img_size": (64, 48)}, "12 .*architecture="),
        # 9 positions: 3 x 3 patches, or 2 x 2 and five prefix tokens
        ({"img_size": 48, "reg_tokens": 4, "no_embed_class": True}, "9 .*5.*architecture="),
    ],
)
def test_positions_of_no_one_square_grid(tmp_path, changes, named):
    with pytest.raises(ValueError, match=f"teacher.pth: .*{named}"):
        load_teacher(written(tmp_path, encoder_of(vit_of(**changes))))


@pytest.mark.parametrize("tokens", [0, 3, 198])
def test_positions_of_no_whole_grid(tmp_path, tokens):
    state = encoder_of(vit_of(depth=1)) | {"pos_embed": torch.zeros(1, tokens, 384)}
    with pytest.raises(ValueError, match=f"teacher.pth: .*{tokens - 1} "):
        load_teacher(written(tmp_path, state))


def test_a_named_architecture_at_another_size(tmp_path):
    """The file is of 64 pixels, the name of 32."""
    vit = create_vit("glyphs", img_size=64)
    save_file(vit.state_dict(), tmp_path / "model.safetensors")
    found = load_teacher(tmp_path / "model.safetensors", architecture="glyphs", image_size=64)
    assert found.resized is None and torch.equal(found.vit.pos_embed, vit.pos_embed)
    assert found.vit.blocks[0].attn.num_heads == 4
    found = load_teacher(tmp_path / "model.safetensors", architecture="glyphs")
    assert found.resized.endswith("from 8 x 8 to 4 x 4 patches")


@pytest.mark.parametrize("size", [100, 0, -16])
def test_image_sizes_that_are_no_whole_patches(tmp_path, size):
    with pytest.raises(ValueError, match=f"image_size={size}: .*16 x 16"):
        load_teacher(written(tmp_path, encoder_of(vit_of(depth=1))), image_size=size)


def test_heads(tmp_path):
    vit = vit_of(embed_dim=24, num_heads=4)
    path = written(tmp_path, encoder_of(vit))
    with pytest.raises(ValueError, match="width 24 .*heads="):
        load_teacher(path)
    found = load_teacher(path, heads=4)
    assert_same_teacher(found.vit, vit)
    assert found.assumed[0] == "4 heads, as given"
    for heads in (5, 0, -1):
        with pytest.raises(ValueError, match=f"heads={heads}: .*24"):
            load_teacher(path, heads=heads)
    with pytest.raises(ValueError, match="heads=4.*architecture='glyphs'"):
        load_teacher(path, heads=4, architecture="glyphs")
    with pytest.raises(ValueError, match="'vit_tiny_patch16_224'.*heads="):
        load_teacher("vit_tiny_patch16_224", heads=4)


@pytest.mark.parametrize("width, heads", [(192, 12), (192, 3), (384, 12)])
@pytest.mark.parametrize("prefix", ["module.model.", "", "encoder."])
def test_heads_are_asked_for_where_published_vits_differ(tmp_path, width, heads, prefix):
    """TinyMIM#4, #11, MAE-Lite: ViTs of width 192 with 12 heads, and of width 384 with 12, under MAE's
    names."""
    vit = vit_of(embed_dim=width, num_heads=heads, depth=1)
    state = encoder_of(vit) | {"decoder_embed.weight": torch.zeros(96, width), "mask_token": torch.zeros(1)}
    path = written(tmp_path, {"model": under(prefix, state)})
    with pytest.raises(ValueError, match=f"width {width} .*12.*heads="):
        load_teacher(path)
    assert_same_teacher(load_teacher(path, heads=heads, quiet=True).vit, vit)


def test_blocks_in_chunks(tmp_path):
    """dinov2#235: its training checkpoints have blocks.CHUNK.INDEX; the head is DINO's and iBOT's."""
    vit = vit_of(init_values=1e-5, depth=3)
    state = {re.sub(r"blocks\.(\d+)", r"blocks.\1.\1", name): each for name, each in encoder_of(vit).items()}
    inside = under("backbone.", state | {"mask_token": torch.zeros(1, 384)})
    path = written(tmp_path, {"teacher": inside | {"dino_head.mlp.0.weight": torch.zeros(2, 2)}})
    teacher = load_teacher(path, quiet=True)
    assert_same_teacher(teacher.vit, vit)
    assert "DINOv2" in teacher.source


def test_i_jepas_target_encoder_is_read(tmp_path):
    """jepa#49: three models in one file, of which the averaged one is evaluated."""
    vit, other = (
        vit_of(
            seed, class_token=False, global_pool="avg", fc_norm=False, embed_dim=768, num_heads=12, depth=1
        )
        for seed in (0, 1)
    )
    encoders = {"encoder": under("module.", encoder_of(other)), "predictor": {"a": torch.zeros(1)}}
    path = written(tmp_path, encoders | {"target_encoder": under("module.", encoder_of(vit)), "epoch": 300})
    assert_same_teacher(load_teacher(path, quiet=True).vit, vit)


def test_other_entries_are_read_where_there_is_one_and_named_where_there_are_several(tmp_path):
    vit = vit_of()
    path = written(tmp_path, {"network": encoder_of(vit), "epoch": 1, "options": {"lr": 0.1}})
    assert_same_teacher(load_teacher(path, quiet=True).vit, vit)
    path = written(tmp_path, {"online": encoder_of(vit), "averaged": encoder_of(vit), "epoch": 1})
    with pytest.raises(OSError, match="online, averaged: .*torch.save"):
        load_teacher(path)


@pytest.mark.parametrize("prefix", ["backbone.", "module.backbone."])
def test_a_prefix_alone_is_not_taken_for_dino(tmp_path, prefix):
    """Lightning's checkpoints have it, too: how images were normalised is then not known."""
    vit = vit_of()
    teacher = load_teacher(written(tmp_path, {"state_dict": under(prefix, vit.state_dict())}), quiet=True)
    assert_same_teacher(teacher.vit, vit)
    assert "DINO" not in teacher.source and teacher.normalisation is None


def test_mocos_small_vit_is_not_taken_for_maes(tmp_path):
    """Converted by moco-v3's convert_to_deit.py nothing but the fixed positions tells it apart, and it has 12
    heads, not 6."""
    vit = with_sines(vit_of(embed_dim=384, num_heads=12, depth=1))
    path = written(tmp_path, {"model": encoder_of(vit)})
    with pytest.raises(ValueError, match="384 .*12.* heads="):
        load_teacher(path)
    assert_same_teacher(load_teacher(path, heads=12).vit, vit)


def changed(changes):
    """A state with other weights; None leaves one out."""
    return lambda state: {name: value for name, value in {**state, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    "change, named",
    [
        (changed({"blocks.1.attn.proj.bias": None}), "blocks.1.attn.proj.bias"),
        (changed({"blocks.0.mlp.fc1.weight": None}), "blocks.0.mlp.fc1.weight"),
        (changed({"blocks.0.attn.rel_pos": torch.zeros(3)}), "blocks.0.attn.rel_pos"),
        (changed({"rel_pos_bias.table": torch.zeros(3)}), "rel_pos_bias.table"),
        (changed({"blocks.1.norm1.weight": torch.zeros(383)}), r"1.norm1.weight .*\(383,\).*\(384,\)"),
        (changed({"blocks.7.norm1.weight": torch.zeros(384)}), "no block 2"),
        (changed({"patch_embed.proj.weight": torch.zeros(384, 768)}), r"proj.weight .*\(384, 768\)"),
        (changed({"patch_embed.proj.weight": None, "patch_embed.proj.0.weight": torch.zeros(9)}), "stem"),
        (changed({"pos_embed": None, "rope": torch.zeros(2)}), "positional .*architecture="),
        (changed({"blocks.0.mlp.fc1.weight": torch.zeros(1024, 384)}), "gated MLP.*architecture="),
        (lambda state: under("student.", state) | under("teacher.", state), "'student.', 'teacher.'"),
        (lambda state: {"layer1.0.conv1.weight": torch.zeros(3)}, "layer1.0.conv1.weight"),
    ],
)
def test_weights_that_are_no_whole_known_vit(tmp_path, change, named):
    with pytest.raises(ValueError, match=f"teacher.pth: .*{named}"):
        load_teacher(written(tmp_path, change(encoder_of(vit_of()))))


def test_what_no_map_needs_may_be_missing(tmp_path):
    state = changed({"norm.weight": None, "norm.bias": None})(encoder_of(vit_of()))
    found = load_teacher(written(tmp_path, state))
    assert found.missing == ["norm.weight", "norm.bias"]
    assert_same_teacher(found.vit, vit_of())


@pytest.mark.parametrize(
    "architecture, named",
    [
        ("vit_tiny_patch16_224", r"not \(192, "),
        ("no such vit", "'no such vit'"),
        ("deit_tiny_distilled_patch16_224", "1 prefix tokens.* 2"),
        ("resnet18", "'resnet18'.*ResNet"),
    ],
)
def test_named_architectures_that_do_not_fit(tmp_path, architecture, named):
    with pytest.raises(ValueError, match=f"teacher.pth: .*{named}"):
        load_teacher(written(tmp_path, encoder_of(vit_of(embed_dim=96, depth=1))), architecture=architecture)


@pytest.mark.parametrize(
    "header",
    [
        3,
        {"nam": "glyphs"},
        {"name": "no such vit"},
        {"name": ["glyphs"]},
        {"name": "glyphs", "overrides": {"depht": 2}},
    ],
    ids=str,
)
def test_headers_that_make_no_sense(tmp_path, header):
    said = {"atlib": json.dumps({"architecture": header})}
    save_file(encoder_of(vit_of(depth=1)), tmp_path / "odd.safetensors", said)
    with pytest.raises(ValueError, match="odd.safetensors: .*header"):
        load_teacher(tmp_path / "odd.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path, value):
    state = encoder_of(vit_of())
    state["blocks.1.mlp.fc2.bias"][5] = value
    path, picture = written(tmp_path, state), tmp_path / "maps.png"
    with pytest.raises(ValueError, match="1 .*1.mlp.fc2.bias"):
        load_teacher(path)
    text = report(path, torch.zeros(1, 3, 64, 64, dtype=torch.uint8), picture)
    assert "blocks.*.mlp.fc2.bias. NaN or infinity in its weights" in text and not picture.exists()


@pytest.mark.parametrize("name", ["nowhere.pth", "a/folder/vit_tiny_patch16_224"])
def test_what_looks_like_a_file_is_one(name):
    with pytest.raises(FileNotFoundError, match=name):
        load_teacher(name)


@pytest.fixture
def by_hand(tmp_path, monkeypatch, no_network):
    """Where weights for timm names are placed by hand, on a machine without a network."""
    monkeypatch.setattr("torch.hub._hub_dir", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def test_timm_names(by_hand):
    name = "vit_tiny_patch16_224"
    vit = randomise(timm.create_model(name))
    save_file(vit.state_dict(), by_hand / f"{name}.safetensors")
    found = load_teacher(name)
    assert same(found.vit.state_dict(), encoder_of(vit)) and not found.vit.training
    assert (found.used, found.unused) == (len(encoder_of(vit)), sorted(HEAD))
    assert not found.missing and found.resized is None
    smaller = load_teacher(name, image_size=96)
    assert smaller.resized.endswith("from 14 x 14 to 6 x 6 patches")
    torch.testing.assert_close(smaller.vit.pos_embed.data, resample_abs_pos_embed(vit.pos_embed.data, [6, 6]))
    assert smaller.architecture == Architecture(name, {"num_classes": 0, "img_size": 96})


def test_timm_names_whose_weights_are_incomplete(by_hand):
    """TrainRequest for a model without a head, timm would not notice."""
    name = "vit_tiny_patch16_224"
    state = timm.create_model(name).state_dict()
    del state["blocks.3.attn.qkv.weight"]
    save_file(state, by_hand / f"{name}.safetensors")
    with pytest.raises(RuntimeError, match="blocks.3.attn.qkv"):
        load_teacher(name)


@pytest.mark.parametrize("name", ["glyphs", "vit_tny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_names_that_are_no_teacher(name):
    with pytest.raises(ValueError, match=name):
        load_teacher(name)


def test_report(tmp_path):
    state = (
        encoder_of(vit_of(init_values=1e-5, reg_tokens=4)) | {"head.weight": torch.zeros(7, 384)} | decoder()
    )
    text = report(written(tmp_path, {"model": state}), image_size=96, heads=6)
    lines = dict(line.split("  ", 1) for line in text.splitlines())
    lines = {name.strip(): text.strip() for name, text in lines.items()}
    assert lines["tokens"] == "41: 1 class token, 4 registers, 36 patches"
    assert "2 layers of 6 heads, width 384" in lines["size"]
    assert "96 x 96 pixels in patches of 16 x 16: a grid of 6 x 6; positions resized" in lines["images"]
    assert lines["transfer"] == "all layers, 0 to 1, each with heads of width 64"
    maps, queries = 2 * 6 * 41 * 41, 2 * 6 * 41 * 64
    sizes = f"maps {maps:,} numbers, {4 * maps / 1024:.1f} KiB; q and k {2 * queries:,} numbers"
    assert lines["per image"].startswith(sizes)
    own = "layer_scale: attention and MLP (standard: none); registers: 4 (standard: 0)"
    assert own in lines["components"]
    assert "pooling" not in lines["components"] and "2605.07191" in lines["components"]
    unused = len(decoder()) + 1
    assert lines["unused"].startswith(f"{unused}: head.weight, mask_token, ")
    assert "decoder_blocks.*.attn.qkv.weight" in lines["unused"]
    assert not {"missing", "not finite", "picture"} & lines.keys()
    text = report(written(tmp_path, encoder_of(vit_of(depth=1))))
    assert "components  those of a standard ViT" in text


def test_report_says_why_layers_cannot_be_transferred(monkeypatch):
    size = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 0}
    vit = VisionTransformer(**size, block_fn=DiffParallelScalingBlock, mlp_layer=Mlp)
    teacher = Teacher(vit, "odd", Architecture("odd"), "made here", used=1, unused=[])
    monkeypatch.setattr(load, "_read", lambda *arguments: teacher)
    assert "transfer  none: a DiffParallelScalingBlock attends more than once" in report("odd")
    with pytest.raises(Unwalkable, match="attends more than once"):
        load_teacher("odd")


def test_the_picture_shows_where_the_class_token_looks(tmp_path, monkeypatch):
    shown = {}
    image_grid = description.image_grid

    def watch(pixels, titles, columns):
        shown.update(pixels=pixels, titles=titles, columns=columns)
        return image_grid(pixels, titles, columns)

    monkeypatch.setattr(description, "image_grid", watch)
    vit, files, out = (
        vit_of(depth=4),
        [tmp_path / f"{index}.png" for index in range(2)],
        tmp_path / "new" / "maps.png",
    )
    for file, image in zip(files, torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)):
        Image.fromarray(image.numpy()).save(file)
    text = report(written(tmp_path, encoder_of(vit)), files, out)
    assert f"picture     {out}" in text and Image.open(out).format == "PNG"
    assert shown["titles"] == ["image", "layer 0", "layer 1", "layer 3"] and shown["columns"] == 4
    rows = shown["pixels"].unflatten(0, (2, 4))
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    seen = []
    for block in vit.blocks:
        block.norm1.register_forward_hook(lambda module, given, out: seen.append(out))
    with torch.no_grad():
        vit((rows[:, 0] - mean) / std)
    for column, layer in ((1, 0), (2, 1), (3, 3)):
        attention = vit.blocks[layer].attn
        q, k, _ = (attention.qkv(seen[layer])).detach().reshape(2, 17, 3, 6, 64).permute(2, 0, 3, 1, 4)
        looked = (q @ k.mT / 8).softmax(-1)[:, :, 0, 1:].mean(1).reshape(2, 4, 4)
        # magma grows brighter from 0 to 1, in 256 steps
        brightness = rows[:, column].sum(1)[:, 8::16, 8::16].flatten(1)
        in_order = looked.flatten(1).gather(1, brightness.argsort(1))
        assert (in_order.diff(dim=1) >= -looked.amax((1, 2)).view(-1, 1) / 255).all()


def test_where_a_picture_can_be(tmp_path):
    """It is known before the teacher is read, which is not even there."""
    pixels = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    (tmp_path / "file").touch()
    for out, named in (
        (tmp_path, "maps.png"),
        (tmp_path / "maps.txt", ".png"),
        (tmp_path / "file" / "maps.png", "file"),
    ):
        with pytest.raises(ValueError, match=f"{out.name}: .*{named}"):
            report(tmp_path / "nowhere.pth", pixels, out)
    without = vit_of(class_token=False, global_pool="avg", fc_norm=False, depth=1)
    text = report(written(tmp_path, encoder_of(without)), pixels, tmp_path / "maps", heads=6)
    assert f"picture     {tmp_path / 'maps.png'}" in text and not (tmp_path / "maps").exists()
    assert Image.open(tmp_path / "maps.png").format == "PNG"


def test_images_that_are_none(tmp_path):
    path = written(tmp_path, encoder_of(vit_of(depth=1)))
    (tmp_path / "text.png").write_text("no picture")
    for images, error, named in (
        (torch.zeros(1, 3, 8, 8), ValueError, "uint8"),
        ([], ValueError, r"images=\[\]"),
        ("one.png", ValueError, "one.png"),
        ([tmp_path / "text.png"], OSError, "text.png"),
    ):
        with pytest.raises(error, match=named):
            report(path, images, tmp_path / "maps.png")
    for arguments in ({"images": ["a.png"]}, {"out": "maps.png"}):
        with pytest.raises(ValueError, match="images=.*out="):
            report(path, **arguments)


def test_a_photograph_is_drawn_turned_as_the_camera_says(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (20, 10)).save(tmp_path / "lying.jpg", exif=exif)
    assert [picture.size for picture in description._opened([tmp_path / "lying.jpg"])] == [(10, 20)]
