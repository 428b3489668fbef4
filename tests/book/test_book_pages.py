"""What the build adds to the pages: old addresses that lead on, and the explorer's files."""

import ast
import inspect
import re
from importlib import import_module
from types import SimpleNamespace

import jupytext
import yaml

from tests.helpers import ROOT
from tools.book_pages import MOVED, lead_on, put_explorer


def test_old_addresses_lead_to_pages_that_are_there(tmp_path):
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    there = {chapter["file"] for part in contents["parts"] for chapter in part["chapters"]}
    assert set(MOVED.values()) <= there and not set(MOVED) & there
    for old in MOVED:
        (tmp_path / old).parent.mkdir(exist_ok=True)
    app = SimpleNamespace(outdir=tmp_path, builder=SimpleNamespace(format="html"))
    lead_on(app, RuntimeError("the build failed"))
    assert not list(tmp_path.rglob("*.html"))
    lead_on(app, None)
    for old, new in MOVED.items():
        page = tmp_path / f"{old}.html"
        (address,) = re.findall(r'url=([^"]+)\.html"', page.read_text())
        assert (page.parent / address).resolve() == (tmp_path / new).resolve()


def test_the_explorer_has_all_the_files_that_its_page_asks_for(tmp_path):
    app = SimpleNamespace(outdir=tmp_path, builder=SimpleNamespace(format="html"))
    put_explorer(app, RuntimeError("the build failed"))
    assert not list(tmp_path.iterdir())
    put_explorer(app, None)
    page = (ROOT / "book" / "play.md").read_text(encoding="utf-8")
    asked = set(re.findall(r'"\.\./(_static/explorer/[^"]+)"', page))
    embed = (ROOT / "atbook" / "explorer" / "embed.js").read_text(encoding="utf-8")
    (names,) = re.findall(r"SCRIPTS = \[(.+)\]", embed)
    asked |= {f"_static/explorer/{name}.js" for name in re.findall(r'"([\w-]+)"', names)}
    asked |= {"_static/explorer/embed.js"}  # which pages with a step of the tour are given
    files = (file for file in tmp_path.rglob("*") if file.is_file())
    assert asked == {file.relative_to(tmp_path).as_posix() for file in files}


# --- The API page lists what users call, and nothing that is not there


PACKAGES = ("atlib", "atfamily", "atrun", "atbook")
PAGE = (ROOT / "book" / "api.md").read_text(encoding="utf-8")
# Module to its listed members; none: all that it defines.
LISTED = {
    module: members.split(", ") if members else None
    for module, members in re.findall(
        r"^\.\. automodule:: (\S+)\n   :members:(?: (.*))?$", PAGE, re.MULTILINE
    )
}
SOURCES = [ROOT / "README.md", *sorted(ROOT.glob("notebooks/*.md")), *sorted(ROOT.glob("book/*.md"))]


def described(module: str) -> list[object]:
    """The functions and classes that an entry of the page describes."""
    imported_module, members = import_module(module), LISTED[module]
    if members is not None:
        return [getattr(imported_module, name) for name in members]
    return [
        value
        for name, value in vars(imported_module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]


def imported(source) -> set[tuple[str, str]]:
    """Module and name of what the code of a page imports from the project."""
    book = jupytext.read(source, fmt="md:myst")
    code = [cell.source for cell in book.cells if cell.cell_type == "code"]
    code += [x for cell in book.cells for x in re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)]
    lines = "\n".join(x for x in "\n".join(code).splitlines() if not x.lstrip().startswith(("%", "!")))
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(lines))
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in PACKAGES
        for alias in node.names
    }


def test_what_is_listed_is_there_and_described():
    """Sphinx would leave out a name without a docstring, and say nothing."""
    for module in LISTED:
        assert described(module), module
        for value in described(module):
            assert value.__doc__, f"{module}: {value} has no docstring"


def test_what_the_book_calls_is_listed():
    """Constants need no entry, a notebook that imports one shows it; nor does the command line."""
    on_the_page = {id(value) for module in LISTED for value in described(module)}
    for source, module, name in sorted((path.name, *names) for path in SOURCES for names in imported(path)):
        value = getattr(import_module(module), name, None)
        if value is None or inspect.ismodule(value):
            package = f"{module}.{name}"
            assert any(f"{listed}.".startswith(f"{package}.") for listed in LISTED), (source, package)
        elif (inspect.isclass(value) or inspect.isfunction(value)) and not module.endswith(".__main__"):
            assert id(value) in on_the_page, (source, module, name)
