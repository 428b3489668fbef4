"""Recipes without a model's name: each rule's value against numbers by hand, and what replaces it."""

from pathlib import Path

import pytest
import torch
from torchvision.transforms.functional import to_pil_image

from atlib.checkpoint import load_vit, read_tensors, save_vit, write_tensors
from atlib.pair import IMAGENET, Normalisation
from atlib.plan import Plan
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun import generic
from atrun.build import build
from atrun.config import read_config, write_config
from atrun.configure import configure
from atrun.data.decoding import CorruptImage
from atrun.log import read_log
from atrun.record import read_record
from atrun.runner import start
from tests.helpers import random_images, randomise
from tests.picture_files import CLASSES, write_folders

LARGE, SMALL = "vit_large_patch16_224.augreg_in21k", "vit_small_patch16_224.dino"
GLYPHS = {"depth": 4, "embed_dim": 48, "num_heads": 3}


def teacher_file(path, normalisation=None, classes=None, **other):
    architecture = Architecture("glyphs", {**GLYPHS, "num_classes": len(classes or range(5)), **other})
    more = {} if normalisation is None else {"normalisation": normalisation.describe()}
    more |= {} if classes is None else {"classes": [*classes]}
    return str(save_vit(path, randomise(architecture.build()), architecture, more))


@pytest.fixture
def photographs(tmp_path):
    """24 pictures of 16 x 12 pixels to train on, 6 to look at."""
    folder = tmp_path / "photographs"
    return str(write_folders(write_folders(folder, "train", range(24)), "validation", range(24, 30)))


def test_distill_of_a_large_teacher_on_imagenet():
    """1,281,167 images: a sixteenth is 80,072, so 256 a step, 5,005 steps a pass; width 1,024, 24 layers."""
    values = generic.derive("distill", "imagenet-1k", LARGE, {}).values
    recipe, augmentation = values["recipe"], values["augmentation"]
    assert (recipe.batch_size, recipe.epochs, recipe.warmup) == (256, 200, 0.1)
    assert recipe.lr == pytest.approx(1e-3 * 0.5 * 0.75)  # sqrt(256 / 1024), 768 / 1024
    assert (recipe.betas, recipe.weight_decay, recipe.label_smoothing) == ((0.9, 0.95), 0.3, 0.1)
    assert (recipe.mixup, recipe.cutmix, recipe.transfer_weight) == (0.8, 1.0, 3.0)
    assert recipe.ema == 0.9999 and recipe.layer_decay is None  # 200 x 5,005 steps
    assert values["plan"] == Plan(how="distill", layers=range(18))
    assert values["drop_path"] == 0.2 and values["teacher"] == LARGE
    assert values["evaluate_every"] == values["maps_every"] == 20
    assert (augmentation.image_size, augmentation.crop) == (224, "random-resized")
    assert augmentation.rand_augment == "rand-m9-mstd0.5-inc1" and augmentation.random_erasing == 0.25
    assert augmentation.normalisation == Normalisation(0.5, 0.5), "as the teacher's, which is AugReg's"


def test_copy_of_a_small_teacher_on_cifar10():
    """50,000 images: 256 a step, 196 steps a pass; 12 layers of width 384."""
    values = generic.derive("copy", "cifar10", SMALL, {}).values
    recipe = values["recipe"]
    assert (recipe.batch_size, recipe.epochs, recipe.warmup) == (256, 100, 0.05)
    assert recipe.lr == pytest.approx(1e-3 * 0.5 * 2)
    assert (recipe.betas, recipe.weight_decay) == ((0.9, 0.999), 0.05)
    assert recipe.ema is None, "19,600 steps are fewer than 50,000"
    assert values["plan"] == Plan() and values["drop_path"] == 0.0
    assert values["augmentation"].image_size == 224, "nobody looked at the images: the teacher's"
    assert values["augmentation"].normalisation == IMAGENET


@pytest.mark.parametrize("teacher, decay, rate", [(SMALL, 0.65, 2.5e-4), (LARGE, 0.75, 0.9375e-4)])
def test_fine_tuning_on_few_images(teacher, decay, rate):
    """500 images: 31 a sixteenth, so 16 a step; 512 passes show 256,000 images. sqrt(16 / 1024) is 1/8."""
    values = generic.derive("fine-tune", "cifar10", teacher, {"data_size": "500"}).values
    recipe = values["recipe"]
    assert (recipe.batch_size, recipe.epochs, recipe.warmup) == (16, 512, 0.1)
    assert (recipe.layer_decay, recipe.lr) == (decay, pytest.approx(rate))
    assert values["evaluate_every"] == 51 and values["plan"] is None and values["teacher"] == teacher


