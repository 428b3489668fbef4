"""The distillation token from the command line: its loss by hand, resumed, evaluated, exported."""

import pytest
import timm
import torch
from torch.nn.functional import cross_entropy

from atlib.checkpoint import load_vit, save_vit
from atlib.loading import seed_for
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun.build import training_images
from atrun.config import read_config
from atrun.log import read_log
from tests.helpers import SMALL_VIT, randomise, same
from tests.picture_files import CLASSES, write_folders


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
