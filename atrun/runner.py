"""Carry out a run in its folder: start it, go on after it was stopped, evaluate what it made."""

import copy
import fcntl
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from atlib.baselines import load_stored_maps, save_stored_maps
from atlib.checkpoint import load_bundle, load_vit, read_header, save_bundle, save_vit
from atlib.checkpoint_manager import CheckpointManager, digest, digest_of_weights
from atlib.evaluate import evaluate_together
from atlib.pair import student_of
from atlib.processes import require_together
from atlib.train import train
from atrun.build import (
    READING,
    Built,
    build,
    coco_images,
    held_out_images,
    image_size,
    loss_of,
    outputs_for,
    result_of,
    training_images,
    with_student,
)
from atrun.config import FREE, RunConfig, config_path, read_config, write_config
from atrun.data.generated import is_generated
from atrun.log import RunLog, require_tracker
from atrun.method import Method
from atrun.parts import Classify, Detect, Labelled
from atrun.record import Record, about, peak_memory_mb, read_record, write_record
from atrun.untrained import UNTRAINED, store_untrained

WEIGHTS = tuple(f"{name}.safetensors" for name in ("student", "teacher", "averaged", "detector"))
LEFT_BEHIND = ("checkpoints/step-*", "record.json", *WEIGHTS, "log.jsonl")  # by a run, besides its config


class Ready(NamedTuple):
    """What a run trains on, is tested on (None where there is nothing to test), and trains."""

    images: Any
    tested_on: Any | None
    built: Built


def check_folder(folder: Path) -> None:
    """Raise `ValueError` where a folder holds a run already, or what one has left, or where it cannot be made
    and written to. Nothing stays written."""
    if config_path(folder).exists():
        raise ValueError(f"{folder} holds a run already: `python -m atlib resume {folder}`, or another --out")
    left = [path for pattern in LEFT_BEHIND for path in sorted(folder.glob(pattern))]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ValueError(
            f"{folder} holds {left[0].relative_to(folder)}{more} of a run without its config.json"
        )
    made = []  # what is not there is made, and taken away again
    try:
        for parent in (*reversed(folder.parents), folder):
            if not parent.is_dir():
                parent.mkdir()
                made.append(parent)
        probe = folder / f".written-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be written to ({error})") from error
    finally:
        for parent in reversed(made):
            parent.rmdir()


def start(config: RunConfig, folder: Path, images=None, log: Callable[[dict], None] | None = None) -> Record:
    """Carry out a new run in `folder` (`images`: its training images, where they are open already) and return
    its record. log: is called with each entry of the run's log, after it was written.

    Of several processes only the first writes. The config is written before the first step, so that a run
    that is killed can go on; where data, teacher or model do not fit together nothing is written. Raises
    `ValueError` for a folder with another run, and `Preempted` after SIGTERM or Ctrl-C, when all is saved.
    """
    require_tracker(config.tracker)
    require_together()
    if is_main_process():
        check_folder(folder)
    images = training_images(config) if images is None else images
    config = config.on(len(images))
    ready = _make_ready(config, images, folder)
    if is_main_process():
        trained_on, task = config.reading.training_split, config.task
        if isinstance(task, Labelled) and task.evaluation_split in trained_on.split("+"):
            warnings.warn(
                f"the run is evaluated on images that it trains on: its training split {trained_on!r} holds"
                f" its evaluation split {task.evaluation_split!r}",
                stacklevel=2,
            )
    with _locked(folder):
        if is_main_process():
            check_folder(folder)  # meanwhile another run may have begun there
            write_config(folder, config)
        return _carry_out(config, folder, ready, log)


def resume(
    folder: Path,
    on_corrupt: str | None = None,
    log: Callable[[dict], None] | None = None,
    trust_data: bool = False,
    allow_other_processes: bool = False,
) -> Record:
    """Go on with the run in `folder` from its newest good checkpoint, or from the beginning without one, and
    return its record.

    A finished run is not touched; one whose weights were deleted writes them again. on_corrupt: from now on,
    and in its config ("raise" or "skip"). log: as in `start`; trust_data: as in `read_config`;
    allow_other_processes: with another number of them than before, and so other bits. Raises `OSError` for a
    folder without a run or with a damaged record, and `ValueError` where its config or its teacher's file was
    changed.
    """
    require_together()
    config = read_config(folder, trust_data)
    if on_corrupt is not None:
        if is_generated(config.data):
            raise ValueError(f"--on-corrupt would change nothing: the images of {config.data} are generated")
        config.require_use(["on_corrupt"])
        before, config = config, config.changed(on_corrupt=on_corrupt)
    if is_finished(folder, config):
        return read_record(record_path(folder))
    ready = _make_ready(config, training_images(config), folder)
    with _locked(folder):
        if on_corrupt is not None and config != before and is_main_process():
            write_config(folder, config)
        return _carry_out(config, folder, ready, log, ("processes",) if allow_other_processes else ())


