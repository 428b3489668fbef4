"""`python -m atlib plot RUN...`: what the logs of runs say, as curves."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from atlib._util import write_atomically
from atrun.log import read_log
from atrun.pictures import as_file

PANELS = (("task_loss", "task loss"), ("transfer_loss", "transfer loss"), ("_accuracy", "accuracy"))


def curves(runs: Sequence[Path]) -> Figure:
    """The task's loss, the transfer loss and the accuracies of runs by epoch, a panel each, a line a run."""
    logs = {}
    for folder in runs:
        logs[folder] = [entry for entry in read_log(folder) if entry.get("event") == "epoch"]
        if not logs[folder]:
            raise ValueError(f"{folder} has no log of a whole pass yet: name a run that has trained")
    alike = Counter(folder.name for folder in logs)
    called = {folder: folder.name if alike[folder.name] == 1 else str(folder) for folder in logs}
    figure = Figure(figsize=(4 * len(PANELS), 3.2), layout="constrained")
    for axes, (ending, title) in zip(figure.subplots(1, len(PANELS)), PANELS):
        axes.set(title=title, xlabel="epoch")
        for folder, entries in logs.items():
            names = dict.fromkeys(name for entry in entries for name in entry if name.endswith(ending))
            for name in names:
                points = [(entry["epoch"], entry[name]) for entry in entries if name in entry]
                label = called[folder] if ending == name else f"{called[folder]}, {name.removesuffix(ending)}"
                axes.plot(*zip(*points), marker="o", markersize=2, label=label)
        if axes.lines:
            axes.legend(fontsize=7)
    return figure


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="FILE.png", required=True, help="where the picture goes")
    parser.set_defaults(run=plot_command)


def plot_command(arguments: argparse.Namespace) -> int:
    if arguments.out.suffix.lower() != ".png":
        raise ValueError(f"--out {arguments.out}: the picture is a PNG, so name a file that ends in .png")
    print(write_atomically(arguments.out, as_file(curves(arguments.runs))))
    return 0
