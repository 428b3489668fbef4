"""Values for the fields of a dataclass from `key=value` texts, each checked against the field's declared
type."""

import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from atlib._util import require_known

PLAIN = (bool, int, float, str, type(None))


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """["lr=1e-3", "plan.what=q"] as {"lr": "1e-3", "plan.what": "q"}. Raises `ValueError` for a text without
    "=" and for a key given twice."""
    changes: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"--set {text!r}: write key=value, such as --set lr=1e-3")
        if key in changes:
            raise ValueError(f"--set {key} is given twice, as {changes[key]!r} and as {value!r}")
        changes[key] = value.strip()
    return changes


def read_changes(kind: type, changes: Mapping[str, str], what: str) -> dict[str, object]:
    """{field: value} for {field: text}, for the dataclass `kind`, which the messages call `what`.

    Text is read as JSON where it is JSON (1e-3, true, null, [0, 1]; `none` is null too) and taken as it
    stands otherwise. Raises `ValueError` for an unknown field (with the known ones) and for a value of
    another type.
    """
    hints = typing.get_type_hints(kind)
    known = [field.name for field in fields(kind)]
    for name in changes:
        require_known(f"setting of {what}", name, known)
    return {name: of_type(name, read_value(text, hints[name]), hints[name]) for name, text in changes.items()}


def read_value(text: str, hint: object = None) -> object:
    """A text as a value: JSON, or the text itself. Where only text is meant, nothing but `none` and `null` is
    read as anything else."""
    if text.lower() in ("none", "null"):
        return None
    if set(_alternatives(hint)) <= {str, type(None)}:
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False}.get(text, text)  # as Python writes them


def of_type(name: str, value: object, hint: object) -> object:
    """`value` in the form that the type asks for (a list as a tuple, a whole number as a float). Raises
    `ValueError` where it does not fit.

    What is in a collection other than a tuple is left to the dataclass's own checks.
    """
    for each in _alternatives(hint):
        if each is float and type(value) is int:
            return float(value)
        if each in PLAIN and type(value) is each:
            return value
        if typing.get_origin(each) is tuple and isinstance(value, (list, tuple)):
            return _as_tuple(name, value, typing.get_args(each))
        if each not in PLAIN and isinstance(value, typing.get_origin(each) or each):
            return value
    raise ValueError(f"{name}={value!r} is of the wrong type: {name} is {_in_words(hint)}")


def _as_tuple(name: str, value: Sequence, kinds: tuple) -> tuple:
    if len(kinds) == 2 and kinds[1] is ...:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise ValueError(f"{name}={list(value)!r} has {len(value)} values: {name} has {len(kinds)}")
    return tuple(of_type(name, each, kind) for each, kind in zip(value, kinds))


def _alternatives(hint: object) -> tuple:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _in_words(hint: object) -> str:
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        type(None): "none",
        tuple: "a list such as [0.9, 0.999]",
        Iterable: "a list such as [0, 1]",
        Mapping: "a mapping",
    }
    kinds = [typing.get_origin(each) or each for each in _alternatives(hint)]
    return " or ".join(
        words.get(kind, f"an {kind.__name__}, whose fields are set one by one") for kind in kinds
    )
