"""Carry out a run in its folder: start it, go on after it was stopped, evaluate what it made."""

import copy
import fcntl
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate.utils import get_int_from_env
from torch import nn

from atfamily.detection.evaluate import evaluate_detector
from atfamily.detection.files import save_detector
from atfamily.stored_maps import load_stored_maps, save_stored_maps
from atlib._util import as_plain
from atlib.checkpoint import load_bundle, load_vit, read_header, save_bundle, save_vit
from atlib.data import Images
from atlib.evaluate import evaluate_together
from atlib.pair import student_of
from atlib.processes import require_together, runs_on_gpu
from atlib.train import train
from atrun.build import Built, build, held_out, loss_of, outputs_for, result_of, training_images, with_student
from atrun.checkpoint_manager import CheckpointManager, digest, digest_of_tensors, identity_of
from atrun.config import FREE, UNTRAINED, RunConfig, read_config, require_use, write_config
from atrun.data.photos import Photos, hold
from atrun.log import RunLog, require_tracker
from atrun.method import Method
from atrun.record import Record, about, peak_memory_mb, read_record, write_record
from atrun.teachers.load import is_file

WEIGHTS = tuple(f"{name}.safetensors" for name in ("student", "teacher", "averaged", "detector"))
TEACHER_SHA = "teacher's sha256"  # of the file that a run's teacher was read from
FILES = "names of files", "sizes of files"  # of what `identity_of` says, what a copy of a folder has too
LEFT_BEHIND = ("checkpoints/step-*", "record.json", *WEIGHTS, "log.jsonl")  # by a run, besides its config


def check_folder(folder: Path) -> None:
    """Raise `ValueError` where a folder holds a run already, or what one has left."""
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a run already: `python -m atlib resume {folder}`, or another --out")
    if left := [path for pattern in LEFT_BEHIND for path in sorted(folder.glob(pattern))]:
        raise ValueError(f"{folder} holds {left[0].relative_to(folder)} of a run without its config.json")


def start(config: RunConfig, folder: Path, images=None, log: Callable[[dict], None] | None = None) -> Record:
    """Carry out a new run in `folder` and return its record. images: to train on, where they are open; log:
    is called with each entry of the run's log, after it was written.

    Of several processes only the first writes. Nothing is written where data, teacher or model do not fit.
    Raises `Preempted` after SIGTERM or Ctrl-C, when all is saved.
    """
    require_together()
    images = training_images(config) if images is None else images
    config = config.on(len(images))
    ready = _make_ready(config, images, folder)
    if is_main_process() and not config.method.pretrains:
        trained_on, tested_on = config.training_split, config.evaluation_split
        if {*tested_on.split("+")} & {*trained_on.split("+")}:
            says = f"training split {trained_on!r} holds some of evaluation split {tested_on!r}"
            warnings.warn(f"the run is evaluated on images that it trains on: {says}", stacklevel=2)
    with _locked(folder):
        if is_main_process():
            check_folder(folder)  # meanwhile another run may have begun there
            write_config(folder, config)
        return _carry_out(config, folder, images, *ready, log)


def resume(
    folder: Path,
    on_corrupt: str | None = None,
    log: Callable[[dict], None] | None = None,
    trust_data: bool = False,
    allow_other_processes: bool = False,
) -> Record:
    """Go on with the run in `folder` from its newest good checkpoint, or from the beginning without one, and
    return its record. A finished run is not touched; one whose weights were deleted writes them again.

    on_corrupt: from now on; allow_other_processes: than before, and so other bits.
    """
    require_together()
    before = config = read_config(folder, trust_data)
    if on_corrupt is not None:
        require_use(["on_corrupt"], config.method, config.data)
        config = replace(config, on_corrupt=on_corrupt)
    if is_finished(folder, config):
        return read_record(folder / "record.json")
    images = training_images(config)
    ready = _make_ready(config, images, folder)
    with _locked(folder):
        if config != before and is_main_process():
            write_config(folder, config)
        may_differ = ("processes",) if allow_other_processes else ()
        return _carry_out(config, folder, images, *ready, log, may_differ)


