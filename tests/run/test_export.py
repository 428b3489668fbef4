"""`python -m atlib export`: what timm and ONNX Runtime read back computes what the run's own weights do."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from atfamily.stored_maps import save_stored_maps
from atlib import AttentionTransfer, Plan
from atlib.baselines import MeanMapCopy
from atlib.checkpoint import load_vit, read_header, save_bundle, save_vit
from atlib.pair import Normalisation, attach
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun import export
from atrun.data.transforms import Augmentation
from atrun.predict import predictions
from atrun.runner import load_result
from tests.helpers import randomise
from tests.picture_files import write_folders
from tests.run.photographs import asked

SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 3}
NAMED = Architecture("vit_tiny_patch16_224", SMALL)
MEAN, STD = (0.3, 0.4, 0.5), (0.2, 0.25, 0.3)
PREPARED = Augmentation(16, mean=MEAN, std=STD, crop_pct=0.8, interpolation="bilinear")
SAID = {"classes": ["cat", "dog", "newt"], "augmentation": PREPARED.describe()}


def vit(seed=0, architecture=NAMED, normalisation=None):
    made = randomise(architecture.build(), seed).eval()
    attach(made, normalisation)
    return made


def saved(path, architecture=NAMED, said=SAID):
    save_vit(path, vit(0, architecture, PREPARED.normalisation if said else None), architecture, said)
    return path


def exported(path, out, *more):
    return command.main(["export", str(path), "--out", str(out), *map(str, more)])


def of_timm(folder):
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def images(count=4, size=16):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def logits(model, batch):
    output = model(batch)
    return getattr(output, "logits", output)


def ran(path, batch):
    session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
    (found,) = session.run(None, {"images": batch.numpy()})
    return torch.from_numpy(found), session.get_modelmeta().custom_metadata_map


def test_timm_reads_a_file_with_its_labels_and_prepares_images_as_it_was_trained(tmp_path):
    source = saved(tmp_path / "a.safetensors")
    assert exported(source, tmp_path / "folder") == 0
    found = of_timm(tmp_path / "folder")
    assert torch.equal(logits(found, images()), logits(load_vit(source), images()))
    assert list(found.pretrained_cfg["label_names"]) == SAID["classes"] and found.num_classes == 3
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8))
    prepared = create_transform(**resolve_data_config(model=found))(picture)
    assert torch.equal(prepared, PREPARED.evaluate(picture))
    # the folder's weights are a file of atlib's, too
    again = tmp_path / "folder" / "model.safetensors"
    assert read_header(again)["classes"] == SAID["classes"]
    assert torch.equal(logits(load_vit(again), images()), logits(found, images()))
    picture.save(tmp_path / "photograph.png")
    said = [predictions(weights, [tmp_path / "photograph.png"]) for weights in (source, again)]
    assert [one.probabilities for one in said[0]] == [one.probabilities for one in said[1]]


def test_a_file_says_how_its_images_were_prepared_not_what_the_models_tag_and_size_say(tmp_path):
    """A model of timm keeps its tag's normalisation in a training loop of one's own; and one for any size was
    built for another."""
    anysize = Architecture("vit_tiny_patch16_224", SMALL | {"img_size": 32, "dynamic_img_size": True})
    model = vit(0, anysize, Normalisation(0.5, 0.5))
    source = save_vit(tmp_path / "a.safetensors", model, anysize, SAID)
    assert Normalisation.of(load_vit(source)) == PREPARED.normalisation
    pair = AttentionTransfer(vit(1), model, Plan(how="distill", unequal_grid="resample", mismatched=True))
    bundle = save_bundle(tmp_path / "b.safetensors", pair, anysize, NAMED, SAID)
    assert read_header(bundle)["normalisation"] == PREPARED.normalisation.describe()
    assert exported(source, tmp_path / "folder") == 0
    settings = resolve_data_config(model=(found := of_timm(tmp_path / "folder")))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8))
    picture.save(tmp_path / "photograph.png")
    (said,) = predictions(source, [tmp_path / "photograph.png"])
    prepared = create_transform(**settings)(picture)[None]
    assert logits(found, prepared).softmax(-1)[0].tolist() == [*said.probabilities.values()]


@pytest.mark.parametrize(
    "architecture",
    [
        Architecture("glyphs", {"depth": 2}),
        Architecture("glyphs", {"distilled": True, "depth": 1, "act_layer": "gelu_tanh"}),
        Architecture("vit_small_patch16_224.dino", SMALL | {"num_classes": 4, "drop_path_rate": 0.1}),
        Architecture("eva02_tiny_patch14_224", SMALL | {"num_heads": 3}),
    ],
    ids=["preset", "distilled", "tag", "eva"],
)
def test_timm_builds_every_kind_of_architecture(tmp_path, architecture):
    source = saved(tmp_path / "a.safetensors", architecture, {})
    assert exported(source, tmp_path / "out", "--mean", 0.5, "--std", 0.25) == 0
    found, own = of_timm(tmp_path / "out"), load_vit(source).eval()
    batch = images(size=own.patch_embed.img_size[0])
    assert torch.equal(logits(found, batch), logits(own, batch))
    assert found.num_classes == own.num_classes
    settings = resolve_data_config(model=found)
    assert settings["mean"] == [0.5] * 3 and settings["std"] == [0.25] * 3
    assert tuple(settings["input_size"]) == (3, *own.patch_embed.img_size)
    # for a task with other classes, timm leaves out the head alone
    other = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, num_classes=7)
    assert torch.equal(other.patch_embed.proj.weight, own.patch_embed.proj.weight) and other.num_classes == 7


def test_a_resmlp_of_one_size_is_exported(tmp_path):
    architecture = Architecture("resmlp_12_224", {"img_size": 16, "num_classes": 3})
    model = randomise(architecture.build_classifier()).eval()
    save_vit(tmp_path / "a.safetensors", model, architecture, SAID)
    assert exported(tmp_path / "a.safetensors", tmp_path / "out") == 0
    found = of_timm(tmp_path / "out")
    assert torch.equal(logits(found, images()), logits(model, images()))
    assert resolve_data_config(model=found)["input_size"] == (3, 16, 16)
    grey = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True, in_chans=1)
    assert grey.stem.proj.weight.shape[1] == 1


def test_a_run_is_exported_with_the_names_of_its_classes(tmp_path):
    data = write_folders(write_folders(tmp_path / "images", "train", range(12)), "validation", range(12, 16))
    run = tmp_path / "run"
    assert command.main(asked(data, run, "ema=0.5", "augmentation.mean=[0.3,0.4,0.5]")) == 0
    averaged = tmp_path / "averaged"
    assert exported(run, tmp_path / "plain") == 0 and exported(run, averaged, "--averaged") == 0
    for name, folder in (("student", tmp_path / "plain"), ("averaged", averaged)):
        own = load_result(run / f"{name}.safetensors")
        found = of_timm(folder)
        assert torch.equal(logits(found, images()), logits(own, images()))
        names = read_header(run / f"{name}.safetensors")["classes"]
        assert list(found.pretrained_cfg["label_names"]) == names and len(names) == found.num_classes
        assert resolve_data_config(model=found)["mean"] == [0.3, 0.4, 0.5]


def copy_bundle(path):
    """A pair whose teacher sees images normalised anew and resized."""
    larger = Architecture("vit_tiny_patch16_224", SMALL | {"img_size": 32, "patch_size": 16})
    teacher = vit(1, larger, Normalisation(0.5, 0.5))
    pair = AttentionTransfer(teacher, vit(), Plan(how="copy"), normalisation=PREPARED.normalisation)
    save_bundle(path, pair, NAMED, larger, SAID)
    return path


def stored_maps(path):
    normalisation = PREPARED.normalisation
    model = MeanMapCopy(vit(1, normalisation=normalisation), vit(), images(), normalisation=normalisation)
    save_stored_maps(path, model, NAMED, SAID)
    return path


@pytest.mark.parametrize("write", [saved, copy_bundle, stored_maps], ids=["plain", "copy", "stored-maps"])
def test_onnx_computes_the_same_for_any_number_of_images(tmp_path, write):
    pytest.importorskip("onnxscript")
    source = write(tmp_path / "a.safetensors")
    assert exported(source, tmp_path / "a.onnx") == 0
    own = load_result(source)
    for count in (1, 5):
        found, about = ran(tmp_path / "a.onnx", images(count))
        torch.testing.assert_close(found, logits(own, images(count)), rtol=0, atol=1e-5)
    assert json.loads(about["classes"]) == SAID["classes"]
    preparation = json.loads(about["preparation"])
    assert preparation["mean"] == [0.3, 0.4, 0.5] and preparation["crop_pct"] == 0.8
    assert preparation["input_size"] == [3, 16, 16] and preparation["interpolation"] == "bilinear"
    assert {path.name for path in tmp_path.iterdir()} == {"a.onnx", "a.safetensors"}


@pytest.mark.parametrize("write", [copy_bundle, stored_maps])
def test_a_student_that_needs_maps_is_no_model_of_timm(tmp_path, capsys, write):
    assert exported(write(tmp_path / "a.safetensors"), tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert ".onnx" in said and "distill" in said
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    source = saved(tmp_path / "a.safetensors")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    for arguments, word in (
        ((source, full), "not empty"),
        ((source, tmp_path / "new", "--mean", 0.5), "std=None"),
        ((source, tmp_path / "new", "--mean", 0.5, "--std", 0.5), "leave --mean"),
    ):
        assert exported(*arguments) == 2
        assert word in capsys.readouterr().err
    assert [path.name for path in full.iterdir()] == ["mine.txt"]

    other, build = vit(9), export.timm.create_model
    monkeypatch.setattr(export.timm, "create_model", lambda n, **how: other if ":" in n else build(n, **how))
    assert exported(source, tmp_path / "new") == 2  # what timm reads back is something else
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors", "full"}
