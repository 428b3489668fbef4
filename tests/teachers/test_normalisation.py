"""Who says how images are normalised for a teacher's weights, and in which order they are believed."""

import json
from functools import partial

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.models import save_for_hf

from atlib import create_vit, load_teacher
from atlib.checkpoint import save_vit
from atlib.pair import Normalisation, attach, renormalised
from atlib.vit import Architecture, check_activation
from atrun.teachers.files import normalisation_beside
from tests.helpers import random_images, randomise

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 1, "num_heads": 3, "num_classes": 0}
OTHER = Normalisation(0.25, 0.125)


@pytest.fixture
def vit():
    torch.manual_seed(0)
    return create_vit(TINY)


def test_a_file_that_does_not_say_is_believed_by_what_is_beside_it(vit, tmp_path, capsys):
    path, load = tmp_path / "vit.safetensors", partial(load_teacher, heads=3)
    save_file(vit.state_dict(), path)
    assert load(path).normalisation is None
    assert "not known" in capsys.readouterr().out
    beside = {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "config.json").write_text(json.dumps(beside))
    assert load(path).normalisation == Normalisation(0.5, 0.5)
    processor = tmp_path / "preprocessor_config.json"
    processor.write_text(json.dumps(CLIP))
    assert load(path).normalisation == Normalisation(OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    said = capsys.readouterr().out.splitlines()[-1]
    assert "0.481 0.458 0.408" in said and "preprocessor_config.json" in said
    assert load(path, normalisation=OTHER).normalisation == OTHER  # what is given counts most


CLIP = {"image_mean": list(OPENAI_CLIP_MEAN), "image_std": list(OPENAI_CLIP_STD)}


@pytest.mark.parametrize(
    "files, right",
    [
        ({"processor_config.json": {"image_processor": CLIP, "tokenizer": {}}}, CLIP),
        ({"processor_config.json": {"image_seq_length": 7}, "preprocessor_config.json": CLIP}, CLIP),
        # transformers' own order
        (
            {
                "processor_config.json": {"image_processor": CLIP},
                "preprocessor_config.json": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
            },
            CLIP,
        ),
        ({"config.json": {"architecture": "vit", "mean": [0.1] * 3, "std": [0.2] * 3}}, (0.1, 0.2)),
        ({"open_clip_config.json": {"preprocess_cfg": {"mean": [0.1] * 3, "std": [0.2] * 3}}}, (0.1, 0.2)),
        # pixels from -1 to 1, by the rescaling alone, and pixels that stay in 0..255
        ({"preprocessor_config.json": {"do_rescale": False, **CLIP}}, "in 0..255"),
        (
            {"preprocessor_config.json": {"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": 1.0}},
            (0.5, 0.5),
        ),
        ({"preprocessor_config.json": {"do_normalize": False}}, (0.0, 1.0)),
        ({"processor_config.json": {}, "config.json": {"model_type": "vit"}}, None),
    ],
)
def test_every_place_where_a_library_writes_it_is_read(tmp_path, files, right):
    """transformers#44623: version 5 writes processor_config.json alone."""
    for name, said in files.items():
        (tmp_path / name).write_text(json.dumps(said))
    read, says = normalisation_beside(tmp_path / "model.safetensors")
    if right is None:
        assert (read, says) == (None, "")
        return
    if right == "in 0..255":
        expected = [value / 255 for value in OPENAI_CLIP_MEAN], [value / 255 for value in OPENAI_CLIP_STD]
    else:
        expected = tuple(right.values()) if isinstance(right, dict) else tuple([each] * 3 for each in right)
    assert list(read.mean) == pytest.approx(expected[0]) and list(read.std) == pytest.approx(expected[1])


def test_what_transformers_saves_is_read_as_its_processor_does_it(tmp_path):
    processing = pytest.importorskip("transformers.processing_utils", reason="needs transformers")
    from transformers import SiglipImageProcessor

    class Processor(processing.ProcessorMixin):
        def __init__(self, image_processor):
            super().__init__(image_processor)

    for mean, factor in ((0.5, 1 / 255), (0.2, 1 / 127.5)):
        processor = SiglipImageProcessor(image_mean=[mean] * 3, rescale_factor=factor, do_resize=False)
        picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        expected = processor(picture, return_tensors="pt")["pixel_values"][0]
        for number, each in enumerate((processor, Processor(processor))):
            each.save_pretrained(tmp_path / f"{mean}{number}")
            read, _ = normalisation_beside(tmp_path / f"{mean}{number}")
            pixels = torch.from_numpy(picture).permute(2, 0, 1).double() / 255
            own = renormalised(pixels[None], Normalisation(0.0, 1.0), read)[0]
            torch.testing.assert_close(own, expected.double(), rtol=0, atol=1e-5)


def test_what_a_run_wrote_says_how_its_images_were_normalised(vit, tmp_path):
    said = {"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    attach(vit, OTHER)
    own = save_vit(tmp_path / "own.safetensors", vit, Architecture(TINY))
    assert load_teacher(own).normalisation == OTHER
    augmentation = {"augmentation": {"mean": [0.1] * 3, "std": [0.2] * 3}, "normalisation": None}
    before = save_vit(tmp_path / "before.safetensors", vit, Architecture(TINY), augmentation)
    assert load_teacher(before).normalisation == Normalisation(0.1, 0.2)


def test_every_tag_with_quickgelu_is_refused_and_the_right_name_given():
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


def test_what_timm_saved_is_built_as_its_config_says(tmp_path):
    """Heads and activation are not in the weights: without the file, they are asked for."""
    options = dict(embed_dim=192, depth=2, num_heads=6, img_size=32, patch_size=8, num_classes=5)
    options["act_layer"] = "quick_gelu"
    made = randomise(timm.create_model("vit_tiny_patch16_224", **options))
    save_for_hf(made, tmp_path, model_args=options, safe_serialization=True)
    images = random_images(2, 3, 32, 32)
    teacher = load_teacher(tmp_path / "model.safetensors", quiet=True)
    assert teacher.architecture.overrides["num_heads"] == 6 and not teacher.guessed
    assert torch.equal(teacher.vit.forward_features(images), made.eval().forward_features(images))
    for pickled in (False, True):  # the folder itself, with safetensors and with a pickle of timm's
        folder = tmp_path / str(pickled)
        save_for_hf(made, folder, model_args=options, safe_serialization=not pickled)
        there = load_teacher(folder, quiet=True)
        assert there.architecture == teacher.architecture
        assert torch.equal(there.vit.forward_features(images), teacher.vit.forward_features(images))
    plain = randomise(timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=0))
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")  # another model, which the file is not of
    assert len(load_teacher(tmp_path / "plain.safetensors", heads=3, quiet=True).vit.blocks) == 1


def test_what_timm_saved_of_another_size_or_with_names_of_its_own(tmp_path):
    images = random_images(2, 3, 32, 32)
    made = randomise(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0))
    save_for_hf(made, tmp_path / "vit", model_args={"depth": 1}, safe_serialization=True)
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    config["model_args"] = {"depth": 1}  # the size is in the configuration of the weights alone
    config["pretrained_cfg"] |= {"input_size": [3, 32, 32], "fixed_input_size": True}
    (tmp_path / "vit" / "config.json").write_text(json.dumps(config))
    teacher = load_teacher(tmp_path / "vit", quiet=True)
    assert teacher.vit.patch_embed.img_size == (32, 32) and teacher.resized is None
    assert torch.equal(teacher.vit.forward_features(images), made.eval().forward_features(images))
    options = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 0}
    beit = randomise(timm.create_model("beit_base_patch16_224", **options))
    save_for_hf(beit, tmp_path / "beit", model_args=options, safe_serialization=True)
    read = load_teacher(tmp_path / "beit", quiet=True)
    assert torch.equal(read.vit.forward_features(images), beit.eval().forward_features(images))


def test_weights_of_quick_gelu_that_timm_saved_in_a_model_of_the_exact_one(tmp_path):
    options = {"embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 0}
    made = timm.create_model("vit_base_patch16_clip_224.openai", **options)
    save_for_hf(made, tmp_path, model_args=options, safe_serialization=True)
    with pytest.raises(ValueError, match="QuickGELU.*take 'vit_base_patch16_clip_quickgelu_224.openai'"):
        load_teacher(tmp_path, quiet=True)
    options["act_layer"] = "quick_gelu"
    save_for_hf(made, tmp_path, model_args=options, safe_serialization=True)
    assert load_teacher(tmp_path, quiet=True).architecture.overrides["act_layer"] == "quick_gelu"