def is_finished(folder: Path, config: RunConfig) -> bool:
    """Whether a run's record and weights are there. Raises `OSError` for a record that cannot be read."""
    if not (folder / "record.json").exists():
        return False
    read_record(folder / "record.json")
    return not missing_results(folder, config)


def missing_results(folder: Path, config: RunConfig) -> list[Path]:
    """The files of weights that a finished run has, and that are not there as a whole."""
    paths, missing = [result_path(folder, config.method)], []
    paths += [] if config.recipe.ema is None else [folder / "averaged.safetensors"]
    paths += [folder / "detector.safetensors"] if config.detects else []
    for path in paths:
        try:
            read_header(path)
        except OSError:  # missing, or cut off
            missing.append(path)
    return missing


def result_path(folder: Path, method: str) -> Path:
    """Where a finished run has its weights."""
    return Path(folder) / ("teacher.safetensors" if Method(method).pretrains else "student.safetensors")


def weights_of(run_or_file: Path, averaged: bool = False) -> Path:
    """The file of weights that is meant by a run's folder, or by itself."""
    if not run_or_file.exists():
        raise FileNotFoundError(f"{run_or_file} does not exist: name a run's folder or a file of weights")
    config = None if run_or_file.is_file() else read_config(run_or_file, trust_data=True)  # data stay closed
    if averaged and (config is None or config.recipe.ema is None):
        raise ValueError(f"--averaged: {run_or_file} has no averaged weights; a run with ema has")
    if config is None:
        return run_or_file
    if averaged:
        return run_or_file / "averaged.safetensors"
    return run_or_file / "detector.safetensors" if config.detects else result_path(run_or_file, config.method)


def is_main_process() -> bool:
    """Whether this process writes; not asked of Accelerate, which would open the process group for it."""
    return get_int_from_env(("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"), 0) == 0


def note(text: str) -> None:
    """Tell people, once, what is no result."""
    if text and is_main_process():
        print(f"python -m atlib: {text}", file=sys.stderr)


