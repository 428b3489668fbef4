"""Runs that detect, on scenes in COCO's form: what they leave, how they go on, what they refuse."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from atfamily.detection.detector import SIZES, detection_loss, mask_rcnn
from atfamily.detection.evaluate import evaluate_detector
from atfamily.detection.files import load_detector
from atfamily.measures.accounting import copy, distill, fine_tuning, shape_of
from atlib import AttentionTransfer
from atlib.checkpoint import load_bundle, load_vit, save_vit
from atlib.loading import seed_for
from atlib.plan import Plan
from atlib.train import train
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun.config import UNTRAINED, read_config
from atrun.configure import configure
from atrun.data.coco import CocoObjects
from atrun.estimate import as_text, estimate, flops_of_detector
from atrun.recipes import published
from atrun.record import read_record
from tests.detection.coco_folder import coco_folder
from tests.helpers import randomise, same, state_of
from tests.stopped_runs import at_step

pytest.importorskip("pycocotools")

MASK_RCNN = ("objectness", "rpn_box_reg", "classifier", "box_reg", "mask")  # what its loss is the sum of

VIT = {"img_size": 64, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
SETTINGS = {"model": "vit_tiny_patch16_224", **{f"model.{name}": value for name, value in VIT.items()}}
SETTINGS |= {"detector_sizes": "small", "batch_size": 4, "steps": 3, "lr": 1e-3}
MODEL = Architecture("vit_tiny_patch16_224", {"num_classes": 0, "drop_path_rate": 0.1, **VIT})


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """Six scenes to learn from (two steps a pass), three to be measured on."""
    return coco_folder(tmp_path_factory.mktemp("data") / "coco", train2017=6, val2017=3)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A file of weights, and the ViT."""
    vit = randomise(MODEL.build())
    return save_vit(tmp_path_factory.mktemp("teacher") / "teacher.safetensors", vit, MODEL), vit


def asked(coco, out, *more, recipe="scratch", **settings):
    """The command that trains a small detector."""
    request = ["train", "--recipe", f"vitdet-{recipe}-vit-base", "--data", "coco", "--out", str(out)]
    settings = SETTINGS | ({} if coco is None else {"data_path": coco}) | settings
    return request + [*more, *(text for name, x in settings.items() for text in (f"--{name}", str(x)))]


def images_of(coco, split, **how):
    file = coco / "annotations" / f"instances_{split}.json"
    return CocoObjects(coco / split, file, size=64, **how)


