"""A detector's file: what it says again after it was read, and which files are refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atfamily.detection.detector import DETECTORS, SMALL
from atfamily.detection.files import load_detector, save_detector
from atlib import AttentionTransfer, Plan
from atlib.checkpoint import save_vit
from atlib.vit import Architecture
from tests.helpers import randomise, same

VIT = Architecture("glyphs", {"img_size": 64, "num_classes": 0, "embed_dim": 16, "num_heads": 2, "depth": 2})
CLASSES = ("circle", "square", "star")


def made(heads, how=None):
    torch.manual_seed(0)
    vit = randomise(VIT.build())
    if how is not None:
        vit = AttentionTransfer(randomise(VIT.build(), seed=1), vit, Plan(how=how))
    return DETECTORS[heads](vit, len(CLASSES), SMALL).eval()


def said(detector):
    with torch.no_grad():
        return detector(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))).found


@pytest.mark.parametrize("heads, how", [("fcos", None), ("faster-rcnn", "distill"), ("mask-rcnn", "copy")])
def test_a_detector_that_was_read_says_the_same(tmp_path, heads, how):
    detector = made(heads, how)
    path = save_detector(tmp_path / "detector.safetensors", detector, heads, CLASSES, VIT, VIT)
    read, classes, student = load_detector(path)
    assert (classes, student, read.sizes) == (CLASSES, VIT, SMALL) and not read.training
    assert any(name.startswith("teacher.") for name in load_file(path)) == (how == "copy")
    assert same(read.backbone.student.state_dict(), detector.backbone.student.state_dict())
    for mine, theirs in zip(said(detector), said(read), strict=True):
        assert len(mine.boxes) > 0 or heads == "fcos"
        for left, right in zip(mine, theirs):
            assert (left is None and right is None) or torch.equal(left, right)


def test_a_copy_is_not_saved_without_its_teacher_nor_as_what_it_is_not(tmp_path):
    path = tmp_path / "detector.safetensors"
    with pytest.raises(ValueError):
        save_detector(path, made("fcos", "copy"), "fcos", CLASSES, VIT)
    with pytest.raises(ValueError):
        save_detector(path, made("fcos"), "faster-rcnn", CLASSES, VIT)
    with pytest.raises(ValueError):
        save_detector(path, made("fcos"), "fcos", CLASSES, VIT._replace(overrides={"embed_dim": 32}))
    assert not path.exists()


def test_other_files_are_refused_by_name(tmp_path):
    of_vit = save_vit(tmp_path / "vit.safetensors", VIT.build(), VIT)
    with pytest.raises(OSError):
        load_detector(of_vit)
    path = save_detector(tmp_path / "detector.safetensors", made("fcos"), "fcos", CLASSES, VIT)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["atlib"])
    header["detector"]["classes"].append("a fourth")
    save_file(tensors, tmp_path / "other.safetensors", {"atlib": json.dumps(header)})
    with pytest.raises(OSError):
        load_detector(tmp_path / "other.safetensors")
    save_file(tensors, tmp_path / "old.safetensors", {"atlib": json.dumps(header | {"detector": {}})})
    with pytest.raises(OSError):
        load_detector(tmp_path / "old.safetensors")
