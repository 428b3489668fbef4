"""The answers in a notebook: the code of a function with all that it needs of other cells, and numbers that
were typed in. Nothing is run. The grader and `hand-in` read with the same functions.

Answers are found by the names that they define, not by their place: students copy, split, move and delete
cells, and some programs drop tags.
"""

import ast
import builtins
import json
import math
import re
import symtable
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from atbook.exercises.own import plain_name

BUILTINS = set(dir(builtins)) | {"__name__", "__file__", "get_ipython", "display", "In", "Out"}
# What only IPython reads: commands, help, and values of commands; no sentence that ends with a question mark.
FOR_IPYTHON = re.compile(r"^(\s*)(?:%+\w|[!?]|[\w.*%\[\]]+\?+\s*$|\w+\s*=\s*[%!]).*")
EDITION = re.compile(r"^EDITION\s*=\s*[\"'](.+?)[\"']", re.MULTILINE)
LONGEST, LONGEST_ANSWER = 2_000_000, 100_000  # letters of all code cells together, and of an answer
# What a cell may set for all others without giving it a name.
SETTINGS = {"set_default_dtype", "setrecursionlimit"}
PYTHON = "Python {}.{}".format(*sys.version_info)
# Functions around typed numbers that change nothing about them.
WRAPPERS = {"tensor", "array", "asarray", "as_tensor", "list", "tuple"}


class Found(NamedTuple):
    """The code of an answer."""

    # The answer, after the statements of other cells that it needs; "" where there is none.
    code: str
    # Why there is none, in words; "" where there is one.
    problem: str = ""


class Typed(NamedTuple):
    """A value that a student typed in."""

    # Plain Python; None where there is none.
    value: Any
    # What is wrong with it, in words; "" where nothing is.
    problem: str = ""


def parsed(code: str) -> ast.Module:
    """The syntax tree of a cell, without the lines that only IPython reads. Raises `SyntaxError`."""
    try:
        try:
            return ast.parse(code)
        except SyntaxError:
            lines = code.splitlines()
            # `pass`: it may be all that stands under a condition
            return ast.parse("\n".join(FOR_IPYTHON.sub(r"\1pass", line) for line in lines))
    # zero bytes, half letters, a thousand brackets
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error).encode(errors="replace").decode() or type(error).__name__) from error


def trees_of(cells: Sequence[str]) -> list[ast.Module | SyntaxError]:
    """The syntax trees of some cells; the error of one that cannot be read."""
    trees: list[ast.Module | SyntaxError] = []
    for code in cells:
        try:
            trees.append(parsed(code))
        except SyntaxError as error:
            trees.append(error)
    return trees


def cells_of(content: bytes) -> tuple[list[str], list[str]]:
    """The sources of a notebook's code cells, and of its text cells; a cell that has none is empty. Raises
    `ValueError` for what is no notebook."""
    try:
        book = json.loads(content.decode("utf-8-sig"))
        cells = book["cells"] if "cells" in book else book["worksheets"][0]["cells"]
        sources: dict[str, list[str]] = {"code": [], "markdown": []}
        for cell in cells:
            source = cell.get("source", cell.get("input", ""))
            text = "".join(map(str, source)) if isinstance(source, list) else str(source or "")
            sources.setdefault(str(cell.get("cell_type")), []).append(text)
        return sources["code"], sources["markdown"]
    except Exception as error:  # whatever a file holds
        raise ValueError(f"no notebook that can be read ({type(error).__name__})") from error


# --- What a statement defines and needs ---


def bound(tree: ast.AST) -> set[str]:
    """The names that a cell or a statement defines, outside of functions."""
    names, left = set(), [tree]
    while left:
        match left.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.split(".")[0])
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                pass  # another scope
            case node:
                left += ast.iter_child_nodes(node)
    return names


