"""What is in a file that a student handed in. `read` runs in a cage, with limits of time and memory: a parser
can be given much to do by little."""

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from zlib import crc32

import torch
from torch import Tensor

from atbook.exercises import answers

MOST_BYTES, MOST_MEMBERS = 60_000_000, 2_000  # of a file after unpacking, and of the files in a zip
MOST_TEXT = 500_000  # letters of all text cells together
AGAIN = re.compile(r"(?:-\d+| ?\(\d+\))(?=\.\w+$)")  # what is added where a name was there before


def is_hidden(path: PurePosixPath) -> bool:
    """Whether programs made a file for themselves (`.ipynb_checkpoints`, `__MACOSX`)."""
    return any(part.startswith((".", "__MACOSX")) for part in path.parts)


def _of_zip(content: bytes, uploads: Sequence[str]) -> tuple[dict[str, bytes], dict[str, bytes], list[str]]:
    """The notebooks and the uploads in a zip, and what is remarked. Raises `ValueError` for one that is too
    large."""
    notebooks, files, remarks, left = {}, {}, [], MOST_BYTES
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        if len(members) > MOST_MEMBERS:
            raise ValueError(f"the zip holds {len(members)} files")
        for member in members:
            inner = PurePosixPath(member.filename.replace("\\", "/"))
            name = AGAIN.sub("", inner.name)
            if member.is_dir() or not (name.endswith(".ipynb") or name in uploads):
                continue
            if is_hidden(inner):
                if not inner.parent.name.startswith((".", "__MACOSX")):
                    remarks.append(f"{inner.name} begins with a dot and was not read")
                continue
            try:
                with archive.open(member) as file:  # what it holds, not what it says that it holds
                    inside = file.read(left + 1)
            except Exception as error:  # the others are still to be graded
                remarks.append(f"{inner.name} cannot be read: {error}")
                continue
            left -= len(inside)
            if left < 0:
                raise ValueError(f"the zip holds more than {MOST_BYTES // 10**6} MB")
            if name in uploads:
                files[name] = inside
            else:
                notebooks[str(inner)] = inside
    return notebooks, files, remarks


def _chosen(notebooks: dict[str, bytes], edition: str, remarks: Sequence[str]) -> bytes:
    """The one notebook of an assignment. Raises `ValueError` where there is none, or more than one."""
    if len(notebooks) > 1:
        of_edition = {name: content for name, content in notebooks.items() if edition.encode() in content}
        notebooks = of_edition if len(of_edition) == 1 else notebooks
    if len(notebooks) != 1:
        raise ValueError("; ".join([f"it holds {len(notebooks)} notebooks (.ipynb), not one", *remarks]))
    return next(iter(notebooks.values()))


def pieces(words: Sequence[str], length: int) -> set[int]:
    """Runs of some words, each as a number."""
    return {
        crc32("\n".join(words[at : at + length]).encode(errors="replace"))
        for at in range(len(words) - length + 1)
    }


def code_pieces(code: str) -> set[int]:
    """Runs of twelve parts of a syntax tree, in which names, numbers and texts are left out: what stays the
    same when everything is renamed."""

    def parts(node: ast.AST) -> Iterable[str]:
        yield type(node).__name__
        for inner in ast.iter_child_nodes(node):
            is_text = isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)
            if not is_text and not isinstance(inner, ast.expr_context):
                yield from parts(inner)

    try:
        return pieces(list(parts(ast.parse(code))), 12)
    except (SyntaxError, ValueError, RecursionError):
        return set()


def cells_read(cells: Sequence[str], texts: Sequence[str], handed_out: Sequence[str], tasks: dict) -> dict:
    """What some cells say: the student's name, the editions, and of each task what was written or typed."""
    says: dict = {"remarks": [], "name": answers.name_of(cells), "labels": sorted(answers.edition_of(cells))}
    says |= {"answers": {}, "typed": {}, "pieces": {}, "texts": []}
    left = MOST_TEXT
    for text in texts:
        says["texts"].append(text[:left])
        left = max(0, left - len(text))
    if not left:
        says["remarks"].append(f"the texts have more than {MOST_TEXT:,} letters: the rest was not read")
    for task, wants in tasks.items():
        if name := wants.get("answer"):
            answer = answers.answer(name, cells, handed_out)
            if broken := answers.broken_rules(answer.code, wants.get("refused", {})):
                answer = answers.Found("", f"{name}: {'; '.join(broken)}")
            says["answers"][task] = answer
            says["pieces"][task] = sorted(code_pieces(answer.code))
        if name := wants.get("typed"):
            typed = answers.typed(name, cells)
            try:
                json.dumps(typed.value)
            except (TypeError, ValueError, RecursionError):  # a set, a number of 5,000 digits
                typed = answers.Typed(None, f"{name} has to be numbers in lists")
            says["typed"][task] = typed
    return says


def read(
    content: Tensor, is_zip: bool, edition: str, uploads: list[str], handed_out: list[str], tasks: dict
) -> list[Tensor]:
    """What is in a notebook or a zip: a JSON with "problem", where it cannot be graded, and else what
    `cells_read` says, and "uploads", the names of the files whose contents follow. All as bytes."""
    files: dict[str, bytes] = {}
    try:
        notebook, remarks = content.numpy().tobytes(), []
        if is_zip:
            notebooks, files, remarks = _of_zip(notebook, uploads)
            notebook = _chosen(notebooks, edition, remarks)
        says = cells_read(*answers.cells_of(notebook), handed_out, tasks)
        says["remarks"] += remarks
    except MemoryError:
        raise
    except Exception as error:
        says = {"problem": f"cannot be read: {error or type(error).__name__}"}
    parts = [json.dumps(says | {"uploads": list(files)}).encode(), *files.values()]
    return [torch.frombuffer(bytearray(part) or bytearray(1), dtype=torch.uint8) for part in parts]
