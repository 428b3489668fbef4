"""A classifier that is no ViT: trained from scratch, kept and evaluated; refused by what needs attention."""

import pytest
import timm
import torch

from atlib.checkpoint import load_vit
from atlib.vit import create_classifier, create_vit
from atrun import __main__ as command
from atrun.configure import configure
from atrun.estimate import estimate
from tests.helpers import same
from tests.stopped_runs import few_held_out as few_held_out  # a fixture

WORLD = "atbook.worlds:marked_glyphs"


def test_a_resnet_is_timms_own_model():
    torch.manual_seed(3)
    expected = timm.create_model("resnet18", num_classes=5)
    torch.manual_seed(3)
    assert same(create_classifier("resnet18", num_classes=5, img_size=32).state_dict(), expected.state_dict())
    with pytest.raises(ValueError, match="ResNet"):
        create_vit("resnet18")


def test_it_is_trained_and_kept(tmp_path, capsys):
    asked = f"train --recipe scratch --model resnet18 --model.stem_width 8 --data {WORLD} --out {tmp_path}"
    assert command.main([*asked.split(), *"--steps 2 --batch_size 8 --data_size 32".split()]) == 0
    kept = load_vit(tmp_path / "student.safetensors")
    assert type(kept) is timm.models.ResNet and kept.num_classes == 8
    capsys.readouterr()
    assert command.main(["evaluate", str(tmp_path)]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_a_dry_run_counts_what_it_can():
    changes = {"model": "resnet18", "batch_size": "8", "steps": "2"}
    found = estimate(configure("find-scratch", WORLD, changes=changes), 32, 8)
    assert found.flops is None and found.seconds > 0
