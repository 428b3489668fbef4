"""Two forked processes on the CPU: weights divided by FSDP2 end where DDP's do.

The tolerance: gradients are summed in another order, so weights are held to an absolute 1e-6 after six steps
that move them by more than 1e-3.
"""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from atfamily.detection.detector import SIZES, mask_rcnn
from atfamily.detection.evaluate import evaluate_detector
from atlib import create_vit
from atrun.data.coco import CocoObjects
from tests import divided
from tests.detection.knows import Knows
from tests.helpers import in_a_fork, made_once, same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder that the two processes wrote to, and how they ended."""
    folder, ended = made_once(
        tmp_path_factory, "divided", lambda folder: in_a_fork(folder, divided.main, folder, seconds=400)
    )
    assert ended.code == 0, ended.said
    if divided.ABORTED in ended.said:
        warnings.warn(ended.said[-8000:], stacklevel=1)
    return folder, ended.returned, ended.said


def found(folder, name, rank=0):
    return json.loads((folder / name / f"found-{rank}.json").read_text())


def difference(left, right):
    return max((left[name] - right[name]).abs().max().item() for name in left)


def without_bias_of_keys(weights):
    """No map depends on the bias of keys: its gradient is what rounding leaves, and Adam steps along it."""
    found = dict(weights)
    for name, value in weights.items():
        if name.endswith("attn.qkv.bias"):
            of_q, of_k, of_v = value.chunk(3)
            assert of_k.abs().max() < 1e-2
            found[name] = torch.cat([of_q, of_v])
    return found


def of_student(weights):
    return {name.removeprefix("student."): value for name, value in weights.items()}


def test_the_processes_ended_as_they_should(done):
    _, ended, said = done  # that divided blocks are walked exactly, tests/core/test_divided_blocks.py says
    assert all(codes == [0, 0] for codes in ended.values()), said


def test_each_process_holds_half_of_the_weights(done):
    """Between steps; where nothing is divided, all of them. The caller's model stays a plain one."""
    folder, _, _ = done
    for rank in range(2):
        half = found(folder, "divided", rank)
        assert half["world"] == 2 and all(share == pytest.approx(0.5, abs=0.02) for share in half["mine"])
        assert half["plain"] == "VisionTransformer" and half["teacher kept"]
        assert found(folder, "whole", rank)["mine"] == [1.0] * 4


@pytest.mark.parametrize("part", ["student", "average"])
def test_divided_weights_end_where_whole_ones_do(part, done):
    """The divided run was stopped after four of six steps besides, and went on with new models."""
    folder, _, _ = done
    whole, halves = (load_file(folder / name / f"{part}-0.safetensors") for name in ("whole", "divided"))
    shapes = [{name: value.shape for name, value in state.items()} for state in (whole, halves)]
    assert shapes[0] == shapes[1]
    assert difference(*map(without_bias_of_keys, (whole, halves))) < 1e-6
    assert difference(divided.small_pair().student.state_dict(), whole) > 1e-3, "it went somewhere"
    assert same(halves, load_file(folder / "divided" / f"{part}-1.safetensors"))


def test_metrics_of_divided_weights_are_those_of_whole_ones(done):
    """Of the weights and of their average, which takes their place for a while; 30 images, each once."""
    folder, _, _ = done
    whole, halves = (found(folder, name)["history"] for name in ("whole", "divided"))
    assert [entry["count"] for entry in halves] == [30, 30]
    for left, right in zip(whole, halves, strict=True):
        assert left == pytest.approx(right, rel=1e-5)
        assert left["test_loss"] != left["average_test_loss"]


def test_checkpoints_of_divided_weights_are_whole(done):
    """One file of weights, which torch reads without unpickling anything but tensors."""
    newest = sorted((done[0] / "divided" / "kept").glob("step-*"))[-1]
    weights = torch.load(newest / "pytorch_model_fsdp.bin", weights_only=True)
    student = load_file(done[0] / "divided" / "student-0.safetensors")
    assert difference(student, of_student(weights)) == 0
    assert not list(newest.rglob("*.metadata")) and not list(newest.rglob("*.distcp"))


def test_a_detector_learns_in_two_processes_and_is_measured_by_both(done):
    """Both end with the same weights, which have moved; the first tells the precision of all five scenes."""
    folder, _, _ = done
    first, second = (found(folder, "detected", rank) for rank in range(2))
    assert first["world"] == 2 and second["found"] == {}
    ends = [load_file(folder / "detected" / f"detector-{rank}.safetensors") for rank in range(2)]
    assert difference(*ends) == 0
    torch.manual_seed(1)
    start = mask_rcnn(create_vit("scenes", num_classes=0), 8, SIZES["small"]).state_dict()
    assert difference(start, ends[0]) > 1e-4
    file = folder / "coco" / "annotations" / "instances_val2017.json"
    images = CocoObjects(folder / "coco" / "val2017", file, size=64)
    alone = evaluate_detector(Knows(images, moved=6), images)
    assert 0 < alone["box_AP"] < 1 and first["found"] == alone
