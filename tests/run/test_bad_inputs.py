"""What a researcher gets wrong, from Python and on the command line: each is refused, before anything is
trained, with the value that is wrong and the way out."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from atlib import AttentionTransfer, Plan, Recipe, create_vit, load_teacher
from atlib.attention import Unwalkable
from atlib.checkpoint import read_header, save_vit
from atlib.data import Images
from atlib.evaluate import evaluate
from atlib.train import train
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun.data.photos import open_photos
from tests.run.photographs import SMALL

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
PIXELS = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
LABELS = torch.arange(8) % 4


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()


def vit(**options):
    return create_vit({**TINY, "num_classes": 4, **options})


def folder(root, split, *classes, mode="RGB"):
    for name in classes:
        (root / split / name).mkdir(parents=True)
        for index in range(4):
            shade = np.full((16, 16, {"RGB": 3, "L": 1, "RGBA": 4}[mode]), 40 * index, dtype=np.uint8)
            Image.fromarray(shade.squeeze(), mode).save(root / split / name / f"{index}.png")
    return root


def both(root, *classes, mode="RGB"):
    return folder(folder(root, "train", *classes, mode=mode), "validation", *classes, mode=mode)


def vit_file(path, more=None, **options):
    architecture = Architecture("vit_tiny_patch16_224", {**TINY, "num_classes": 3, **options})
    return save_vit(path, architecture.build(), architecture, more or {})


# --- From Python


def images(pixels=PIXELS, targets=LABELS):
    return Images(pixels, targets)


def taught(plan=None, **options):
    return AttentionTransfer(vit(), vit(**options), plan or Plan())


def trained(model, data):
    return train(model, data, Recipe(steps=1, batch_size=4), cpu=True, progress=None)


def itself():
    model = vit()
    return AttentionTransfer(model, model, Plan())


FROM_PYTHON = {
    "the teacher is the student": (itself, ValueError, "same object"),
    "a layer that does not exist": (lambda: taught(Plan(layers=[5])), ValueError, "layer 5.*0 to 1"),
    "a plan that is a word": (lambda: taught("copy"), ValueError, r"plan='copy'.*Plan\("),
    "a teacher that is no ViT": (
        lambda: AttentionTransfer(torch.nn.Linear(2, 2), vit(), Plan()),
        Unwalkable,
        "Linear",
    ),
    "grey images": (lambda: taught()(torch.zeros(2, 1, 16, 16)), ValueError, r"\(2, 1, 16, 16\).*3 channels"),
    "images of another size": (lambda: taught()(torch.zeros(2, 3, 20, 20)), ValueError, "20, 20.*16 x 16"),
    "pixels as they are stored": (lambda: taught()(PIXELS), ValueError, "torch.uint8.*floats"),
    "one image without a batch": (lambda: taught()(torch.zeros(3, 16, 16)), ValueError, r"\(3, 16, 16\)"),
    "patches that are dropped": (lambda: taught(patch_drop_rate=0.5), ValueError, "patch_drop_rate=0"),
    "a normalisation that is a pair": (
        lambda: AttentionTransfer(vit(), vit(), Plan(), normalisation=(0.5, 0.5)),
        ValueError,
        r"\(0.5, 0.5\).*Normalisation\(mean, std\)",
    ),
    "a label beyond the classes": (
        lambda: trained(vit(), images(targets=LABELS * 3)),
        ValueError,
        "label 6 .*4 classes.*num_classes=",
    ),
    "a label below 0": (lambda: trained(vit(), images(targets=LABELS - 1)), ValueError, "label -1 "),
    "labels that are floats": (lambda: trained(vit(), images(targets=LABELS.float())), ValueError, "float32"),
    "no images to train on": (
        lambda: trained(vit(), images(PIXELS[:0], LABELS[:0])),
        ValueError,
        "no images",
    ),
    "no images to evaluate": (
        lambda: evaluate(vit(), images(PIXELS[:0], LABELS[:0])),
        ValueError,
        "no images",
    ),
    "a ViT without a head": (lambda: evaluate(vit(num_classes=0), images()), ValueError, "num_classes=0"),
    "pixels that are floats": (lambda: images(PIXELS.float()), ValueError, "uint8.*float32"),
    "fewer labels than images": (lambda: images(targets=LABELS[:5]), ValueError, "8 images, but 5"),
    "weights with another activation": (
        lambda: load_teacher("vit_base_patch16_clip_224.openai"),
        ValueError,
        "vit_base_patch16_clip_quickgelu_224.openai",
    ),
}


@pytest.mark.parametrize("call, error, named", FROM_PYTHON.values(), ids=FROM_PYTHON)
def test_from_python(call, error, named):
    with pytest.raises(error, match=named):
        call()


# --- On the command line

DISTILL = ("--recipe", "distill-vit-large", "--model.num_heads", "2", "--plan.layers", "[0]")
SCRATCH = ("--recipe", "mae-scratch-vit-base", "--model.num_heads", "2")


def nan_file(path):
    model = vit(num_classes=0)
    torch.nn.init.constant_(model.blocks[0].norm1.bias, float("nan"))
    return save_vit(path, model, Architecture({**TINY, "num_classes": 0}))


# what is asked for, in a folder with data and files, and what the answer names
ON_THE_COMMAND_LINE = {
    "no such folder": (SCRATCH, {"data": "nowhere"}, ["nowhere does not exist"]),
    "an empty folder": (SCRATCH, {"data": "empty"}, ["empty holds no images", "train/cat/1.jpg"]),
    "one class": (SCRATCH, {"data": "one"}, ["a folder of its own", "pretrain"]),
    "images without folders": (SCRATCH, {"data": "flat"}, ["a folder of its own", "pretrain"]),
    "a class for validation alone": (SCRATCH, {"data": "extra"}, ["4 images", "'emu'", "train"]),
    "an unreadable image": ((*SCRATCH, "--strict"), {"data": "broken"}, ["cannot be decoded", "--strict"]),
    "no such data set": ((*SCRATCH, "--data", "cifar11"), {}, ["'cifar11'", "'cifar10'"]),
    "no such recipe": (("--recipe", "mae-scratch-vit-bas"), {}, ["mae-scratch-vit-base"]),
    "no such split": ((*SCRATCH, "--evaluation_split", "tset"), {}, ["'tset'", "'validation'"]),
    "no such setting": ((*SCRATCH, "--leyers", "3"), {}, ["--leyers"]),
    "a word for a number": ((*SCRATCH, "--lr", "fast"), {}, ["--lr fast", "float"]),
    "a negative rate": ((*SCRATCH, "--lr", "-1"), {}, ["lr=-1.0", "above 0"]),
    "a mean for no teacher": ((*SCRATCH, "--teacher_mean", "[1,1,1]"), {}, ["teacher_mean", "a teacher"]),
    "a mean alone": ((*DISTILL, "--teacher_mean", "[1,1,1]"), {"teacher": "t"}, ["teacher_std"]),
    "a std of 0": (
        (*DISTILL, "--teacher_mean", "[1,1,1]", "--teacher_std", "[0,1,1]"),
        {"teacher": "t"},
        ["0.0, 1.0, 1.0", "above 0"],
    ),
    "no whole patches": (
        (*DISTILL, "--teacher-image-size", "17"),
        {"teacher": "t"},
        ["17", "8 x 8", "such as 16", "--teacher_image_size NUMBER"],
    ),
    "another grid": ((*DISTILL, "--teacher_image_size", "32"), {"teacher": "t"}, ["(4, 4)", "resample"]),
    "another depth": (DISTILL, {"teacher": "deep"}, ["depth: teacher 3, student 2", "depth="]),
    "another depth, by name": (
        (*DISTILL, "--teacher", "vit_tiny_patch16_224.augreg_in21k"),
        {},
        ["depth: teacher 12, student 2"],
    ),
    "no such layer": ((*DISTILL[:-1], "[7]"), {"teacher": "t"}, ["layer 7", "0 to 1"]),
    "patches dropped": (
        (*DISTILL, "--model.patch_drop_rate", "0.5"),
        {"teacher": "t"},
        ["patch_drop_rate=0"],
    ),
    "a teacher with NaN": (DISTILL, {"teacher": "nan"}, ["norm1.bias", "another checkpoint"]),
    "no such teacher": (DISTILL, {"teacher": "none"}, ["does not exist", "pretrain"]),
    "a hub's name": ((*DISTILL, "--teacher", "facebook/dino-vits16"), {}, ["does not exist", "hf download"]),
    "a hub's name, timm's": (
        (*DISTILL, "--teacher", "hf-hub:timm/vit_base_patch16_224.mae"),
        {},
        ["does not exist", "hf download"],
    ),
    "a preset": ((*DISTILL, "--teacher", "glyphs"), {}, ["glyphs has no published weights"]),
    "another activation": (
        (*DISTILL, "--teacher", "vit_base_patch16_clip_224.openai"),
        {},
        ["vit_base_patch16_clip_quickgelu_224.openai"],
    ),
    "no ViT": ((*DISTILL, "--teacher", "resnet18"), {}, ["ResNet"]),
}
# What can be seen without opening data or weights, a dry run sees too.
NEEDS_DATA = ("a class for", "an unreadable", "no such split", "a teacher with NaN")


@pytest.fixture
def place(tmp_path):
    """A folder with data sets and teachers, right ones and wrong ones."""
    both(tmp_path / "good", "cat", "dog", "owl")
    folder(folder(tmp_path / "extra", "train", "cat", "dog"), "validation", "cat", "emu")
    folder(tmp_path / "one", "train", "cat")
    (folder(tmp_path / "flat", "train", "cat") / "train" / "cat").rename(tmp_path / "images")
    (
        (tmp_path / "flat" / "train").rmdir(),
        (tmp_path / "flat").rmdir(),
        (tmp_path / "images").rename(tmp_path / "flat"),
    )
    (both(tmp_path / "broken", "cat", "dog") / "train" / "cat" / "0.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    vit_file(tmp_path / "t.safetensors", num_classes=0)
    vit_file(tmp_path / "deep.safetensors", num_classes=0, depth=3)
    nan_file(tmp_path / "nan.safetensors")
    return tmp_path


def run(place, words, data="good", teacher=None, *more):
    words = [*words, *(() if teacher is None else ("--teacher", str(place / f"{teacher}.safetensors")))]
    if "--data" not in words:
        words += ["--data", str(place / data)]
    return command.main(
        ["train", *words, "--out", str(place / "out"), *(f"--{each}" for each in SMALL), *more]
    )


@pytest.mark.parametrize("case", ON_THE_COMMAND_LINE)
def test_on_the_command_line(place, capsys, case):
    words, where, named = ON_THE_COMMAND_LINE[case]
    assert run(place, words, **where) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in named), said
    assert not list(place.glob("out/*.safetensors"))
    if not case.startswith(NEEDS_DATA):
        assert run(place, words, where.get("data", "good"), where.get("teacher"), "--dry-run") == 2


# --- What is no mistake, though it looks like one


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_grey_images_and_those_with_transparency_are_read_as_colour(tmp_path, mode):
    photos = open_photos(both(tmp_path / "images", "cat", "dog", mode=mode), split="train", train=False)
    batch, _ = photos.take([3])
    assert batch.shape == (1, 3, 16, 16) and torch.equal(batch[:, 0], batch[:, 2])


def test_weights_in_half_precision_teach(tmp_path):
    state = create_vit("vit_tiny_patch16_224", **TINY, num_classes=0).half().state_dict()
    save_file(state, tmp_path / "half.safetensors")
    teacher = load_teacher(tmp_path / "half.safetensors", heads=2)
    assert teacher.vit.blocks[0].attn.qkv.weight.dtype == torch.float32


# --- Classes


def evaluated(capsys, *words):
    capsys.readouterr()
    code = command.main(["evaluate", *map(str, words)])
    return code, "".join(capsys.readouterr())


def test_a_run_stores_its_classes_and_normalisation_and_is_evaluated_on_them_alone(place, capsys):
    assert run(place, SCRATCH) == 0
    path = place / "out" / "student.safetensors"
    header = read_header(path)
    assert header["classes"] == ["cat", "dog", "owl"] and header["normalisation"]["mean"][0] == 0.485
    code, whole = evaluated(capsys, path, "--data", place / "good")
    assert code == 0 and "matched" not in whole
    code, said = evaluated(capsys, path, "--data", both(place / "others", "cat", "emu"))
    assert code == 2 and "'emu'" in said and "'cat', 'dog', 'owl'" in said
    # fewer, in another order than the outputs: labels follow their names
    fewer = both(place / "fewer", "owl", "dog")
    code, said = evaluated(capsys, path, "--data", fewer)
    assert code == 0 and "matched by their names, 2 of the 3" in said


@pytest.mark.parametrize(
    "more, options, named",
    [
        ({}, {"num_classes": 0}, "without a class head"),
        ({}, {"num_classes": 4}, "tells 4 apart"),
        ({"classes": ["a", "b", "c"]}, {}, "'a', 'b', 'c'"),
        ({"classes": ["cat", "dog"]}, {"num_classes": 2}, "does not know, 'owl'"),
    ],
)
def test_a_file_is_not_measured_on_other_classes(place, capsys, more, options, named):
    path = vit_file(place / "other.safetensors", more, **options)
    code, said = evaluated(capsys, path, "--data", place / "good")
    assert code == 2 and named in said and "accuracy" not in said


# --- Without labels


@pytest.mark.parametrize("data", ["flat", "one", "good"])
def test_masked_auto_encoding_needs_no_labels(place, data):
    out = place / "out"
    words = ["pretrain", "mae", "--data", str(place / data), "--out", str(out), "--model.depth", "1"]
    assert command.main([*words, "--epochs", "1", "--warmup_epochs", "0", "--batch_size", "4"]) == 0
    header = read_header(out / "teacher.safetensors")
    assert header["normalisation"] == {"mean": [0.5] * 3, "std": [0.25] * 3} and "classes" not in header
