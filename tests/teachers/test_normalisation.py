"""Who says how images are normalised for a teacher's weights, and in which order they are believed."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.models import save_for_hf

from atlib import AttentionTransfer, Plan, create_vit, load_teacher
from atlib.checkpoint import save_vit
from atlib.pair import IMAGENET, Normalisation, attach
from atlib.vit import Architecture, check_activation, weights_file
from tests.helpers import random_images, randomise
from tests.teacher_layouts import decoder

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 1, "num_heads": 3, "num_classes": 0}
OTHER = Normalisation(0.25, 0.125)


def test_numbers_of_pixels_up_to_255_are_refused_with_those_up_to_1():
    with pytest.raises(ValueError, match=r"divided by 255: 0\.498, 0\.498, 0\.498"):
        Normalisation((127, 127, 127), (50, 50, 50))
    with pytest.raises(ValueError, match=r"std=50.*0\.196"):
        Normalisation(0.5, 50)


@pytest.fixture
def vit():
    torch.manual_seed(0)
    return create_vit(TINY)


def test_a_file_that_does_not_say_is_believed_by_what_is_beside_it(vit, tmp_path, capsys):
    path = tmp_path / "vit.safetensors"
    save_file(vit.state_dict(), path)
    assert load_teacher(path).normalisation is None
    assert "not known" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(
        json.dumps({"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}})
    )
    assert load_teacher(path).normalisation == Normalisation(0.5, 0.5)
    processor = tmp_path / "preprocessor_config.json"
    processor.write_text(
        json.dumps({"image_mean": list(OPENAI_CLIP_MEAN), "image_std": list(OPENAI_CLIP_STD)})
    )
    teacher = load_teacher(path)
    assert teacher.normalisation == Normalisation(OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    said = capsys.readouterr().out.splitlines()[-1]
    assert "32 x 32 px" in said and "0.481 0.458 0.408" in said and "preprocessor_config.json" in said
    processor.write_text(json.dumps({"do_normalize": False}))
    assert load_teacher(path).normalisation == Normalisation(0.0, 1.0)
    # what is given counts most
    assert load_teacher(path, normalisation=OTHER).normalisation == OTHER
    processor.write_text("{")
    with pytest.raises(OSError, match="preprocessor_config.json.*normalisation="):
        load_teacher(path)


def test_what_a_run_wrote_says_how_its_images_were_normalised(vit, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}})
    )
    attach(vit, OTHER)
    own = save_vit(tmp_path / "own.safetensors", vit, Architecture(TINY))
    assert load_teacher(own).normalisation == OTHER
    augmentation = {"augmentation": {"mean": [0.1] * 3, "std": [0.2] * 3}, "normalisation": None}
    before = save_vit(tmp_path / "before.safetensors", vit, Architecture(TINY), augmentation)
    assert load_teacher(before).normalisation == Normalisation(0.1, 0.2)


def test_layouts_of_a_single_code_are_that_codes(vit, tmp_path):
    path = tmp_path / "mae.pth"
    torch.save({"model": {**vit.state_dict(), **decoder()}}, path)
    assert load_teacher(path).normalisation == IMAGENET


def test_a_timm_name_says_it_itself(tmp_path, monkeypatch, capsys):
    name = "vit_tiny_patch16_224.augreg_in21k"
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    weights_file(name).parent.mkdir()
    save_file(create_vit(name).state_dict(), weights_file(name))
    teacher = load_teacher(name)
    assert teacher.normalisation == Normalisation(0.5, 0.5)
    assert "mean 0.5 0.5 0.5" in capsys.readouterr().out


def test_every_tag_with_quickgelu_is_refused_and_the_right_name_given():
    import timm

    tags = [
        name
        for name in timm.list_pretrained("vit_*")
        if "QuickGELU" in " ".join(timm.get_pretrained_cfg(name).notes or ()) and "quickgelu" not in name
    ]
    assert len(tags) >= 17
    for name in tags:
        with pytest.raises(ValueError) as caught:
            check_activation(name)
        right = name.replace("_clip_", "_clip_quickgelu_")
        assert repr(right) in str(caught.value) and timm.is_model(right.split(".")[0])
        check_activation(right), check_activation(name, {"act_layer": "quick_gelu"})


def test_flip_teaches_a_student_with_its_activation_which_the_message_names(tmp_path):
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 1, "num_heads": 3}
    pooled = {"global_pool": "avg", "fc_norm": False, "pool_include_prefix": True, "num_classes": 0}
    teacher = create_vit({**size, **pooled, "act_layer": "gelu_tanh"})
    plain = create_vit({**size, **pooled, "num_classes": 4})
    with pytest.raises(ValueError, match="act_layer='gelu_tanh'"):
        AttentionTransfer(teacher, plain, Plan())
    right = create_vit({**size, **pooled, "num_classes": 4, "act_layer": "gelu_tanh"})
    assert AttentionTransfer(teacher, right, Plan()).mismatched == {}


def test_what_timm_saved_is_built_as_its_config_says(tmp_path):
    """Heads and activation are not in the weights: without the file, three heads are taken for granted."""
    options = dict(
        embed_dim=192, depth=2, num_heads=6, img_size=32, patch_size=8, num_classes=5, act_layer="quick_gelu"
    )
    made = randomise(timm.create_model("vit_tiny_patch16_224", **options))
    save_for_hf(made, tmp_path, model_args=options, safe_serialization=True)
    images = random_images(2, 3, 32, 32)
    teacher = load_teacher(tmp_path / "model.safetensors", quiet=True)
    assert teacher.architecture.overrides["num_heads"] == 6 and not teacher.guessed
    assert torch.equal(teacher.vit.forward_features(images), made.eval().forward_features(images))
    assert (
        load_teacher(tmp_path / "model.safetensors", heads=3, quiet=True).architecture != teacher.architecture
    )
    for pickled in (False, True):  # the folder itself, with safetensors and with a pickle of timm's
        folder = tmp_path / str(pickled)
        save_for_hf(made, folder, model_args=options, safe_serialization=not pickled)
        there = load_teacher(folder, quiet=True)
        assert there.architecture == teacher.architecture
        assert torch.equal(there.vit.forward_features(images), teacher.vit.forward_features(images))
    (tmp_path / "True" / "pytorch_model.bin").unlink()
    with pytest.raises(OSError, match="no model.safetensors beside it"):
        load_teacher(tmp_path / "True")
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"]["nose"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json names an architecture that cannot be built.*nose"):
        load_teacher(tmp_path / "model.safetensors")