def used(tree: ast.AST) -> set[str]:
    """The names of a statement that have to be defined elsewhere; a function's own variables are none."""
    names: set[str] = set()

    def look(table: symtable.SymbolTable) -> None:
        at_the_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            outside = symbol.is_referenced() and (at_the_top or symbol.is_global())
            if outside or symbol.is_declared_global():
                names.add(symbol.get_name())
        for inner in table.get_children():
            look(inner)

    code = ast.unparse(tree).encode(errors="replace").decode()
    look(symtable.symtable(code, "<your notebook>", "exec"))
    return names


def _stands_alone(statement: ast.stmt) -> bool:
    """Whether a statement may be run for what it defines or changes: experiments, which call much and define
    nothing that is a function, are left out by what needs them, not here."""
    if not isinstance(statement, ast.Expr):
        return True
    call = statement.value
    if not isinstance(call, ast.Call):
        return False
    alone = isinstance(call.func, ast.Name) and not (call.args or call.keywords)
    return isinstance(call.func, ast.Attribute) or alone or _is_setting(statement)


def _is_setting(statement: ast.stmt) -> bool:
    called = getattr(getattr(statement, "value", None), "func", None)
    is_statement = isinstance(statement, ast.Expr)
    return is_statement and (getattr(called, "attr", None) or getattr(called, "id", None)) in SETTINGS