def device() -> str:
    """Where a trained model computes."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_result(path: Path) -> nn.Module:
    """The model in a file that a run has left, after Copy teacher and student as one. Raises `OSError`."""
    header = read_header(path)
    if "stored_maps" in header:
        return load_stored_maps(path)
    return (load_bundle(path) if "needs_teacher" in header else load_vit(path)).eval()


def _make_ready(config: RunConfig, images, folder: Path) -> tuple[Any | None, Built]:
    """What the run is tested on (None: nothing) and what it trains, checked before hours are spent."""
    require_tracker(config.tracker)
    tested_on = None if config.method.pretrains else held_out(config)
    if config.method.reads_logits and tuple(read_header(config.teacher)["classes"]) != tuple(images.classes):
        raise ValueError(f"{config.teacher} was trained on other classes than {config.data} has")
    built = build(config, outputs_for(config, images), getattr(images, "normalisation", None), folder)
    note(built.teacher_view or "")
    if tested_on is not None:
        _check_classes(config, images, tested_on, built.student.overrides["num_classes"])
        counts = f"{len(images)} images to train on ({config.training_split})"
        note(f"{counts}, {len(tested_on)} to evaluate on ({config.evaluation_split})")
    return tested_on, built


def _check_classes(config: RunConfig, images, tested_on, outputs: int) -> None:
    """Raise `ValueError` for classes of the evaluation that the training images or the model lack."""
    trained_on, what = config.training_split, f"{config.data} {config.evaluation_split}"
    train_classes, test_classes = tuple(images.classes), tuple(tested_on.classes)
    if train_classes and test_classes and train_classes != test_classes:
        unknown = sorted({*train_classes} ^ {*test_classes})[:5]
        raise ValueError(f"{what} has other classes than {trained_on}: {unknown or 'in another order'}")
    if config.detects:
        return
    if (label := tested_on.targets.max().item()) >= outputs:
        raise ValueError(f"{what} has label {label}, the model {outputs} classes: set model.num_classes")
    labels = getattr(images, "targets", None)
    if labels is None or config.data_size is not None or labels.ndim != 1:
        return
    if lacking := sorted(set(tested_on.targets.tolist()) - set(labels.tolist())):
        names = [train_classes[label] if train_classes else label for label in lacking[:5]]
        raise ValueError(f"{what} has classes without an image in {trained_on}: {names}")


def _carry_out(
    config: RunConfig,
    folder: Path,
    images,
    tested_on,
    built: Built,
    also: Callable[[dict], None] | None,
    may_differ: tuple[str, ...] = (),
) -> Record | None:
    """Train, keep the result, write the record, which the first process returns."""
    averaged = copy.deepcopy(student_of(built.model)) if config.recipe.ema is not None else None
    same, detects = config.fingerprint(), config.detects
    # what a file says beside the weights: how images are prepared and normalised, its classes, its test
    normalisation = getattr(images, "normalisation", None)
    prepared: dict[str, Any] = {} if detects else {"augmentation": config.describe().get("augmentation")}
    prepared["normalisation"] = as_plain(normalisation)
    if config.classifies:
        test = tested_as(config.evaluation_split, tested_on)
        prepared |= {"classes": list(images.classes), "tested_on": test, "binary": config.recipe.binary}
    for name in ("teacher", "student_weights"):
        weights = getattr(config, name)
        if weights not in (None, UNTRAINED) and is_file(weights):
            same[f"{name}'s sha256"] = digest(Path(weights))
    if TEACHER_SHA in same:
        prepared[TEACHER_SHA] = same[TEACHER_SHA]
    if built.untrained is not None:
        same[TEACHER_SHA] = digest_of_tensors(built.untrained.state_dict())
        if is_main_process() and not (folder / "teacher.safetensors").exists():
            # kept: another version of torch may draw other numbers from the seed
            save_vit(folder / "teacher.safetensors", built.untrained, built.teacher)
    split, free = config.evaluation_split, (*FREE, *may_differ)
    keeper = CheckpointManager(folder / "checkpoints", config.save_every, config.keep, same, free)

    def metrics(model: nn.Module) -> dict:
        if detects:
            return {f"{split}_{name}": value for name, value in evaluate_detector(model, tested_on).items()}
        measured = evaluate_together(model, tested_on)
        # the accuracy is not that of the whole split
        fewer = {f"{split}_images": measured.count} if measured.count < len(tested_on) else {}
        return {f"{split}_accuracy": measured.accuracy, f"{split}_loss": measured.loss, **fewer}

    log = None
    if is_main_process():
        newest = keeper.latest()
        after = 0 if newest is None else int(newest.name.removeprefix("step-"))
        log = RunLog(folder, after, config.tracker, also)
    images = on_device(config, images)
    with nullcontext() if log is None else closing(log):
        history = train(
            built.model,
            images,
            config.recipe,
            loss=loss_of(config),
            seed=config.seed,
            evaluate=None if tested_on is None else metrics,
            evaluate_every=config.evaluate_every,
            after_pass=_maps_drawer(config, tested_on, log),
            progress=config.recipe_name,
            keeper=keeper,
            log=log,
            workers=config.workers,
            average_into=averaged,
        )
    if log is None:
        return None
    if averaged is not None:
        averaged = with_student(built.model, averaged)
    _save(folder, config, built, averaged, images, prepared)
    no_results = ("epoch", "step", "lr", "corrupt_indices")
    record = Record(
        experiment="train",
        method=str(config.method),
        seed=config.seed,
        config=config.describe(),
        results={name: value for name, value in history[-1].items() if name not in no_results},
        history=history,
        seconds=round(log.seconds, 2),
        peak_memory_mb=round(peak_memory_mb(), 1),
        about=about("cuda" if runs_on_gpu() else "cpu"),
    )
    write_record(folder / "record.json", record)
    return record


def free_memory() -> float:
    """Bytes free where a run trains: on its GPU, else in this machine."""
    if runs_on_gpu():
        return torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", 0)))[0]
    return psutil.virtual_memory().available


def on_device(config: RunConfig, images):
    """The training images held on the device that trains, where they fit and can be augmented there."""
    place = torch.device("cpu")
    if runs_on_gpu():
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    most = min(config.on_device * 2**30, free_memory() / 2)
    moved = None
    if type(images) is Images and images.pixels.nbytes <= most and place.type == "cuda":
        moved = images.to(place)
    # a shorter run does not ask for all of them
    elif type(images) is Photos and config.recipe.steps * config.recipe.batch_size >= len(images):
        moved = hold(images, place, most, config.workers)
    if moved is None:
        return images
    size = f"{moved.pixels.nbytes / 2**20:.3g} MiB"
    note(f"the training images are held on {place} ({size}), decoded once: --on_device 0 reads them anew")
    return moved


def _maps_drawer(config: RunConfig, images, log: RunLog | None) -> Callable[[nn.Module, dict], None] | None:
    """What draws, after every so many passes, where teacher and student look; None where it is not asked."""
    if config.maps_every == 0:
        return None
    from atrun.pictures import as_file, maps_picture  # runs without pictures draw nothing

    count = min(6, len(images))
    few = images.take([index * len(images) // count for index in range(count)])[0]

    def draw(model: nn.Module, entry: dict) -> None:
        if entry["epoch"] % config.maps_every == 0 or entry["step"] == config.recipe.steps:
            figure = maps_picture(model, few)  # on every process: where weights are divided, all are needed
            if log is not None:
                log.picture("maps", entry["step"], as_file(figure))

    return draw


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within it no other run writes in this folder, and what a killed one has half written is gone."""
    if not is_main_process():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            # the system lets it go when the process ends, however it ends
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {folder}: wait for it, or end it") from None
        except OSError:
            pass  # a shared file system without locks: better unguarded than not at all
        for left in (path for place in (folder, folder / "checkpoints") for path in place.glob(".*")):
            if left.is_file() and re.fullmatch(r"\..+\.\d+\.tmp", left.name):
                left.unlink(missing_ok=True)
        yield


