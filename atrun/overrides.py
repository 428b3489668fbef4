"""Settings on the command line: `--lr 1e-3 --plan.what q`, read against the declared types of dataclasses.

The reading is jsonargparse's, which knows every type that the fields of a run have (a list or a mapping of
layers, an optional text, a pair of betas) and prints them in a help text. tyro, tried beside it, has the
finer errors, and refuses a field that may be either a list or a mapping, as `Plan.layers` is.
"""

import argparse
import ast
import difflib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import takewhile
from typing import Any, NamedTuple, get_args, get_type_hints

from jsonargparse import ArgumentParser


def pairs(arguments: Sequence[str]) -> dict[str, str]:
    """["--lr", "1e-3", "--plan.what=q"] as {"lr": "1e-3", "plan.what": "q"}. A name may have dashes in place
    of its underscores, as other commands' options have.

    Raises `ValueError` for a name without a value, a value without a name, and a name given twice.
    """
    texts: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"{name!r} belongs to no option: write --name value, such as --lr 1e-3")
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ValueError(f"{name} has no value: write {name} VALUE")
            value = waiting.pop(0)
        name = name[2:].replace("-", "_")
        if name in texts:
            raise ValueError(f"--{name} is given twice, as {texts[name]!r} and as {value!r}")
        texts[name] = value
    return texts


def read(texts: Mapping[str, str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some settings, {name: value} for {name: text}; `kinds` has the type of every one there
    is.

    Raises `ValueError` for an unknown name, with the close ones, and for a text that is no value of its type.
    """
    values = {}
    for name, text in texts.items():
        if name not in kinds:
            close = difflib.get_close_matches(name, kinds)
            meant = f" Did you mean {' or '.join(f'--{other}' for other in close)}?" if close else ""
            raise ValueError(f"unknown setting --{name}.{meant} `train --settings` lists them all")
        if not isinstance(text, str):
            raise ValueError(f"{name}={text!r}: settings are texts, as on the command line, {str(text)!r}")
        if text.lower() == "none" and (kinds[name] is Any or type(None) in get_args(kinds[name])):
            text = "null"  # as YAML, in which values are read, writes it
        # A parser for each: one that knows `model` takes `model.depth` for a part of its value.
        parser = _parser({name: kinds[name]})
        try:
            values[name] = parser.parse_args([f"--{name}={text}"])[name]
        except argparse.ArgumentError as error:
            kind = kinds[name].__name__ if isinstance(kinds[name], type) else kinds[name]
            raise ValueError(f"--{name} {text}: it must be {kind}") from error
    return values


class Setting(NamedTuple):
    """What a help text says of a setting. default: `MISSING` where there is none."""

    kind: Any  # its type
    says: str
    default: Any


def said_of(of: type) -> dict[str, Setting]:
    """The fields of a dataclass that are its own, not inherited, with what the `#:` comment above each says,
    which the book's page of the library prints as well."""
    kinds, words = get_type_hints(of), _comments(of)
    own = [field for field in fields(of) if field.name in inspect.get_annotations(of)]
    return {field.name: Setting(kinds[field.name], words.get(field.name, ""), field.default) for field in own}


def _comments(of: type) -> dict[str, str]:
    """The comments above what a class declares; none where its source was not installed with it."""
    try:
        lines = textwrap.dedent(inspect.getsource(of)).splitlines()
    except OSError:
        return {}
    (written,) = ast.parse("\n".join(lines)).body
    assert isinstance(written, ast.ClassDef)
    found = {}
    for node in written.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            before = reversed(lines[: node.lineno - 1])
            above = [*takewhile(lambda line: line.startswith("#:"), map(str.strip, before))]
            found[node.target.id] = " ".join(line.removeprefix("#:").strip() for line in reversed(above))
    return found


def help_text(sections: Mapping[str, Mapping[str, Setting]]) -> str:
    """What each setting means, its type, and its value where nothing says it, section by section:
    {title: {name: what is said of it}}."""
    return "\n".join(f"{title}:\n{_lines(of)}" for title, of in sections.items())


def _lines(of: Mapping[str, Setting]) -> str:
    parser = ArgumentParser(exit_on_error=False)
    for name, one in of.items():
        default = argparse.SUPPRESS if one.default is MISSING else one.default
        parser.add_argument(f"--{name}", type=one.kind, default=default, help=one.says)
    return parser.format_help().partition("exit.\n")[2]


def _parser(kinds: Mapping[str, Any]) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    return parser
