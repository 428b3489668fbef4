"""What a researcher gets wrong is refused before anything is trained, with the value and the way out."""

import re

import pytest
import torch
from safetensors.torch import save_file

from atlib import AttentionTransfer, Plan, Recipe, create_vit, load_teacher
from atlib.attention import Unwalkable
from atlib.checkpoint import read_header, save_vit
from atlib.data import Images
from atlib.evaluate import evaluate
from atlib.train import train
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun.configure import configure
from tests.picture_files import picture
from tests.run.photographs import SMALL, said

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
PIXELS = torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8)
LABELS = torch.arange(8) % 4


def vit(**options):
    return create_vit({**TINY, "num_classes": 4, **options})


def folder(root, split, *classes):
    for name in classes:
        (root / split / name).mkdir(parents=True, exist_ok=True)
        for index in range(4):
            picture(index).save(root / split / name / f"{index}.png")
    return root


def both(root, *classes):
    return folder(folder(root, "train", *classes), "validation", *classes)


# --- From Python


def images(pixels=PIXELS, targets=LABELS):
    return Images(pixels, targets)


def taught(**options):
    return AttentionTransfer(vit(), vit(**options), Plan())


def trained(targets):
    return train(vit(), images(PIXELS, targets), Recipe(steps=1, batch_size=4), cpu=True, progress=None)


FROM_PYTHON = [
    (lambda: AttentionTransfer(vit(), vit(), Plan(), normalisation=(0.5, 0.5)), "Normalisation"),
    (lambda: taught()(torch.zeros(2, 3, 20, 20)), "16 x 16"),
    (lambda: taught()(PIXELS), "uint8"),
    (lambda: taught()(torch.zeros(3, 16, 16)), "(3, 16, 16)"),
    (lambda: taught(patch_drop_rate=0.5), "patch_drop_rate"),
    (lambda: trained(LABELS - 1), "label -1"),
    (lambda: trained(LABELS.float()), "float32"),
    (lambda: evaluate(vit(), images(PIXELS[:0], LABELS[:0])), "no images"),
    (lambda: evaluate(vit(num_classes=0), images()), "num_classes"),
    (lambda: images(PIXELS.float()), "float32"),
    (lambda: images(targets=LABELS[:5]), "8 images"),
]


@pytest.mark.parametrize("call, named", FROM_PYTHON)
def test_from_python(call, named):
    with pytest.raises((ValueError, Unwalkable), match=re.escape(named)):
        call()


# --- A run that cannot be: a recipe, `data:`, `teacher:` (THIS: a file) and `seed:`, settings, what is named

CONFIGURED = """
find-scrach -> 'find-scratch'
find-scratch stepz=3 -> --steps
find-scratch plans.what=q -> --plan.what
find-scratch epochs=3 steps=9 -> steps and epochs
find-scratch epochs=3 -> warmup_epochs=6.25
find-scratch lr=Infinity -> --lr Infinity
find-scratch lr=1:30 -> --lr 1:30
find-scratch recipe_name=copy-vit-large -> --recipe_name
find-scratch seed:4294967296 -> seed=4294967296
find-scratch model.depth=0 -> model.depth
mae-scratch-vit-base data:imagenet-1k augmentation.mean=[0,0,Infinity] -> Infinity
mae model=glyphs mask_ratio=2 -> mask_ratio=2.0
mae decoder_width=10 -> decoder_heads=4
mae teacher:THIS -> mae has no teacher
find-scratch drop_path=1 -> drop_path=1.0
find-scratch method=copy -> teacher
find-copy teacher:THIS plan.layers=[7] -> layer 7
find-copy teacher:THIS plan.how=distill -> 'distill'
copy teacher:vit_tiny_patch16_224.augreg_in21k model=resnet18 -> ResNet
find-scratch teacher:THIS -> scratch has no teacher
find-scratch student_weights=THIS -> student_weights
find-fine-tune teacher:THIS student_weights=THIS -> student_weights
find-fine-tune teacher:untrained -> scratch
find-copy teacher:untrained teacher_heads=2 -> teacher_heads=2
find-distill teacher:THIS method=features feature_layers=[7] -> layer 7
find-scratch mask_ratio=0.5 -> mask_ratio would change nothing
find-scratch streaming=true -> streaming would change nothing
find-copy teacher:THIS transfer_weight=1 -> transfer_weight would change nothing
find-copy teacher:THIS reference_images=5 -> reference_images would change nothing
mae label_smoothing=0.1 -> label_smoothing would change nothing
moco-v3-vit-small data:imagenet-1k augmentation.color_jitter=0.4 -> color_jitter would change nothing
find-scratch jitter=[0.5,2.0] -> jitter would change nothing
vitdet-scratch-vit-base data:coco mixup=0.8 -> mixup would change nothing
vitdet-scratch-vit-base data:coco augmentation.flip=0 -> augmentation
vitdet-scratch-vit-base data:coco jitter=[2.0,0.1] -> jitter=(2.0, 0.1)
vitdet-scratch-vit-base data:coco milestones=[1.5] -> milestones
vitdet-scratch-vit-base data:cifar10 -> 'mask-rcnn'
vitdet-distill-vit-base data:coco teacher:untrained method=features -> 'coco'
mae-scratch-vit-base data:coco -> 'coco'
mae-lite-distilled-pretrain data:imagenet-1k teacher:untrained -> untrained
mae-lite-distilled-pretrain data:imagenet-1k model.patch_size=32 -> teacher ((14, 14), 1), student ((7, 7), 1)
find-scratch lr=-1 -> lr=-1.0
find-copy teacher:THIS teacher_mean=[1,1,1] -> teacher_std
find-copy teacher:THIS teacher_mean=[1,1,1] teacher_std=[0,1,1] -> above 0
distill-vit-large data:imagenet-1k teacher:facebook/dino-vits16 -> hf download
distill-vit-large data:imagenet-1k teacher:vit_base_patch16_clip_224.openai -> vit_base_patch16_clip_quickgelu
distill-vit-large data:imagenet-1k teacher:vit_tiny_patch16_224.augreg_in21k -> depth: teacher 12, student 24
"""


