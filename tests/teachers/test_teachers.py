"""A teacher read from any published layout is the model that was written; what does not fit is refused."""

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
from atlib.vit import Architecture, WeightsUnavailable
from atrun.teachers import load
from atrun.teachers.load import Teacher, load_teacher, report
from examples import moco_to_timm
from examples.flip_to_timm import FLIP, to_timm
from tests.helpers import random_images, randomise, same


def encoder_of(vit):
    """The weights without a class head."""
    return {name: value.clone() for name, value in vit.state_dict().items() if not name.startswith("head")}


def decoder():
    """Some names of MAE's decoder (models_mae.py)."""
    parts = ("norm1", "attn.qkv", "mlp.fc1")
    names = [f"decoder_blocks.0.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    names += ["mask_token", "decoder_pos_embed", "decoder_embed.weight", "decoder_pred.bias"]
    return {name: torch.randn(8) for name in names}


def flax_of(vit):
    """FLIP's parameters (models_flip.py and t5x/layers.py): {name with slashes: array}."""
    state = {name: value.numpy() for name, value in encoder_of(vit).items()}
    flax = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "cls": state["cls_token"],
        "posembed_encoder/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
    }
    for block in range(len(vit.blocks)):
        own, theirs = f"blocks.{block}.", f"Transformer/encoderblock_{block:02d}/"
        for norm in (1, 2):
            flax[f"{theirs}LayerNorm_{norm - 1}/scale"] = state[f"{own}norm{norm}.weight"]
            flax[f"{theirs}LayerNorm_{norm - 1}/bias"] = state[f"{own}norm{norm}.bias"]
        attention = f"{theirs}MultiHeadDotProductAttention_0/"
        for kind, flat in (("weight", False), ("bias", True)):
            q, k, v = np.split(state[f"{own}attn.qkv.{kind}"], 3)
            parts = {"query": q, "key": k, "value": v, "out": state[f"{own}attn.proj.{kind}"]}
            for name, part in parts.items():
                flax[f"{attention}{name}/{'bias' if flat else 'kernel'}"] = part if flat else part.T
        for layer in (0, 1):
            flax[f"{theirs}MlpBlock_0/Dense_{layer}/kernel"] = state[f"{own}mlp.fc{layer + 1}.weight"].T
            flax[f"{theirs}MlpBlock_0/Dense_{layer}/bias"] = state[f"{own}mlp.fc{layer + 1}.bias"]
    flax = {f"img_encoder/{name}": value for name, value in flax.items()}
    return flax | {
        "txt_encoder/token_embedding/embedding": np.zeros((5, 4), np.float32),
        "img_mlp1/kernel": np.zeros((4, 4), np.float32),
        "logit_scale": np.zeros(1, np.float32),
    }


def vit_of(seed=0, **changes):
    """A ViT-S of two layers on 64 pixels: 16 patches, 6 heads of width 64."""
    config = {"img_size": 64, "embed_dim": 384, "depth": 2, "num_heads": 6, "num_classes": 7} | changes
    return randomise(create_vit(config), seed).eval()


def written(tmp_path, state):
    """A file with these weights, as `torch.save` writes it."""
    torch.save(state, tmp_path / "teacher.pth")
    return tmp_path / "teacher.pth"


def with_sines(vit):
    """MAE's and MoCo-v3's fixed positions have zeros for the class token."""
    vit.pos_embed.data[:, 0] = 0
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


DINO_HEAD = {"head.mlp.0.weight": torch.zeros(3), "head.last_layer.weight_g": torch.zeros(3)}


def dino_of(vit):
    """A full checkpoint of main_dino.py: the student is wrapped, the teacher is not, and both have a head."""
    student = {f"module.backbone.{name}": value + 1 for name, value in encoder_of(vit).items()}
    teacher = under("backbone.", encoder_of(vit)) | DINO_HEAD
    models = {"student": student | under("module.", DINO_HEAD), "teacher": teacher}
    about = {"args": argparse.Namespace(arch="vit"), "epoch": 100, "dino_loss": {"center": torch.zeros(3)}}
    return models | about


def deit3_of(vit):
    state = vit.state_dict().items()
    return {"model": {re.sub(r"ls([12])\.gamma", r"gamma_\1", name): value for name, value in state}}


HEAD = ["head.weight", "head.bias"]
POOLED = {"class_token": False, "global_pool": "avg", "fc_norm": False}


def chunked(vit):
    """dinov2#235: its training checkpoints have blocks.CHUNK.INDEX; the head is DINO's and iBOT's."""
    state = {re.sub(r"blocks\.(\d+)", r"blocks.\1.\1", name): each for name, each in encoder_of(vit).items()}
    inside = under("backbone.", state | {"mask_token": torch.zeros(1, 384)})
    return {"teacher": inside | {"dino_head.mlp.0.weight": torch.zeros(2, 2)}}


