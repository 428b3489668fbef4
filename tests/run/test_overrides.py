"""Settings on the command line: what is read from the text, what is refused, and what the refusal names."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from atlib.run.config import settings
from atlib.run.overrides import help_text, pairs, read

KINDS = {
    "steps": int,
    "lr": float,
    "clip": float | None,
    "name": str,
    "path": str | None,
    "compile": bool,
    "betas": tuple[float, float],
    "layers": Iterable[int] | Mapping[int, int] | None,
    "model": str,
    "model.x": Any,
}


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("steps", "12", 12),
        ("lr", "1e-3", 0.001),
        ("lr", "2", 2.0),
        ("clip", "none", None),
        ("clip", "null", None),
        ("clip", "0.5", 0.5),
        ("name", "12", "12"),
        ("name", "true", "true"),
        ("name", "none", "none"),
        ("path", "None", None),
        ("path", "/a=b", "/a=b"),
        ("compile", "true", True),
        ("compile", "False", False),
        ("betas", "[0.9, 1]", (0.9, 1.0)),
        ("layers", "[3, 4, 5]", [3, 4, 5]),
        ("layers", "{0: 2, 1: 3}", {0: 2, 1: 3}),
        ("model.x", "3", 3),
        ("model.x", "1e-5", 1e-5),
        ("model.x", "avg", "avg"),
        ("model.x", "[8, 4]", [8, 4]),
        ("model.x", "None", None),
    ],
)
def test_text_becomes_what_the_field_declares(name, text, value):
    found = read({name: text}, KINDS)[name]
    assert found == value and type(found) is type(value)
    if isinstance(value, tuple):
        assert [type(each) for each in found] == [type(each) for each in value]


@pytest.mark.parametrize(
    "name, text",
    [
        ("steps", "1e-3"),
        ("steps", "many"),
        ("steps", "true"),
        ("steps", "none"),
        ("clip", "hard"),
        ("lr", "nan"),
        ("compile", "7"),
        ("betas", "[0.9]"),
        ("betas", '["a", 1]'),
        ("betas", "0.9"),
        ("layers", "3"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_value_and_type(name, text):
    with pytest.raises(ValueError, match=re.escape(f"--{name} {text}: ")):
        read({name: text}, KINDS)


def test_an_unknown_name_is_refused_with_the_close_ones():
    with pytest.raises(ValueError, match="--stepz.*--steps"):
        read({"stepz": "1"}, KINDS)


def test_a_model_and_one_of_its_arguments_go_together():
    assert read({"model": "glyphs", "model.x": "3"}, KINDS) == {"model": "glyphs", "model.x": 3}


def test_options_in_both_spellings():
    found = pairs(["--lr", "1e-3", "--plan.what=q", "--path", "/a=b", "--shift", "-1"])
    assert found == {"lr": "1e-3", "plan.what": "q", "path": "/a=b", "shift": "-1"}


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--lr"], "--lr"),
        (["--lr", "--steps", "3"], "--lr"),
        (["lr=3"], "'lr'"),
        (["--lr", "1", "--lr", "2"], "--lr .*'1'.*'2'"),
    ],
)
def test_what_is_no_pair_is_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        pairs(arguments)


def test_the_help_lists_every_setting_with_its_type():
    text = help_text(settings(), {"lr": 0.25})
    assert all(f"--{name}" in text for name in settings())
    assert "float, default: 0.25" in " ".join(text.split())
