"""Recipes on a few small photographs, in the order that their papers run them; two steps each."""

import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from atlib.checkpoint import load_vit, save_vit
from atlib.loading import seed_for
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun.build import build, training_images
from atrun.config import read_config
from atrun.log import read_log
from atrun.recipes import published
from atrun.record import read_record
from tests.helpers import SMALL_VIT, randomise, same
from tests.picture_files import CLASSES, write_folders

SMALL = {"batch_size": 8, "steps": 2, "warmup": 0, "training_split": "train+validation"}
VIT = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 12, "img_size": 16}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Twelve photographs in three classes, one folder each."""
    return write_folders(tmp_path_factory.mktemp("photographs"), "train", range(12))


@pytest.fixture(scope="module")
def run(photographs):
    """Runs a recipe, smaller, from the weights of another; its folder."""
    made = {}

    def run(name, teacher=None, image_size=16):
        if name not in made:
            method = published(name).method
            vit = VIT | {"img_size": image_size}
            settings = SMALL | {f"model.{key}": value for key, value in vit.items()}
            settings |= {"augmentation.image_size": image_size}
            if method == "moco":
                settings |= {"hidden_width": 16, "projection_width": 8}
            if method == "dino":
                settings |= {"hidden_width": 16, "bottleneck_width": 8, "outputs": 12, "local_size": 8}
            if method in ("mae", "dmae"):
                settings |= {"decoder_width": 4 * published(name).pretext["decoder_heads"]}
            asked = ["pretrain", name] if method.pretrains else ["train", "--recipe", name]
            if teacher is not None:
                asked += ["--teacher", str(made[teacher] / result(teacher))]
            out = photographs.parent / f"run-{len(made)}"
            asked += ["--data", str(photographs), "--out", str(out)]
            asked += [f"--{key}={value}" for key, value in settings.items()]
            assert command.main(asked) == 0
            made[name] = out
        return made[name]

    return run


def result(name):
    return "teacher.safetensors" if published(name).method.pretrains else "student.safetensors"


CHAINS = {
    **dict.fromkeys(("mae-lite-pretrain", "moco-v3-vit-small", "dino-vit-small-boosted", "deit3-21k-base")),
    **dict.fromkeys(("mae-lite-fine-tune", "deit-base-384"), "mae-lite-pretrain"),
    "deit3-21k-fine-tune-base": "deit3-21k-base",
    "deit3-fine-tune-base-384": "deit3-21k-fine-tune-base",
}


def test_each_recipe_runs_and_begins_where_the_one_before_it_ended(run):
    for name, teacher in CHAINS.items():
        bigger = 24 if name.endswith("384") else 16  # positions are resized
        folder = run(name, teacher, bigger)
        config, vit = read_config(folder), load_vit(folder / result(name))
        assert (config.recipe_name, config.method) == (name, published(name).method)
        assert config.recipe.steps == 2 and vit.patch_embed.img_size == (bigger, bigger)
        assert vit.num_classes == (0 if config.method.pretrains else 3)
        if config.method == "moco":
            drawn = build(config, 0).model.vit.patch_embed.proj.weight
            assert torch.equal(drawn, vit.patch_embed.proj.weight) is config.freeze_patches
        if teacher is not None:  # two steps of such small rates leave the weights where they were
            before = load_vit(run(teacher) / result(teacher))
            pairs = zip(before.blocks.parameters(), vit.blocks.parameters(), strict=True)
            assert max((old - new).abs().max().item() for old, new in pairs) < 0.02, name
        assert np.isfinite(read_record(folder / "record.json").results["loss"])


@pytest.mark.parametrize("name", ["mae-lite-distilled-pretrain", "attndistill-vit-tiny"])
def test_what_pretrains_beside_a_teacher_leaves_a_student_that_has_learned_from_it(run, name, photographs):
    """From other first weights than the teacher's; the next recipe starts from the result."""
    teacher = run("mae-lite-pretrain") / "teacher.safetensors"
    before = teacher.read_bytes()
    folder = run(name, "mae-lite-pretrain")
    config, vit = read_config(folder), load_vit(folder / "teacher.safetensors")
    assert (config.recipe_name, config.method) == (name, published(name).method)
    assert config.teacher == str(teacher.resolve()) and teacher.read_bytes() == before
    assert vit.num_classes == 0 and vit.blocks[0].attn.num_heads == 12
    assert not torch.equal(vit.blocks[0].attn.qkv.weight, load_vit(teacher).blocks[0].attn.qkv.weight)
    logged = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert all(np.isfinite(entry["loss"]) for entry in logged if "loss" in entry)
    assert np.isfinite(read_record(folder / "record.json").results["loss"])
    assert command.main(["resume", str(folder)]) == 0, "it is finished"


