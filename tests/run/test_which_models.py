"""Which models look, transfer, evaluate and export take: the table on book/any-teacher.md, made anew."""

import re
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from torchvision.models import VisionTransformer

from atlib import (
    AttentionTransfer,
    Normalisation,
    Plan,
    Unwalkable,
    create_vit,
    load_teacher,
    look,
    transfer,
    walk,
)
from atlib.pair import attach
from atrun.__main__ import main
from atrun.one_call import _teacher_file
from examples.own_vit import OwnViT
from tests.helpers import randomise
from tests.run.test_generic import photographs as photographs  # a fixture

FEW = {"epochs": "1", "lr": "1e-4"}
SIZES = {"depth": 2, "img_size": 32, "embed_dim": 48, "num_heads": 2, "num_classes": 3}
OF_HF = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}


def of_transformers():
    hf = pytest.importorskip("transformers", reason="needs transformers")
    return hf.Dinov2Model(hf.Dinov2Config(**OF_HF, image_size=32, patch_size=8))


def folder_of_timm(path):
    model = timm.create_model("vit_small_patch16_224", patch_size=8, **SIZES)
    save_for_hf(model, path, model_args={"patch_size": 8, **SIZES}, safe_serialization=True)
    return path


def folder_of_transformers(path):
    of_transformers().save_pretrained(path)
    return path


def own_vit():
    model = OwnViT()
    model.image_size = (32, 32)
    return model


# what is given, and what `look` and `transfer` are given of it
MODELS = {
    "a ViT of `create_vit`": lambda path: create_vit("vit_small_patch16_224", patch_size=8, **SIZES),
    "a ViT of timm": lambda path: timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32),
    "a BEiT of timm": lambda path: timm.create_model("beit_base_patch16_224", depth=1, img_size=32),
    "a folder of timm's `save_for_hf`": folder_of_timm,
    "a model of transformers": lambda path: of_transformers(),
    "a folder of `save_pretrained`": folder_of_transformers,
    "a ViT of torchvision": lambda path: VisionTransformer(32, 8, 2, 4, 48, 96, num_classes=3),
    "a class of your own, with its `image_size`": lambda path: own_vit(),
    "a ResNet": lambda path: timm.create_model("resnet18"),
}


def takes(call) -> bool:
    try:
        call()
    except (ValueError, Unwalkable):
        return False
    return True


def looked_at(given, path) -> bool:
    if isinstance(given, Path):
        picture = path / "photographs" / "validation"
        picture = next(picture.rglob("*.png"))
        return main(["look", f"local-dir:{given}", str(picture), "--out", str(path / "page.html")]) == 0
    return takes(lambda: look(given, torch.zeros(3, 32, 32, dtype=torch.uint8), megabytes=1))


def row(given, path, data) -> list[str]:
    if isinstance(given, torch.nn.Module):
        randomise(given)
    looks = looked_at(given, path)
    pairs = isinstance(given, Path) or takes(
        lambda: AttentionTransfer(given, create_vit("glyphs"), Plan(how="distill", layers={0: 0}, **UNEQUAL))
    )
    student = "half" if not isinstance(given, OwnViT) else "vit_tiny_patch16_224"
    run = path / "run"
    teaches = takes(lambda: transfer(given, data, student, out=run, settings=FEW))
    uses = teaches and main(["evaluate", str(run)]) == 0
    uses = uses and main(["export", str(run), "--out", str(path / "exported")]) == 0
    return ["yes" if one else "no" for one in (looks, pairs, teaches, uses)]


UNEQUAL = dict(unequal_heads="aggregate", unequal_grid="resample", unequal_prefix="drop", mismatched=True)


@pytest.mark.parametrize("name", [name for name in MODELS if "folder" not in name][:5])
def test_a_live_teacher_is_written_as_it_is(name, tmp_path):
    model = randomise(MODELS[name](None)).eval()
    known = Normalisation((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    attach(model, known)
    path, settings = _teacher_file(model, tmp_path / "new" / "run", {"epochs": "1"})
    heads = settings.get("teacher_heads")
    written = load_teacher(path, heads=None if heads is None else int(heads))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for here, there in zip(walk(model, images).layers, walk(written.vit, images).layers, strict=True):
            torch.testing.assert_close(there.map, here.map, rtol=1e-4, atol=1e-5)
    assert settings["epochs"] == "1"
    if "teacher_mean" in settings:
        assert settings["teacher_mean"] == "[0.1, 0.2, 0.3]" and settings["teacher_std"] == "[0.4, 0.5, 0.6]"
    else:
        assert written.normalisation == known


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_table_of_the_page_is_what_is_so(name, tmp_path, photographs):
    page = Path(__file__).parents[2] / "book" / "any-teacher.md"
    (said,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", page.read_text(), re.MULTILINE)
    assert said.split(" | ") == row(MODELS[name](tmp_path / "given"), tmp_path, photographs)
