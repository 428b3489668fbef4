"""A student's verdicts: `python -m atlib.exercises NOTEBOOK` runs a notebook and lists what its checks
say."""

import argparse
import json
import re
import sys
from pathlib import Path

from atlib.exercises.judging import assigned, every

CHECK = re.compile(r"^\s*check\(\s*[\"'](\w+\.\w+)[\"']", re.MULTILINE)
SAID = re.compile(r"^Exercise (\w+\.\w+): (.*)$", re.MULTILINE)


def verdicts(path: Path) -> dict[str, str]:
    """{number: what its check says} of all checks in a notebook, which is run for it, in its own folder; a
    cell that fails does not stop the others. Raises `ValueError` for a file that is no notebook, and
    `FileNotFoundError`."""
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
    found = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        texts = [output.text for output in cell.outputs if output.output_type == "stream"]
        errors = [f"{each.ename}: {each.evalue}" for each in cell.outputs if each.output_type == "error"]
        for number in CHECK.findall(cell.source):
            found[number] = f"its cell failed: {errors[0]}" if errors else "its cell printed nothing"
        found |= dict(SAID.findall("\n".join(texts)))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the verdicts; 0 where all are right, 1 where one is not, 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m atlib.exercises", description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--json", action="store_true", help="a list of {number, title, right, says}")
    given = parser.parse_args(arguments)
    try:
        found = verdicts(given.notebook)
    except (ValueError, OSError) as error:
        print(f"python -m atlib.exercises: {error}", file=sys.stderr)
        return 2
    titles = {exercise.number: exercise.title for exercise in [*every(), *assigned()]}
    listed = [
        {"number": number, "title": titles.get(number, ""), "right": says.startswith("right"), "says": says}
        for number, says in found.items()
    ]
    if given.json:
        print(json.dumps(listed, indent=1, ensure_ascii=False))
    else:
        for each in listed:
            print(f"{each['number']:6} {each['says']}")
        print(f"{sum(each['right'] for each in listed)} of {len(listed)} right")
    return 0 if listed and all(each["right"] for each in listed) else 1


if __name__ == "__main__":
    sys.exit(main())
