"""What all benchmarks with a record do: check their options, leave the record."""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

from atbook.records import add_record, records_file, results_folder
from atrun.record import Record, about, peak_memory_mb


def leave(
    name: str,
    config: Mapping,
    results: dict,
    rounds: list,
    start: float,
    out: Path | None,
    device: str = "cpu",
) -> None:
    """Write the record of a benchmark that began at `start` (of `time.perf_counter`), and say where.

    config: the settings of the run, with or without the name `out`. rounds: the figures of single
    repetitions. out: the file to which the record is added; None for the book's.
    """
    config = {key: value for key, value in config.items() if key != "out"}
    seconds, memory = round(time.perf_counter() - start, 1), round(peak_memory_mb(), 1)
    record = Record("benchmarks", name, 0, config, results, rounds, seconds, memory, about(device))
    out = out or records_file("benchmarks", None, results_folder(Path(__file__).parent))
    print(f"\nwrote {add_record(out, record)}")


def require_positive(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """End with a message if an option of these names is below 1."""
    for name in names:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
