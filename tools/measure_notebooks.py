"""Measure the time and memory of each notebook and write results/notebooks.jsonl; called by `make measure`.

Every notebook runs in a kernel of its own, one after the other, and reports its own peak memory at the end.
The book prints these records on each notebook's first page and in the preface. Run it on a machine that does
nothing else.
"""

import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

from atbook.records import add_record, records_file
from atrun.record import Record, about

ROOT = Path(__file__).resolve().parent.parent
ASK = "from atrun.record import peak_memory_mb; print(peak_memory_mb())"


def measure(source: Path) -> Record:
    """Run one notebook and return its record: seconds from the kernel's start to the last cell's end, peak
    memory in MB."""
    notebook = jupytext.read(source)
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    notebook.cells.append(nbformat.v4.new_code_cell(ASK))
    start = time.perf_counter()
    NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(source.parent)}}
    ).execute()
    seconds = time.perf_counter() - start
    memory = float("".join(output.text for output in notebook.cells[-1].outputs))
    return Record(
        "notebooks",
        source.stem,
        0,
        {"source": source.name},
        {"code_cells": cells},
        [],
        round(seconds, 1),
        round(memory, 1),
        about(),
    )


def main() -> None:
    wanted = sys.argv[1:]
    for source in sorted((ROOT / "notebooks").glob("*.md")):
        if wanted and source.stem not in wanted:
            continue
        record = measure(source)
        add_record(records_file("notebooks", None, ROOT / "results"), record)
        print(f"{source.stem:28} {record.seconds:6.1f} s  {record.peak_memory_mb:7.0f} MB", flush=True)


if __name__ == "__main__":
    main()
