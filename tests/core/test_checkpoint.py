"""What is written can be read, by atlib and by plain timm; what cannot be read is named and left alone."""

import json
import os

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlib import AttentionTransfer, Plan, _util, create_vit
from atlib._util import write_atomically
from atlib.checkpoint import load_bundle, load_vit, save_bundle, save_vit, save_weights
from atlib.pair import Normalisation, attach, student_of
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


@pytest.mark.parametrize(
    "architecture",
    [
        GLYPHS,
        Architecture("vit_tiny_patch16_224.augreg_in21k", {"depth": 1, "num_classes": 3}),
        Architecture("deit_tiny_distilled_patch16_224", {"depth": 1, "num_classes": 3}),
    ],
    ids=str,
)
def test_vit_round_trip(tmp_path, architecture):
    vit = vit_of(architecture)
    path = save_vit(tmp_path / "deep" / "er" / "vit.safetensors", vit, architecture)
    found = load_vit(path)
    assert type(found) is type(vit) and same(found.state_dict(), vit.state_dict())


def test_a_saved_vit_is_a_plain_timm_state(tmp_path):
    vit = vit_of(GLYPHS)
    path = save_vit(tmp_path / "vit.safetensors", vit, GLYPHS)
    plain = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=8
    )
    plain.load_state_dict(load_file(path), strict=True)
    images = random_images(2, 3, 32, 32)
    assert torch.equal(plain.eval()(images), vit(images))


def test_weights_of_any_module(tmp_path):
    module = torch.nn.Linear(3, 2)
    assert same(load_file(save_weights(tmp_path / "weights.safetensors", module)), dict(module.state_dict()))


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


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_bundles_student_says_how_its_images_are_normalised(tmp_path, how):
    pair, said = pair_of(how), Normalisation((0.3,) * 3, (0.2,) * 3)
    attach(pair.student, said)
    found = load_bundle(save_bundle(tmp_path / "bundle.safetensors", pair, GLYPHS, OTHER))
    assert Normalisation.of(student_of(found)) == said


@pytest.mark.parametrize(
    "architecture, named",
    [
        (Architecture("glyphs"), "'glyphs', overrides={}"),
        (Architecture("glyphs", {"depth": 2, "num_classes": 9}), "'num_classes': 9"),
        (Architecture("cifar"), "'cifar'"),
    ],
    ids=str,
)
def test_a_wrong_architecture_is_refused_before_anything_is_written(tmp_path, architecture, named):
    path = tmp_path / "file.safetensors"
    with pytest.raises(ValueError, match=named):
        save_vit(path, vit_of(GLYPHS), architecture)
    with pytest.raises(ValueError, match=named):
        save_bundle(path, pair_of("copy"), architecture, OTHER)
    with pytest.raises(ValueError, match=named):
        save_bundle(path, pair_of("copy"), GLYPHS, architecture)
    assert list(tmp_path.iterdir()) == []


def damaged(path, kind):
    """Turn a good file into a bad one; returns its bytes."""
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    content = {
        "cut off": good[:-1],
        "cut off in the header": good[: length // 2],
        "empty": b"",
        "a web page": b"<html>Not found</html>" * 9,
        "header garbled": good[:20] + b"\xff\xfe" + good[22:],
    }[kind]
    path.write_bytes(content)
    return content


@pytest.mark.parametrize(
    "kind", ["cut off", "cut off in the header", "empty", "a web page", "header garbled"]
)
@pytest.mark.parametrize("load", [load_vit, load_bundle])
def test_damaged_files_are_named_and_left_alone(tmp_path, kind, load):
    path = tmp_path / "file.safetensors"
    (
        save_vit(path, vit_of(GLYPHS), GLYPHS)
        if load is load_vit
        else save_bundle(path, pair_of("copy"), GLYPHS, OTHER)
    )
    content = damaged(path, kind)
    with pytest.raises(OSError, match=path.name):
        load(path)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("load, field", [(load_vit, "architecture"), (load_bundle, "needs_teacher")])
@pytest.mark.parametrize("metadata", [None, {"atlib": "{}"}, {"format": "pt"}], ids=str)
def test_foreign_files_are_named(tmp_path, load, field, metadata):
    path = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.zeros(2)}, path, metadata)
    with pytest.raises(OSError, match=f"foreign.safetensors.*'{field}'"):
        load(path)


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "null",
        '{"architecture": 3, "needs_teacher": true}',
        '{"architecture": {"nam": "glyphs"}}',
        '{"architecture": {"name": "no such vit"}}',
        "not json",
    ],
)
@pytest.mark.parametrize("load", [load_vit, load_bundle])
def test_headers_that_make_no_sense_are_named(tmp_path, load, text):
    path = tmp_path / "odd.safetensors"
    save_file({"weight": torch.zeros(2)}, path, {"atlib": text})
    with pytest.raises(OSError, match="odd.safetensors"):
        load(path)