@pytest.mark.parametrize(
    "name, shorter_side, expected",
    [
        (SMALL, 240, 224),  # no more than its own
        (SMALL, 50, 224),  # 14 patches of 16 pixels
        ("vit_small_patch14_dinov2.lvd142m", 1000, 518),
        ("vit_small_patch14_dinov2.lvd142m", 240, 252),  # 18 patches of 14 pixels
        ("vit_small_patch14_dinov2.lvd142m", 100, 196),
        ("glyphs", 100, 32),
    ],
)
def test_the_image_size_is_the_teachers_or_less(monkeypatch, name, shorter_side, expected):
    monkeypatch.setattr(generic, "_material", lambda *asked: (5000, shorter_side))
    values = generic.derive("scratch", "photographs", None, {"model": name}).values
    assert values["augmentation"].image_size == expected


@pytest.mark.parametrize("images, batch", [(20, 16), (511, 16), (512, 32), (100_000, 256)])
def test_the_batch_leaves_sixteen_steps(images, batch):
    values = generic.derive("scratch", "cifar10", SMALL, {"data_size": str(images)}).values
    assert values["recipe"].batch_size == batch


def test_a_folder_and_a_file(tmp_path, photographs):
    teacher = teacher_file(tmp_path / "teacher.safetensors", Normalisation(0.5, 0.25))
    derived = generic.derive("distill", photographs, teacher, {})
    values, recipe, augmentation = derived.values, *(derived.values[n] for n in ("recipe", "augmentation"))
    assert values["model"] == Architecture("glyphs", GLYPHS)
    # ceil(256,000 / 24) passes; sqrt(16 / 1024), 768 / 48
    assert (recipe.batch_size, recipe.epochs, recipe.lr) == (16, 10_667, pytest.approx(1e-3 / 8 * 16))
    assert recipe.mixup == recipe.cutmix == 0 and values["plan"].layers == (0, 1, 2)
    assert (augmentation.image_size, augmentation.crop, augmentation.padding) == (32, "padded", 4)
    assert augmentation.normalisation == Normalisation(0.5, 0.25)
    text = derived.text({"epochs": "3"})
    assert "--model glyphs: the teacher's" in text
    assert "--augmentation.image_size 32: the teacher's\n" in text
    assert "--epochs" not in text and "--lr 0.002: " in text


def test_data_that_come_as_they_are(tmp_path):
    teacher = teacher_file(tmp_path / "teacher.safetensors", img_size=64)
    derived = generic.derive("copy", "atbook.worlds:marked_glyphs", teacher, {"data_size": "500"})
    assert derived.values["model"].overrides == GLYPHS | {"img_size": 32}, "the images' own size"
    assert derived.values["recipe"].mixup == 0
    assert not any(rule.startswith("augmentation") for rule in derived.rules), "no such setting would do"


def test_settings_replace_rules_and_others_follow():
    run = configure("distill", "imagenet-1k", SMALL, {"batch_size": "64"})
    assert run.recipe.lr == pytest.approx(1e-3 * 0.25 * 2), "the rate follows the batch"
    run = configure("distill", "imagenet-1k", SMALL, {"steps": "20020", "plan.layers": "[0,1]"})
    assert (run.recipe.steps, run.recipe.epochs, run.recipe.ema) == (20020, None, None)
    assert run.evaluate_every == 1, "four passes"
    assert run.plan.layers == (0, 1)
    run = configure("distill", "imagenet-1k", SMALL, {"base_lr": "1e-3"})
    assert run.on(1_281_167).recipe.lr == pytest.approx(1e-3), "256 images a step"
    run = configure("scratch", "cifar10", None, {"model": SMALL, "model.depth": "24", "lr": "1e-4"})
    assert run.recipe.lr == 1e-4 and run.drop_path == 0.2 and run.model.overrides == {"depth": 24}
    run = configure("distill", "cifar10", SMALL, {"teacher_mean": "[0,0,0]", "teacher_std": "[1,1,1]"})
    assert run.augmentation.normalisation == Normalisation(0.0, 1.0)


def test_an_untrained_teacher_is_built_like_the_model():
    run = configure("copy", "cifar10", "untrained", {"model": SMALL})
    assert run.teacher == "untrained" and run.model == Architecture(SMALL)
    assert run.augmentation.normalisation == IMAGENET


def test_a_broken_image_does_not_stop_the_look_at_sizes(tmp_path):
    """It stopped a run that was to leave such images out."""
    write_folders(tmp_path / "photographs", "train", range(6))
    whole = generic._material(str(tmp_path / "photographs"), {}, 0)
    files = sorted((tmp_path / "photographs" / "train").rglob("*.png"))
    files[0].write_bytes(files[0].read_bytes()[:40])
    assert generic._material(str(tmp_path / "photographs"), {}, 0) == whole
    for file in files:
        file.write_bytes(b"no picture")
    with pytest.raises(CorruptImage, match="none of the 5 images"):
        generic._material(str(tmp_path / "photographs"), {}, 0)


TEACHER = "vit_small_patch16_224"  # 12 layers, 384 wide, 6 heads


