"""The commands of a real run: each is a plain function that prints and returns an exit code."""

import argparse
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from typing import NamedTuple

import torch

from atlib._util import INTERRUPTED, STOPPED, memory_message, out_of_memory, require_known
from atlib.checkpoint import read_header
from atlib.pair import Normalisation, Pair, student_of
from atlib.train import NonFiniteLoss, Preempted
from atrun import generic, recipes
from atrun.build import (
    READING,
    coco_images,
    held_out_images,
    known_size,
    outputs_for,
    preparation_of,
    require_size,
    training_images,
)
from atrun.classes import classes_of, labels_by_name
from atrun.config import (
    TRUST_DATA,
    RunConfig,
    built_for,
    config_path,
    explained,
    is_run,
    read_config,
    settings,
)
from atrun.configure import (
    TASKS_OF_OUR_OWN,
    config_diff,
    configure,
    configure_again,
    data_name,
    evaluated_split,
    oddities,
    teacher_name,
)
from atrun.data.generated import is_generated
from atrun.data.loading import ON_CORRUPT
from atrun.data.transforms import Augmentation
from atrun.log import as_line
from atrun.measure import ModelOnTest, measured_lines, shifted_test
from atrun.method import Method
from atrun.overrides import help_text, pairs, read
from atrun.parts import COCO, Detect
from atrun.record import Record
from atrun.runner import (
    check_folder,
    detector_path,
    held_out,
    is_finished,
    is_main_process,
    load_result,
    missing_results,
    precision,
    record_path,
    result_path,
    resume,
    start,
    tested_as,
    weights_of,
)

SETTINGS = (
    "Settings are further options, `--NAME VALUE` after the others: a field of the run or of its recipe as it"
    " stands (--lr 1e-3 --steps 500 --workers 8), of its parts (--plan.what q,"
    " --augmentation.flip 0), or any argument of the model's constructor (--model.depth 6). Published recipes"
    " are in epochs (--epochs 50 --warmup_epochs 5) and rates per 256 images (--base_lr 1e-3): steps and rate"
    " follow from the data and --batch_size, unless --steps and --lr say them. Lists are JSON, [0, 1]; null"
    " is none. The defaults below are those where a recipe says nothing else."
)


# What `--speed` stands for, from the published code's precision to the fastest on a GPU.
SPEEDS = {
    "exact": {"mixed_precision": "no", "compile": "false"},
    "tf32": {"mixed_precision": "tf32", "compile": "false"},
    "bf16": {"mixed_precision": "bf16", "compile": "false"},
    "compiled": {"mixed_precision": "bf16", "compile": "true"},
}
STRICT = "end at an image that cannot be decoded (default: it is named, counted and left out)"
EXAMPLES = {
    "train": "train --recipe distill --teacher vit_small_patch14_dinov2 --student small --data DIR --out RUN",
    "pretrain": "pretrain mae --data DIR --out RUN",
}


class _Settings(argparse.Action):
    """Prints the further options of `train` or `pretrain`, each with its type and default, and exits."""

    def __call__(self, parser, namespace, values, option_string=None):
        sections = explained(pretraining=parser.prog.endswith(" pretrain"))
        parser.exit(message=f"{textwrap.fill(SETTINGS, 79)}\n\n{help_text(sections)}\n")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add a command's options, and what it calls, `run`; `takes_settings` where it takes further `pairs`."""
    add = {"resume": _add_resume, "evaluate": _add_evaluate}.get(command, _add_train)
    add(parser)
    if command in ("train", "pretrain"):
        parser.set_defaults(takes_settings=True)
        parser.description = f"For example\n\n  python -m atlib {EXAMPLES[command]}"
        parser.epilog = (
            "Settings are further options, --epochs 50 --lr 1e-3 --plan.what q --model.depth 6:\n"
            f"`python -m atlib {command} --settings` lists them all."
        )
        parser.add_argument(
            "--settings", action=_Settings, nargs=0, help="list all further options, and exit"
        )
    if command == "evaluate":
        parser.set_defaults(takes_settings=True)
        every = {name: one for of in explained(False).values() for name, one in of.items()}
        unsaid = {name: every[name]._replace(default=MISSING) for name in READING}
        title = "How the data are read, as further options (default: as the run reads its own)"
        parser.epilog = help_text({title: unsaid})


