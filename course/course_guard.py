"""The plugin through which otter grades: it takes the answers out of a submission, and runs nothing else of
it.

Otter runs answers and hidden tests in one process. An answer that can change torch there, or read a file, has
every point and every secret. So an answer may define and compute, and no more: what it imports is on a list,
and it neither opens, nor executes, nor reaches into Python or into other modules. The answers are put into
the notebook as it was handed out, found by the names that they define, not by their place: students copy,
split, move and delete cells, and some programs drop the tags.

A list of what is refused is no cage. Grade without a network, and read what is reported.
"""

import ast
import builtins
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from otter.plugins import AbstractOtterPlugin

BUILTINS = set(
    "open exec eval compile __import__ globals locals vars dir type getattr setattr delattr breakpoint exit"
    " quit get_ipython In Out".split()
)
# Parts of modules that may not be reached: what runs text, reads or writes files, changes other modules.
PARTS = set(
    "accelerator amp anomaly_mode ao backends char classes compiler core cpp ctypeslib cuda distributed"
    " distributions export f2py foreach forward_ad func function futures fx grad_mode graph hub intrinsic jit"
    " lib library ma masked modules monitor mps mtia nested np numa onnx ops optim overrides package parallel"
    " profiler profiler_legacy profiler_util qat quantizable quantization quantized quasirandom rec"
    " return_types serialization storage testing torch torch_version typing_extensions utils version windows"
    " xpu".split()
)
# These open files, compile, reach frames or memory, look up names in text, or set attributes by other means.
DOORS = set(
    "open fromfile from_file fromregex genfromtxt tofile memmap open_memmap DataSource dump dumps compile"
    " gi_frame gi_code cr_frame cr_code ag_frame ag_code f_back f_globals f_locals f_builtins tb_frame"
    " tb_next data_ptr frombuffer from_buffer format format_map get_type_hints singledispatch"
    " singledispatchmethod update_wrapper wraps setstate set_default_device seterrcall".split()
)
# These are names of the standard library's modules and of tensors' methods alike.
METHODS = {"array", "chunk", "copy", "math", "select", "trace"}
SPECIAL = {"__init__", "__call__"}
# They sound like files, and are none.
KEPT_IN_MEMORY = {"load_state_dict", "save_for_backward", "saved_tensors"}
ANSWER = "otter_answer_cell"
EDITION = re.compile(r"^EDITION\s*=\s*[\"'](.+?)[\"']", re.MULTILINE)


# --- What a cell defines ---


def parsed(code: str) -> ast.Module:
    """The syntax tree of a cell, without the lines that only IPython reads. Raises `SyntaxError`."""
    try:
        return ast.parse(code)
    except SyntaxError:
        lines = code.splitlines()
        return ast.parse("\n".join("" if line.lstrip()[:1] in ("%", "!") else line for line in lines))
    except (ValueError, RecursionError, MemoryError) as error:  # zero bytes, a thousand brackets
        raise SyntaxError(str(error) or type(error).__name__) from error


class _Bound(ast.NodeVisitor):
    """Collects the names that are bound outside of functions."""

    def __init__(self):
        self.names: set[str] = set()

    def _named(self, node) -> None:
        self.names.add(node.name)

    def _other_scope(self, node) -> None:
        pass

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _named
    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _other_scope

    def visit_alias(self, node: ast.alias) -> None:
        self.names.add(node.asname or node.name.split(".")[0])

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names.add(node.id)


def bound(tree: ast.AST) -> set[str]:
    """The names that a cell defines."""
    collected = _Bound()
    collected.visit(tree)
    return collected.names


