"""Files of other libraries become timm ViTs that compute the same: folders of save_pretrained, torchvision's,
Meta's DINOv3; and names of a hub say what is missing."""

import json

import pytest
import timm
import torch
from timm.models import save_for_hf

from atlib import load_teacher, walk
from atlib.vit import WeightsUnavailable
from atrun.teachers.folders import read_folder
from tests.helpers import random_images, randomise
from tools.other_libraries import models

pytest.importorskip("transformers")
BUILDS = models()
FOLDERS = [name for name in BUILDS if name.startswith("transformers")]
IMAGES = random_images(2, 3, 32, 32)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_save_pretrained_is_the_same_vit(tmp_path, name):
    model = randomise(BUILDS[name]()).eval()
    model.save_pretrained(tmp_path)
    teacher = load_teacher(tmp_path)
    with torch.no_grad():
        own, found = walk(model, IMAGES), walk(teacher.vit, IMAGES)
    assert (found.tokens - own.tokens).abs().max() <= 1e-4 * own.tokens.abs().max()
    for one, other in zip(found.layers, own.layers):
        assert (one.map - other.map).abs().max() <= 1e-4
    assert teacher.architecture.build().state_dict().keys() == teacher.vit.state_dict().keys()
    assert json.loads(json.dumps(teacher.architecture.overrides)) == teacher.architecture.overrides


def test_a_folder_at_another_image_size(tmp_path):
    randomise(BUILDS["transformers Dinov2Model"]()).save_pretrained(tmp_path)
    teacher = load_teacher(tmp_path, image_size=48)
    assert walk(teacher.vit, random_images(1, 3, 48, 48)).tokens.shape == (1, 37, 24)
    assert "4 x 4 to 6 x 6" in teacher.resized


def test_folders_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(OSError, match=r"no model.safetensors"):
        load_teacher(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="holds a bert"):
        read_folder(tmp_path)


def test_torchvisions_file(tmp_path):
    model = randomise(BUILDS["torchvision VisionTransformer"]()).eval()
    torch.save(model.state_dict(), tmp_path / "vit_b_16-1234.pth")
    teacher = load_teacher(tmp_path / "vit_b_16-1234.pth", heads=3)
    with torch.no_grad():
        own, found = walk(model, IMAGES), walk(teacher.vit, IMAGES)
        assert (found.tokens - own.tokens).abs().max() <= 1e-5 * own.tokens.abs().max()
        norm = model.encoder.ln(own.tokens)[:, 0]
        assert (teacher.vit(IMAGES) - norm).abs().max() <= 1e-4
    assert "torchvision" in teacher.source and teacher.missing == []
    assert list(teacher.unused) == ["heads.head.weight", "heads.head.bias"]


@pytest.mark.parametrize("biased", [True, False])
def test_metas_dinov3(tmp_path, biased):
    """A file with Meta's names, made from a timm model; which timm's own conversion takes back."""
    name = "vit_small_patch16_dinov3" + ("_qkvb" if biased else "")
    vit = randomise(timm.create_model(name, num_classes=0)).eval()
    tensors = {}
    for key, value in vit.state_dict().items():
        theirs = key.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")
        theirs = theirs.replace("reg_token", "storage_tokens")
        if not theirs.endswith(("q_bias", "v_bias")):
            tensors[theirs] = value
    for index, block in enumerate(vit.blocks):
        zero = torch.zeros(384)
        q, v = (block.attn.q_bias, block.attn.v_bias) if biased else (zero, zero)
        tensors[f"blocks.{index}.attn.qkv.bias"] = torch.cat([q, torch.ones(384), v]).detach()
        tensors[f"blocks.{index}.attn.qkv.bias_mask"] = torch.ones(3 * 384)
    tensors |= {"mask_token": torch.zeros(1, 384), "rope_embed.periods": torch.ones(16)}
    torch.save(tensors, tmp_path / "dinov3_vits16.pth")
    teacher = load_teacher(tmp_path / "dinov3_vits16.pth", image_size=64)
    assert teacher.architecture.name == name and "DINOv3" in teacher.source
    state = teacher.vit.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in vit.state_dict().items())


@pytest.mark.parametrize("name", ["facebook/dinov2-base", "hf-hub:timm/vit_base_patch16_224.augreg_in21k"])
def test_a_name_of_a_hub_says_what_to_put_where(name):
    with pytest.raises(WeightsUnavailable, match=r"config.json and model.safetensors .*--local-dir"):
        load_teacher(name)


def test_a_beits_weights_ask_for_its_name_and_are_read_by_it(tmp_path):
    """Their layer scales have DeiT III's names, and their biases of relative positions are no one else's."""
    made = randomise(timm.create_model("beit_base_patch16_224", depth=1, num_classes=0)).eval()
    torch.save(made.state_dict(), tmp_path / "beit.pth")
    with pytest.raises(ValueError, match="relative positions.*architecture="):
        load_teacher(tmp_path / "beit.pth")
    whole = {**made.state_dict()}
    for name, value in made.state_dict().items():
        whole |= {name.replace("blocks.0.", f"blocks.{layer}."): value for layer in range(12)}
    torch.save(whole, tmp_path / "beit.pth")
    teacher = load_teacher(tmp_path / "beit.pth", architecture="beit_base_patch16_224", quiet=True)
    assert len(teacher.vit.blocks) == 12 and torch.equal(
        teacher.vit.blocks[3].gamma_1, made.blocks[0].gamma_1
    )


def test_the_top_folder_of_a_hubs_cache(tmp_path):
    cache = tmp_path / "models--facebook--dino"
    made = randomise(timm.create_model("vit_small_patch16_224", depth=1, img_size=32, num_classes=0)).eval()
    options = {"depth": 1, "img_size": 32, "num_classes": 0}
    save_for_hf(made, cache / "snapshots" / "abc", model_args=options, safe_serialization=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    teacher = load_teacher(cache, quiet=True)
    assert torch.equal(teacher.vit.pos_embed, made.pos_embed) and "abc" in teacher.name