def _add_train(parser: argparse.ArgumentParser) -> None:
    """Of `train` and `pretrain`."""
    pretraining = parser.prog.endswith(" pretrain")
    if pretraining:
        parser.add_argument("recipe", metavar="TASK", help=f"one of {', '.join(_tasks())}")
        teacher = "of the tasks that have one: a timm name or a file of weights (default: the recipe's)"
    else:
        names = (
            "scratch, fine-tune, copy or distill, derived from teacher and data, or a name of the page of"
            " recipes, such as copy-vit-large, mae-scratch-vit-base, find-copy"
        )
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--recipe", help=names)
        again = "a run's config.json, or its folder: the same run again, but for what else is said here"
        which.add_argument("--config", type=Path, metavar="FILE", help=again)
        parser.add_argument("--trust-data", action="store_true", help=TRUST_DATA)
        teacher = "a timm name, a file of weights, a run's folder, or untrained (default: the recipe's)"
    parser.add_argument("--teacher", help=teacher)
    if not pretraining:
        student = (
            "of scratch, copy and distill: tiny, small or half, the teacher's architecture in that size, or a"
            " timm name; layers and heads are paired by rules that are printed (default: as the teacher)"
        )
        parser.add_argument("--student", metavar="SIZE|NAME", help=student)
    data = (
        "a name of the catalogue (cifar10 ...), a hub id, parquet files or image folders, or a function that"
        f" makes them, as PACKAGE.MODULE:FUNCTION; {COCO} for a detector, with --data_path FOLDER"
    )
    parser.add_argument("--data", metavar="NAME|PATH", help=data, required=pretraining)
    seed = "decides first weights, order and augmentation (default: 0, or that of --config)"
    parser.add_argument("--seed", type=int, help=seed)
    out = "the run's folder: config, checkpoints, log, weights, record"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    speed = "of a step: float32, as published; tf32; bf16; or bf16 and torch.compile (default: the recipe's)"
    parser.add_argument("--speed", choices=SPEEDS, help=speed)
    parser.add_argument("--strict", action="store_true", help=STRICT)
    dry_run = (
        "print model, schedule, memory, time and cost; train nothing, read no weights, decode no image"
        " (data that are in no catalogue are opened, to count images and classes)"
    )
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.set_defaults(run=train_command)


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR")
    on_corrupt = (
        "from now on: stop at an image that cannot be decoded, or leave it out, of training and of evaluation"
        " (default: as the run was started)"
    )
    parser.add_argument("--on-corrupt", "--on_corrupt", choices=ON_CORRUPT, help=on_corrupt)
    others = "go on with another number of processes than before, with other random numbers: other bits"
    parser.add_argument("--allow-other-processes", action="store_true", help=others)
    parser.add_argument("--trust-data", action="store_true", help=TRUST_DATA)
    parser.set_defaults(run=resume_command)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    paths = "a finished run, or a file of weights that one has left; of several also the ensemble"
    parser.add_argument("paths", type=Path, nargs="+", metavar="DIR|FILE", help=paths)
    parser.add_argument("--data", metavar="NAME|PATH", help="default: what the run was trained on")
    parser.add_argument("--split", help="default: the one that the run evaluates on")
    shifted = (
        "in place of data: a test set under a shift, with its own classes among the model's: cifar10.1,"
        " imagenetv2, imagenet-a, imagenet-r, imagenet-sketch or imagenet-real; --data_path FOLDER says where"
        " its files are (default: from the hub)"
    )
    parser.add_argument("--shifted", metavar="NAME", help=shifted)
    averaged = "the averaged weights, where the recipe has them"
    parser.add_argument("--averaged", action="store_true", help=averaged)
    parser.add_argument("--trust-data", action="store_true", help=TRUST_DATA)
    parser.set_defaults(run=evaluate_command)


def train_command(arguments: argparse.Namespace) -> int:
    """`train` and `pretrain`."""
    pretraining = arguments.command == "pretrain"
    if pretraining:
        require_known("task of pre-training", arguments.recipe, _tasks())
    elif arguments.recipe in _tasks():
        raise ValueError(
            f"the recipe {arguments.recipe!r} learns from images alone, and `train` from the labels of"
            f" {arguments.data!r}: `python -m atlib pretrain {arguments.recipe} --data {arguments.data}` runs"
            " it"
        )
    config = _configured(arguments)
    if arguments.dry_run:
        return dry_run(config)
    if arguments.out is None:
        raise ValueError("--out DIR is missing: where shall the run's files go? (--dry-run needs none)")
    if is_main_process():
        check_folder(arguments.out)
    images = training_images(config)
    note_hours([config], len(images), outputs_for(config, images))
    if changed := config_diff(config, len(images)):
        _note(f"changed against the published recipe {config.recipe_name}: {'; '.join(changed)}")
    return _until_stopped(arguments.out, lambda: start(config, arguments.out, images))