@pytest.mark.parametrize(
    "student, width, heads, depth, layers, unequal",
    [
        ("small", 384, 6, 12, range(9), None),
        ("half", 192, 3, 6, {0: 1, 1: 3, 2: 5, 3: 7}, "aggregate"),
        ("vit_tiny_patch16_224", 192, 3, 12, range(9), "aggregate"),
    ],
)
def test_a_student_of_another_size(student, width, heads, depth, layers, unequal):
    settings = generic.student_settings(student, TEACHER, {})
    run = configure("distill", "cifar10", TEACHER, settings)
    vit = run.skeleton(10)
    assert (vit.embed_dim, vit.blocks[0].attn.num_heads, len(vit.blocks)) == (width, heads, depth)
    assert run.plan == Plan(how="distill", layers=layers, unequal_heads=unequal)
    assert run.recipe.lr == pytest.approx(1e-3 * 0.5 * 768 / width)


def test_features_of_a_smaller_student_are_paired_as_maps_are(tmp_path):
    settings = generic.student_settings("half", TEACHER, {})
    run = configure("features", "cifar10", TEACHER, settings)
    assert run.feature_layers == ((0, 1), (1, 3), (2, 5), (3, 7))
    write_config(tmp_path, run)
    assert read_config(tmp_path) == run
    again = configure("features", "cifar10", TEACHER, {**settings, "feature_layers": "{0: 2, 5: 11}"})
    assert again.feature_layers == ((0, 2), (5, 11))
    assert configure("features", "cifar10", TEACHER, {}).feature_layers == tuple(range(9))


def test_logits_want_a_teacher_of_the_same_classes(tmp_path, photographs):
    for teacher in (SMALL, teacher_file(tmp_path / "headless.safetensors")):
        with pytest.raises(ValueError, match="fine-tune"):
            configure("logits", photographs, teacher)
    other = teacher_file(tmp_path / "other.safetensors", classes=CLASSES[::-1])
    with pytest.raises(ValueError, match="other classes"):
        start(configure("logits", photographs, other), tmp_path / "run")


@pytest.mark.parametrize("name", ["logits", "hard-logits"])
def test_a_run_of_logits_computes_the_losses_of_its_two_classifiers(tmp_path, photographs, name):
    teacher = teacher_file(tmp_path / "teacher.safetensors", classes=CLASSES)
    config = configure(name, photographs, teacher, {"model.embed_dim": "24"})
    images = random_images(2, 3, 32, 32)
    model = build(config, len(CLASSES)).model.train()
    found, theirs = model(images), load_vit(teacher).eval()(images)
    p, own = (theirs / 3).softmax(-1), (found.logits / 3).log_softmax(-1)
    soft = 9 * (p * (p.log() - own)).sum(-1).mean()
    hard = torch.nn.functional.cross_entropy(found.logits, theirs.argmax(-1))
    torch.testing.assert_close(found.transfer_loss, hard if name == "hard-logits" else soft)


@pytest.mark.parametrize("recipe", ["distill-unlabelled", "features-unlabelled"])
def test_a_flat_folder_teaches_by_the_transfer_loss_alone(tmp_path, photographs, capsys, recipe):
    """The loss is the transfer loss and falls; the student starts a fine-tuning, and says no class before."""
    flat, out = tmp_path / "flat", tmp_path / "run"
    flat.mkdir()
    for index in range(16):
        noise = random_images(1, 3, 32, 32, seed=index)[0]
        to_pil_image(noise.sigmoid()).save(flat / f"{index}.png")
    teacher = teacher_file(tmp_path / "teacher.safetensors", Normalisation(0.5, 0.25))
    tensors, header = read_tensors(Path(teacher))
    sharp = {name: 40 * value if "qkv" in name else value for name, value in tensors.items()}
    write_tensors(Path(teacher), sharp, header)
    asked = ["train", "--recipe", recipe, "--data", str(flat), "--teacher", teacher, "--out", str(out)]
    assert command.main([*asked, *"--model.embed_dim 24 --model.depth 2 --epochs 30 --lr 3e-3".split()]) == 0
    said = capsys.readouterr().err
    assert "transfer_weight 1.0: it is the whole loss" in said and "evaluate_every" not in said
    steps = [entry for entry in read_log(out) if entry["event"] == "step"]
    assert all(entry["loss"] == entry["transfer_loss"] and "task_loss" not in entry for entry in steps)
    losses = [entry["loss"] for entry in steps]
    assert sum(losses[-5:]) < sum(losses[:5])
    vit = load_vit(out / "teacher.safetensors")
    assert (vit.num_classes, vit.embed_dim, len(vit.blocks)) == (0, 24, 2)
    assert not any("accuracy" in name for name in read_record(out / "record.json").results)
    for words in (["evaluate", str(out)], ["predict", str(out), str(flat)]):
        assert command.main(words) == 2 and "--recipe fine-tune" in capsys.readouterr().err
    tuned = ["train", "--recipe", "fine-tune", "--data", photographs, "--teacher", str(out)]
    assert command.main([*tuned, "--epochs", "1", "--out", str(tmp_path / "tuned")]) == 0
    assert load_vit(tmp_path / "tuned" / "student.safetensors").num_classes == len(CLASSES)
