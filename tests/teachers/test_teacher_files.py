"""Weight files are read as data: every kind that is published, and nothing that would have to be run."""

import argparse
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from atrun.teachers.files import read_weights
from tests.helpers import same

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.float16)}


@pytest.mark.parametrize("name", ["", "model", "state_dict", "model_ema", "teacher"])
@pytest.mark.parametrize("zipped", [True, False])
def test_pth_files_with_and_without_a_container(tmp_path, name, zipped):
    beside = {"epoch": 3, "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)), "optimizer": {"state": {}}}
    content = {name: STATE, **beside} if name else STATE
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    found = read_weights(tmp_path / "w.pth")
    assert same(found.tensors, STATE) and found.container == name and found.header == {}
    assert found.beside == (("epoch", "args", "optimizer") if name else ())


def test_dinos_teacher_is_taken_before_its_student(tmp_path):
    torch.save({"student": {"a": torch.zeros(1)}, "teacher": STATE}, tmp_path / "w.pth")
    found = read_weights(tmp_path / "w.pth")
    assert same(found.tensors, STATE) and found.beside == ("student",)


class Bad:
    """Unpickling one runs a command that leaves a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize(
    "write",
    [
        lambda path, bad: torch.save({"model": STATE, "args": bad}, path),
        lambda path, bad: torch.save({"model": STATE, "args": argparse.Namespace(hidden=bad)}, path),
        lambda path, bad: torch.save(bad, path, _use_new_zipfile_serialization=False),
        *(lambda path, bad, p=p: path.write_bytes(pickle.dumps(bad, protocol=p)) for p in (2, 3, 4, 5)),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_pickle_is_not_run(tmp_path, write):
    mark, path = tmp_path / "was-run", tmp_path / "w.pth"
    write(path, Bad(mark))
    pickle.loads(pickle.dumps(Bad(tmp_path / "control")))
    assert (tmp_path / "control").exists(), "this command does run when the pickle is trusted"
    with pytest.raises(OSError, match="w.pth") as caught:
        read_weights(path)
    assert "weights_only" not in str(caught.value), "torch's advice is to run the code after all"
    assert not mark.exists()


def test_code_in_an_npz_is_not_run(tmp_path):
    mark = tmp_path / "was-run"
    np.savez(tmp_path / "w.npz", a=np.array([Bad(mark)], dtype=object))
    with pytest.raises(OSError, match="w.npz"):
        read_weights(tmp_path / "w.npz")
    assert not mark.exists()


@pytest.mark.parametrize("kind, left", [("zipped", 0.98), ("old", 0.5), ("safetensors", 0.5)])
def test_files_cut_off_are_named_and_left_alone(tmp_path, kind, left):
    path, state = tmp_path / "w.npz", {"weight": torch.randn(40, 40)}
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zipped")
    content = path.read_bytes()[: int(left * path.stat().st_size)]
    path.write_bytes(content)
    with pytest.raises(OSError, match="w.npz"):
        read_weights(path)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]