def jepa_of(vit):
    """jepa#49: three models in one file, of which the averaged one is evaluated."""
    state, other = encoder_of(vit), {name: value + 1 for name, value in encoder_of(vit).items()}
    return {"encoder": under("module.", other), "predictor": {}, "target_encoder": under("module.", state)}


# name: the ViT's arguments, what its publisher's file holds, names that are not used. Those that end with "?"
# ask for heads: published ViTs of that width have 6, or 12 (TinyMIM#4, MAE-Lite).
MASK, MORE = {"mask_token": torch.zeros(1, 384)}, {"epoch": 1, "args": argparse.Namespace(lr=1.0)}
HEADS = [*HEAD, "head_dist.weight", "head_dist.bias"]
LAYOUTS = {
    "MAE's encoder?": ({}, lambda vit: {"model": encoder_of(with_sines(vit))}, []),
    "MAE with decoder?": ({}, lambda vit: {"model": encoder_of(vit) | decoder(), **MORE}, list(decoder())),
    "MAE fine-tuned": ({"global_pool": "avg"}, lambda vit: {"model": vit.state_dict()}, HEAD),
    "MoCo-v3's linear classifier?": (
        {"num_heads": 12},
        lambda vit: {
            "state_dict": under("module.", with_sines(vit).state_dict()),
            "best_acc1": torch.tensor(7.0),
        },
        [f"module.{name}" for name in HEAD],
    ),
    "DINO, full": ({}, dino_of, [*DINO_HEAD]),
    "DeiT, distilled": ({"distilled": True}, lambda vit: {"model": vit.state_dict()}, HEADS),
    "DeiT III": ({"no_embed_class": True, "init_values": 1e-4}, deit3_of, HEAD),
    "DINOv2": ({"init_values": 1e-5}, lambda vit: encoder_of(vit) | MASK, [*MASK]),
    "DINOv2, own": ({"init_values": 1e-5}, chunked, ["backbone.mask_token", "dino_head.mlp.0.weight"]),
    "I-JEPA": (POOLED | {"embed_dim": 768, "num_heads": 12, "depth": 1}, jepa_of, []),
    "no class token?": (POOLED, encoder_of, []),
    "registers": ({"reg_tokens": 4}, encoder_of, []),
    "normalised queries, no bias": ({"qk_norm": True, "qkv_bias": False}, encoder_of, []),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_layouts(tmp_path, name):
    changes, publish, unused = LAYOUTS[name]
    vit = vit_of(**changes)
    path = written(tmp_path, publish(vit))
    told = {"heads": vit.blocks[0].attn.num_heads} if name.endswith("?") else {}
    if told:
        with pytest.raises(ValueError):
            load_teacher(path)
    found = load_teacher(path, **told)
    assert_same_teacher(found.vit, vit)
    assert not found.missing and found.resized is None
    assert sorted(found.unused) == sorted(unused) and found.used == len(encoder_of(vit))
    rebuilt = Architecture(**json.loads(json.dumps(found.architecture._asdict()))).build()
    rebuilt.load_state_dict(found.vit.state_dict())
    assert_same_teacher(rebuilt.eval(), vit)


def test_dinov2_registers_have_no_position(tmp_path):
    """Class token and patches get positions, then registers are put between them."""
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


def test_flip_converted():
    """FLIP's parameters by their names in JAX, long hand, against the ViT that they were written from."""
    vit = with_sines(vit_of(**FLIP))
    state = to_timm({name.replace("/", "."): array for name, array in flax_of(vit).items()})
    assert same(state, vit.state_dict())


def test_moco_converted():
    """main_moco.py's checkpoint: base encoder, its copy that follows, and predictor."""
    vit = with_sines(vit_of(num_heads=12))
    state = under("module.base_encoder.", encoder_of(vit) | {"head.0.weight": torch.zeros(3)})
    state |= under("module.momentum_encoder.", {name: value + 1 for name, value in encoder_of(vit).items()})
    assert same(moco_to_timm.to_timm(state | {"module.predictor.0.weight": torch.zeros(3)}), encoder_of(vit))


def test_clip_must_be_named(tmp_path):
    """The image tower of open_clip, whose names are CLIP's."""
    tower = pytest.importorskip("open_clip.transformer", reason="needs open_clip").VisionTransformer
    model = randomise(tower(224, 16, 256, 10, 4, 4.0, output_dim=512)).eval()
    path = written(tmp_path, under("visual.", model.state_dict()) | {"logit_scale": torch.zeros(())})
    with pytest.raises(ValueError):
        load_teacher(path)
    found = load_teacher(path, architecture="vit_xsmall_patch16_clip_224.tinyclip_yfcc15m").vit
    images = random_images(1, 3, 224, 224)
    with torch.no_grad():
        own, expected = walk(found, images), walk(model, images)
    for one, other in zip(own.layers, expected.layers, strict=True):
        torch.testing.assert_close(one.map, other.map, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("beit_base_patch16_224", {}),
        ("beit_base_patch16_224", {"use_abs_pos_emb": True, "use_rel_pos_bias": False}),
        ("eva02_tiny_patch14_224", {}),
    ],
)
def test_weights_of_beit_and_eva_ask_for_their_name(tmp_path, name, changes):
    """BEiT's layer scales have DeiT III's names, `gamma_1`, and its biases are no one else's."""
    made = randomise(timm.create_model(name, depth=1, num_classes=0, **changes)).eval()
    state = made.state_dict()
    with pytest.raises(ValueError):
        load_teacher(written(tmp_path, state))
    if "eva" in name:
        whole = {key.replace("s.0.", f"s.{i}."): value for i in range(12) for key, value in state.items()}
        teacher = load_teacher(written(tmp_path, whole), architecture=name, quiet=True)
        assert same(teacher.vit.blocks[3].state_dict(), made.blocks[0].state_dict())


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


