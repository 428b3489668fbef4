"""What is written can be read, by atlib and by plain timm; what cannot be read is named and left alone."""

import json
import os

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from atlib import AttentionTransfer, Plan, _util
from atlib._util import write_atomically
from atlib.checkpoint import load_bundle, save_bundle, save_vit
from atlib.vit import Architecture
from tests.helpers import random_images, randomise, same

GLYPHS = Architecture("glyphs", {"depth": 2})
OTHER = Architecture("glyphs", {"depth": 2, "num_classes": 192})


def vit_of(architecture, seed=0):
    return randomise(architecture.build(), seed).eval()


def pair_of(how, layers=None):
    return AttentionTransfer(
        vit_of(OTHER, 1), vit_of(GLYPHS, 2), Plan(how=how, layers=layers, share_drop_path=False)
    ).eval()


def header(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["atlib"])


def test_a_saved_vit_is_a_plain_timm_state(tmp_path):
    vit = vit_of(GLYPHS)
    path = save_vit(tmp_path / "vit.safetensors", vit, GLYPHS)
    plain = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=8
    )
    plain.load_state_dict(load_file(path), strict=True)
    images = random_images(2, 3, 32, 32)
    assert torch.equal(plain.eval()(images), vit(images))


@pytest.mark.parametrize("layers", [None, [1]], ids=str)
def test_after_copy_a_bundle_holds_the_teacher_and_says_so(tmp_path, layers):
    pair, images = pair_of("copy", layers), random_images(2, 3, 32, 32)
    path = save_bundle(tmp_path / "bundle.safetensors", pair, GLYPHS, OTHER)
    assert header(path)["needs_teacher"] is True
    found = load_bundle(path)
    assert isinstance(found, AttentionTransfer) and not found.training and not found.teacher.training
    assert found.layers == pair.layers and found.plan.how == "copy" and found.plan.share_drop_path is False
    assert torch.equal(found(images).logits, pair(images).logits)
    assert same(found.teacher.state_dict(), pair.teacher.state_dict())


def test_after_distill_a_bundle_is_the_student_alone(tmp_path):
    pair, images = pair_of("distill"), random_images(2, 3, 32, 32)
    path = save_bundle(tmp_path / "bundle.safetensors", pair, GLYPHS, OTHER)
    assert header(path)["needs_teacher"] is False
    assert all(name.startswith("student.") for name in load_file(path))
    found = load_bundle(path)
    assert type(found) is timm.models.VisionTransformer and not found.training
    torch.testing.assert_close(found(images), pair(images).logits)


def test_writing_never_shows_half_a_file(tmp_path, monkeypatch):
    """Up to the moment of the rename the old content is there, and it is the whole new file that is
    renamed."""
    path, seen = tmp_path / "file", []
    path.write_bytes(b"old")
    rename = os.replace

    def watch(source, target):
        seen.append((path.read_bytes(), source.read_bytes(), source.parent == path.parent))
        rename(source, target)

    monkeypatch.setattr(_util.os, "replace", watch)
    write_atomically(path, b"new content")
    assert seen == [(b"old", b"new content", True)] and path.read_bytes() == b"new content"
    assert list(tmp_path.iterdir()) == [path]
