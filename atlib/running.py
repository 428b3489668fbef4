"""Carry out a run in its folder: start it, go on after it was stopped, evaluate what it made."""

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from atlib.checkpoint import load_bundle, load_vit, save_bundle, save_vit
from atlib.evaluate import evaluate_together
from atlib.keeper import Keeper, digest
from atlib.record import Record, about, peak_memory_mb, read_record, write_record
from atlib.run import PRETRAINING, RunConfig, config_path, read_config, write_config
from atlib.run_log import RunLog, require_tensorboard
from atlib.run_parts import Built, build, held_out_images, loss_of, outputs_for, result_of, training_images, with_student
from atlib.teachers import is_file
from atlib.train import train

try:
    import fcntl
except ImportError:  # Windows: there two processes in one folder are not noticed
    fcntl = None


class Ready(NamedTuple):
    """What a run trains on, is tested on (None where there is nothing to test), and trains."""

    images: object
    tested_on: object | None
    built: Built


def check_folder(folder: Path) -> None:
    """Raise `ValueError` where a folder holds a run already."""
    if config_path(folder).exists():
        raise ValueError(f"{folder} holds a run already: `python -m atlib resume {folder}` goes on with it; for a new one choose another --out")


def start(config: RunConfig, folder: Path, images=None) -> Record:
    """Carry out a new run in `folder` (`images`: its training images, where they are open already) and return its record.

    Of several processes only the first writes. The config is written before the first step, so that a run that is killed can go on; where data,
    teacher or model do not fit together nothing is written.
    Raises `ValueError` for a folder with another run, and `Preempted` after a SIGTERM, when all is saved.
    """
    if config.tensorboard:
        require_tensorboard()
    if is_main_process():
        check_folder(folder)
    ready = _make_ready(config, training_images(config) if images is None else images)
    if is_main_process():
        write_config(folder, config)
    return _carry_out(config, folder, ready)


def resume(folder: Path) -> Record:
    """Go on with the run in `folder` from its newest good checkpoint, or from the beginning without one, and return its record.

    A finished run is not touched. Raises `OSError` for a folder without a run, and `ValueError` where its config or its teacher's file was changed.
    """
    config = read_config(folder)
    if record_path(folder).exists():
        return read_record(record_path(folder))
    return _carry_out(config, folder, _make_ready(config, training_images(config)))


def record_path(folder: Path) -> Path:
    """Where a finished run has its record: it is written last."""
    return Path(folder) / "record.json"


def result_path(folder: Path, method: str) -> Path:
    """Where a finished run has its weights."""
    return Path(folder) / ("teacher.safetensors" if method in PRETRAINING else "student.safetensors")


def is_main_process() -> bool:
    """Whether this process writes. Read off the launcher's variables: Accelerate would open the process group for it, before training does."""
    return int(os.environ.get("RANK", 0)) == 0


def load_result(path: Path) -> nn.Module:
    """The model in a file that a run has left: a ViT, or after Copy teacher and student as one. Raises `OSError` naming what cannot be read."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} does not exist: is the run finished? `python -m atlib resume {Path(path).parent}` goes on with it")
    try:
        with safe_open(path, framework="pt") as file:
            bundle = "needs_teacher" in json.loads((file.metadata() or {}).get("atlib", "{}"))
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise OSError(f"{path} is no readable safetensors file ({error}); it was left as it is") from error
    return (load_bundle(path) if bundle else load_vit(path)).eval()


def _make_ready(config: RunConfig, images) -> Ready:
    """Open and build everything, and find out now, not hours later, that the evaluation has classes that the training images lack."""
    tested_on = None if config.method in PRETRAINING else held_out(config)
    built = build(config, outputs_for(config, images))
    outputs = built.student.overrides["num_classes"]
    if tested_on is not None and tested_on.targets.max() >= outputs:
        raise ValueError(f"{config.data} {config.evaluation_split} has label {tested_on.targets.max().item()}, the model {outputs} classes, those of the "
                         "training images: choose another evaluation_split, or set model.num_classes")
    return Ready(images, tested_on, built)


def _carry_out(config: RunConfig, folder: Path, ready: Ready) -> Record | None:
    """Train, keep the result, write the record. The record of the first process; the others have none."""
    images, tested_on, built = ready
    averaged = copy.deepcopy(getattr(built.model, "student", built.model)) if config.recipe.ema is not None else None
    same = config.fingerprint() | ({"teacher's sha256": digest(Path(config.teacher))} if config.teacher is not None and is_file(config.teacher) else {})
    keeper = Keeper(Path(folder) / "checkpoints", config.save_every, config.keep, same, f"{config.evaluation_split}_accuracy")

    def metrics(model: nn.Module) -> dict:
        found = evaluate_together(model, tested_on)
        return {f"{config.evaluation_split}_accuracy": found.accuracy, f"{config.evaluation_split}_loss": found.loss}

    with _log_of(config, folder, keeper) as log:
        history = train(built.model, images, config.recipe, loss=loss_of(config.method), seed=config.seed, evaluate=None if tested_on is None else metrics,
                        evaluate_every=config.evaluate_every, progress=config.recipe_name, keeper=keeper, log=log, workers=config.workers,
                        average_into=averaged)
        if log is None:
            return None
        seconds = log.seconds
    _save(result_path(folder, config.method), config, built)
    if averaged is not None:
        _save(Path(folder) / "averaged.safetensors", config, built._replace(model=with_student(built.model, averaged)))
    results = {name: value for name, value in history[-1].items() if name not in ("epoch", "step", "lr")}
    record = Record("train", config.method, config.seed, config.describe(), results, history, round(seconds, 2), round(peak_memory_mb(), 1),
                    about("cuda" if torch.cuda.is_available() else "cpu"))
    write_record(record_path(folder), record)
    return record


def held_out(config: RunConfig):
    """The images that a run is evaluated on."""
    return held_out_images(config.data, config.evaluation_split, config.augmentation, config.data_path, config.image_column, config.label_column,
                           config.on_corrupt, config.workers)


@contextmanager
def _log_of(config: RunConfig, folder: Path, keeper: Keeper) -> Iterator[RunLog | None]:
    """The run's log, of the first process only, while no other run may train in this folder."""
    if not is_main_process():
        yield None
        return
    with open(Path(folder) / ".lock", "w") as lock:
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets it go when the process ends, however it ends
        except BlockingIOError:
            raise ValueError(f"another process is training in {folder}: wait for it, or end it, before you go on") from None
        except OSError:
            pass  # a shared file system without locks: better unguarded than not at all
        newest = keeper.latest()
        log = RunLog(folder, 0 if newest is None else int(newest.name.removeprefix("step-")), config.tensorboard)
        try:
            yield log
        finally:
            log.close()


def _save(path: Path, config: RunConfig, built: Built) -> None:
    result = result_of(config, built.model)
    if config.method == "copy":
        save_bundle(path, result, built.student, built.teacher)
    else:
        save_vit(path, result, built.student)
