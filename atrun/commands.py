"""The commands that train: each is a plain function that prints and returns an exit code."""

import argparse
import textwrap
from collections.abc import Callable
from pathlib import Path

from atlib._util import INTERRUPTED, STOPPED, require_known
from atlib.processes import processes_asked
from atlib.train import Preempted
from atrun import estimate, generic, recipes, runner
from atrun.build import outputs_for, published_size, training_images
from atrun.config import COCO, TRUST_DATA, RunConfig, read_config, settings
from atrun.configure import config_diff, configure_again, configured, teacher_name
from atrun.data.decoding import ON_CORRUPT
from atrun.log import as_line
from atrun.method import DERIVED, Method
from atrun.overrides import help_text, pairs
from atrun.record import Record

SETTINGS = (
    "Settings are further options, `--NAME VALUE` after the others: a field of the run or its recipe (--lr"
    " 1e-3), of its parts (--plan.what q), or any argument of the model's constructor (--model.depth 6)."
    " Published recipes are in epochs (--epochs 50) and rates per 256 images (--base_lr 1e-3): steps and rate"
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
EXAMPLES = {
    "train": "train --recipe distill --teacher vit_small_patch14_dinov2 --student small --data DIR --out RUN",
    "pretrain": "pretrain mae --data DIR --out RUN",
}
TASKS = *recipes.TASKS, *recipes.PRETRAINING  # what `pretrain` runs: ours, and the papers' recipes for them


class _Settings(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        parser.exit(message=f"{textwrap.fill(SETTINGS, 79)}\n\n{help_text(settings())}\n")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add a command's options, and what it calls, `run`; `takes_settings` where it takes further `pairs`."""
    if command == "resume":
        parser.add_argument("folder", type=Path, metavar="DIR")
        corrupt = "of an image that cannot be decoded, from now on"
        parser.add_argument("--on-corrupt", "--on_corrupt", choices=ON_CORRUPT, help=corrupt)
        others = "go on with another number of processes than before, and so other bits"
        parser.add_argument("--allow-other-processes", action="store_true", help=others)
        parser.add_argument("--trust-data", action="store_true", help=TRUST_DATA)
        parser.set_defaults(run=resume_command)
        return
    if command == "pretrain":
        parser.add_argument("recipe", metavar="TASK", help=f"one of {', '.join(TASKS)}")
        teacher = "of the tasks that have one: a timm name or a file of weights (default: the recipe's)"
    else:
        names = "scratch, fine-tune, copy, distill ..., derived from teacher and data, or a published name"
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--recipe", help=names)
        again = "a run's config.json, or its folder: the same run again, but for what else is said here"
        which.add_argument("--config", type=Path, metavar="FILE", help=again)
        parser.add_argument("--trust-data", action="store_true", help=TRUST_DATA)
        student = "of derived recipes: tiny, small, half or a timm name (default: as the teacher)"
        parser.add_argument("--student", metavar="SIZE|NAME", help=student)
        teacher = "a timm name, a file of weights, a run's folder, or untrained (default: the recipe's)"
    parser.add_argument("--teacher", help=teacher)
    data = (
        "a name of the catalogue (cifar10 ...), a hub id, parquet files, image folders, a function as"
        f" PACKAGE.MODULE:FUNCTION, or {COCO}, with --data_path FOLDER"
    )
    parser.add_argument("--data", metavar="NAME|PATH", help=data, required=command == "pretrain")
    seed = "decides first weights, order and augmentation (default: 0, or that of --config)"
    parser.add_argument("--seed", type=int, help=seed)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's folder, of all its files")
    speed = "of a step: float32, as published; tf32; bf16; or bf16 and torch.compile (default: the recipe's)"
    parser.add_argument("--speed", choices=SPEEDS, help=speed)
    dry_run = "print model, schedule, memory, time and cost; train nothing, read no weights, decode no image"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    processes = "of a dry run: the processes that `accelerate launch` is to start (default: as it did, or 1)"
    parser.add_argument("--processes", type=int, metavar="N", help=processes)
    parser.add_argument("--settings", action=_Settings, nargs=0, help="list all further options, and exit")
    parser.description = f"For example\n\n  python -m atlib {EXAMPLES[command]}"
    parser.epilog = (
        "Settings are further options, --epochs 50 --lr 1e-3 --plan.what q --model.depth 6:\n"
        f"`python -m atlib {command} --settings` lists them all."
    )
    parser.set_defaults(run=train_command, takes_settings=True)


def train_command(arguments: argparse.Namespace) -> int:
    recipe, out = arguments.recipe, arguments.out
    if arguments.command == "pretrain":
        require_known("task of pre-training", recipe, TASKS)
    elif recipe in TASKS:
        raise ValueError(f"the recipe {recipe!r} learns without labels: `python -m atlib pretrain {recipe}`")
    changes, again = settings_of(arguments), getattr(arguments, "config", None)
    if again is not None:
        asked = arguments.data, arguments.teacher, changes, arguments.seed
        config = configure_again(again, *asked, arguments.trust_data)
    elif arguments.data is None:
        raise ValueError("--data NAME|PATH is missing: what shall the student learn from?")
    else:
        if student := getattr(arguments, "student", None):
            if recipe not in DERIVED:
                raise ValueError(f"--student {student}: the recipe {recipe!r} names its own")
            teacher = None if arguments.teacher is None else teacher_name(arguments.teacher)
            changes = generic.student_settings(student, teacher, changes)
        config, rules = configured(recipe, arguments.data, arguments.teacher, changes, arguments.seed or 0)
        runner.note(rules)  # after all that can be wrong, which would be hard to see below it
    if arguments.dry_run:
        return dry_run(config, arguments.processes)
    if arguments.processes is not None:
        raise ValueError(f"--processes {arguments.processes}: of --dry-run; `accelerate launch` starts them")
    if out is None:
        raise ValueError("--out DIR is missing: where shall the run's files go? (--dry-run needs none)")
    if runner.is_main_process():
        runner.check_folder(out)
    images = training_images(config)
    if changed := config_diff(config, len(images)):
        runner.note(f"changed against the published recipe {config.recipe_name}: {'; '.join(changed)}")
    return _in_folder(out, lambda: runner.start(config, out, images))


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The further options of a command that trains."""
    return SPEEDS.get(arguments.speed, {}) | pairs(arguments.settings)


def resume_command(arguments: argparse.Namespace) -> int:
    folder, config = arguments.folder, read_config(arguments.folder, arguments.trust_data)
    if runner.is_finished(folder, config):
        return _say(f"{folder} is finished: {runner.weights_of(folder)}, {folder / 'record.json'}")
    if (folder / "record.json").exists():
        missing = ", ".join(map(str, runner.missing_results(folder, config)))
        runner.note(f"missing: {missing}; the run makes it again")
    options = {"trust_data": arguments.trust_data, "allow_other_processes": arguments.allow_other_processes}
    return _in_folder(folder, lambda: runner.resume(folder, arguments.on_corrupt, **options))


def dry_run(config: RunConfig, processes: int | None = None) -> int:
    """Print what a run would be and cost. processes: that share a step; None: as a launcher started."""
    processes = processes_asked() if processes is None else processes
    if not 1 <= processes <= config.recipe.batch_size:
        raise ValueError(f"--processes {processes}: from 1 to the batch, {config.recipe.batch_size}")
    size = published_size(config)
    # of data that nobody has published, the number of images and classes; no image is decoded
    if size is None:
        images = training_images(config)
        size = len(images), outputs_for(config, images)
    expected = estimate.estimate(config, *size, processes=processes)
    return _say(estimate.as_text(expected, config_diff(config, size[0])))


def until_stopped(run: Callable[[], str | None], go_on: str) -> int:
    """Print what carrying out a run says; of one that was stopped in order, how it goes on."""
    try:
        text = run()
    except Preempted as stopped:
        runner.note(f"{stopped}\n{go_on}")
        return STOPPED
    except KeyboardInterrupt:
        runner.note(f"interrupted; {go_on}")
        return INTERRUPTED
    return 0 if text is None else _say(text)


def _in_folder(folder: Path, run: Callable[[], Record | None]) -> int:
    return until_stopped(lambda: summary(folder, run()), f"resume with: python -m atlib resume {folder}")


def summary(folder: Path, record: Record | None) -> str | None:
    """What a finished run prints; None of other processes than the first, which have no record."""
    if record is None:
        return None
    beside = {Method.COPY: "its teacher", Method.MEAN_MAPS: "the maps"}.get(record.method)
    needs = f", with {beside} in the same file, which it needs" if beside else ""
    weights = f"weights: {runner.result_path(folder, record.method)}{needs}"
    if (detector := folder / "detector.safetensors").exists():
        weights = f"detector: {detector}{needs}\n{weights}"
    return f"{as_line(record.results)}\n{weights}\nrecord: {folder / 'record.json'}"


def _say(text: str) -> int:
    if runner.is_main_process():
        print(text)
    return 0
