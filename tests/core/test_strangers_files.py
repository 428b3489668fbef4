"""A stranger's file says what a file may say: it names no other file, no address, no code, no absurd size."""

import json
import os
import pickle
import sys

import pytest
import timm
import torch
from safetensors.torch import save_file

from atfamily.detection.files import load_detector
from atfamily.stored_maps import load_stored_maps
from atlib import create_vit, load_teacher
from atlib.checkpoint import load_bundle, load_vit
from atrun.__main__ import main
from atrun.config import read_config, write_config
from atrun.configure import configure
from atrun.export import open_to_export
from atrun.runner import result_path, resume

TINY = {"embed_dim": 12, "depth": 1, "num_heads": 2, "img_size": 32, "num_classes": 3}
NAME = "vit_tiny_patch16_224"
# What timm takes for itself, sizes beyond any ViT's or the file's (two within bounds), values not plain.
ATTACKS = [
    {"checkpoint_path": "PICKLE"}, {"pretrained": True},
    {"pretrained": True, "pretrained_cfg_overlay": {"file": "PICKLE"}},
    {"pretrained": True, "pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/x.pth"}},
    {"pretrained_cfg": {"url": "http://127.0.0.1:9/x.pth"}}, {"cache_dir": "/tmp/elsewhere"},
    {"features_only": True}, {"scriptable": True}, {"device": "cuda"}, {"block_fn": "os.system"},
    {"norm_layer": {"a": 1}}, {"norm_layer": "../../etc/passwd"}, {"depth": 10**9}, {"embed_dim": 10**9},
    {"embed_dim": 2**15, "depth": 500}, {"img_size": 10**9}, {"img_size": 2**14, "patch_size": 1},
    {"img_size": [10**9, 10**9]}, {"patch_size": -1}, {"num_classes": 10**12}, {"reg_tokens": 10**9},
    {"mlp_ratio": 1e30}, {"mlp_ratio": float("inf")}, {"depth": "12"},
    {"embed_dim": 4096, "depth": 48, "num_heads": 16}, {"num_classes": 2**20},
]  # fmt: skip


class Attack:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def pickled(tmp_path, monkeypatch, no_network):
    """A pickle that leaves a mark where it is run, and a timm that opens whatever it is told to."""
    path, real = tmp_path / "weights.pth", timm.create_model
    path.write_bytes(pickle.dumps(Attack(tmp_path / "run")))

    def like_the_oldest(name, *args, checkpoint_path="", pretrained=False, **kwargs):
        assert not pretrained and "pretrained_cfg_overlay" not in kwargs
        if checkpoint_path:
            torch.load(checkpoint_path, weights_only=False)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(timm, "create_model", like_the_oldest)
    yield path
    assert not (tmp_path / "run").exists()


def said(attack, pickled):
    return json.loads(json.dumps(attack).replace("PICKLE", str(pickled)))


def written(path, header):
    """A file of the tiny ViT's weights that says something else of it."""
    save_file(create_vit(NAME, **TINY).state_dict(), path, {"atlib": json.dumps(header)})
    return path


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_a_header_names_no_file_no_address_and_no_absurd_size(attack, tmp_path, pickled):
    native = {"name": NAME, "overrides": TINY | said(attack, pickled)}
    path = written(tmp_path / "vit.safetensors", {"architecture": native})
    for read in (load_vit, open_to_export, load_teacher):
        with pytest.raises((OSError, ValueError)):
            read(path)
    if attack not in ATTACKS[::6]:
        return  # other files are read by the same rule
    bundle = written(tmp_path / "bundle.safetensors", {"needs_teacher": False, "student": native})
    with pytest.raises(OSError):
        load_bundle(bundle)
    maps = written(tmp_path / "maps.safetensors", {"stored_maps": True, "student": native})
    with pytest.raises(OSError):
        load_stored_maps(maps)
    sizes = {"detector": {"heads": "fcos", "classes": ["a"], "sizes": {}}, "student": native}
    with pytest.raises(OSError):
        load_detector(written(tmp_path / "detector.safetensors", sizes))


@pytest.mark.parametrize("attack", ATTACKS[:-2], ids=str)
def test_a_config_beside_weights_is_read_so_too(attack, tmp_path, pickled):
    save_file(create_vit(NAME, **TINY).state_dict(), tmp_path / "model.safetensors")
    about = {"architecture": NAME, "model_args": TINY | said(attack, pickled)}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError):
        load_teacher(tmp_path)


# --- a run's folder ---


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder with a module of a stranger's in it, from which `python -m` imports."""
    code = f"import os\nos.mkdir({str(tmp_path / 'run')!r})\ndef made(**k): ...\n"
    (tmp_path / "helper.py").write_text(code), (tmp_path / "sklearn.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert not (tmp_path / "run").exists() and "helper" not in sys.modules


def named(folder, data):
    """A run's folder whose config names this function."""
    config = configure("find-scratch", "atbook.worlds:marked_glyphs")
    path = write_config(folder, config)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": data}))
    written(result_path(folder, "scratch"), {"architecture": {"name": NAME, "overrides": TINY}})
    return folder


@pytest.mark.parametrize("data", ["helper:made", "os:abort"])
def test_a_runs_folder_names_no_function_of_the_working_folder(data, elsewhere):
    run = named(elsewhere / "its", data)
    for read in (read_config, resume):
        with pytest.raises(ValueError, match=data):
            read(run)
    assert main(["evaluate", str(run)]) == 2
    assert read_config(run, trust_data=True).data == data  # and runs nothing yet
