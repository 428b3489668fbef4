"""The commands of a real run: train, resume, evaluate, pretrain, teacher. Each is a plain function that prints and returns an exit code."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from atlib.augmentation import Augmentation
from atlib.changes import parse_changes
from atlib.configure import Asked, configure, data_name, evaluated_split, oddities
from atlib.dry_run import estimate
from atlib.dry_run_text import as_text
from atlib.evaluate import evaluate
from atlib.names import require_known
from atlib.record import Record
from atlib.run import BUILT_IN, PRETRAINING, RunConfig, config_path, read_config
from atlib.run_parts import held_out_images, known_size, outputs_for, training_images
from atlib.running import check_folder, held_out, is_main_process, load_result, record_path, result_path, resume, start
from atlib.train import NonFiniteLoss, Preempted

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: it was stopped, and the same run can go on
SETTINGS = ("a field of the run or of its recipe (lr=1e-3, steps=500, batch_size=256, seed ...), of its parts (plan.what=q, augmentation.flip=0, "
            "model.depth=6), or of the published recipe before epochs become steps (published.epochs=50); may be given several times")


def add_commands(commands) -> None:
    """Add the commands of a run to a parser's sub-commands."""
    train = commands.add_parser("train", help="train a student by a recipe, in a folder of its own; also under accelerate launch and torchrun")
    train.add_argument("--recipe", required=True, help="a name of the page of recipes, such as copy-vit-large, mae-scratch-vit-base, built-in-copy")
    train.add_argument("--teacher", default=None, help="a timm name or a file of weights (default: the recipe's)")
    pretrain = commands.add_parser("pretrain", help="make a teacher: retrieval on the built-in world, masked auto-encoding on any images")
    pretrain.add_argument("recipe", metavar="TASK", help=f"one of {', '.join(PRETRAINING)}")
    pretrain.set_defaults(teacher=None)
    for each in (train, pretrain):
        each.add_argument("--data", default=BUILT_IN if each is pretrain else None, required=each is train, metavar="NAME|PATH",
                          help=f"{BUILT_IN}, a name of the catalogue (imagenet-1k, cifar10 ...), a hub id, or parquet files or folders of images")
        each.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=SETTINGS)
        each.add_argument("--seed", type=int, default=0, help="decides first weights, order and augmentation (default: 0)")
        each.add_argument("--out", type=Path, default=None, metavar="DIR", help="the run's folder: config, checkpoints, log, weights, record")
        each.add_argument("--tensorboard", action="store_true", help="also write DIR/tensorboard")
        each.add_argument("--dry-run", action="store_true", help="print model, schedule, memory, time and cost; train nothing, read no data and no weights")
        each.set_defaults(run=train_command)
    again = commands.add_parser("resume", help="go on with a run that was stopped, from its newest good checkpoint")
    again.add_argument("folder", type=Path, metavar="DIR")
    again.set_defaults(run=resume_command)
    evaluating = commands.add_parser("evaluate", help="accuracy of what a run has made, on any data")
    evaluating.add_argument("path", type=Path, metavar="DIR|FILE", help="a finished run, or a file of weights that one has left")
    evaluating.add_argument("--data", default=None, metavar="NAME|PATH", help="default: what the run was trained on")
    evaluating.add_argument("--split", default=None, help="default: the one that the run evaluates on")
    evaluating.add_argument("--averaged", action="store_true", help="the averaged weights, where the recipe has them")
    evaluating.set_defaults(run=evaluate_command)
    teacher = commands.add_parser("teacher", help="what a teacher is, and what of it can be transferred")
    teacher.add_argument("name", metavar="NAME|PATH")
    teacher.add_argument("--images", type=Path, nargs="+", default=None, metavar="PATH", help="image files whose maps are drawn")
    teacher.add_argument("--out", type=Path, default=None, metavar="FILE", help="where the picture of its maps goes, a .png")
    teacher.add_argument("--image-size", type=int, default=None, help="pixels a side that it shall take (default: its own)")
    teacher.add_argument("--heads", type=int, default=None, help="of a file whose weights do not tell")
    teacher.add_argument("--architecture", default=None, metavar="NAME", help="of a file whose weights do not tell: a timm name")
    teacher.set_defaults(run=teacher_command)