PLANS = [{"how": "teleport"}, {"layer": [0]}, {"layers": [9]}, None]


@pytest.mark.parametrize(
    "change", [*({"plan": plan} for plan in PLANS), {"teacher": {"name": "glyphs"}}], ids=str
)
def test_bundles_whose_parts_make_no_pair_are_named(tmp_path, change):
    path = save_bundle(tmp_path / "bundle.safetensors", pair_of("copy"), GLYPHS, OTHER)
    save_file(load_file(path), path, {"atlib": json.dumps(header(path) | change)})
    content = path.read_bytes()
    with pytest.raises(OSError, match="bundle.safetensors"):
        load_bundle(path)
    assert path.read_bytes() == content


def test_vit_and_bundle_are_not_taken_for_each_other(tmp_path):
    vit, bundle = tmp_path / "vit.safetensors", tmp_path / "bundle.safetensors"
    save_vit(vit, vit_of(GLYPHS), GLYPHS)
    save_bundle(bundle, pair_of("copy"), GLYPHS, OTHER)
    with pytest.raises(OSError, match="vit.safetensors"):
        load_bundle(vit)
    with pytest.raises(OSError, match="bundle.safetensors.*load_bundle"):
        load_vit(bundle)


def test_weights_that_do_not_fit_their_architecture(tmp_path):
    path = tmp_path / "vit.safetensors"
    save_file(
        {name: value.clone() for name, value in create_vit("cifar").state_dict().items()},
        path,
        {"atlib": json.dumps({"architecture": {"name": "glyphs", "overrides": {}}})},
    )
    with pytest.raises(OSError, match=r"(?s)vit.safetensors.*blocks\.5"):
        load_vit(path)


@pytest.mark.parametrize("load", [load_vit, load_bundle])
def test_missing_files_and_folders(tmp_path, load):
    with pytest.raises(FileNotFoundError, match="nowhere.safetensors"):
        load(tmp_path / "nowhere.safetensors")
    with pytest.raises(OSError, match=tmp_path.name):
        load(tmp_path)


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = save_vit(tmp_path / "vit.safetensors", vit_of(GLYPHS), GLYPHS)
    old = path.read_bytes()

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(_util.os, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        save_vit(path, vit_of(GLYPHS, 7), GLYPHS)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


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


@pytest.mark.parametrize(
    "other, named", [({"num_heads": 2}, r"\[2, 2, 2, 2\]"), ({"act_layer": "relu"}, "GELU.*ReLU")], ids=str
)
def test_an_architecture_that_only_fits_the_weights_is_refused(tmp_path, other, named):
    """The same names and shapes, and another function."""
    vit = create_vit("glyphs", **other)
    with pytest.raises(ValueError, match=named):
        save_vit(tmp_path / "vit.safetensors", vit, Architecture("glyphs"))
    assert list(tmp_path.iterdir()) == []


def test_a_teacher_without_an_architecture_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ValueError, match="architecture=None.*distill"):
        save_bundle(tmp_path / "pair.safetensors", pair_of("copy"), GLYPHS, None)
    assert not list(tmp_path.iterdir())


def test_saving_draws_nothing(tmp_path):
    vit = GLYPHS.build()
    state = torch.get_rng_state()
    save_vit(tmp_path / "vit.safetensors", vit, GLYPHS)
    assert torch.equal(torch.get_rng_state(), state)
