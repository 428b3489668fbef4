"""The library's own lines, on a page of the book: what is taught is what runs."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

from IPython.display import Markdown

import atlib


def source(*parts: Callable) -> Markdown:
    """The lines of functions and methods of `atlib`, without their docstrings, under the names of their
    files."""
    blocks = []
    for part in parts:
        path = Path(inspect.getfile(part)).relative_to(Path(atlib.__file__).parent.parent)
        blocks.append(
            f"`{path.as_posix()}`\n\n```python\n{_without_docstring(dedent(inspect.getsource(part)))}\n```"
        )
    return Markdown("\n\n".join(blocks))


def _without_docstring(code: str) -> str:
    lines, (function,) = code.rstrip().splitlines(), ast.parse(code).body
    if isinstance(function, ast.FunctionDef) and ast.get_docstring(function) is not None:
        first = function.body[0]
        del lines[first.lineno - 1 : first.end_lineno]
    return "\n".join(lines)
