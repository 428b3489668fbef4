"""A classifier that is no ViT: trained from scratch, kept and evaluated by the command line; refused by what
hands attention over."""

import pytest
import timm
import torch

from atlib.checkpoint import load_vit
from atlib.vit import Architecture, create_classifier, create_vit
from atrun import __main__ as command
from atrun.configure import configure
from atrun.estimate import estimate, model_lines
from tests.helpers import ROOT, same
from tests.stopped_runs import few_held_out as few_held_out  # a fixture

WORLD = "atbook.worlds:marked_glyphs"
TEACHER = str(ROOT / "results" / "transfer" / "find" / "teacher-seed0.safetensors")
SHORT = "--steps 2 --batch_size 8 --data_size 32".split()


def test_a_resnet_is_timms_own_model():
    torch.manual_seed(3)
    expected = timm.create_model("resnet18", num_classes=5)
    torch.manual_seed(3)
    found = create_classifier("resnet18", num_classes=5, img_size=32)
    assert same(found.state_dict(), expected.state_dict())
    fixed = create_classifier("swin_tiny_patch4_window7_224", img_size=64, window_size=2, depths=(1, 1, 1, 1))
    assert fixed.patch_embed.img_size == (64, 64), "what has a size gets it"
    with pytest.raises(TypeError, match="'dept'"):
        create_classifier("resnet18", dept=3)
    with pytest.raises(ValueError, match="'resnet18' .*ResNet"):
        create_vit("resnet18")
    with pytest.raises(ValueError, match="'resnet18' .*ResNet"):
        Architecture("resnet18").build()


@pytest.mark.parametrize(
    "recipe, name, options",
    [
        ("scratch", "resnet18", ""),
        ("find-scratch", "resnet18", ""),
        ("find-scratch", "mixer_s16_224", "--model.img_size 32"),
    ],
)
def test_it_is_trained_and_kept(recipe, name, options, tmp_path, capsys):
    out = tmp_path / "run"
    asked = ["train", "--recipe", recipe, "--model", name, "--data", WORLD, "--out", str(out), *SHORT]
    assert command.main([*asked, *options.split()]) == 0
    kept = load_vit(out / "student.safetensors")
    assert type(kept) is type(timm.create_model(name)) and kept.num_classes == 8
    capsys.readouterr()
    assert command.main(["evaluate", str(out)]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_a_dry_run_counts_what_it_can():
    config = configure("find-scratch", WORLD, changes={"model": "resnet18", "batch_size": "8", "steps": "2"})
    expected = estimate(config, 32, 8, limit=1.0)
    assert expected.flops is None and expected.seconds > 0
    (line,) = model_lines(expected)
    weights = sum(weight.numel() for weight in timm.create_model("resnet18", num_classes=8).parameters())
    assert line == f"resnet18: {weights:,} parameters, a ResNet, which has no maps"
