"""The command line: `python -m atlib train` trains by a recipe, `resume` goes on, `evaluate`, `pretrain` and
`teacher` are about what it makes and takes; `experiments` lists the book's experiments, `experiment NAME`
repeats one."""

import argparse
import statistics
import sys
import warnings
from pathlib import Path

from atlib._util import require_known
from atlib.lab.evals import EXAMINATIONS, Examination, run_examination
from atlib.lab.scales import METHODS, SCALES, scales
from atlib.lab.studies import CENTRAL, STUDIES
from atlib.lab.study import Place, Study, run_study
from atlib.record import Record, read_records
from atlib.run.commands import INTERRUPTED, add_commands, memory_message, out_of_memory
from atlib.vit import WeightsUnavailable
from atlib.walking import Unwalkable

EXPERIMENTS: dict[str, Study | Examination] = {"transfer": CENTRAL, **STUDIES, **EXAMINATIONS}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0, 2 after printing what was wrong with the request, 1 for a training that
    failed, 75 for one that was stopped, 130 for one that was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m atlib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "experiments",
        help="list the experiments of the book: what they show, their cost, which records are committed",
    )
    experiment = commands.add_parser(
        "experiment", help="repeat an experiment of the book and write its records"
    )
    experiment.add_argument(
        "name", help="; ".join(f"{name}: {study.shows}" for name, study in EXPERIMENTS.items())
    )
    experiment.add_argument(
        "--scale", default="built-in", help=f"one of {', '.join(SCALES)} (default: built-in)"
    )
    experiment.add_argument(
        "--seeds",
        type=int,
        default=None,
        help="number of seeds, from 0 on (default: as many as are recorded)",
    )
    experiment.add_argument(
        "--methods",
        nargs="+",
        default=None,
        metavar="METHOD",
        help=f"only some; of transfer: {', '.join(METHODS)} (default: all of the experiment at this scale)",
    )
    experiment.add_argument(
        "--data",
        type=Path,
        default=None,
        help=(
            "folder with CIFAR-10's parquet files, for the scale pacs one that holds cifar10/ and pacs/"
            " (default: from the hub)"
        ),
    )
    experiment.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        help="folder of the records, OUT/NAME/SCALE.jsonl; studies start from OUT/transfer/SCALE.jsonl (default: results)",
    )
    experiment.add_argument(
        "--work", type=Path, default=None, help="folder for weights (default: runs/transfer/SCALE)"
    )
    experiment.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs side by side, one thread each (default: 1, with all threads)",
    )
    add_commands(commands)
    given = parser.parse_args(arguments)
    if given.command == "experiments":
        print(overview(Path("results")))
        return 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _as_sentence(warnings.showwarning)
            if given.command != "experiment":
                return given.run(given)
            records, path = _run_experiment(given)
    except (ValueError, OSError, WeightsUnavailable, Unwalkable) as error:
        print(f"python -m atlib: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m atlib: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        print(f"python -m atlib: {memory_message(error)}", file=sys.stderr)
        return 1
    _print_table(records)
    print(f"records: {path}")
    return 0


def overview(results: Path) -> str:
    """What `python -m atlib experiments` prints: every experiment, what it shows, the paper's counterpart,
    cost, and records in `results`."""
    lines = []
    for name, study in EXPERIMENTS.items():
        where = [study.only] if study.only else SCALES
        runs = {scale: len(read_records(name, scale, results=results)) for scale in where}
        found = (
            ", ".join(f"{number} runs at {scale}" for scale, number in runs.items() if number) or "none here"
        )
        lines += [
            f"{name}: {study.shows}",
            f"    paper:   {study.paper}",
            (
                f"    cost:    about {study.minutes} minutes at the built-in scale ({study.seeds} seeds, two"
                f" cores); scales: {', '.join(where)}"
            ),
            f"    records: {found}",
        ]
    return "\n".join(lines)


def _as_sentence(plain):
    """What shows a warning: ours as a sentence, those of other packages as Python does it."""

    def show(message, category, filename, lineno, file=None, line=None):
        if Path(filename).is_relative_to(Path(__file__).parent):
            print(f"python -m atlib: {message}", file=sys.stderr)
        else:
            plain(message, category, filename, lineno, file, line)

    return show


def _run_experiment(given: argparse.Namespace) -> tuple[list[Record], Path]:
    require_known("experiment", given.name, EXPERIMENTS)
    require_known("scale", given.scale, scales())
    study = EXPERIMENTS[given.name]
    seeds = study.seeds if given.seeds is None else given.seeds
    if seeds < 1 or given.jobs < 1:
        raise ValueError(f"--seeds and --jobs must be at least 1, got {seeds} and {given.jobs}")
    place = Place(given.scale, given.data, given.out, given.work or Path("runs", "transfer", given.scale))
    run = run_examination if isinstance(study, Examination) else run_study
    return run(study, place, seeds, given.methods, given.jobs), place.records(given.name)


def _print_table(records) -> None:
    records = [
        record for record in records if "test_accuracy" in record.results
    ]  # what is measured on a teacher has none
    methods = list(dict.fromkeys(record.method for record in records))
    width = max((len(method) for method in methods), default=0)
    for method in methods:
        scores = [100 * record.results["test_accuracy"] for record in records if record.method == method]
        spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        print(
            f"{method:{width}} {statistics.mean(scores):5.1f}{spread}  ({len(scores)}"
            f" seed{'s' if len(scores) > 1 else ''})"
        )


if __name__ == "__main__":
    sys.exit(main())