def train_command(given: argparse.Namespace) -> int:
    """`train` and `pretrain`."""
    pretraining = given.command == "pretrain"
    if pretraining:
        require_known("task of pre-training", given.recipe, PRETRAINING)
    asked = Asked(given.recipe, given.data, given.teacher, parse_changes(given.set), given.seed, given.tensorboard)
    config = configure(asked)
    if given.dry_run:
        return _dry_run(asked, config)
    if given.out is None:
        raise ValueError("--out DIR is missing: where shall config, checkpoints, log and weights go? (--dry-run needs none)")
    if is_main_process():
        check_folder(given.out)
    images = training_images(config)
    config = configure(asked, len(images))  # epochs are as long as the data that are really there
    return _until_stopped(given.out, lambda: start(config, given.out, images))


def resume_command(given: argparse.Namespace) -> int:
    """`resume`: a finished run says so."""
    if record_path(given.folder).exists():
        return _say(f"{given.folder} is finished: {result_path(given.folder, read_config(given.folder).method)}, {record_path(given.folder)}")
    return _until_stopped(given.folder, lambda: resume(given.folder))


def evaluate_command(given: argparse.Namespace) -> int:
    """`evaluate`: a finished run on its own data or on others; or a file of weights, on data that are named."""
    if not given.path.exists():
        raise FileNotFoundError(f"{given.path} does not exist: name a run's folder or a file of weights")
    if given.averaged and given.path.is_file():
        raise ValueError(f"--averaged chooses among a run's weights, and {given.path} is a file: leave one of them out")
    folder = given.path if given.path.is_dir() else given.path.parent
    config = read_config(folder) if given.path.is_dir() or config_path(folder).exists() else None
    if config is not None and config.method in PRETRAINING:
        raise ValueError(f"{folder} holds a teacher without a class head: `python -m atlib teacher {result_path(folder, config.method)}` says what it is")
    if config is None and given.data is None:
        raise ValueError(f"{given.path} lies in no run's folder, which would say what data it was trained on: name them with --data")
    if given.averaged and config is not None and config.recipe.ema is None:
        raise ValueError(f"the run in {folder} has no averaged weights: its recipe has no ema")
    path = given.path if given.path.is_file() else folder / "averaged.safetensors" if given.averaged else result_path(folder, config.method)
    model = load_result(path)
    if given.data is None:
        split, images = given.split or config.evaluation_split, held_out(config if given.split is None else replace(config, evaluation_split=given.split))
    else:
        data = data_name(given.data)
        split = given.split or evaluated_split(data)
        size = getattr(model, "student", model).patch_embed.img_size[0]
        images = held_out_images(data, split, Augmentation(size) if config is None else config.augmentation)
    found = evaluate(model.to("cuda" if torch.cuda.is_available() else "cpu"), images)
    return _say(f"{path} on {given.data or config.data}, {split}: accuracy {100 * found.accuracy:.2f} % of {found.count:,} images, loss {found.loss:.4f}")


def teacher_command(given: argparse.Namespace) -> int:
    """`teacher`: what it is; saves a picture of its maps where asked."""
    from atlib.teachers import report

    return _say(report(given.name, given.images, given.out, image_size=given.image_size, heads=given.heads, architecture=given.architecture))


def _dry_run(asked: Asked, config: RunConfig) -> int:
    size = known_size(config)
    if size is None:  # of data that nobody has published, the number of images and classes; no image is decoded
        images = training_images(config)
        size = len(images), outputs_for(config, images)
    count, outputs = size
    return _say(as_text(estimate(configure(asked, count), count, outputs), oddities(asked.recipe)))


def _until_stopped(folder: Path, run) -> int:
    """Carry a run out; a run that was stopped in order says how it goes on."""
    try:
        record = run()
    except Preempted as stopped:
        if is_main_process():
            print(f"python -m atlib: {stopped}\nresume with: python -m atlib resume {folder}", file=sys.stderr)
        return STOPPED
    except NonFiniteLoss as error:
        print(f"python -m atlib: {error}", file=sys.stderr)
        return 1
    return 0 if record is None else _say(summary(folder, record))


def summary(folder: Path, record: Record) -> str:
    """What a finished run prints."""
    method = record.method
    lines = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in record.results.items()]
    needs = ", with its teacher in the same file, which it needs" if method == "copy" else ""
    return "\n".join([", ".join(lines), f"weights: {result_path(folder, method)}{needs}", f"record: {record_path(folder)}"])


def _say(text: str) -> int:
    if is_main_process():
        print(text)
    return 0
