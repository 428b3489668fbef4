"""What is written can be read, by atlib and by plain timm; what cannot be read is named and left alone."""

import os

import timm
import torch
from safetensors.torch import load_file

from atlib import AttentionTransfer, Plan, _util
from atlib._util import write_atomically
from atlib.checkpoint import load_bundle, load_vit, save_bundle, save_vit
from atlib.pair import Normalisation
from atlib.vit import Architecture
from tests.helpers import random_images, randomise, same

GLYPHS = Architecture("glyphs", {"depth": 2})
OTHER = Architecture("glyphs", {"depth": 2, "num_classes": 192})


def vit_of(architecture, seed=0):
    return randomise(architecture.build(), seed).eval()


def saved(tmp_path, **plan):
    """A pair, and what is read from its file."""
    plan = Plan(**plan, share_drop_path=False)
    pair = AttentionTransfer(vit_of(OTHER, 1), vit_of(GLYPHS, 2), plan).eval()
    path = save_bundle(tmp_path / "bundle.safetensors", pair, GLYPHS, OTHER)
    return pair, load_bundle(path), path


def test_a_saved_vit_is_a_plain_timm_state(tmp_path):
    vit, images = vit_of(GLYPHS), random_images(2, 3, 32, 32)
    path = save_vit(tmp_path / "vit.safetensors", vit, GLYPHS)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 8}
    plain = timm.models.VisionTransformer(**sizes)
    plain.load_state_dict(load_file(path), strict=True)
    assert torch.equal(plain.eval()(images), vit(images))


def test_an_augmentation_need_not_say_a_normalisation(tmp_path):
    for augmentation, expected in (
        ({"image_size": 32}, None),
        ({"mean": 0.4, "std": 0.3}, Normalisation(0.4, 0.3)),
    ):
        vit = load_vit(save_vit(tmp_path / "vit", vit_of(GLYPHS), GLYPHS, {"augmentation": augmentation}))
        assert Normalisation.of(vit) == expected


def test_after_copy_a_bundle_holds_the_teacher_and_the_plan(tmp_path):
    pair, found, _ = saved(tmp_path, layers={1: 0}, heads={1: [0, 2]})
    images = random_images(2, 3, 32, 32)
    assert found.plan == pair.plan and found.needs_teacher
    assert not found.training and not found.teacher.training
    assert torch.equal(found(images).logits, pair(images).logits)
    assert same(found.teacher.state_dict(), pair.teacher.state_dict())


def test_after_distill_a_bundle_is_the_student_alone(tmp_path):
    pair, found, path = saved(tmp_path, how="distill")
    images = random_images(2, 3, 32, 32)
    assert all(name.startswith("student.") for name in load_file(path))
    assert type(found) is timm.models.VisionTransformer and not found.training
    assert torch.equal(found(images), pair.student(images))


def test_writing_never_shows_half_a_file(tmp_path, monkeypatch):
    """Up to the rename the old content is there, and it is the whole new file that is renamed."""
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