@pytest.mark.parametrize("row", CONFIGURED.strip().splitlines())
def test_what_is_wrong_is_named_before_data_or_weights_are_touched(row, no_network):
    asked, named = row.replace("THIS", __file__).split(" -> ")
    recipe, *words = asked.split()
    told = dict(word.split(":", 1) for word in words if "=" not in word)
    changes = dict(word.split("=", 1) for word in words if "=" in word)
    data, seed = told.get("data", "atbook.worlds:marked_glyphs"), int(told.get("seed", 0))
    with pytest.raises((ValueError, OSError, Unwalkable)) as refused:
        configure(recipe, data, told.get("teacher"), changes, seed)
    assert named in str(refused.value)


# --- On the command line

DISTILL = ("--recipe", "distill-vit-large", "--model.num_heads", "2", "--plan.layers", "[0]")
SCRATCH = ("--recipe", "mae-scratch-vit-base", "--model.num_heads", "2")


# what is asked for, in a folder with data and files, and what the answer names
ON_THE_COMMAND_LINE = {
    "one class": (SCRATCH, {"data": "one"}, ["needs a folder", "pretrain"]),
    "a class for validation alone": (SCRATCH, {"data": "extra"}, ["4 images", "'emu'", "train"]),
    "another grid": ((*DISTILL, "--teacher_image_size", "32"), {"teacher": "t"}, ["(4, 4)", "resample"]),
    "a teacher with NaN": (DISTILL, {"teacher": "nan"}, ["norm1.bias", "another checkpoint"]),
}


@pytest.fixture
def place(tmp_path):
    """A folder with data sets and teachers, right ones and wrong ones."""
    both(tmp_path / "good", "cat", "dog", "owl")
    folder(folder(tmp_path / "extra", "train", "cat", "dog"), "validation", "cat", "emu")
    folder(tmp_path / "one", "train", "cat")
    folder(tmp_path, "flat", "")
    model, architecture = vit(num_classes=0), Architecture({**TINY, "num_classes": 0})
    save_vit(tmp_path / "t.safetensors", model, architecture)
    torch.nn.init.constant_(model.blocks[0].norm1.bias, float("nan"))
    save_vit(tmp_path / "nan.safetensors", model, architecture)
    return tmp_path


def run(place, words, data="good", teacher=None):
    teach = () if teacher is None else ("--teacher", str(place / f"{teacher}.safetensors"))
    where = ("--data", str(place / data), "--out", str(place / "out"))
    return command.main(["train", *words, *teach, *where, *(f"--{each}" for each in SMALL)])


@pytest.mark.parametrize("case", ON_THE_COMMAND_LINE)
def test_on_the_command_line(place, capsys, case):
    words, where, named = ON_THE_COMMAND_LINE[case]
    assert run(place, words, **where) == 2
    wrong = capsys.readouterr().err
    assert all(part in wrong for part in named), wrong
    assert not list(place.glob("out/*.safetensors"))


# --- What is no mistake, though it looks like one


def test_weights_in_half_precision_teach(tmp_path):
    state = create_vit("vit_tiny_patch16_224", **TINY, num_classes=0).half().state_dict()
    save_file(state, tmp_path / "half.safetensors")
    teacher = load_teacher(tmp_path / "half.safetensors", heads=2)
    assert teacher.vit.blocks[0].attn.qkv.weight.dtype == torch.float32


# --- Classes


def test_a_run_stores_its_classes_and_normalisation_and_is_evaluated_on_them_alone(place, capsys):
    assert run(place, SCRATCH) == 0
    path = place / "out" / "student.safetensors"
    header = read_header(path)
    assert header["classes"] == ["cat", "dog", "owl"] and header["normalisation"]["mean"][0] == 0.485
    code, whole, _ = said(capsys, "evaluate", path, "--data", place / "good")
    assert code == 0 and "matched" not in whole
    code, _, wrong = said(capsys, "evaluate", path, "--data", both(place / "others", "cat", "emu"))
    assert code == 2 and "'emu'" in wrong and "'cat', 'dog', 'owl'" in wrong
    # fewer, in another order than the outputs: labels follow their names
    fewer = both(place / "fewer", "owl", "dog")
    code, out, _ = said(capsys, "evaluate", path, "--data", fewer)
    assert code == 0 and "matched by their names, 2 of the 3" in out


# --- Without labels


@pytest.mark.parametrize("data", ["flat", "one"])
def test_masked_auto_encoding_needs_no_labels(place, data):
    out = place / "out"
    words = ["pretrain", "mae", "--data", str(place / data), "--out", str(out), "--model.depth", "1"]
    assert command.main([*words, "--epochs", "1", "--warmup_epochs", "0", "--batch_size", "4"]) == 0
    header = read_header(out / "teacher.safetensors")
    assert header["normalisation"] == {"mean": [0.5] * 3, "std": [0.25] * 3} and "classes" not in header
