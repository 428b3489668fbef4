"""The commands of the book's experiments: `experiments` lists them, `experiment NAME` repeats one."""

import argparse
import statistics
import sys
from pathlib import Path

from atlib._util import STOPPED, require_known
from atlib.lab.detection import DETECTION
from atlib.lab.evals import EXAMINATIONS, Examination, run_examination
from atlib.lab.scales import CLASSIFYING, SCALES, WORLD_METHODS, TeacherFailed, scales
from atlib.lab.studies import CENTRAL, STUDIES
from atlib.lab.study import ACCURACY, Place, Study, run_study
from atlib.record import Record, read_records
from atlib.train.trainer import Preempted

EXPERIMENTS: dict[str, Study | Examination] = {
    "transfer": CENTRAL,
    **STUDIES,
    DETECTION.name: DETECTION,
    **EXAMINATIONS,
}


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of one of the two commands, and what it calls, `run`."""
    if command == "experiments":
        parser.set_defaults(run=experiments_command)
        return
    parser.add_argument(
        "name", help="; ".join(f"{name}: {study.shows}" for name, study in EXPERIMENTS.items())
    )
    parser.add_argument(
        "--scale",
        default=None,
        help=f"one of {', '.join(SCALES)} (default: find, or the first that the experiment is made for)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=None,
        help="number of seeds, from 0 on (default: as many as are recorded)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=None,
        metavar="METHOD",
        help=f"only some; of transfer: {', '.join(WORLD_METHODS)} (default: all at this scale)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=None,
        help=(
            "folder with CIFAR-10's parquet files, for the scale pacs one that holds cifar10/ and pacs/"
            " (default: from the hub)"
        ),
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        help=(
            "folder of the records, OUT/NAME/SCALE.jsonl; studies start from OUT/transfer/SCALE.jsonl"
            " (default: results)"
        ),
    )
    parser.add_argument(
        "--work", type=Path, default=None, help="folder for weights (default: runs/transfer/SCALE)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs side by side, one thread each (default: 1, with all threads)",
    )
    parser.set_defaults(run=experiment_command)


def experiments_command(given: argparse.Namespace) -> int:
    """`experiments`."""
    print(overview(Path("results")))
    return 0


def experiment_command(given: argparse.Namespace) -> int:
    """`experiment`: repeats one, prints its table; 1 where a teacher has not learned its own task, 75 where
    its pre-training was stopped and goes on when it is called again."""
    try:
        records, path = _run_experiment(given)
    except (TeacherFailed, Preempted) as error:
        print(f"python -m atlib: {error}", file=sys.stderr)
        return 1 if isinstance(error, TeacherFailed) else STOPPED
    _print_table(records, EXPERIMENTS[given.name])
    print(f"records: {path}")
    return 0


def overview(results: Path) -> str:
    """What `python -m atlib experiments` prints: every experiment, what it shows, the paper's counterpart,
    cost, and records in `results`."""
    lines = []
    for name, study in EXPERIMENTS.items():
        where = study.only or CLASSIFYING
        runs = {scale: len(read_records(name, scale, results=results)) for scale in where}
        found = (
            ", ".join(f"{number} runs at {scale}" for scale, number in runs.items() if number) or "none here"
        )
        lines += [
            f"{name}: {study.shows}",
            f"    paper:   {study.paper}",
            (
                f"    cost:    about {study.minutes} minutes ({study.seeds} seeds, two"
                f" cores); scales: {', '.join(where)}"
            ),
            f"    records: {found}",
        ]
    return "\n".join(lines)


def _run_experiment(given: argparse.Namespace) -> tuple[list[Record], Path]:
    """Repeat an experiment; its records, and their file."""
    require_known("experiment", given.name, EXPERIMENTS)
    study = EXPERIMENTS[given.name]
    scale = given.scale or (study.only or CLASSIFYING)[0]
    require_known("scale", scale, scales())
    seeds = study.seeds if given.seeds is None else given.seeds
    if seeds < 1 or given.jobs < 1:
        raise ValueError(f"--seeds and --jobs must be at least 1, got {seeds} and {given.jobs}")
    place = Place(scale, given.data, given.out, given.work or Path("runs", "transfer", scale))
    run = run_examination if isinstance(study, Examination) else run_study
    return run(study, place, seeds, given.methods, given.jobs), place.records(given.name)


def _print_table(records: list[Record], study: Study | Examination) -> None:
    figures = {each.name: each.measure.figure for each in study.variants} if isinstance(study, Study) else {}
    scores: dict[str, list[float]] = {}
    for record in records:
        value = record.results.get(f"test_{figures.get(record.method, ACCURACY.figure)}")
        if value is not None:  # what is measured on a teacher has none
            scores.setdefault(record.method, []).append(100 * value)
    width = max((len(method) for method in scores), default=0)
    for method, values in scores.items():
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        figure = figures.get(method, ACCURACY.figure)
        named = "" if figure == ACCURACY.figure else f" {figure}"
        print(
            f"{method:{width}} {statistics.mean(values):5.1f}{spread}{named}  ({len(values)}"
            f" seed{'s' if len(values) > 1 else ''})"
        )