def used(tree: ast.AST) -> set[str]:
    """The names that a piece of code reads anywhere."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


# --- What an answer may not do ---


def objections(tree: ast.AST, allowed: dict) -> list[str]:
    """Why a piece of code is not run: one text for each line that does what an answer may not do.

    allowed: "modules", those that may be imported; "refused", {attribute: what to do instead}, what this
    assignment does not need; "stores", the variables whose attributes may be set.
    """
    reasons = [
        f"line {getattr(node, 'lineno', '?')} {says}"
        for node in ast.walk(tree)
        for says in _objections(node, allowed)
    ]
    return list(dict.fromkeys(reasons))


def _objections(node: ast.AST, allowed: dict) -> Iterator[str]:
    refused, modules = allowed.get("refused", {}), set(allowed["modules"])
    match node:
        case ast.Import(names=names):
            yield from (f"imports {alias.name}" for alias in names if alias.name not in modules)
        case ast.ImportFrom(module=module, names=names):
            if module not in modules or node.level:
                yield f"imports from {module or '.'}"
            for alias in names:
                if f"{module}.{alias.name}" not in modules and (alias.name == "*" or _closed(alias.name)):
                    yield f"imports {alias.name}"
        case ast.Attribute(attr=name):
            if _closed(name) and not (name in SPECIAL and isinstance(node.ctx, ast.Load)):
                yield f"uses .{name}"
            if not isinstance(node.ctx, ast.Load) and not _may_set(node, allowed.get("stores", ())):
                yield f"sets {ast.unparse(node)}, which may be somebody else's"
        case ast.MatchClass(kwd_attrs=names):
            yield from (f"uses .{name}" for name in names if _closed(name))
    for name in _names(node):
        if name in BUILTINS or (name.startswith("__") and name not in SPECIAL):
            yield f"uses {name}"
        if name in refused and isinstance(node, (ast.Attribute, ast.alias)):
            yield f"uses {name}: {refused[name]}"


def _names(node: ast.AST) -> Iterable[str]:
    """The names that stand in a node itself."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return () if isinstance(node, ast.Attribute) and name in BUILTINS else (name,)
        case ast.alias(name=name, asname=asname):
            return (name, asname) if asname else (name,)
    name = getattr(node, "name", None)  # of definitions, handlers of errors, patterns
    return (name,) if isinstance(name, str) else ()


def _closed(name: str) -> bool:
    """Whether an attribute of that name is refused wherever it is."""
    of_python = name in sys.stdlib_module_names and name not in METHODS
    reads_files = name.startswith(("load", "save")) and name not in KEPT_IN_MEMORY
    return name.startswith("_") or name in PARTS | DOORS or of_python or reads_files


def _may_set(node: ast.Attribute, stores: Iterable[str]) -> bool:
    """Whether an attribute may be set: it belongs to one of the named variables, and torch has none of that
    name. (A method can be called with any module for its `self`.)"""
    if not (isinstance(node.value, ast.Name) and node.value.id in stores):
        return False
    import torch

    owners = (torch, torch.Tensor, torch.nn.functional, torch.nn.Module, torch.autograd.Function, builtins)
    return not any(hasattr(owner, node.attr) for owner in owners)


# --- Answers out of a submission ---


def code_of(notebook) -> list[str]:
    """The sources of a notebook's code cells."""
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def answers(released, submission, allowed: dict) -> list[str]:
    """Put a submission's answers into the released notebook; returns what the report says of them."""
    labels = {label for code in code_of(submission) for label in EDITION.findall(code)}
    labels |= {str(submission.metadata["course"])} if "course" in submission.get("metadata", {}) else set()
    if labels and allowed["edition"] not in labels:
        return [
            f"refused: this is edition {allowed['edition']}, the notebook is of {', '.join(sorted(labels))}"
        ]
    said = [] if labels else ["the notebook does not say of which edition it is"]
    cells = []
    for code in code_of(submission):
        try:
            cells.append((code, parsed(code)))
        except SyntaxError as error:
            cells.append((code, error))
    known = set(dir(builtins)) | {name for code in code_of(released) for name in _bound_if_parsed(code)}
    slots = [
        cell
        for cell in released.cells
        if cell.cell_type == "code" and ANSWER in cell.metadata.get("tags", [])
    ]
    for slot in slots:
        wanted = bound(parsed(slot.source))
        what = ", ".join(sorted(wanted))
        answer = _answer(wanted, cells)
        if answer is None:
            said.append(f"{what}: no cell defines it")
        elif isinstance(answer, SyntaxError):
            said.append(f"{what}: not run, line {answer.lineno or '?'} is no Python: {answer.msg}")
        else:
            trees = [tree for _, tree in cells if isinstance(tree, ast.Module)]
            whole = ast.Module([*_helpers(answer, trees, known), *answer.body], [])
            if reasons := objections(whole, allowed):
                said.append(f"{what}: not run, because " + "; ".join(reasons))
            else:
                slot.source = ast.unparse(whole)  # what was read is what runs
    return said