def resized_by_pillow(positions, prefix, side_from, side_to):
    """Bicubic with antialiasing, one channel at a time."""
    grid = positions[0, prefix:].reshape(side_from, side_from, -1).numpy()
    channels = [Image.fromarray(grid[:, :, i].copy(), "F") for i in range(grid.shape[2])]
    resized = [channel.resize((side_to, side_to), Image.Resampling.BICUBIC) for channel in channels]
    patches = torch.from_numpy(np.stack([np.asarray(channel) for channel in resized], -1))
    return torch.cat([positions[:, :prefix], patches.reshape(1, side_to**2, -1)], 1)


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
@pytest.mark.parametrize(
    "changes, prefix, side",
    [({}, 1, 7), ({}, 1, 4), ({"no_embed_class": True}, 0, 2), ({"reg_tokens": 4}, 5, 7)],
)
def test_positions_follow_the_image_size(tmp_path, changes, prefix, side):
    vit = vit_of(**changes)
    found = load_teacher(written(tmp_path, encoder_of(vit)), image_size=16 * side, heads=6)
    assert found.vit.patch_embed.grid_size == (side, side)
    expected = resized_by_pillow(vit.pos_embed.data, prefix, 4, side)
    torch.testing.assert_close(found.vit.pos_embed.data, expected, rtol=0, atol=2e-6)
    assert found.resized is None if side == 4 else f"4 x 4 to {side} x {side}" in found.resized
    others = {name: value for name, value in encoder_of(vit).items() if name != "pos_embed"}
    assert same({name: found.vit.state_dict()[name] for name in others}, others)