def _configured(arguments: argparse.Namespace) -> RunConfig:
    """The run that `train` or `pretrain` is asked for; what was derived for it is said."""
    changes, seed = settings_of(arguments), arguments.seed or 0
    if getattr(arguments, "config", None) is not None:
        same = arguments.data, arguments.teacher, changes, arguments.seed
        return configure_again(arguments.config, *same, arguments.trust_data)
    if arguments.data is None:
        raise ValueError("--data NAME|PATH is missing: what shall the student learn from?")
    if student := getattr(arguments, "student", None):
        if arguments.recipe not in generic.NAMES:
            raise ValueError(f"--student {student}: the recipe {arguments.recipe!r} names its own")
        teacher = None if arguments.teacher is None else teacher_name(arguments.teacher)
        changes = {**generic.student_settings(student, teacher, changes), **changes}
    return configured(arguments.recipe, arguments.data, arguments.teacher, changes, seed)[0]


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The further options of a command that trains."""
    speed = SPEEDS.get(getattr(arguments, "speed", None), {})
    return speed | pairs(arguments.settings) | ({"on_corrupt": "raise"} if arguments.strict else {})


def configured(
    recipe: str, data: str, teacher: str | None, changes: Mapping[str, str], seed: int = 0
) -> tuple[RunConfig, str]:
    """`configure`, and what was derived, a line for each value with its rule, which is said, too."""
    derived, rules = None, ""
    if recipe in generic.NAMES:
        where = data_name(data, changes.get("data_path"))
        teacher = None if teacher is None else teacher_name(teacher)
        derived = generic.derive(recipe, where, teacher, changes, seed)
    config = configure(recipe, data, teacher, changes, seed, derived)
    if derived is not None:  # after all that can be wrong, which would be hard to see below it
        rules = derived.text(changes)
        _note(f"{recipe}: {rules}")
    return config, rules


def _tasks() -> tuple[str, ...]:
    """What `pretrain` runs: this project's tasks, and the papers' recipes for them."""
    return *TASKS_OF_OUR_OWN, *recipes.PRETRAINING


def resume_command(arguments: argparse.Namespace) -> int:
    """`resume`: a finished run says so; one without its weights says from what they are made again."""
    folder, config = arguments.folder, read_config(arguments.folder, arguments.trust_data)
    if is_finished(folder, config):
        return _say(f"{folder} is finished: {weights_of(folder)}, {record_path(folder)}")
    if record_path(folder).exists():
        missing = ", ".join(map(str, missing_results(folder, config)))
        again = "by training from the beginning: no checkpoint is left"
        if any(folder.glob("checkpoints/step-*")):
            again = "from the last checkpoint"
        _note(f"the run is finished, but {missing} is missing; it is made again {again}")
    asked = {name: getattr(arguments, name) for name in ("on_corrupt", "trust_data", "allow_other_processes")}
    return _until_stopped(folder, lambda: resume(folder, **asked))


def evaluate_command(arguments: argparse.Namespace) -> int:
    """`evaluate`: finished runs, or files of weights, on the runs' own data, on others or on a shifted set;
    of several models also their ensemble."""
    for name in ("data", "split"):
        if arguments.shifted is not None and getattr(arguments, name) is not None:
            raise ValueError(
                f"--shifted {arguments.shifted} is data of its own, with one split: leave --{name} out"
            )
    candidates = [_candidate(path, arguments) for path in arguments.paths]
    reading = read(pairs(arguments.settings), {name: settings()[name] for name in READING})
    for candidate in candidates:
        if candidate.detects and (len(candidates) > 1 or arguments.shifted is not None):
            raise ValueError(
                f"{candidate.path} holds a detector, which is measured by itself on data {COCO!r}: leave the"
                " others out, and --shifted"
            )
        if candidate.detects:
            return _evaluate_detector(candidate.path, candidate.config, arguments, reading)
    tests = [_test_of(candidate, arguments, reading) for candidate in candidates]
    return _say("\n".join(measured_lines(tests)))


class Candidate(NamedTuple):
    """What is to be evaluated. path: the file of weights; config: of its run, where it lies in one's folder;
    detects: whether it is a detector."""

    path: Path
    config: RunConfig | None
    detects: bool


def _candidate(path: Path, arguments: argparse.Namespace) -> Candidate:
    """The weights of a run's folder or a file. Raises `ValueError` or `OSError` where there are none that can
    be evaluated as asked."""
    weights, folder = weights_of(path, arguments.averaged), path if path.is_dir() else path.parent
    trusts = arguments.trust_data or arguments.data is not None or arguments.shifted is not None
    config = read_config(folder, trusts) if path.is_dir() or is_run(folder) else None
    if config is not None and config.method.pretrains:
        raise ValueError(
            f"{folder} holds a ViT without a class head: with labels, `train --recipe fine-tune --teacher"
            f" {folder}` gives it one"
        )
    if config is None and arguments.data is None and arguments.shifted is None:
        raise ValueError(
            f"{path} lies in no run's folder, which would say what data it was trained on: name them with"
            " --data"
        )
    detects = isinstance(config.task, Detect) if config is not None else "detector" in read_header(weights)
    return Candidate(weights, config, detects)


def _test_of(candidate: Candidate, arguments: argparse.Namespace, reading: dict) -> ModelOnTest:
    """A candidate's model with the images that it is tested on, prepared as it wants them."""
    path, config, _ = candidate
    model = load_result(path)
    if arguments.shifted is not None:
        return shifted_test(path, model, arguments.shifted, *_preparation(path, config, model), reading)
    note = ""
    if arguments.data is None:
        config.require_use(reading)
        split = arguments.split or config.task.evaluation_split
        images = held_out(config.changed(evaluation_split=split, **reading))
        note = "" if reading else _tested_anew(path, config, split, images)
    else:
        data = data_name(arguments.data, reading.get("data_path"))
        if is_generated(data) and reading:
            raise ValueError(
                f"--{next(iter(reading))} would change nothing: it belongs to data that are read, and"
                f" {data} are generated; leave it out"
            )
        split = arguments.split or evaluated_split(data)
        augmentation, note = _preparation(path, config, model) if not is_generated(data) else (None, "")
        images = held_out_images(data, split, augmentation, **reading)
    name = arguments.data or config.data
    require_size(model, images, f"{name} {split}")
    labels, matched = labels_by_name(classes_of(path), model, images, f"{name} {split}", path)
    note += _held_out_note(name, split, len(images))
    return ModelOnTest(path, model, images, labels, f"{name}, {split}", note=matched + note)