def _bound_if_parsed(code: str) -> set[str]:
    try:
        return bound(parsed(code))
    except SyntaxError:
        return set()


def _answer(wanted: set[str], cells: list[tuple]) -> ast.Module | SyntaxError | None:
    """The last cell that defines what is wanted, and not as `...`. A cell that defines it as a function comes
    first, because `shares = shares(maps)` is a trial. Where no cell does, the error of a cell that cannot be
    read, or None."""
    defining = [tree for _, tree in cells if isinstance(tree, ast.Module) and wanted & bound(tree)]
    filled = [tree for tree in defining if not _is_empty(tree, wanted)]
    if filled:
        written = [
            tree for tree in filled if any(getattr(node, "name", None) in wanted for node in tree.body)
        ]
        return (written or filled)[-1]
    names = re.compile(rf"^(?:def\s+)?(?:{'|'.join(sorted(wanted))})\s*[(=:]", re.MULTILINE)
    broken = [error for code, error in cells if isinstance(error, SyntaxError) and names.search(code)]
    return broken[-1] if broken else defining[-1] if defining else None


def _is_empty(tree: ast.Module, wanted: set[str]) -> bool:
    """Whether all that is wanted is still to be filled in."""
    parts = [node for node in tree.body if wanted & bound(node)]
    bodies = [node.body if isinstance(node, ast.FunctionDef) else [node] for node in parts]
    return all(
        isinstance(getattr(statement, "value", None), ast.Constant)
        and (isinstance(statement, ast.Expr) or statement.value.value is ...)
        for body in bodies
        for statement in body
    )


def _helpers(answer: ast.Module, trees: list[ast.Module], known: set[str]) -> list[ast.stmt]:
    """The imports, functions and constants of other cells that an answer needs, in their order."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    statements = [
        node for tree in trees if tree is not answer for node in tree.body if isinstance(node, kinds)
    ]
    taken: set[int] = set()
    missing = used(answer) - bound(answer) - known
    done = set(known) | bound(answer)
    while missing:
        name = missing.pop()
        done.add(name)
        at = [place for place, statement in enumerate(statements) if name in bound(statement)]
        if at:
            taken.add(at[-1])
            missing |= used(statements[at[-1]]) - done
    return [statements[place] for place in sorted(taken)]


def literal(notebook, name: str):
    """The value that a notebook's last plain assignment gives to a name; None where there is none."""
    for code in reversed(code_of(notebook)):
        try:
            body = parsed(code).body
        except SyntaxError:
            continue
        for node in reversed(body):
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == name for t in node.targets
            ):
                try:
                    value = ast.literal_eval(node.value)
                except ValueError:
                    continue
                if value is not ...:
                    return value
    return None


# --- The plugin ---


class Guard(AbstractOtterPlugin):
    """Otter's side: `plugin_config` is what `tools/course.py` writes of an edition."""

    def before_execution(self, submission):
        """The released notebook with the submission's answers, which otter runs in place of the
        submission."""
        self._remove_other_files()
        released = nbformat.reads(Path("released.json").read_text(encoding="utf-8"), as_version=4)
        self.said = answers(released, submission, self.plugin_config)
        known = {
            user.get(key) for user in self.submission_metadata.get("users", []) for key in ("email", "name")
        }
        if known and literal(submission, "STUDENT") not in known:
            self.said.append(
                f"STUDENT is {literal(submission, 'STUDENT')!r}, handed in by {sorted(map(str, known))}"
            )
        # First of all: it keeps the functions with which it compares, as they are now.
        released.cells.insert(0, nbformat.v4.new_code_cell("import hidden"))
        return released

    def after_grading(self, results):
        """Write into the results what the report says."""
        results.set_output("\n".join(self.said))

    def generate_report(self):
        """The same, for the terminal."""
        return "\n".join(self.said)

    def _remove_other_files(self) -> None:
        """Remove files that came with a submission: one named torch.py would be imported."""
        source = Path("../source/files")
        if Path.cwd().name != "submission" or not source.is_dir():
            raise RuntimeError(f"{Path.cwd()} is not the folder in which otter grades")
        keep = {path.name for path in source.iterdir()} | set(self.plugin_config.get("uploads", ()))
        keep |= {Path(self.submission_path).name, "tests", "__init__.py"}
        for path in Path.cwd().iterdir():
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
