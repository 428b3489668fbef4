"""Write the output-free notebooks/*.ipynb from their MyST sources notebooks/*.md, and the front page's too;
`--check` only compares.

It goes one way only, from .md to .ipynb. (`jupytext --sync` decides by file times which of the two is right,
and a fresh checkout has no meaningful file times: it has been seen to revert an edit.) The result depends on
nothing but the source: cell ids are made from the cells' text, so editing one cell changes one cell of the
.ipynb.
"""

import argparse
import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jupytext
from nbformat.v4 import new_code_cell, new_markdown_cell

ROOT = Path(__file__).resolve().parent.parent
FRONT = Path("book/index.md")  # the only page of book/ that opens on Colab

# These cells come before every notebook's own, in the .ipynb only: in the book the badge would be a picture
# from the network, and the set-up is done. The repository is cloned, not just installed, for the records in
# results/; the install is not editable, because a running kernel does not find an editable one. uv installs
# it, because pip takes minutes.
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab})"
SET_UP = """\
# Only on Colab: fetch the book and install its library. Elsewhere both are there already.
import sys
from pathlib import Path

if "google.colab" in sys.modules and not Path("../atlib").exists():
    !git clone --quiet --depth 1 {url}
    %pip install --quiet uv
    !{{sys.executable}} -m uv pip install --quiet --python {{sys.executable}} "./{name}[widget]"
    %cd {name}/notebooks"""


def repository() -> str:
    """The repository's address, from its one source."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"]["Repository"]


def colab(path: str, url: str) -> str:
    """The address that opens the .ipynb at `path` of the repository on Colab."""
    return (
        f"https://colab.research.google.com/github/{url.removeprefix('https://github.com/')}/blob/main/{path}"
    )


def absolute_links(text: str, folder: str, url: str) -> str:
    """Turn the relative links of a cell's Markdown into addresses: on Colab a relative link leads nowhere.

    Another notebook opens on Colab, a picture is the file itself, any other file is on the repository's page.
    """

    def replace(match: re.Match) -> str:
        path = (ROOT / folder / match["path"]).resolve().relative_to(ROOT)
        if path.parts[0] == "notebooks" and path.suffix in {".md", ".ipynb"}:
            return f"]({colab(path.with_suffix('.ipynb').as_posix(), url)})"
        if path == FRONT:
            return f"]({colab('book/index.ipynb', url)})"
        if path.suffix == ".svg":
            files = url.replace("https://github.com/", "https://raw.githubusercontent.com/")
            return f"]({files}/main/{path.as_posix()})"
        return f"]({url}/blob/main/{path.as_posix()}{match['anchor'] or ''})"

    # a page of the built book, opened in a state: Colab has only what the page is made from
    text = re.sub(r'href="\.\./(book/[\w-]+)\.html#[^"]*"', rf'href="{url}/blob/main/\1.md"', text)
    return re.sub(r"\]\((?P<path>(?!\w+:)[\w./-]+\.\w+)(?P<anchor>#[\w-]+)?\)", replace, text)


def for_students(cells: list) -> Iterator:
    """The cells as a student gets them: an exercise's starter is run, and its solution is folded text after
    the check, where "Run all" cannot put it in place of an answer."""
    solution = None
    for cell in cells:
        tags = cell.metadata.get("tags", [])
        if "solution" in tags:
            solution = cell.source
            continue
        if "exercise" in tags:
            cell.metadata["tags"] = ["exercise"]
        yield cell
        if "check" in tags:
            folded = f"<details>\n<summary>Solution</summary>\n\n```python\n{solution}\n```\n\n</details>"
            yield new_markdown_cell(folded)


def converted(source: Path) -> str:
    """The text of the .ipynb that belongs to the MyST notebook `source`."""
    book = jupytext.read(source, fmt="md:myst")
    url = repository()
    path = f"{source.parent.name}/{source.stem}.ipynb"
    badge = BADGE.format(colab=colab(path, url))
    set_up = SET_UP.format(url=url, name=url.rpartition("/")[2])
    cells, seen = [], {}
    for cell in [new_markdown_cell(badge), new_code_cell(set_up), *for_students(book.cells)]:
        text = cell.source
        if cell.cell_type == "markdown":
            text = absolute_links(text, source.parent.name, url)
        digest = hashlib.sha256(f"{cell.cell_type}\n{text}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1  # two cells with the same text still need two ids
        entry = {
            "cell_type": cell.cell_type,
            "id": digest if seen[digest] == 1 else f"{digest}-{seen[digest]}",
            "metadata": dict(cell.metadata),
            "source": text.splitlines(keepends=True),
        }
        if cell.cell_type == "code":
            entry |= {"execution_count": None, "outputs": []}
        cells.append(entry)
    # Nothing else goes into the metadata: running a notebook leaves versions and widget state there, which
    # make every diff noisy, and GitHub calls a notebook with stale widget state invalid.
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def sources_in(folder: Path) -> list[Path]:
    """The MyST sources of a folder; to those of the book belongs its front page."""
    fronts = [ROOT / FRONT] if folder == ROOT / "notebooks" and (ROOT / FRONT).exists() else []
    return [*sorted(folder.glob("*.md")), *fronts]


def out_of_step(folder: Path) -> list[str]:
    """One line for each notebook of `folder` whose .ipynb is missing, differs from its source, or has no
    source."""
    problems = []
    for source in sources_in(folder):
        pair = source.with_suffix(".ipynb")
        if not pair.exists():
            problems.append(f"{pair.name} is missing")
        elif pair.read_text(encoding="utf-8") != converted(source):
            problems.append(f"{pair.name} differs from what {source.name} makes")
    for pair in sorted(folder.glob("*.ipynb")):
        if not pair.with_suffix(".md").exists():
            problems.append(f"{pair.name} has no {pair.with_suffix('.md').name}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a pair is out of step")
    parser.add_argument("--folder", type=Path, default=ROOT / "notebooks")
    arguments = parser.parse_args()
    if arguments.check:
        problems = out_of_step(arguments.folder)
        if problems:
            sys.exit(
                "\n".join(problems)
                + "\nRun `make notebooks` (the .md is the source; the .ipynb is written from it)."
            )
        return
    for source in sources_in(arguments.folder):
        pair, text = source.with_suffix(".ipynb"), converted(source)
        if not pair.exists() or pair.read_text(encoding="utf-8") != text:
            pair.write_text(text, encoding="utf-8")
            print(f"wrote {pair.name}")


if __name__ == "__main__":
    main()