def _held_out_note(data: str, split: str, count: int) -> str:
    """What is to be said where a folder has no split of this name, and its tenth is measured; else ""."""
    folder = Path(data)
    if split != "validation" or not folder.is_dir() or any(folder.glob("*.parquet")):
        return ""
    from atrun.data.folders import ImageFolders

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever reads them has said it
        splits = ImageFolders(folder, labelled=False)
    if "validation" in splits or "train" not in splits:
        return ""
    return (
        f"\n{data} has no folder of validation images: these {count:,} are the tenth of its images that a"
        " run on it holds out of training"
    )


def _tested_anew(path: Path, config: RunConfig, split: str, images) -> str:
    """What is to be said where a split holds other images than when the run was tested on it; else ""."""
    before = read_header(path).get("tested_on")
    now = tested_as(config.changed(evaluation_split=split), images)["tested_on"]
    if before is None or before["split"] != split or before == now:
        return ""
    grown = f"{before['images']:,} then, {now['images']:,} now"
    how = grown if before["images"] != now["images"] else "as many, with other labels"
    return (
        f"\n{config.data}, {split}: other images than when the run ended ({how}). If they are held out of its"
        " training images, the model has learned most of them, and this accuracy is too high: evaluate it on"
        " images of their own, with --data and --split"
    )


def _evaluate_detector(
    path: Path, config: RunConfig | None, arguments: argparse.Namespace, reading: dict
) -> int:
    """`evaluate` of a whole detector, on its run's folder of images or on another."""
    if arguments.data not in (None, COCO):
        raise ValueError(
            f"--data {arguments.data}: {path} holds a detector, which is measured on data {COCO!r}; another"
            " folder of that form is --data_path FOLDER"
        )
    for name in reading:
        if name not in ("data_path", "workers"):
            raise ValueError(
                f"--{name} would change nothing: images of {COCO!r} have no such choice; leave it out"
            )
    detector, classes, _ = load_detector_of(path)
    folder, split = None, evaluated_split(COCO)
    if config is not None:
        folder, split = config.reading.data_path, config.task.evaluation_split
    folder, split = reading.get("data_path", folder), arguments.split or split
    size = detector.backbone.student.patch_embed.img_size[0]
    images = coco_images(folder, split, size, workers=reading.get("workers", 0))
    if images.classes != classes:
        raise ValueError(
            f"{folder}, {split} has categories {images.classes}, and {path} knows {classes}: evaluate it on"
            " data with the classes that it was trained for"
        )
    precisions = precision(detector.to("cuda" if torch.cuda.is_available() else "cpu"), images)
    figures = [f"{name.replace('_', ' ')} {100 * value:.1f}" for name, value in precisions.items()]
    said = ", ".join(figures) or "nothing to find"
    return _say(f"{path} on {COCO}, {split}: {said} (per cent), of {len(images):,} images")


