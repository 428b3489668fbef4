"""Settings on the command line, `--lr 1e-3 --plan.what q`, read by jsonargparse by the types of fields."""

import argparse
import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, get_args, get_type_hints

from jsonargparse import ArgumentParser


def pairs(arguments: Sequence[str]) -> dict[str, str]:
    """["--lr", "1e-3", "--plan.what=q"] as {"lr": "1e-3", "plan.what": "q"}; a dash is an underscore."""
    texts: dict[str, str] = {}
    waiting = list(arguments)
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"{name!r} belongs to no option: write --NAME VALUE")
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ValueError(f"{name} has no value: write {name} VALUE")
            value = waiting.pop(0)
        texts[name[2:].replace("-", "_")] = value
    return texts


def read(texts: Mapping[str, str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some settings, {name: value} for {name: text}; `kinds` has the type of every one there
    is. With "model" among them any argument of the model, `model.NAME`, is taken."""
    values = {}
    for name, text in texts.items():
        is_models = "model" in kinds and name.startswith("model.")
        kind = Any if is_models else kinds.get(name, MISSING)
        if kind is MISSING:
            close = difflib.get_close_matches(name, kinds)
            meant = f" Did you mean {' or '.join(f'--{other}' for other in close)}?" if close else ""
            raise ValueError(f"unknown setting --{name}.{meant} `train --settings` lists them all")
        text = str(text)
        if re.search(r"\d:\d", text) and str not in (kind, *get_args(kind)):
            raise ValueError(f"--{name} {text}: in YAML 1:30 is 90, and a mapping is {{1: 30}}")
        if text.lower() == "none" and (kind is Any or type(None) in get_args(kind)):
            text = "null"  # as YAML, in which values are read, writes it
        # A parser for each: one that knows `model` takes `model.depth` for a part of its value.
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument(f"--{name}", type=kind)
        try:
            values[name] = parser.parse_args([f"--{name}={text}"])[name]
        except argparse.ArgumentError as error:
            needed = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            raise ValueError(f"--{name} {text}: it must be {needed}") from error
    return values


class Setting(NamedTuple):
    """What a help text says of a setting. default: `MISSING` where there is none."""

    kind: Any  # its type
    says: str
    default: Any


def fields_of(of: type) -> dict[str, Setting]:
    """The fields of a dataclass, with what the `#:` comments at them say, where there is a source."""
    try:
        source = inspect.getsource(of)
    except OSError:
        source = ""
    words = dict(re.findall(r"^ +(\w+): .*  #: (.*)", source, re.MULTILINE))
    for comments, name in re.findall(r"((?:^ +#: .*\n)+) +(\w+):", source, re.MULTILINE):
        words[name] = " ".join(re.findall(r"#: (.*)", comments))
    kinds = get_type_hints(of)
    return {one.name: Setting(kinds[one.name], words.get(one.name, ""), one.default) for one in fields(of)}


def help_text(sections: Mapping[str, Mapping[str, Setting]]) -> str:
    """What each setting means, its type, and its default: {title: {name: what is said of it}}."""
    texts = []
    for title, settings in sections.items():
        parser = ArgumentParser(exit_on_error=False)
        for name, one in settings.items():
            default = argparse.SUPPRESS if one.default is MISSING else one.default
            parser.add_argument(f"--{name}", type=one.kind, default=default, help=one.says)
        texts.append(f"{title}:\n" + parser.format_help().partition("exit.\n")[2])
    return "\n".join(texts)