def _is_star(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*"


# --- An answer ---


def answer(name: str, cells: Sequence[str], handed_out: Sequence[str]) -> Found:
    """The code of the answer that defines a name, with what it needs of other cells.

    cells: the code cells of a submission. handed_out: those of the notebook that students got, whose
    statements are used where the submission lacks them.
    """
    try:
        return Found(_code_of(name, cells, handed_out))
    except ValueError as error:
        return Found("", f"{name}: {error}"[:300])


def _code_of(name: str, cells: Sequence[str], handed_out: Sequence[str]) -> str:
    """The code of an answer. Raises `ValueError`, which says why there is none."""
    if (length := sum(map(len, cells))) > LONGEST:
        raise ValueError(f"the cells have {length:,} letters, at most {LONGEST:,} are read")
    trees = trees_of(cells)
    tree = _answer(name, cells, trees)
    if tree is None:
        raise ValueError("no cell defines it")
    if isinstance(tree, SyntaxError):
        raise ValueError(f"line {tree.lineno or '?'} of its cell is no {PYTHON}: {tree.msg}")
    if _is_empty(tree, name):
        raise ValueError("not done, the starter is as it was handed out")
    other = [part for part in trees if part is not tree]
    groups = [
        [node for part in parts if isinstance(part, ast.Module) for node in part.body if _stands_alone(node)]
        for parts in (trees_of(handed_out), other, [tree])
    ]
    try:
        needed, absent = _needed(name, groups)
        code = ast.unparse(ast.Module(needed, []))
    except (SyntaxError, RecursionError) as error:  # `return` outside of a function, a thousand brackets
        raise ValueError(f"its cell is no {PYTHON}: {error}") from error
    for needs in sorted(absent):
        if broken := _broken(needs, cells, trees):
            where = f"line {broken[-1].lineno or '?'} of that cell is no {PYTHON}: {broken[-1].msg}"
            raise ValueError(f"needs {needs}, and {where}")
    if len(code) > LONGEST_ANSWER:
        raise ValueError(f"{len(code):,} letters with all it needs, at most {LONGEST_ANSWER:,} are run")
    return code.encode(errors="replace").decode()


def _broken(name: str, cells: Sequence[str], trees: Sequence[ast.Module | SyntaxError]) -> list[SyntaxError]:
    """The errors of the cells that would define a name and cannot be read."""
    start = rf"^[ \t]*(?:(?:async\s+)?def\s+|class\s+|type\s+)?{re.escape(name)}\s*[(=:[]"
    names = re.compile(start, re.MULTILINE)
    return [t for code, t in zip(cells, trees) if isinstance(t, SyntaxError) and names.search(code)]


def _answer(
    name: str, cells: Sequence[str], trees: Sequence[ast.Module | SyntaxError]
) -> ast.Module | SyntaxError | None:
    """The last cell that defines a name, and not as `...`. A cell that defines it as a function comes first,
    because `shares = shares(maps)` is a trial. Where no cell does, the error of a cell that cannot be read,
    or None."""
    defining = [tree for tree in trees if isinstance(tree, ast.Module) and name in bound(tree)]
    filled = [tree for tree in defining if not _is_empty(tree, name)]
    if filled:
        written = [tree for tree in filled if any(getattr(node, "name", None) == name for node in tree.body)]
        return (written or filled)[-1]
    broken = _broken(name, cells, trees)
    return broken[-1] if broken else defining[-1] if defining else None


def _is_empty(tree: ast.Module, name: str) -> bool:
    """Whether a name is still to be filled in."""
    parts = [node for node in tree.body if name in bound(node)]
    bodies = [node.body if isinstance(node, ast.FunctionDef) else [node] for node in parts]
    return all(_says_nothing(statement) for body in bodies for statement in body)


def _says_nothing(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring, `...`, or an assignment of `...`."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Constant) and (isinstance(statement, ast.Expr) or value.value is ...)


def _needed(name: str, groups: Sequence[Sequence[ast.stmt]]) -> tuple[list[ast.stmt], set[str]]:
    """The statements that define a name, and all that they need, in their order, imports first; and the names
    that nothing defines.

    groups: the statements of the notebook as it was handed out, of the submission, and of the answer's own
    cell. The last group that defines what is needed does so: by its last function, class or import of that
    name, or by all its statements that give it a value. What changes it comes along (a table that is filled
    step by step), and so do settings, and imports of everything, whose names nobody says.
    """
    everything = [statement for group in groups for statement in group]
    sets = {
        node.name: {name for inner in ast.walk(node) if isinstance(inner, ast.Global) for name in inner.names}
        for node in everything
        if isinstance(node, ast.FunctionDef)
    }
    # once, and not for every name: a text may have thousands of both
    places: dict[str, list[int]] = {}
    changes: dict[str, list[int]] = {}
    for place, statement in enumerate(everything):
        for defined in bound(statement):
            places.setdefault(defined, []).append(place)
        for changed in _changes(statement):
            changes.setdefault(changed, []).append(place)
    for place, statement in enumerate(everything):
        called = getattr(getattr(statement, "value", None), "func", None)
        for made in sets.get(getattr(called, "id", ""), ()) if isinstance(statement, ast.Expr) else ():
            if made not in places:
                changes.setdefault(made, []).append(place)
    group_of = [number for number, group in enumerate(groups) for _ in group]
    taken = {at for at, statement in enumerate(everything) if _is_star(statement) or _is_setting(statement)}
    missing = {name} | {needs for place in taken for needs in used(everything[place])} - BUILTINS
    done, absent = set(BUILTINS), set()
    while missing:
        wanted = missing.pop()
        done.add(wanted)
        at = places.get(wanted, [])
        at = [place for place in at if group_of[place] == group_of[at[-1]]]
        whole = [place for place in at if isinstance(everything[place], _WHOLE)]
        if whole and wanted == name:  # `talking = talking(...)` below it is a trial
            at = whole[-1:]
        elif whole:
            at = at[-1:]
        elif not at and wanted not in changes:
            absent.add(wanted)
        later = [place for place in changes.get(wanted, ()) if not at or place > at[0]]
        new = {*at, *(() if at and isinstance(everything[at[-1]], _IMPORTS) else later)} - taken
        taken |= new
        missing |= {needs for place in new for needs in used(everything[place])} - done
    order = sorted(taken, key=lambda at: (not isinstance(everything[at], _IMPORTS), at))
    return [_if_it_is_there(everything[at]) for at in order], absent


_IMPORTS = (ast.Import, ast.ImportFrom)
_WHOLE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, *_IMPORTS)


def _if_it_is_there(statement: ast.stmt) -> ast.stmt:
    """An import of everything, which may be of what only a student's machine has; others as they are."""
    if not _is_star(statement):
        return statement
    return ast.parse(f"try:\n    {ast.unparse(statement)}\nexcept ImportError:\n    pass").body[0]


def _changes(statement: ast.stmt) -> set[str]:
    """The names whose entries or attributes a statement sets, and those whose methods it calls for nothing
    but what they do (`table.append(3)`), also in a loop."""
    names: set[str] = set()
    if isinstance(statement, _WHOLE):
        return names
    for node in ast.walk(statement):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            targets = [node.value.func]
        else:
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        for target in targets:
            while isinstance(target, (ast.Subscript, ast.Attribute)):
                target = target.value
                if isinstance(target, ast.Name):
                    names.add(target.id)
    return names


def broken_rules(code: str, refused: Mapping[str, str]) -> list[str]:
    """Which rules of a task some code breaks: {a name: what to do instead}, as it would be said."""
    messages = []
    for node in ast.walk(ast.parse(code)):
        names: Collection[str] = ()
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name):
                names = (name,)
            case ast.Constant(value=str(name)):
                names = (name,)
            case ast.alias(name=name):
                names = name.split(".")
            case ast.ImportFrom(module=str(name)):
                names = name.split(".")
        messages += [f"{name} is not for this task: {refused[name]}" for name in names if name in refused]
    return list(dict.fromkeys(messages))