def load_detector_of(path: Path):
    """The detector in a file that a run has left, as `atfamily.detection.files.load_detector` reads it."""
    from atfamily.detection.files import load_detector

    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: `python -m atlib resume {path.parent}` goes on with the run, or writes"
            " its weights again where it is finished"
        )
    return load_detector(path)


def _preparation(
    path: Path, config: RunConfig | None, model: torch.nn.Module
) -> tuple[Augmentation | None, str]:
    """How images are prepared for a file's weights: as it says, else as its run does, else a guess, noted."""
    said, augmentation = preparation_of(path)
    if said:
        return augmentation, ""
    if config is not None:
        return config.augmentation, ""
    size = built_for(student_of(model))
    guess = Augmentation() if size is None else Augmentation(size[0])
    known = model.normalisation if isinstance(model, Pair) else Normalisation.of(model)
    if known is not None:
        guess = replace(guess, mean=known.mean, std=known.std)
    return guess, (
        f"\n{path} does not say how images were prepared for it; here they were taken at"
        f" {guess.image_size} pixels, crop {guess.crop_pct}, mean {guess.mean} and std {guess.std}. If it"
        " was trained otherwise, evaluate it in its run's folder"
    )


def dry_run(config: RunConfig) -> int:
    """Print what a run would be and cost, after some of its steps on noise; nothing is trained."""
    from atrun import estimate, estimate_text  # a run that trains counts no FLOPs

    size = known_size(config)
    # of data that nobody has published, the number of images and classes; no image is decoded
    if size is None:
        images = training_images(config)
        size = len(images), outputs_for(config, images)
    count, outputs = size
    expected = estimate.estimate(config, count, outputs)
    return _say(estimate_text.as_text(expected, oddities(config.recipe_name), config_diff(config, count)))


def _until_stopped(folder: Path, run) -> int:
    """Carry a run out; a run that was stopped in order says how it goes on."""
    go_on = f"resume with: python -m atlib resume {folder}"
    try:
        record = run()
    except Preempted as stopped:
        _note(f"{stopped}\n{go_on}")
        return STOPPED
    except NonFiniteLoss as error:
        print(f"python -m atlib: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        _note(f"interrupted{f'; {go_on}' if config_path(folder).exists() else ': nothing was written yet'}")
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        print(
            f"python -m atlib: {memory_message(error)}. Start it in another folder with --accumulate 4 (a"
            " step is computed in so many parts, and is the same), --checkpoint_activations true or a"
            " smaller --batch_size; --dry-run says what a step needs",
            file=sys.stderr,
        )
        return 1
    return 0 if record is None else _say(summary(folder, record))


def summary(folder: Path, record: Record) -> str:
    """What a finished run prints."""
    beside = {Method.COPY: "its teacher", Method.MEAN_MAPS: "the maps"}.get(record.method)
    needs = f", with {beside} in the same file, which it needs" if beside else ""
    weights = f"weights: {result_path(folder, record.method)}{needs}"
    if detector_path(folder).exists():
        weights = f"detector: {detector_path(folder)}{needs}\n{weights}"
    return f"{as_line(record.results)}\n{weights}\nrecord: {record_path(folder)}"


def note_hours(configs: Sequence[RunConfig], images: int, outputs: int) -> None:
    """Say before some runs begin that they will take more than an hour, as far as FLOPs tell."""
    if not is_main_process():
        return
    from atrun.estimate import rough_hours  # a run that resumes counts no FLOPs

    hours = sum(rough_hours(config, images, outputs) for config in configs)
    if hours > 1:
        _note(f"about {hours:.2g} hours on this machine: --dry-run measures it, --epochs N makes it shorter")


def _note(text: str) -> None:
    """Tell people, once, what is no result."""
    if is_main_process():
        print(f"python -m atlib: {text}", file=sys.stderr)


def _say(text: str) -> int:
    if is_main_process():
        print(text)
    return 0
