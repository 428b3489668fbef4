"""The commands of the book's laboratory: `experiments` lists its experiments, `experiment NAME` repeats one,
`claims` judges what the book says by their records, `teacher` makes a teacher."""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from atbook.lab.detection import DETECTION
from atbook.lab.evals import EXAMINATIONS, Examination, run_examination
from atbook.lab.findings import findings_table
from atbook.lab.real import REAL
from atbook.lab.real_full import REAL_FULL, REAL_LONG
from atbook.lab.scales import (
    CLASSIFYING,
    SCALES,
    TUNING_SEED,
    WORLD_METHODS,
    CifarScale,
    GlyphScale,
    MosaicScale,
    PacsScale,
    PublishedScale,
    TeacherFailed,
    scales,
)
from atbook.lab.studies import CENTRAL, STUDIES
from atbook.lab.study import ACCURACY, Place, Study, run_study
from atbook.lab.translation import TRANSLATION
from atbook.records import read_file, read_records, records_file, spread
from atlib._util import STOPPED, require_known
from atlib.checkpoint import save_vit
from atlib.train import Preempted
from atrun.record import Record

EXPERIMENTS: dict[str, Study | Examination] = {
    "transfer": CENTRAL,
    **STUDIES,
    DETECTION.name: DETECTION,
    REAL.name: REAL,
    REAL_FULL.name: REAL_FULL,
    REAL_LONG.name: REAL_LONG,
    TRANSLATION.name: TRANSLATION,
    **EXAMINATIONS,
}


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of a command, and what it calls, `run`."""
    add = parser.add_argument
    if command == "claims":
        add("chapters", nargs="*", metavar="CHAPTER", help="such as 05 (default: all)")
    elif command == "teacher":
        add("world", help="find or match")
        add("--out", type=Path, required=True, metavar="FILE", help="its weights, .safetensors")
        add("--seed", type=int, default=0, help="decides first weights, images and order (default: 0)")
        add("--steps", type=int, help="of its training (default: as in the book)")
        add("--images", type=int, help="without labels (default: 40,000, as in the book)")
    elif command == "experiment":
        _add_experiment(add)
    runs = {"experiments": experiments_command, "claims": claims_command, "teacher": teacher_command}
    parser.set_defaults(run=runs.get(command, experiment_command))


def _add_experiment(add: Callable) -> None:
    add("name", nargs="?", help="; ".join(f"{name}: {study.shows}" for name, study in EXPERIMENTS.items()))
    add(
        "--all",
        action="store_true",
        help="every experiment, at the scales and for the seeds that are recorded: what is missing is run",
    )
    where = "(default: find, or the first that the experiment is made for)"
    add("--scale", help=f"one of {', '.join(SCALES)} {where}")
    add("--seeds", type=int, help="number of seeds, from 0 on (default: the number that `experiments` lists)")
    some = f"only some; of transfer: {', '.join(WORLD_METHODS)} (default: all at this scale)"
    add("--methods", nargs="+", metavar="METHOD", help=some)
    add(
        "--data",
        type=Path,
        help="folder with CIFAR-10's parquet files, for the scales pacs, mosaics and real-* one that holds"
        " cifar10/ and pacs/ (default: from the hub)",
    )
    add(
        "--out",
        type=Path,
        default=Path("results"),
        help="folder of the records, OUT/NAME/SCALE.jsonl; studies start from OUT/transfer/SCALE.jsonl"
        " (default: results)",
    )
    add("--work", type=Path, help="folder for weights (default: runs/transfer/SCALE)")
    jobs = "runs side by side, one thread each (default: 1, with all threads)"
    add("--jobs", type=int, default=1, help=jobs)


def experiments_command(asked: argparse.Namespace) -> int:
    """`experiments`."""
    print(overview(Path("results")))
    return 0


def claims_command(asked: argparse.Namespace) -> int:
    """`claims`."""
    print(findings_table(*asked.chapters))
    return 0


def teacher_command(asked: argparse.Namespace) -> int:
    """`teacher`: the retrieval teacher of a world, as the experiments make it, shorter where asked; 1 where
    it has not learned its own task."""
    worlds = {name: scale for name, scale in scales().items() if isinstance(scale, GlyphScale)}
    require_known("world", asked.world, worlds)
    scale = worlds[asked.world]
    for name in ("steps", "images"):
        if getattr(asked, name) is not None and getattr(asked, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(asked, name)}")
    if asked.steps is not None:  # a shorter one is not held to what a whole one has learned
        scale = replace(scale, pretraining=replace(scale.pretraining, steps=asked.steps), gate=math.inf)
    if asked.images is not None:
        scale = replace(scale, unlabelled=asked.images)
    try:
        teacher, architecture, history = scale.make_teacher(asked.seed, f"teacher of {asked.world}")
    except TeacherFailed as error:
        print(f"python -m atbook: {error}", file=sys.stderr)
        return 1
    save_vit(asked.out, teacher.cpu(), architecture)
    print(f"{asked.out}: it has left {history[-1]['unlearned']:.3f} of its task unlearned")
    return 0


def experiment_command(asked: argparse.Namespace) -> int:
    """`experiment`: repeats one, or all, and prints the table of each; 1 where a teacher has not learned its
    own task, 75 where its pre-training was stopped and goes on when it is called again."""
    if asked.all == (asked.name is not None):
        raise ValueError("name one experiment (`python -m atbook experiments` lists them), or ask for --all")
    if not asked.all:
        return _repeat(asked)
    of_one = {name for name in ("scale", "seeds", "methods", "work") if getattr(asked, name) is not None}
    if of_one:
        raise ValueError(f"--{min(of_one)} is of one experiment, and --all repeats every one: leave one out")
    for name, scale, seeds in recorded(asked.out):
        if (
            isinstance(scales()[scale], (CifarScale, PacsScale, MosaicScale, PublishedScale))
            and asked.data is None
        ):
            print(f"{name} at {scale} is left out: it needs images, --data FOLDER")
            continue
        one = {"name": name, "scale": scale, "seeds": seeds}
        if code := _repeat(argparse.Namespace(**vars(asked) | one)):
            return code
    return 0


def recorded(results: Path) -> list[tuple[str, str, int]]:
    """(experiment, scale, number of seeds) of all that has records in `results`, and of what has none yet
    where it is made for first: in the order in which one starts from another."""
    repeats = []
    for name, study in EXPERIMENTS.items():
        scales_of = study.only or CLASSIFYING
        runs = {scale: read_records(name, scale, results=results) for scale in scales_of}
        # a model that others are measured by may be of the tuning seed: no reported one
        last = {scale: [r.seed for r in records if r.seed < TUNING_SEED] for scale, records in runs.items()}
        seeds = {scale: 1 + max(reported) for scale, reported in last.items() if reported}
        repeats += [(name, *at) for at in (seeds or {scales_of[0]: study.seeds}).items()]
    return repeats


def _repeat(asked: argparse.Namespace) -> int:
    try:
        records, path = _run_experiment(asked)
    except (TeacherFailed, Preempted) as error:
        print(f"python -m atbook: {error}", file=sys.stderr)
        return 1 if isinstance(error, TeacherFailed) else STOPPED
    _print_table(records, EXPERIMENTS[asked.name])
    print(f"records: {path}")
    return 0


def overview(results: Path) -> str:
    """What `python -m atbook experiments` prints: every experiment, what it shows, the paper's counterpart,
    scales, and records in `results` with the time that they took, searches included."""
    lines = []
    for name, study in EXPERIMENTS.items():
        where = study.only or CLASSIFYING
        here = []
        for scale in where:
            if number := len(read_records(name, scale, results=results)):
                seconds = sum(record.seconds for record in read_file(records_file(name, scale, results)))
                here.append(f"{number} runs at {scale} ({seconds / 120:.0f} minutes of two cores)")
        lines += [
            f"{name}: {study.shows}",
            f"    paper:   {study.paper}",
            f"    scales:  {', '.join(where)} ({study.seeds} seeds)",
            f"    records: {', '.join(here) or 'none here'}",
        ]
    return "\n".join(lines)


def _run_experiment(asked: argparse.Namespace) -> tuple[list[Record], Path]:
    """Repeat an experiment; its records, and their file."""
    require_known("experiment", asked.name, EXPERIMENTS)
    study = EXPERIMENTS[asked.name]
    scale = asked.scale or (study.only or CLASSIFYING)[0]
    require_known("scale", scale, scales())
    seeds = study.seeds if asked.seeds is None else asked.seeds
    if seeds < 1 or asked.jobs < 1:
        raise ValueError(f"--seeds and --jobs must be at least 1, got {seeds} and {asked.jobs}")
    place = Place(scale, asked.data, asked.out, asked.work or Path("runs", "transfer", scale))
    run = run_examination if isinstance(study, Examination) else run_study
    return run(study, place, seeds, asked.methods, asked.jobs), place.records(asked.name)


def _print_table(records: list[Record], study: Study | Examination) -> None:
    variants = study.variants if isinstance(study, Study) else ()
    figures = {variant.name: variant.measure.figure for variant in variants}
    scores: dict[str, list[float]] = {}
    for record in records:
        value = record.results.get(f"test_{figures.get(record.method, ACCURACY.figure)}")
        if value is not None:  # what is measured on a teacher has none
            scores.setdefault(record.method, []).append(100 * value)
    width = max((len(method) for method in scores), default=0)
    for method, values in scores.items():
        figure = figures.get(method, ACCURACY.figure)
        named = "" if figure == ACCURACY.figure else f" {figure}"
        seeds = f"{len(values)} seed{'s' * (len(values) > 1)}"
        print(f"{method:{width}} {spread(values):>5}{named}  ({seeds})")
