"""Checkpoints: the same bits after any interruption, and no failing disk costs the last good one."""

import errno
import json
import os
import random
import resource
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from atlib import AttentionTransfer, Plan
from atlib.data import Images, crop_and_flip
from atlib.evaluate import evaluate
from atlib.pair import Normalisation, attach
from atlib.recipe import Recipe
from atlib.train import NonFiniteLoss, Preempted, student_loss, train
from atrun.checkpoint_manager import (
    CheckpointError,
    CheckpointManager,
    damage_of,
    digest_of_model,
    digest_of_tensors,
)
from tests.helpers import same, state_of, tiny

# 64 images in steps of 20: passes of four steps, the last of four images only.
HALF = Normalisation((0.5,) * 3, (0.25,) * 3)
SHORT = Recipe(steps=10, batch_size=20)
EVERYTHING = replace(SHORT, accumulate=2, ema=0.9, mixup=0.8, cutmix=1.0, layer_decay=0.8)


def pair(how):
    return lambda: AttentionTransfer(tiny(1), tiny(2, drop_path_rate=0.3), Plan(how=how))


def run(build, data, recipe, folder=None, every=100, **options):
    """A fresh model, as after a restart, trained (further): weights, history, averaged weights."""
    model, average = build(), tiny() if recipe.ema else None
    torch.manual_seed(random.randrange(1000))  # what was drawn before must not matter
    kept = None if folder is None else CheckpointManager(folder, every)
    history = train(model, data, recipe, seed=7, progress=None, keeper=kept, average_into=average, **options)
    return state_of(model), history, state_of(average) if average is not None else {}


def kept_run(data, folder, recipe=SHORT, every=100, config=None, free=(), **options):
    """A fresh "tiny" trained (further), with its checkpoints in `folder`."""
    keeper = CheckpointManager(folder, every, config=config, free=free)
    return train(tiny(), data, recipe, progress=None, keeper=keeper, **options)


def steps(folder):
    return [int(path.name[5:]) for path in sorted(Path(folder).glob("step-*"))]


# --- the same bits


@pytest.mark.parametrize(
    "build, recipe",
    [
        (lambda: tiny(drop_path_rate=0.3), EVERYTHING),
        (pair("copy"), SHORT),
        (pair("distill"), EVERYTHING),
        (tiny, replace(SHORT, optimizer="lamb", mixed_precision="bf16", binary=True, clip=None)),
    ],
    ids=["plain, everything", "copy", "distill, everything", "lamb, bf16, binary"],
)
def test_a_run_in_pieces_ends_with_the_same_bits(build, recipe, glyphs64, tmp_path):
    """Stopped in the middle of a pass (3), at the end of one (4), and when it is finished."""
    moving = glyphs64.with_augment(crop_and_flip())
    # whoever draws from a global generator on the way finds each as it was left
    measured = {
        "evaluate": lambda model: {
            "accuracy": evaluate(model, glyphs64).accuracy,
            "drawn": [torch.rand(()).item(), random.gauss(0, 1), float(np.random.randn())],
        },
        "evaluate_every": 1,
    }
    whole, history, averaged = run(build, moving, recipe, **measured)
    for end in (3, 4, None, None):
        pieces, of_pieces, average_of_pieces = run(build, moving, recipe, tmp_path, stop_at=end, **measured)
    assert same(pieces, whole) and same(averaged, average_of_pieces) and of_pieces == history
    whole = {name.removeprefix("student."): value for name, value in whole.items()}
    assert not recipe.ema or not same(averaged, whole)


# --- what is kept


