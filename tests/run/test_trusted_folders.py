"""A run's folder while others write in it, after data have changed, and with what a killed run has left."""

import fcntl
import os
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from atbook.worlds import glyphs
from atlib.processes import require_together
from atrun import __main__ as command
from atrun import runner
from atrun.checkpoint_manager import identity_of
from atrun.config import read_config
from atrun.data.photos import open_photos
from atrun.record import read_record
from atrun.runner import is_finished, is_main_process, resume
from tests.picture_files import write_folders
from tests.stopped_runs import asked
from tests.stopped_runs import few_held_out as few_held_out  # a fixture


def test_who_loses_a_folder_writes_nothing_into_it(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    real = runner._make_ready

    def meanwhile(*arguments):
        ready = real(*arguments)
        out.mkdir()
        held.append(open(out / ".lock", "w"))  # noqa: SIM115 - another run begins while this one is made ready
        fcntl.flock(held[0], fcntl.LOCK_EX)
        return ready

    held: list = []
    monkeypatch.setattr(runner, "_make_ready", meanwhile)
    assert command.main(asked("find-scratch", out)) == 2
    assert "another process" in capsys.readouterr().err and os.listdir(out) == [".lock"]
    held[0].close()


CHANGES = {
    "a file's content": lambda folder: Image.new("RGB", (40, 48)).save(folder / "cat" / "000.png"),
    "a file's time": lambda folder: os.utime(folder / "cat" / "000.png", (1, 1)),
    "one more": lambda folder: shutil.copy(folder / "cat" / "000.png", folder / "cat" / "97.png"),
    "two swapped": lambda folder: swap(folder / "cat" / "000.png", folder / "cat" / "003.png"),
    "another class": lambda folder: (folder / "cat" / "000.png").rename(folder / "dog" / "000.png"),
}


def swap(a, b):
    a.rename(a.with_suffix(".tmp")), b.rename(a), a.with_suffix(".tmp").rename(b)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_are_noticed(change, tmp_path):
    """A run goes on with none of these: test_evaluate_command.py."""
    pictures = write_folders(write_folders(tmp_path, "train", range(20)), "validation", range(9))
    before = identity_of(open_photos(str(pictures), split="train"))
    assert before == identity_of(open_photos(str(pictures), split="train"))
    CHANGES[change](pictures / "train")
    assert identity_of(open_photos(str(pictures), split="train")) != before


def test_generated_pixels_and_classes_are_known():
    images = glyphs.marked_glyphs(size=8, seed=0)
    other = replace(images, pixels=images.pixels + 1)
    assert identity_of(images) == identity_of(glyphs.marked_glyphs(size=8, seed=0)) != identity_of(other)
    assert set(identity_of(images)) == {"classes", "pixels"}


def test_a_cut_file_of_weights_is_not_finished_and_what_was_half_written_goes(tmp_path):
    out = tmp_path / "run"
    assert command.main(asked("find-scratch", out)) == 0
    config, weights = read_config(out), out / "student.safetensors"
    whole = weights.read_bytes()
    assert is_finished(out, config)
    weights.write_bytes(whole[: len(whole) // 2])
    assert not is_finished(out, config)
    left = [out / ".student.safetensors.123.tmp", out / "checkpoints" / ".written.77.tmp"]
    for path in left:
        path.write_bytes(b"half")
    (out / ".mine.tmp").write_bytes(b"a user's own")
    with open(out / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process"):
            resume(out)
    resume(out)
    assert weights.read_bytes() == whole and is_finished(out, config) and read_record(out / "record.json")
    assert not any(path.exists() for path in left) and (out / ".mine.tmp").exists()


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "2", "RANK": "1"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"},  # asked for two, started one
    ],
    ids=str,
)
def test_processes_that_do_not_know_of_each_other_are_refused(environment, tmp_path, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError):
        require_together()
    assert command.main(asked("find-scratch", tmp_path / "run")) == 2
    assert not (tmp_path / "run").exists()


def test_processes_that_a_launcher_started_are_not(monkeypatch):
    require_together()
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    require_together()
    assert not is_main_process()
