"""Where teacher and student look: what the picture of a training run shows, and that it changes no bit."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from atlib import AttentionTransfer, Plan, walk
from atrun import pictures
from atrun.config import RunConfig
from atrun.configure import configure
from atrun.pictures import as_file, maps_picture
from atrun.runner import resume, start
from tests.helpers import random_images, randomise, tiny
from tests.stopped_runs import few_held_out as few_held_out  # a fixture

TEACHER = "results/transfer/find/teacher-seed0.safetensors"
SMALL = {"steps": "5", "batch_size": "8", "data_size": "20", "save_every": "2"}


def looked_at(layer):
    """A map (B, H, 1 + 16, 1 + 16): what the class token gives to each patch."""
    return layer.map.mean(1)[:, 0, 1:].unflatten(1, (4, 4))


def test_the_columns_are_the_maps_of_teacher_and_student():
    images = random_images(3, 3, 32, 32)
    teacher, student = randomise(tiny(depth=4), 1), randomise(tiny(depth=4), 2)
    for how in ("distill", "copy"):
        pair = AttentionTransfer(teacher, student, Plan(how=how, layers=[0, 1, 3])).train()
        columns = pictures._columns(pair.eval(), images)
        assert list(columns) == [f"{name} {layer}" for name in ("teacher", "student") for layer in (0, 1, 3)]
        own = walk(student.eval(), images).layers
        theirs = walk(teacher, images).layers
        for layer in (0, 1, 3):
            torch.testing.assert_close(columns[f"teacher {layer}"], looked_at(theirs[layer]))
            expected = theirs[layer] if how == "copy" else own[layer]
            torch.testing.assert_close(columns[f"student {layer}"], looked_at(expected))


def test_a_teachers_layers_have_their_own_numbers():
    """Of a teacher of other depth, and one of its layers that teaches two of the student's."""
    teacher, student = randomise(tiny(depth=2), 1), randomise(tiny(depth=4), 2)
    pair = AttentionTransfer(teacher, student, Plan(how="distill", layers={0: 0, 1: 0, 3: 1})).eval()
    columns = pictures._columns(pair, images := random_images(3, 3, 32, 32))
    assert [*columns][:3] == ["teacher 0", "teacher 0 for 1", "teacher 1 for 3"]
    torch.testing.assert_close(columns["teacher 1 for 3"], looked_at(walk(teacher, images).layers[1]))


@pytest.mark.parametrize(
    "model",
    [
        tiny(depth=3),
        tiny(class_token=False, global_pool="avg"),
        AttentionTransfer(tiny(1), tiny(2), Plan(how="distill", what="q")),
        AttentionTransfer(tiny(1), tiny(2, num_heads=4), Plan(how="distill", unequal_heads="average")),
        AttentionTransfer(tiny(1, reg_tokens=2), tiny(2, reg_tokens=2), Plan()),
        AttentionTransfer(tiny(1, patch_size=4), tiny(2), Plan(unequal_grid="resample")),
    ],
)
def test_every_kind_of_pair_has_a_picture(model):
    model.train()
    figure = maps_picture(model, random_images(2, 3, 32, 32))
    assert model.training and as_file(figure).startswith(b"\x89PNG")


def config(**changes) -> RunConfig:
    data = "atbook.worlds:marked_glyphs"
    return configure("find-distill", data, TEACHER, SMALL | changes)


def test_pictures_come_every_so_often_and_change_no_bit(tmp_path):
    plain = start(config(), tmp_path / "plain")
    drawn = start(config(maps_every="2"), tmp_path / "drawn")
    assert drawn.history == plain.history
    first, second = (tmp_path / name / "student.safetensors" for name in ("plain", "drawn"))
    assert first.read_bytes() == second.read_bytes()
    assert not (tmp_path / "plain" / "maps").exists()
    found = sorted((tmp_path / "drawn" / "maps").iterdir())
    assert [path.name for path in found] == ["step-00000005.png"], "two passes of 3 steps, cut at the fifth"
    pixels = np.asarray(Image.open(found[0]).convert("RGB"))
    assert pixels.std() > 10, "a picture of one colour shows nothing"


def test_a_callback_gets_what_the_log_has(tmp_path):
    entries = []
    start(config(), tmp_path / "run", log=entries.append)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert entries == lines and [entry["step"] for entry in entries] == [1, 2, 3, 3, 4, 5, 5]
    for entry in entries:
        assert entry["loss"] == pytest.approx(entry["task_loss"] + 10 * entry["transfer_loss"])
    (tmp_path / "run" / "student.safetensors").unlink()
    (tmp_path / "run" / "record.json").unlink()
    resume(tmp_path / "run", log=entries.append)
    assert len(entries) == len(lines), "nothing was left to train"