def tested_as(split: str, images) -> dict[str, Any]:
    """Which images a classifier is tested on, as its file says it: others may be some that it has learned."""
    labels = hashlib.sha256(images.targets.long().cpu().numpy().tobytes()).hexdigest()
    files = {name: value for name, value in identity_of(images).items() if name in FILES}
    return {"split": split, "images": len(images), "labels": labels, **files}


def _save(
    folder: Path,
    config: RunConfig,
    built: Built,
    averaged: nn.Module | None,
    images,
    prepared: Mapping[str, Any],
) -> None:
    """Keep the trained model and its average; of a detector the ViT and the whole."""

    def save(path: Path, model: nn.Module) -> None:
        if config.method is Method.COPY:
            save_bundle(path, model, built.student, built.teacher, prepared)
        elif config.method is Method.MEAN_MAPS:
            save_stored_maps(path, model, built.student, prepared)
        else:
            save_vit(path, model, built.student, prepared)

    path = result_path(folder, config.method)
    if config.detects:
        vit = built.model.backbone.vit
        save(path, vit if config.method is Method.COPY else student_of(vit))
        described = config.detector, images.classes, built.student, built.teacher
        save_detector(folder / "detector.safetensors", built.model, *described)
        if averaged is not None:
            save_detector(folder / "averaged.safetensors", averaged, *described)
        return
    save(path, result_of(config, built.model))
    if averaged is not None:
        save(folder / "averaged.safetensors", result_of(config, averaged))