def test_a_grid_of_as_many_patches_is_another_grid(tmp_path):
    """timm#2737: timm 1.0.20 left the positions of 2 x 8 patches as they were for 4 x 4."""
    config = {"img_size": (32, 128), "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 0}
    vit = randomise(create_vit(config))
    read = load_teacher(save_vit(tmp_path / "vit.safetensors", vit, Architecture(config)), image_size=64)
    grid = vit.pos_embed.data[:, 1:].unflatten(1, (2, 8)).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(grid, (4, 4), mode="bicubic", antialias=True)
    torch.testing.assert_close(read.vit.pos_embed[:, 1:].mT.unflatten(2, (4, 4)), expected)
    assert torch.equal(read.vit.pos_embed[:, :1], vit.pos_embed[:, :1])
    assert read.resized == "positions resized bicubically from 2 x 8 to 4 x 4 patches"


def test_a_named_architecture_at_another_size(tmp_path):
    """The file is of 64 pixels, the name of 32."""
    vit = create_vit("glyphs", img_size=64)
    found = load_teacher(written(tmp_path, vit.state_dict()), architecture="glyphs", image_size=64)
    assert found.resized is None and torch.equal(found.vit.pos_embed, vit.pos_embed)
    assert found.vit.blocks[0].attn.num_heads == 4


def test_a_checkpoint_of_lightning_is_anybodys(tmp_path):
    """How images were normalised in that training is not known, whatever its names look like."""
    vit = vit_of()
    content = {"state_dict": under("model.", vit.state_dict()) | DINO_HEAD, "pytorch-lightning_version": "2"}
    teacher = load_teacher(written(tmp_path, content), quiet=True)
    assert_same_teacher(teacher.vit, vit)
    assert "DINO" not in teacher.source and teacher.normalisation is None


def changed(**changes):
    """A state with other weights, "__" for a dot; None leaves one out."""
    new = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda state: {name: value for name, value in {**state, **new}.items() if value is not None}


BAD = {
    "a weight is missing": changed(blocks__1__attn__proj__bias=None),
    "a weight that timm has no place for": changed(blocks__0__attn__rel_pos=torch.zeros(3)),
    "a block is missing": changed(blocks__7__norm1__weight=torch.zeros(384)),
    "a gated MLP": changed(blocks__0__mlp__fc1__weight=torch.zeros(1024, 384)),
    "a norm before the blocks": changed(norm_pre__weight=torch.zeros(384)),
    "two ViTs": lambda state: under("student.", state) | under("teacher.", state),
    "two entries": lambda state: {"online": state, "averaged": state},
    "positions of an oblong": changed(pos_embed=torch.zeros(1, 13, 384)),
    # 3 x 3 patches, or 2 x 2 and five prefix tokens
    "positions of two grids": changed(pos_embed=torch.zeros(1, 9, 384), reg_token=torch.zeros(1, 4, 384)),
    "not finite": changed(blocks__1__mlp__fc2__bias=torch.full((384,), torch.nan)),
}


def loaded(content, **arguments):
    return lambda here: load_teacher(written(here, content), **arguments)


def bundled(here):
    glyphs = Architecture("glyphs", {"depth": 1})
    pair = AttentionTransfer(glyphs.build(), glyphs.build(), Plan())
    return load_teacher(save_bundle(here / "bundle.safetensors", pair, glyphs, glyphs))


VIT_S = encoder_of(vit_of())
REFUSED = {
    WeightsUnavailable: {"a hub's name": lambda here: load_teacher("facebook/dinov2-base")},
    OSError: {"two entries": loaded(BAD.pop("two entries")(VIT_S))},
    ValueError: {
        **{name: loaded(change(VIT_S)) for name, change in BAD.items()},
        "heads that do not divide": loaded(VIT_S, heads=5),
        "heads beside a name": loaded(VIT_S, heads=6, architecture="vit_tiny_patch16_224"),
        "a name with QuickGELU": loaded(VIT_S, architecture="vit_base_patch16_clip_224.openai"),
        "another kind of transformer": lambda here: load_teacher("swin_tiny_patch4_window7_224"),
        "a bundle": bundled,
    },
}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, rows in REFUSED.items() for name in rows])
def test_what_is_no_teacher_is_refused(tmp_path, kind, name):
    with pytest.raises(kind):
        REFUSED[kind][name](tmp_path)


def test_what_no_map_needs_may_be_missing(tmp_path):
    state = changed(norm__weight=None, norm__bias=None)(encoder_of(vit_of()))
    found = load_teacher(written(tmp_path, state))
    assert found.missing == ["norm.weight", "norm.bias"]
    assert_same_teacher(found.vit, vit_of())


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
    torch.testing.assert_close(smaller.vit.pos_embed.data, resample_abs_pos_embed(vit.pos_embed.data, [6, 6]))


def test_timm_names_whose_weights_are_incomplete(by_hand):
    """Asked for a model without a head, timm would not notice."""
    name = "vit_tiny_patch16_224"
    state = timm.create_model(name).state_dict()
    del state["blocks.3.attn.qkv.weight"]
    save_file(state, by_hand / f"{name}.safetensors")
    with pytest.raises(RuntimeError, match="blocks.3.attn.qkv"):
        load_teacher(name)


def test_report(tmp_path):
    state = encoder_of(vit_of(init_values=1e-5, reg_tokens=4)) | decoder()
    text = report(written(tmp_path, {"model": state}), image_size=96, heads=6)
    assert "41: 1 class token, 4 registers, 36 patches" in text
    maps, queries = 2 * 6 * 41 * 41, 2 * 6 * 41 * 64
    assert f"maps {maps:,} numbers, {4 * maps / 1024:.1f} KiB; q and k {2 * queries:,} numbers" in text
    assert "not finite" in report(written(tmp_path, BAD["not finite"](VIT_S)))


def test_report_says_why_layers_cannot_be_transferred(monkeypatch):
    size = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 0}
    vit = VisionTransformer(**size, block_fn=DiffParallelScalingBlock, mlp_layer=Mlp)
    teacher = Teacher(vit, "odd", Architecture("odd"), "made here", used=1, unused=[])
    monkeypatch.setattr(load, "_read", lambda *arguments, **options: teacher)
    assert "transfer  none: a DiffParallelScalingBlock attends more than once" in report("odd")
    with pytest.raises(Unwalkable):
        load_teacher("odd")