def test_the_last_two_are_kept(glyphs64, tmp_path):
    kept_run(glyphs64, tmp_path, Recipe(steps=20, batch_size=16), every=3)
    names = ["step-00000018", "step-00000020"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names, "nothing else is left"
    assert CheckpointManager(tmp_path, every=3).latest().name == names[1]


def test_nothing_that_is_read_back_can_run_code(glyphs64, tmp_path, monkeypatch):
    kept_run(glyphs64, tmp_path, EVERYTHING, stop_at=2)
    files = {path.name for path in (tmp_path / "step-00000002").iterdir()}
    tensors = {"model.safetensors", "process-00000.safetensors", "shared.safetensors"}
    assert tensors | {"manifest.json", "facts.json"} <= files
    loads, load = [], torch.load

    def noted(*arguments, **options):
        loads.append(options.get("weights_only"))
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", noted)
    monkeypatch.setattr("pickle.load", lambda *arguments, **options: pytest.fail("pickle.load"))
    kept_run(glyphs64, tmp_path, EVERYTHING, stop_at=3)
    assert loads and all(loads), "torch.load reads weights_only"


# --- what was changed


def test_a_changed_run_is_refused_and_says_what_changed(glyphs64, tmp_path):
    config = {"data": "glyphs", "model": {"num_heads": 4}, "plan": {"how": "copy"}}
    kept_run(glyphs64, tmp_path, config=config, stop_at=2)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    other = replace(SHORT, lr=2e-3, betas=(0.9, 0.95))
    config = {"data": "glyphs", "model": {"num_heads": 2}, "plan": {"how": "distill"}}
    with pytest.raises(ValueError) as caught:
        kept_run(glyphs64, tmp_path, other, config=config, seed=1)
    for name in ("recipe.lr was 0.001", "recipe.betas", "seed was 0", "how was 'copy'", "num_heads was 4"):
        assert name in str(caught.value)
    assert "data was" not in str(caught.value)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def weighted(model, images, targets, recipe, weight):
    return weight * student_loss(model, images, targets, recipe)


def distilled(images, folder, make=tiny, seen=HALF, roll=0, loss=partial(weighted, weight=1.0), **options):
    """A run with a teacher, in which all can be otherwise that a config does not say."""
    attach(teacher := make(1), seen)
    model = AttentionTransfer(teacher, tiny(2), Plan(how="distill", mismatched=True), normalisation=HALF)
    data = Images(images.pixels, images.targets.roll(roll), images.classes, HALF.mean, HALF.std)
    keeper = CheckpointManager(folder, 100)
    return train(model, data, SHORT, loss=loss, progress=None, keeper=keeper, **options)


@pytest.fixture(scope="module")
def begun(glyphs64, tmp_path_factory):
    distilled(glyphs64, folder := tmp_path_factory.mktemp("begun"), stop_at=2)
    return folder


@pytest.mark.parametrize(
    "named, change",
    [
        ("teachers", {"make": lambda seed: tiny(3)}),
        ("teachers", {"make": lambda seed: tiny(seed, act_layer="relu")}),  # of the same weights
        ("views", {"seen": replace(HALF, std=(0.2, 0.2, 0.2000001))}),  # another preprocessor_config.json
        ("targets", {"roll": 1}),
        ("loss", {"loss": partial(weighted, weight=50.0)}),
        ("loss", {"loss": student_loss}),
    ],
)
def test_what_a_config_does_not_say_is_compared_too(glyphs64, begun, named, change):
    with pytest.raises(ValueError) as caught:
        distilled(glyphs64, begun, **change)
    said = [name for name in ("teachers", "views", "targets", "loss") if f"{name} was" in str(caught.value)]
    assert said == [named]


def test_a_digest_of_a_model_sees_what_its_weights_do_not_show():
    digest, weights = digest_of_model(tiny(1)), digest_of_tensors(tiny(1).state_dict())
    assert digest == digest_of_model(tiny(1)) and digest != digest_of_model(tiny(1, num_heads=1))
    assert digest != digest_of_model(tiny(1, act_layer="gelu_tanh"))
    exact, rough = (torch.nn.Sequential(torch.nn.GELU(approximate=how)) for how in ("none", "tanh"))
    assert digest_of_model(exact) != digest_of_model(rough)
    others = tiny(1, num_heads=1), tiny(2), tiny(1).to(torch.bfloat16)
    assert [digest_of_tensors(other.state_dict()) == weights for other in others] == [True, False, False]


def test_what_is_free_may_change_also_where_it_was_written_down(glyphs64, tmp_path):
    kept_run(glyphs64, tmp_path, config={"data": "glyphs", "on_corrupt": "raise"}, stop_at=2)
    with pytest.raises(ValueError):
        kept_run(glyphs64, tmp_path, config={"data": "glyphs"})
    history = kept_run(glyphs64, tmp_path, config={"data": "glyphs"}, free=("on_corrupt",))
    assert history[-1]["step"] == 10


# --- damage


def flip(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.fixture(scope="module")
def stopped(glyphs64, tmp_path_factory):
    """The weights at the end of a run; and the folder of one that stopped after 6 steps, kept at 4 and 6."""
    folder = tmp_path_factory.mktemp("stopped")
    run(tiny, glyphs64, SHORT, folder, every=2, stop_at=6)
    return run(tiny, glyphs64, SHORT)[0], folder


MANIFESTS = "{", '{"files": {}, "metrics": {}}', '{"files": {"facts.json": {"sha256": "x"}}, "metrics": {}}'


@pytest.mark.parametrize(
    "file, harm",
    [
        ("model.safetensors", flip),
        ("optimizer.bin", lambda path: path.write_bytes(path.read_bytes()[:100])),
        ("process-00000.safetensors", Path.unlink),
        ("manifest.json", Path.unlink),
        *(("manifest.json", lambda path, text=text: path.write_text(text)) for text in MANIFESTS),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(file, harm, stopped, tmp_path):
    kept = CheckpointManager(shutil.copytree(stopped[1], tmp_path / "kept"), every=2)
    assert steps(kept.folder) == [4, 6] and damage_of(kept.folder / "step-00000006") is None
    harm(kept.folder / "step-00000006" / file)
    with pytest.warns(UserWarning, match=f"step-00000006 .*{file}") as warned:
        assert [kept.latest().name for _ in range(2)] == ["step-00000004"] * 2
    assert len(warned) == 1, "it is said once"


def no_space(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("limit", [None, 1_000, 90_000], ids="{} bytes".format)
def test_a_full_disk_leaves_the_last_good_checkpoint(limit, glyphs64, stopped, tmp_path, monkeypatch):
    """None: the last step fails. Else the operating system refuses to write more than so many bytes into a
    file: safetensors, torch.save and Python each say so in another way."""
    kept = shutil.copytree(stopped[1], tmp_path / "kept")
    assert limit is None or limit < max(path.stat().st_size for path in kept.glob("*/*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(entry):
        if entry["step"] == 7 and limit is None:
            monkeypatch.setattr("os.replace", no_space)
        elif entry["step"] == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(CheckpointError):
            run(tiny, glyphs64, SHORT, kept, every=2, log=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
        monkeypatch.undo()
    assert damage_of(kept / "step-00000006") is None and steps(kept) == [4, 6]
    assert len(list(kept.iterdir())) == 2
    assert same(run(tiny, glyphs64, SHORT, kept, every=2)[0], stopped[0])


def test_a_folder_that_cannot_be_written_to_is_found_before_training(glyphs64, tmp_path):
    (tmp_path / "file").write_text("")
    model = tiny()
    before = state_of(model)
    with pytest.raises(CheckpointError):
        train(model, glyphs64, SHORT, progress=None, keeper=CheckpointManager(tmp_path / "file", 2))
    assert same(state_of(model), before)


# --- errors and signals on the way


def test_a_loss_that_is_not_finite_names_the_checkpoint_and_the_images(glyphs64, tmp_path):
    def loss(model, images, targets, recipe):
        value = student_loss(model, images, targets, recipe)
        loss.calls += 1
        return value * float("nan") if loss.calls == 6 else value

    loss.calls = 0
    fed = []
    watched = glyphs64.with_augment(None)
    watched.epoch = lambda part, workers: (fed.append(b.indices) or b for b in glyphs64.epoch(part))
    with pytest.raises(NonFiniteLoss) as caught:
        train(tiny(), watched, SHORT, loss=loss, progress=None, keeper=CheckpointManager(tmp_path, 2))
    error = caught.value
    assert error.step == 5 and error.indices == fed[5] and error.checkpoint == tmp_path / "step-00000004"
    assert all(str(part) in str(error) for part in ("step 5", error.checkpoint, error.indices))


@pytest.fixture
def interruptible():
    """Ctrl-C as at a terminal: where tests run in the background of a shell, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_keeps_the_step_in_progress_and_says_where(glyphs64, stopped, tmp_path, number):
    handler = signal.getsignal(number)
    with pytest.raises(Preempted) as caught:
        run(tiny, glyphs64, SHORT, tmp_path, log=lambda e: e["step"] == 6 and os.kill(os.getpid(), number))
    assert caught.value.checkpoint == tmp_path / "step-00000007" and steps(tmp_path) == [7]
    assert signal.getsignal(number) is handler
    assert same(run(tiny, glyphs64, SHORT, tmp_path)[0], stopped[0])


def test_a_damaged_later_checkpoint_never_costs_the_good_ones(tmp_path):
    """The run was resumed before it; with one checkpoint to keep, the one that was just written is it."""
    keeper = CheckpointManager(tmp_path, every=1, last=1)
    for step in (4, 12, 8):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        (folder / "weights").write_bytes(b"x")
        (folder / "manifest.json").write_text(json.dumps({"metrics": {"accuracy": step / 12}, "files": {}}))
    keeper._prune(tmp_path / "step-00000008")
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000008", "step-00000012"}
