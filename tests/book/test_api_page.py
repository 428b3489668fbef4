"""The API page lists what users call: all that the book and README call, and nothing that is not there."""

import ast
import inspect
import re
from importlib import import_module

import jupytext
import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "book" / "api.md").read_text(encoding="utf-8")
# Module to its listed members; none: all that it defines.
LISTED = {
    module: members.split(", ") if members else None
    for module, members in re.findall(
        r"^\.\. automodule:: (\S+)\n   :members:(?: (.*))?$", PAGE, re.MULTILINE
    )
}
SOURCES = [
    ROOT / "README.md",
    *sorted((ROOT / "notebooks").glob("*.md")),
    *sorted((ROOT / "book").glob("*.md")),
]


def described(module: str) -> list[object]:
    """The functions and classes that an entry of the page describes."""
    found, members = import_module(module), LISTED[module]
    if members is not None:
        return [getattr(found, name) for name in members]
    return [
        value
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]


def imported(source) -> set[tuple[str, str]]:
    """Module and name of what the code of a page imports from atlib."""
    book = jupytext.read(source, fmt="md:myst")
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    code += [
        block for cell in book.cells for block in re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)
    ]
    lines = "\n".join(
        line for line in "\n".join(code).splitlines() if not line.lstrip().startswith(("%", "!"))
    )
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(lines))
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "atlib"
        for alias in node.names
    }


def test_every_module_is_listed_once():
    modules = re.findall(r"automodule:: (\S+)", PAGE)
    assert sorted(modules) == sorted(LISTED)


@pytest.mark.parametrize("module", LISTED)
def test_what_is_listed_is_there_and_public(module):
    members = LISTED[module] or []
    assert len(set(members)) == len(members)
    assert not any(part.startswith("_") for name in [module, *members] for part in name.split("."))
    assert described(module) and all(value.__doc__ for value in described(module))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_what_the_book_calls_is_listed(source):
    """Constants need no entry, a notebook that imports one shows it; nor does the command line."""
    on_the_page = {id(value) for module in LISTED for value in described(module)}
    for module, name in sorted(imported(source)):
        value = getattr(import_module(module), name, None)
        if value is None or inspect.ismodule(value):
            package = f"{module}.{name}"
            assert any(f"{each}.".startswith(f"{package}.") for each in LISTED), (
                f"{package} is not on the API page"
            )
        elif (inspect.isclass(value) or inspect.isfunction(value)) and module != "atlib.__main__":
            assert id(value) in on_the_page, f"{module}.{name} is not on the API page"