def is_finished(folder: Path, config: RunConfig) -> bool:
    """Whether a run's record and weights are there. Raises `OSError` for a record that cannot be read."""
    if not record_path(folder).exists():
        return False
    try:
        read_record(record_path(folder))
    except OSError as error:
        raise OSError(f"{error}. Move it away: `python -m atlib resume {folder}` writes it again") from error
    return not missing_results(folder, config)


def missing_results(folder: Path, config: RunConfig) -> list[Path]:
    """The files of weights that a finished run has, and that are not there as a whole."""
    averaged = [] if config.recipe.ema is None else [averaged_path(folder)]
    detector = [detector_path(folder)] if isinstance(config.task, Detect) else []
    paths = result_path(folder, config.method), *averaged, *detector
    return [path for path in paths if not _is_whole(path)]


def _is_whole(path: Path) -> bool:
    """Whether a file of weights is there, and not cut off."""
    try:
        read_header(path)
    except OSError:
        return False
    return True


def record_path(folder: Path) -> Path:
    """Where a finished run has its record: it is written last, after the weights."""
    return Path(folder) / "record.json"


def result_path(folder: Path, method: str) -> Path:
    """Where a finished run has its weights."""
    return Path(folder) / ("teacher.safetensors" if Method(method).pretrains else "student.safetensors")


def averaged_path(folder: Path) -> Path:
    """Where a finished run has its averaged weights, where its recipe has them; of a detector, the whole of
    it."""
    return Path(folder) / "averaged.safetensors"


def detector_path(folder: Path) -> Path:
    """Where a finished run that detects has the whole detector; `result_path` is its ViT's."""
    return Path(folder) / "detector.safetensors"


def weights_of(run_or_file: Path, averaged: bool = False) -> Path:
    """The file of weights that is meant by a run's folder or by itself: of a run what it was for, a ViT or a
    detector. Raises `ValueError` for averaged weights of a file or of a run without them; `OSError` for what
    is not there, and for a folder without a run."""
    if not run_or_file.exists():
        raise FileNotFoundError(f"{run_or_file} does not exist: name a run's folder or a file of weights")
    if run_or_file.is_file():
        if averaged:
            raise ValueError(f"--averaged is for a run's folder, {run_or_file} is a file")
        return run_or_file
    config = read_config(run_or_file, trust_data=True)  # its data are not opened
    if averaged and config.recipe.ema is None:
        raise ValueError(f"the run in {run_or_file} has no averaged weights: its recipe has no ema")
    if averaged:
        return averaged_path(run_or_file)
    if isinstance(config.task, Detect):
        return detector_path(run_or_file)
    return result_path(run_or_file, config.method)


def is_main_process() -> bool:
    """Whether this process writes; not asked of Accelerate, which would open the process group for it."""
    ranks = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")  # in Accelerate's order
    return int(next((os.environ[name] for name in ranks if name in os.environ), 0)) == 0


def load_result(path: Path) -> nn.Module:
    """The model in a file that a run has left, after Copy teacher and student as one. Raises `OSError`."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: `python -m atlib resume {path.parent}` writes it")
    header = read_header(path)
    if "stored_maps" in header:
        return load_stored_maps(path)
    return (load_bundle(path) if "needs_teacher" in header else load_vit(path)).eval()


def _make_ready(config: RunConfig, images, folder: Path) -> Ready:
    """Open and build all, and find out now, not hours later, that training lacks the evaluation's classes."""
    tested_on = held_out(config) if isinstance(config.task, Labelled) else None
    if config.method.reads_logits and tuple(read_header(config.teacher)["classes"]) != tuple(images.classes):
        raise ValueError(f"{config.teacher} was trained on other classes than {config.data} has")
    built = build(config, outputs_for(config, images), getattr(images, "normalisation", None), folder)
    if built.teacher_view is not None and is_main_process():
        print(f"python -m atlib: {built.teacher_view}", file=sys.stderr)
    if isinstance(config.task, Detect):
        if tested_on.classes != images.classes:
            raise ValueError(
                f"{config.data} {config.task.evaluation_split} has categories {tested_on.classes}, and"
                f" {config.reading.training_split} has {images.classes}"
            )
        return Ready(images, tested_on, built)
    outputs = built.student.overrides["num_classes"]
    if tested_on is not None:
        _check_classes(config, images, tested_on)
    if tested_on is not None and tested_on.targets.max() >= outputs:
        raise ValueError(
            f"{config.data} {config.task.evaluation_split} has label {tested_on.targets.max().item()}, the"
            f" model {outputs} classes: choose another evaluation_split, or set model.num_classes"
        )
    if tested_on is not None and is_main_process():
        both = config.reading.training_split, config.task.evaluation_split
        said = f"{len(images)} images to train on ({both[0]}), {len(tested_on)} to evaluate on ({both[1]})"
        print(f"python -m atlib: {said}", file=sys.stderr)
    return Ready(images, tested_on, built)


