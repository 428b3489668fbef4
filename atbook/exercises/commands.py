"""A student's verdicts: `python -m atbook exercises NOTEBOOK` runs a notebook and lists what its checks
say."""

import argparse
import json
import re
from pathlib import Path
from typing import NamedTuple

HEAD = re.compile(r"^### Exercise (\w+\.\d+)\. (.+)\n\n(★+) (\d+) minutes\.", re.MULTILINE)
CHECK = re.compile(r"^\s*check\(\s*[\"'](\w+\.\w+)[\"']", re.MULTILINE)
SAID = re.compile(r"^Exercise (\w+\.\w+): (.*)$", re.MULTILINE)


class Heading(NamedTuple):
    """What a reader sees above an exercise."""

    title: str
    #: How hard it is, from 1 to 3.
    stars: int
    #: How long it may take.
    minutes: int


def headings(text: str) -> dict[str, Heading]:
    """{number: heading} of the exercises in a page's text."""
    return {number: Heading(title, len(stars), int(n)) for number, title, stars, n in HEAD.findall(text)}


def verdicts(path: Path) -> dict[str, str]:
    """Run a notebook in its own folder and return {number: what its check says}; a cell that fails does not
    stop the others. Raises `ValueError` for a file that is no notebook, and `FileNotFoundError` where there
    is none."""
    import nbformat
    from nbclient import NotebookClient

    try:
        notebook = nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise ValueError(f"{path} is not a notebook: {str(error).splitlines()[0]}") from error
    folder = {"metadata": {"path": str(path.resolve().parent)}}
    NotebookClient(
        notebook, timeout=1800, kernel_name="python3", allow_errors=True, resources=folder
    ).execute()
    says = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        texts = [out.text for out in cell.outputs if out.output_type == "stream"]
        errors = [f"{out.ename}: {out.evalue}" for out in cell.outputs if out.output_type == "error"]
        for number in CHECK.findall(cell.source):
            says[number] = f"its cell failed: {errors[0]}" if errors else "its cell printed nothing"
        says |= dict(SAID.findall("\n".join(texts)))
    return says


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of `exercises`, and what it calls, `run`."""
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--json", action="store_true", help="a list of {number, title, right, says}")
    parser.set_defaults(run=exercises_command)


def exercises_command(arguments: argparse.Namespace) -> int:
    """Print the verdicts; 0 where all are right, 1 where one is not."""
    by_number = verdicts(arguments.notebook)
    cells = json.loads(arguments.notebook.read_text(encoding="utf-8"))["cells"]
    above = {number: head for cell in cells for number, head in headings("".join(cell["source"])).items()}
    listed = [
        {
            "number": number,
            "title": above[number].title if number in above else "",
            "right": says.startswith("right"),
            "says": says,
        }
        for number, says in by_number.items()
    ]
    if arguments.json:
        print(json.dumps(listed, indent=1, ensure_ascii=False))
    else:
        for verdict in listed:
            print(f"{verdict['number']:6} {verdict['says']}")
        print(f"{sum(verdict['right'] for verdict in listed)} of {len(listed)} right")
    return 0 if listed and all(verdict["right"] for verdict in listed) else 1
