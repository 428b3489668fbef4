"""Kills a small run again and again with `kill -9`: `killed`, which forks the runs, has computed nothing."""

import hashlib
import json
import os
import random
import signal
import time
import warnings
from pathlib import Path

import torch

from atbook.worlds import glyph_images
from atbook.worlds.glyphs import generate
from atlib.data import crop_and_flip
from atlib.recipe import Recipe
from atlib.train import train
from atrun.checkpoint_manager import CheckpointManager
from tests.divided import small_pair

RECIPE = Recipe(steps=20, batch_size=12, accumulate=2, ema=0.9, mixup=0.8, cutmix=1.0)


def run(folder: Path) -> None:
    """The whole run, or what is left of it; the digest of weights and history goes into folder/digest."""
    pair, average = small_pair(), small_pair().student
    data = glyph_images(generate("train", 64)).with_augment(crop_and_flip())
    torch.manual_seed(os.getpid())  # a restarted process has drawn something else before
    keeper = CheckpointManager(folder / "checkpoints", every=3)
    history = train(pair, data, RECIPE, progress=None, cpu=True, average_into=average, keeper=keeper)
    # what was logged of the loss and its parts is among the bits
    logged = json.dumps(history).encode()
    weights = [x for module in (pair.student, average) for _, x in sorted(module.state_dict().items())]
    (folder / "digest").write_text(
        hashlib.sha256(b"".join([logged, *(value.numpy().tobytes() for value in weights)])).hexdigest()
    )


def child(folder: Path) -> int:
    """Start `run` in a process of its own and return its id."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            run(folder)
            code = 0
        finally:
            os._exit(code)
    return number


def ended(number: int) -> int | None:
    """The status of a child, None while it runs."""
    done, status = os.waitpid(number, os.WNOHANG)
    return status if done else None


def killed(folder: Path, kills: int, seed: int = 0) -> dict:
    """Kill the run at least `kills` times, half of them meant for the moment in which a checkpoint is
    written, and let it finish; one more run is never killed. "while saving" counts the kills that left a
    half-written checkpoint behind: a quarter of `kills`, or `kills` is tripled.
    """
    draw = random.Random(seed)
    tally = {"kills": 0, "while saving": 0, "damaged": 0}
    (folder / "whole").mkdir(parents=True)
    began = time.perf_counter()
    assert os.waitpid(child(folder / "whole"), 0)[1] == 0, "the run that is left alone failed"
    seconds = time.perf_counter() - began
    (folder / "killed").mkdir()
    checkpoints = folder / "killed" / "checkpoints"
    number, finished = child(folder / "killed"), 0
    # Where saving is fast, a kill meant for it may come too late: then more are made, not fewer count.
    while tally["kills"] < kills or tally["while saving"] < kills // 4 and tally["kills"] < 3 * kills:
        saving = tally["kills"] % 2 == 1
        deadline, started = draw.uniform(0, seconds), time.perf_counter()
        while (status := ended(number)) is None:
            if saving and any(checkpoints.glob(".step-*.tmp")):
                time.sleep(draw.uniform(0, 0.03))
                break
            if not saving and time.perf_counter() - started > deadline:
                break
        if status is not None:  # it finished first: the next one begins anew, in the same folder
            assert status == 0, f"a run ended with status {status}"
            finished += 1  # may happen more than once between two kills
            checkpoints.rename(folder / f"finished-{finished}")
            (folder / "killed" / "digest").unlink()
        else:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            tally["kills"] += 1
            tally["while saving"] += any(checkpoints.glob(".step-*.tmp"))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                CheckpointManager(checkpoints, every=3).latest()
            tally["damaged"] += len(caught)
        number = child(folder / "killed")
    assert os.waitpid(number, 0)[1] == 0, "the last run failed"
    digests = [(folder / name / "digest").read_text() for name in ("whole", "killed")]
    return tally | {"same": digests[0] == digests[1], "left": sorted(p.name for p in checkpoints.iterdir())}