# --- What was typed in ---


def typed(name: str, cells: Sequence[str]) -> Typed:
    """The value that the last plain assignment to a name gives it."""
    values, computed = [], ""
    for tree in trees_of(cells):
        for node in tree.body if isinstance(tree, ast.Module) else ():
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if not any(isinstance(target, ast.Name) and target.id == name for target in targets):
                continue
            written = getattr(node, "value", None)
            if written is None:
                continue
            try:
                value = ast.literal_eval(_unwrapped(written))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                computed = f"{name} has to be typed in, and not to be computed: {_short(written)}"
                continue
            if value is not ...:
                values.append(value)
    if not values:
        return Typed(None, computed or f"{name} is not filled in")
    different = f"{name} is given {len(values)} different values: the last counts"
    return Typed(values[-1], different if any(value != values[-1] for value in values) else "")


def _unwrapped(node: ast.expr) -> ast.expr:
    """What a call as `torch.tensor([...])` or `[...].tolist()` is made of; anything else as it is."""
    if isinstance(node, ast.Call) and not node.keywords:
        function = node.func
        called = getattr(function, "attr", None) or getattr(function, "id", None)
        if called in WRAPPERS and len(node.args) == 1:
            return _unwrapped(node.args[0])
        if called == "tolist" and isinstance(function, ast.Attribute) and not node.args:
            return _unwrapped(function.value)
    return node


def _short(node: ast.expr) -> str:
    try:
        return ast.unparse(node)[:60]
    except RecursionError:
        return "..."


def name_of(cells: Sequence[str]) -> Typed:
    """The name that a student filled in, `STUDENT`."""
    value, problem = typed("STUDENT", cells)
    if value is None:
        return Typed(None, problem)
    if not isinstance(value, str) or not value.strip() or len(value) > 200:
        return Typed(None, "STUDENT has to be a name or a number, in quotes")
    return Typed(plain_name(value), problem)


def numbers(value: Any, shape: Sequence[int]) -> list | None:
    """A nested list of finite numbers of some shape; None where a value is none."""
    if not shape:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        try:
            return float(value) if math.isfinite(value) else None
        except OverflowError:
            return None
    if not isinstance(value, (list, tuple)) or len(value) != shape[0]:
        return None
    parts = [numbers(part, shape[1:]) for part in value]
    return None if any(part is None for part in parts) else parts


def edition_of(cells: Sequence[str]) -> set[str]:
    """The editions that a notebook says it belongs to."""
    return {label for code in cells for label in EDITION.findall(code)}