@pytest.fixture(scope="module")
def whole(coco, tmp_path_factory):
    """The folder of a run that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert command.main(asked(coco, out, save_every=1)) == 0
    return out


def test_a_run_is_the_library_by_hand_and_evaluate_repeats_its_precision(coco, whole, capsys):
    torch.manual_seed(seed_for(0, "student"))
    detector = mask_rcnn(MODEL.build(), 8, SIZES["small"])
    recipe = published("vitdet-scratch-vit-base").recipe.on(6)
    recipe = replace(recipe, steps=3, batch_size=4, lr=1e-3, warmup=0.135 / 100)
    data = images_of(coco, "train2017", jitter=(0.1, 2.0))
    train(detector, data, recipe, loss=detection_loss, seed=0, progress=None)
    read, classes, _ = load_detector(whole / "detector.safetensors")
    assert same(read.state_dict(), detector.state_dict()) and classes == data.classes
    assert same(state_of(load_vit(whole / "student.safetensors")), state_of(detector.backbone.vit))
    found = evaluate_detector(detector, images_of(coco, "val2017"))
    record = read_record(whole / "record.json")
    measured = {name: x for name, x in record.results.items() if name.startswith("val2017_")}
    assert measured == {f"val2017_{name}": x for name, x in found.items()}
    parts = [record.results[f"task_loss/loss_{part}"] for part in MASK_RCNN]
    assert record.results["task_loss"] == pytest.approx(sum(parts), rel=1e-5)
    assert {"box_AP", "mask_AP"} <= set(found)
    capsys.readouterr()
    assert command.main(["evaluate", str(whole)]) == 0
    printed = capsys.readouterr().out
    assert str(whole / "detector.safetensors") in printed and "of 3 images" in printed
    for kind in ("box", "mask"):
        assert f"{kind} AP {100 * found[f'{kind}_AP']:.1f}" in printed


def test_stopped_within_a_pass_it_goes_on_to_the_same_bits(coco, whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(1, KeyboardInterrupt(), patch)
        assert command.main(asked(coco, out, save_every=1)) == 130
    assert not (out / "detector.safetensors").exists()
    assert command.main(["resume", str(out)]) == 0
    ends = [load_detector(each / "detector.safetensors").detector for each in (out, whole)]
    assert same(ends[0].state_dict(), ends[1].state_dict())
    assert read_record(out / "record.json").results == read_record(whole / "record.json").results


def test_copy_keeps_its_teacher_and_distill_and_fine_tuning_do_not(coco, teacher, tmp_path, capsys):
    path, vit = teacher
    instead = {"plan.how": "copy", "plan.layers": "null"}
    for method in ("distill", "fine-tune", "copy"):
        out, more = tmp_path / method, {"steps": 1, "detector": "fcos"}
        recipe = "distill" if method == "copy" else method
        more |= {"plan.layers": "[0, 1]"} if method == "distill" else {}
        more |= {"method": "copy", **instead, "ema": 0.5} if method == "copy" else {}
        still = {"lr": 1e-12, "weight_decay": 0} if method == "fine-tune" else {}
        request = asked(coco, out, "--teacher", str(path), recipe=recipe, **more, **still)
        assert command.main(request) == 0
        detector = load_detector(out / "detector.safetensors").detector
        assert isinstance(detector.backbone.vit, AttentionTransfer) == (method == "copy")
        if method == "copy":
            assert same(state_of(detector.teacher), state_of(vit))
            assert same(state_of(load_bundle(out / "student.safetensors").teacher), state_of(vit))
        else:
            assert same(state_of(load_vit(out / "student.safetensors")), state_of(detector.backbone.vit))
        if method == "fine-tune":
            start, found = state_of(vit), state_of(detector.backbone.vit)
            assert all(torch.allclose(found[name], start[name], rtol=0, atol=1e-9) for name in start)
    averaged = load_detector(tmp_path / "copy" / "averaged.safetensors").detector
    assert not same(averaged.heads.state_dict(), detector.heads.state_dict())
    assert read_config(tmp_path / "copy").detector == "fcos"
    capsys.readouterr()
    assert command.main(["evaluate", str(tmp_path / "copy"), "--averaged"]) == 0
    assert "averaged.safetensors on coco" in (said := capsys.readouterr().out) and "mask" not in said


def broken(coco, folder, change):
    """A copy of the folder whose annotations were changed."""
    shutil.copytree(coco, folder)
    file = folder / "annotations" / "instances_train2017.json"
    read = json.loads(file.read_text())
    change(read)
    file.write_text(json.dumps(read))
    return folder


def test_categories_are_matched_by_their_ids(coco, tmp_path, capsys):
    other = broken(coco, tmp_path / "other", lambda read: read["categories"].reverse())
    assert command.main(asked(other, tmp_path / "ok", steps=1)) == 0
    fewer = broken(coco, tmp_path / "fewer", lambda x: x["categories"].append({"id": 99, "name": "bird"}))
    assert command.main(asked(fewer, tmp_path / "run")) == 2
    assert "'bird'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_published_detector_by_its_numbers(monkeypatch):
    """ViT-B of 448 pixels, counted without being run: 784 patches, 1,849 steps an epoch, 184,900 in all."""
    from atfamily.measures.accounting import Memory
    from atrun import estimate as of

    monkeypatch.setattr(of, "memory_of", lambda config, outputs: Memory(0, 0, 0, 0, 0))
    monkeypatch.setattr(of, "time_steps", lambda *arguments: None)
    monkeypatch.setattr(of, "flops_of_detector", lambda config, outputs: 10**12)
    config = configure("vitdet-scratch-vit-base", "coco")
    found = estimate(config, 118_287, 80)
    text = as_text(found)
    assert found.steps_per_epoch == 1849 and "184,900 steps of 64 images" in text
    assert "at least 1000 GFLOPs an image in training, 1.18e+19 FLOPs in all" in text
    assert "785 tokens (28 x 28 patches and 1 more)" in text
    with torch.device("meta"):
        detector = mask_rcnn(configure("vitdet-scratch-vit-base", "coco").skeleton(80), 80, SIZES["vitdet"])
    numbers = sum(each.numel() for each in detector.parameters())
    of_vit = sum(each.numel() for each in found.skeleton.parameters())
    assert sum(group.numbers for group in found.groups) == numbers
    assert f"{numbers - of_vit:,} parameters in pyramid and heads" in text
    assert found.moments["milestone 1"] == (164_356, pytest.approx(1e-5), pytest.approx(1e-5))
    assert found.moments["last step"][1] == pytest.approx(1e-6)


@pytest.mark.parametrize("method, again", [("scratch", 0), ("copy", 1), ("distill", 4)])
def test_two_layers_more_cost_a_detector_what_they_cost_a_classifier(method, again):
    """By the formulas of `accounting`, and, `again` times a layer, a product of the size of queries by keys
    that is made over again in order to store no map. Fused attention counts as written out: PyTorch 2.6 does
    not count the CPU's kernel, and later ones count its scores twice."""
    config = configure("vitdet-scratch-vit-base", "coco")
    config = replace(config, detector="fcos", detector_sizes="small")
    formula_of = {"copy": copy, "distill": distill}.get(method, lambda shape, layers: fine_tuning(shape))
    if method != "scratch":
        config = replace(config, method=method, plan=Plan(how=method), teacher=UNTRAINED)
    counted, formula = [], []
    for depth in (2, 4):
        deeper = replace(config, model=Architecture("scenes", {"depth": depth}))
        counted.append(flops_of_detector(deeper, 80))
        formula.append(formula_of(shape_of(deeper.skeleton(80)), depth))
    product = 4 * 2 * 65 * 65 * 16  # of four heads, 65 tokens
    assert counted[1] - counted[0] == formula[1] - formula[0] + 2 * again * product
