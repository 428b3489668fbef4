"""`python -m atlib look`: from a file of weights and a picture to one page that needs nothing else."""

import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

from atlib import AttentionTransfer, Plan, create_vit, look, transfer
from atlib.checkpoint import save_bundle, save_vit
from atlib.vit import Architecture
from atrun.__main__ import main
from tests.helpers import SMALL_VIT, randomise
from tests.looking.reading import content_of
from tests.run.test_generic import photographs as photographs  # a fixture


@pytest.fixture
def folder(tmp_path, small_vit):
    """A picture and files of weights."""
    values = np.random.default_rng(0).integers(256, size=(60, 80, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "photo.png")
    architecture = Architecture(SMALL_VIT)
    save_vit(tmp_path / "plain.safetensors", small_vit(0), architecture)
    said = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 1.0, "interpolation": "bilinear"}
    save_vit(tmp_path / "says.safetensors", small_vit(1), architecture, {"augmentation": said})
    pair = AttentionTransfer(small_vit(2), small_vit(3), Plan(how="copy"))
    save_bundle(tmp_path / "pair.safetensors", pair, architecture, architecture)
    return tmp_path


def test_a_page_from_a_file_and_a_picture(folder, capsys):
    out = folder / "new" / "page.html"
    assert main(["look", f"{folder}/says.safetensors", f"{folder}/photo.png", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert str(out) in said and "MB" in said
    assert "mean 0.1, 0.2, 0.3" in said and "as its file says" in said
    page = out.read_text()
    assert [model["name"] for model in content_of(out.read_text())["models"]] == ["says"]
    assert not re.search(r"""(src|href)=["'](?!data:)""", page.split("<script type")[0])
    assert not re.search(r"\beval\b|new Function|import\(|fetch\(|https?://", page)


def test_images_in_memory_are_normalised_as_the_header_says(folder, small_vit, capsys):
    said = {"augmentation": None, "normalisation": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}
    save_vit(folder / "memory.safetensors", small_vit(1), Architecture(SMALL_VIT), said)
    asked = ["look", f"{folder}/memory.safetensors", f"{folder}/photo.png", "--out", f"{folder}/page.html"]
    assert main(asked) == 0 and "mean 0.1, 0.2, 0.3" in capsys.readouterr().out


def test_two_models_another_size_and_other_options(folder, capsys):
    out = folder / "page.html"
    options = "--size 64 --layers 0 2 --only-heads 1 --mean 0.5 0.5 0.5 --crop 1 --squash".split()
    files = [f"{folder}/{name}.safetensors" for name in ("plain", "says")]
    assert main(["look", *files, f"{folder}/photo.png", "--out", str(out), *options]) == 0
    models = content_of(out.read_text())["models"]
    assert [model["grid"] for model in models] == [[8, 8], [8, 8]]
    assert all([one["layer"] for one in model["layers"]] == [0, 2] for model in models)
    said = capsys.readouterr().out
    assert said.count("squeezed") == 2 and said.count("mean 0.5, 0.5, 0.5") == 2
    assert "deviation 0.4, 0.5, 0.6" in said, "what was not asked for is the file's"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plain.safetensors", "photo.png", "--out", "page.pdf"],
        ["plain.safetensors", "plain.safetensors", "photo.png", "--out", "page.html"],
        ["pair.safetensors", "photo.png", "--out", "page.html", "--size", "64"],
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_written(folder, monkeypatch, arguments):
    monkeypatch.chdir(folder)
    assert main(["look", *arguments]) == 2 and not (folder / "page.html").exists()


def test_a_runs_folder_and_a_folder_of_timm_and_several_pictures(folder, monkeypatch, photographs):
    monkeypatch.chdir(folder)
    teacher = create_vit("glyphs", depth=2)
    transfer(teacher, photographs, "half", out=folder / "run", settings={"epochs": "1", "lr": "1e-4"})
    timm_folder = folder / "saved"
    model = timm.create_model("beit_base_patch16_224", depth=1, img_size=32, embed_dim=48, num_heads=2)
    arguments = {"depth": 1, "img_size": 32, "embed_dim": 48, "num_heads": 2}
    save_for_hf(model, timm_folder, model_args=arguments, safe_serialization=True)
    Image.new("RGB", (40, 40)).save("second.jpg")
    assert main(["look", "photo.png", "run", f"local-dir:{timm_folder}", "second.jpg", "--size", "32"]) == 0
    page = content_of((folder / "look-photo.html").read_text())
    assert page["pictures"] == ["photo.png", "second.jpg"] and len(page["more"]) == 1
    assert [len(model["layers"]) for model in page["models"]] == [1, 1]


def test_a_timm_name_is_read_with_its_head(folder, monkeypatch):
    monkeypatch.chdir(folder)
    built = []

    def create(name, **options):
        built.append((name, options.pop("pretrained")))
        return timm.create_model(name, depth=1, **options)

    monkeypatch.setattr("atrun.looking.commands.create_classifier", create)
    asked = ["look", "vit_relpos_small_patch16_224", "photo.png", "--size", "32"]
    assert main([*asked, "--out", "maps.svg"]) == 0
    assert built == [("vit_relpos_small_patch16_224", True)] and Path("maps.svg").stat().st_size


def test_models_without_names_are_told_apart():
    vits = [randomise(create_vit("vit_tiny_patch16_224", img_size=32, depth=1), seed) for seed in (0, 1)]
    shown = look(vits, torch.zeros(3, 32, 32, dtype=torch.uint8))
    assert list(shown.models) == ["vit_tiny_patch16_224 (0)", "vit_tiny_patch16_224 (1)"]