OTHERS = {"cait-m48": VIT | {"num_heads": 2, "depth": 1}, "resmlp-s12": {}}


@pytest.mark.parametrize("name", OTHERS)
def test_recipes_of_other_networks_run_on_the_command_line(name, photographs, tmp_path):
    """And leave a network of that kind, which classifies."""
    out = tmp_path / "run"
    asked = ["train", "--recipe", name, "--data", str(photographs), "--out", str(out)]
    settings = SMALL | {f"model.{key}": value for key, value in OTHERS[name].items()}
    settings |= {"augmentation.image_size": 16 if OTHERS[name] else 32}
    assert command.main([*asked, *(f"--{key}={value}" for key, value in settings.items())]) == 0
    config = read_config(out)
    assert (config.recipe_name, config.recipe.steps) == (name, 2)
    model = config.architecture(3).build_classifier()
    kind = {"cait-m48": "Cait", "resmlp-s12": "MlpMixer"}[name]
    assert type(model).__name__ == kind
    model.load_state_dict(load_file(out / "student.safetensors"))
    side = config.augmentation.image_size
    assert model.eval()(torch.zeros(1, 3, side, side)).shape == (1, 3)
    assert np.isfinite(read_record(out / "record.json").results["loss"])


# --- The distillation token: its loss by hand, resumed and exported


def test_a_run_with_a_token(tmp_path):
    """1/2 CE of the class head + 1/2 CE of the token's on all images; goes on, evaluated and exported."""
    photographs = write_folders(write_folders(tmp_path / "data", "train", range(16)), "validation", range(4))
    architecture = Architecture("glyphs", {**SMALL_VIT, "num_classes": 3})
    path, vit = tmp_path / "teacher.safetensors", randomise(architecture.build())
    teacher = save_vit(path, vit, architecture, {"classes": CLASSES})
    out = tmp_path / "run"
    train = ["train", "--recipe", "distillation-token", "--student", "half", "--teacher", str(teacher)]
    train += ["--data", str(photographs), "--out", str(out), "--batch_size", "16", "--steps", "2"]
    train += ["--augmentation.crop", "centre", "--augmentation.flip", "0", "--save_every", "1"]
    assert command.main(train) == 0
    config = read_config(out)
    torch.manual_seed(seed_for(config.seed, "student"))
    student = config.architecture(3).build().train()
    student.set_distilled_training(True)
    images, labels = training_images(config).take(range(16))
    of_class, of_token = student(images)
    with torch.no_grad():
        chosen = load_vit(teacher).eval()(images).argmax(1)
    first = next(entry for entry in read_log(out) if "loss" in entry)
    task, taught = cross_entropy(of_class, labels, label_smoothing=0.1), cross_entropy(of_token, chosen)
    assert first["task_loss"] == pytest.approx(task.item(), rel=1e-5)
    assert first["transfer_loss"] == pytest.approx(taught.item(), rel=1e-5)
    assert first["loss"] == pytest.approx((task + taught).item() / 2, rel=1e-5)
    kept = out / "student.safetensors"
    trained = load_vit(kept).eval()
    kept.unlink()
    assert command.main(["resume", str(out)]) == 0
    assert same(trained.state_dict(), load_vit(kept).state_dict())
    assert command.main(["export", str(out), "--out", str(tmp_path / "timm")]) == 0
    exported = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(exported(images), trained(images))