def _check_classes(config: RunConfig, images, tested_on) -> None:
    """Raise `ValueError` for classes that the evaluation has and the training images lack: none of them could
    be learned. A part of the images, chosen by the seed, may lack some."""
    trained_on, tested = config.reading.training_split, config.task.evaluation_split
    what = f"{config.data} {tested}"
    if images.classes and tested_on.classes and tuple(images.classes) != tuple(tested_on.classes):
        unknown = sorted(set(tested_on.classes) - set(images.classes))
        named = (
            f"classes that {trained_on} lacks, {unknown[:5]}" if unknown else "the classes in another order"
        )
        raise ValueError(
            f"{what} has {named}: {len(tested_on.classes)} there and {len(images.classes)} in {trained_on}"
        )
    labels = getattr(images, "targets", None)
    if labels is None or config.reading.data_size is not None or labels.ndim != 1:
        return
    if lacking := sorted(set(tested_on.targets.tolist()) - set(labels.tolist())):
        names = [images.classes[label] if images.classes else label for label in lacking[:5]]
        count = torch.isin(tested_on.targets, torch.tensor(lacking)).sum().item()
        raise ValueError(
            f"{what} has {count} images of {len(lacking)} classes without an image in {trained_on}, such as"
            f" {names}: they cannot be learned"
        )


def _carry_out(
    config: RunConfig,
    folder: Path,
    ready: Ready,
    also: Callable[[dict], None] | None,
    may_differ: tuple[str, ...] = (),
) -> Record | None:
    """Train, keep the result, write the record. The record of the first process; the others have none.
    may_differ: from what the run was started with."""
    images, tested_on, built = ready
    averaged = copy.deepcopy(student_of(built.model)) if config.recipe.ema is not None else None
    same, detects = config.fingerprint(), isinstance(config.task, Detect)
    tested = tested_as(config, tested_on)
    split, evaluate_every = "none", 0
    if isinstance(config.task, Labelled):
        split, evaluate_every = config.task.evaluation_split, config.task.evaluate_every
    if built.untrained is not None:
        same["teacher's sha256"] = digest_of_weights(built.untrained)
        if is_main_process():
            store_untrained(folder, built.untrained, built.teacher)
    for name in ("teacher", "student_weights"):
        weights = getattr(config, name)
        if weights not in (None, UNTRAINED):
            from atrun.teachers.load import is_file  # runs without a teacher do not need its room

            if is_file(weights):
                same[f"{name}'s sha256"] = digest(Path(weights))
    checkpoints = folder / "checkpoints"
    best = f"{split}_{'box_AP' if detects else 'accuracy'}"
    # what checkpoints of before had in place of a tracker's name, and of what teachers see
    free = (*FREE, "tensorboard", "what the teacher sees", *may_differ)
    keeper = CheckpointManager(checkpoints, config.save_every, config.keep, same, best, free)

    def metrics(model: nn.Module) -> dict:
        if detects:
            return {f"{split}_{name}": value for name, value in precision(model, tested_on).items()}
        measured = evaluate_together(model, tested_on)
        # the accuracy is not that of the whole split
        fewer = {f"{split}_images": measured.count} if measured.count < len(tested_on) else {}
        return {f"{split}_accuracy": measured.accuracy, f"{split}_loss": measured.loss, **fewer}

    with _log_of(config, folder, keeper, also) as log:
        history = train(
            built.model,
            images,
            config.recipe,
            loss=loss_of(config),
            seed=config.seed,
            evaluate=None if tested_on is None else metrics,
            evaluate_every=evaluate_every,
            after_pass=_maps_drawer(config, tested_on, log),
            progress=config.recipe_name,
            keeper=keeper,
            log=log,
            workers=config.workers,
            average_into=averaged,
        )
        if log is None:
            return None
        seconds = log.seconds
    averaged = averaged and built._replace(model=with_student(built.model, averaged))
    prepared = prepared_as(config, images) | tested
    if detects:
        _save_detectors(folder, config, built, averaged, images.classes, prepared)
    else:
        _save(result_path(folder, config.method), config, built, prepared)
        if averaged is not None:
            _save(averaged_path(folder), config, averaged, prepared)
    no_results = ("epoch", "step", "lr", "corrupt_indices")
    results = {name: value for name, value in history[-1].items() if name not in no_results}
    cost = round(seconds, 2), round(peak_memory_mb(), 1)
    on = about("cuda" if torch.cuda.is_available() else "cpu")
    run = str(config.method), config.seed, config.describe()
    record = Record("train", *run, results, history, *cost, on)
    write_record(record_path(folder), record)
    return record


