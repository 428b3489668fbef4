"""The command line: `python -m atlib experiment transfer --scale built-in --seeds 5`."""

import argparse
import statistics
import sys
from pathlib import Path

from atlib.experiment import Place, run_experiment
from atlib.names import require_known
from atlib.record import read_record
from atlib.scales import METHODS, scales
from atlib.sweep import run_sweep

EXPERIMENTS = {"transfer": "scratch, fine-tune, copy from three teachers, distill", "distillation": "the weight and the layers of distill"}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0, or 2 after printing what was wrong with the request."""
    parser = argparse.ArgumentParser(prog="python -m atlib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    experiment = commands.add_parser("experiment", help="repeat an experiment of the book and write its records")
    experiment.add_argument("name", help="; ".join(f"{name}: {what}" for name, what in EXPERIMENTS.items()))
    experiment.add_argument("--scale", default="built-in", help=f"one of {', '.join(scales())} (default: built-in)")
    experiment.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on (default: 5)")
    experiment.add_argument("--methods", nargs="+", default=None, metavar="METHOD", help=f"some of {', '.join(METHODS)} (default: the scale's)")
    experiment.add_argument("--data", type=Path, default=None, help="folder with CIFAR-10's parquet files (default: from the hub)")
    experiment.add_argument("--out", type=Path, default=None, help="folder for records (default: results/NAME/SCALE)")
    experiment.add_argument("--work", type=Path, default=None, help="folder for weights (default: runs/transfer/SCALE)")
    experiment.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each (default: 1, with all threads)")
    given = parser.parse_args(arguments)
    try:
        require_known("experiment", given.name, EXPERIMENTS)
        require_known("scale", given.scale, scales())
        if given.seeds < 1 or given.jobs < 1:
            raise ValueError(f"--seeds and --jobs must be at least 1, got {given.seeds} and {given.jobs}")
        work = given.work or Path("runs", "transfer", given.scale)
        records = given.out or Path("results", given.name, given.scale)
        if given.name == "transfer":
            methods = given.methods or list(scales()[given.scale].methods)
            paths = run_experiment(Place(given.scale, given.data, records, work), given.seeds, methods, given.jobs)
        else:  # starts from what the central experiment chose
            transfer = Place(given.scale, given.data, Path("results", "transfer", given.scale), work)
            paths = run_sweep(transfer, records, given.seeds, given.jobs)
    except (ValueError, OSError) as error:
        print(f"python -m atlib: {error}", file=sys.stderr)
        return 2
    _print_table([read_record(path) for path in paths])
    print(f"records: {records}")
    return 0


def _print_table(records) -> None:
    for method in dict.fromkeys(record.method for record in records):
        scores = [100 * record.results["test_accuracy"] for record in records if record.method == method]
        spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        print(f"{method:16} {statistics.mean(scores):5.1f}{spread}  ({len(scores)} seed{'s' if len(scores) > 1 else ''})")


if __name__ == "__main__":
    sys.exit(main())
