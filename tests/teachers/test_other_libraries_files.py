"""Folders of save_pretrained, torchvision's files, Meta's DINOv3 become timm ViTs that compute the same."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

from atlib import load_teacher, walk
from atlib.pair import IMAGENET
from atrun.teachers.names import KINDS
from tests.helpers import random_images, randomise, same
from tools.other_libraries import models

transformers = pytest.importorskip("transformers")
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
    of_file = load_teacher(tmp_path / "model.safetensors")
    assert same(of_file.vit.state_dict(), teacher.vit.state_dict())


def test_torchvisions_file(tmp_path):
    model = randomise(BUILDS["torchvision VisionTransformer"]()).eval()
    torch.save(model.state_dict(), tmp_path / "vit_b_16-1234.pth")
    teacher = load_teacher(tmp_path / "vit_b_16-1234.pth", heads=3)
    with torch.no_grad():
        own, found = walk(model, IMAGES), walk(teacher.vit, IMAGES)
        assert (found.tokens - own.tokens).abs().max() <= 1e-5 * own.tokens.abs().max()
        norm = model.encoder.ln(own.tokens)[:, 0]
        assert (teacher.vit(IMAGES) - norm).abs().max() <= 1e-4
    assert teacher.normalisation == IMAGENET and teacher.missing == []
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
    assert teacher.architecture.name == name
    state = teacher.vit.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in vit.state_dict().items())


def test_a_folder_with_missing_weights_is_refused(tmp_path):
    """Transformers fills them with random numbers, and prints a table."""
    BUILDS["transformers ViTModel"]().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    fewer = {name: value for name, value in state.items() if "layer.2." not in name}
    save_file(fewer, tmp_path / "model.safetensors")
    with pytest.raises(ValueError):
        load_teacher(tmp_path)


def test_what_a_config_leaves_out_is_as_transformers_has_it():
    for kind, (_, _, activation, heads) in KINDS.items():
        kind = f"{kind}_vision_model" if kind in ("clip", "siglip", "siglip2") else kind
        config = transformers.CONFIG_MAPPING[kind]()
        assert (config.num_attention_heads, config.hidden_act) == (heads, activation), kind
    assert transformers.DINOv3ViTConfig().rope_theta == 100.0
    assert transformers.BeitConfig().use_mean_pooling and transformers.Data2VecVisionConfig().use_mean_pooling


@pytest.mark.parametrize("kind, gated", [("DINOv3ViT", False), ("DINOv3ViT", True), ("Beit", False)])
def test_an_activation_that_timm_does_not_build_is_refused(tmp_path, kind, gated):
    sizes = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=48)
    gate = {"use_gated_mlp": True} if gated else {}
    for activation in ("gelu", "silu", "gelu_new"):
        options = sizes | gate | {"image_size": 32, "patch_size": 8, "hidden_act": activation}
        made = getattr(transformers, f"{kind}Config")(**options)
        model = randomise(getattr(transformers, f"{kind}Model")(made)).eval()
        model.save_pretrained(tmp_path / activation)
        if activation != ("silu" if gated else "gelu"):
            with pytest.raises(ValueError):
                load_teacher(tmp_path / activation, quiet=True)
            continue
        seen = walk(load_teacher(tmp_path / activation, quiet=True).vit, IMAGES)
        torch.testing.assert_close(seen.stream[-1], walk(model, IMAGES).stream[-1], rtol=1e-4, atol=1e-4)


def test_an_epsilon_that_timm_does_not_build_is_refused(tmp_path):
    sizes = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=48)
    made = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, layer_norm_eps=1e-2)
    transformers.ViTModel(made).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="0.01"):
        load_teacher(tmp_path, quiet=True)


def test_siglip_2_at_its_own_grid(tmp_path):
    """Its live model asks for patches; a square image of the grid of its positions is enough."""
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)
    config = transformers.Siglip2VisionConfig(**sizes, patch_size=8, num_patches=16)
    model = randomise(transformers.Siglip2VisionModel(config)).eval()
    model.save_pretrained(tmp_path)
    teacher = load_teacher(tmp_path)
    # pixels of a patch row by row, colours last (transformers' `convert_image_to_patches`)
    patches = IMAGES.reshape(2, 3, 4, 8, 4, 8).permute(0, 2, 4, 3, 5, 1).reshape(2, 16, 192)
    mask, shapes = torch.ones(2, 16, dtype=torch.long), torch.tensor([[4, 4], [4, 4]])
    with torch.no_grad():
        right = model(patches, mask, shapes).last_hidden_state
        torch.testing.assert_close(teacher.vit.forward_features(IMAGES), right, rtol=1e-4, atol=1e-4)


def test_the_top_folder_of_a_hubs_cache(tmp_path):
    cache = tmp_path / "models--facebook--dino"
    made = randomise(timm.create_model("vit_small_patch16_224", depth=1, img_size=32, num_classes=0)).eval()
    options = {"depth": 1, "img_size": 32, "num_classes": 0}
    save_for_hf(made, cache / "snapshots" / "abc", model_args=options, safe_serialization=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    (cache / "snapshots" / "older").mkdir()
    teacher = load_teacher(cache, quiet=True)
    assert torch.equal(teacher.vit.pos_embed, made.pos_embed) and "abc" in teacher.name