def precision(detector: nn.Module, images) -> dict[str, float]:
    """COCO's figures of a detector, as `atfamily.detection.evaluate.evaluate_detector` gives them."""
    from atfamily.detection.evaluate import evaluate_detector

    return evaluate_detector(detector, images)


def held_out(config: RunConfig):
    """The images that a run is evaluated on."""
    split = config.task.evaluation_split
    if isinstance(config.task, Detect):
        return coco_images(config.reading.data_path, split, image_size(config), workers=config.workers)
    flat = config.flat()
    reading = {name: flat[name] for name in READING if name in flat}
    return held_out_images(config.data, split, config.augmentation, **reading)


def _maps_drawer(
    config: RunConfig, images: Any, log: RunLog | None
) -> Callable[[nn.Module, dict], None] | None:
    """What draws, after every so many passes, where teacher and student look in the same six images; None
    where no picture is asked for."""
    every = config.task.maps_every if isinstance(config.task, Classify) else 0
    if every == 0:
        return None
    from atrun.pictures import as_png, maps_picture, some_of  # runs without pictures draw nothing

    few = some_of(images)

    def draw(model: nn.Module, entry: dict) -> None:
        if entry["epoch"] % every == 0 or entry["step"] == config.recipe.steps:
            figure = maps_picture(model, few)  # on every process: where weights are divided, all are needed
            if log is not None:
                log.picture("maps", entry["step"], as_png(figure))

    return draw


@contextmanager
def _log_of(
    config: RunConfig, folder: Path, keeper: CheckpointManager, also: Callable[[dict], None] | None
) -> Iterator[RunLog | None]:
    """The run's log, of the first process only."""
    if not is_main_process():
        yield None
        return
    newest = keeper.latest()
    after = 0 if newest is None else int(newest.name.removeprefix("step-"))
    with closing(RunLog(folder, after, config.tracker, also)) as log:
        yield log


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within it no other run writes in this folder, and what a killed one has half written is gone. Only the
    first process asks. Raises `ValueError` where another has it."""
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
            if left.is_file() and re.fullmatch(r"\..+\.\d+\.tmp|\.written-\d+", left.name):
                left.unlink(missing_ok=True)
        yield


def _save_detectors(
    folder: Path,
    config: RunConfig,
    built: Built,
    averaged: Built | None,
    classes: Sequence[str],
    prepared: Mapping[str, Any],
) -> None:
    """Keep the ViT (after Copy with its teacher), which other runs can start from and learn from, and the
    whole detector."""
    from atfamily.detection.files import save_detector

    vit = built.model.backbone.vit
    if config.method is Method.COPY:
        save_bundle(result_path(folder, config.method), vit, built.student, built.teacher, prepared)
    else:
        save_vit(result_path(folder, config.method), student_of(vit), built.student, prepared)
    described = config.task.detector, classes, built.student, built.teacher
    save_detector(detector_path(folder), built.model, *described)
    if averaged is not None:
        save_detector(averaged_path(folder), averaged.model, *described)


def prepared_as(config: RunConfig, images) -> dict[str, Any]:
    """What a file says beside the weights: how images are prepared and normalised for them, so that an
    evaluation elsewhere sees the same, and, of a classifier, the names of its classes."""
    own = getattr(images, "normalisation", None)
    said = {} if isinstance(config.task, Detect) else {"augmentation": config.describe().get("augmentation")}
    if isinstance(config.task, Classify):
        said["classes"] = list(images.classes)
    return said | {"normalisation": None if own is None else own.describe()}


def tested_as(config: RunConfig, images) -> dict[str, Any]:
    """Which images a classifier is tested on, as its file says it: by their split, their number, and a digest
    of their labels. An evaluation in the run's folder can tell by it whether they are the same; of those that
    are held out of the training images, others would be images that the model has learned."""
    if not isinstance(config.task, Classify):
        return {}
    labels = hashlib.sha256(images.targets.long().cpu().numpy().tobytes()).hexdigest()
    return {"tested_on": {"split": config.task.evaluation_split, "images": len(images), "labels": labels}}


def _save(path: Path, config: RunConfig, built: Built, prepared: Mapping[str, Any]) -> None:
    """Keep a model, with what `prepared_as` says."""
    result = result_of(config, built.model)
    match config.method:
        case Method.COPY:
            save_bundle(path, result, built.student, built.teacher, prepared)
        case Method.MEAN_MAPS:
            save_stored_maps(path, result, built.student, prepared)
        case _:
            save_vit(path, result, built.student, prepared)
