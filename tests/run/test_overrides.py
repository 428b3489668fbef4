"""`--set key=value`: what is read from the text, what is refused, and what the refusal says."""

from dataclasses import dataclass

import pytest

from atlib.run.overrides import parse_changes, read_changes, read_value


@dataclass(frozen=True)
class Settings:
    steps: int = 1
    lr: float = 0.1
    clip: float | None = 1.0
    name: str = "a"
    path: str | None = None
    compile: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    layers: tuple[int, ...] = ()


@pytest.mark.parametrize(
    "text, name, value",
    [
        ("12", "steps", 12),
        ("1e-3", "lr", 0.001),
        ("2", "lr", 2.0),
        ("none", "clip", None),
        ("null", "clip", None),
        ("0.5", "clip", 0.5),
        ("12", "name", "12"),
        ("true", "name", "true"),
        ("None", "path", None),
        ("/a=b", "path", "/a=b"),
        ("true", "compile", True),
        ("False", "compile", False),
        ("[0.9, 1]", "betas", (0.9, 1.0)),
        ("[3, 4, 5]", "layers", (3, 4, 5)),
        ("[]", "layers", ()),
    ],
)
def test_text_becomes_what_the_field_declares(text, name, value):
    found = read_changes(Settings, {name: text}, "it")[name]
    assert found == value and type(found) is type(value)
    if isinstance(value, tuple):
        assert [type(each) for each in found] == [type(each) for each in value]


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("steps", "1e-3", "steps=0.001 is of the wrong type: steps is a whole number"),
        ("steps", "many", "steps='many' is of the wrong type"),
        ("steps", "true", "steps=True is of the wrong type"),
        ("steps", "none", "steps=None is of the wrong type"),
        ("clip", "hard", "clip is a number or none"),
        ("compile", "1", "compile is true or false"),
        ("betas", "[0.9]", r"betas=\[0.9\] has 1 values: betas has 2"),
        ("betas", '["a", 1]', "betas='a' is of the wrong type"),
        ("betas", "0.9", "betas is a list such as"),
        ("stepz", "1", "unknown setting of it 'stepz'. Did you mean 'steps'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, text, says):
    with pytest.raises(ValueError, match=says):
        read_changes(Settings, {name: text}, "it")


def test_texts_are_split_at_the_first_equals_sign():
    assert parse_changes(["lr=1e-3", "plan.what = q", "path=/a=b"]) == {
        "lr": "1e-3",
        "plan.what": "q",
        "path": "/a=b",
    }
    for wrong, says in (
        (["lr"], "write key=value"),
        (["=3"], "write key=value"),
        (["lr=1", "lr=2"], "lr is given twice, as '1' and as '2'"),
    ):
        with pytest.raises(ValueError, match=says):
            parse_changes(wrong)


def test_a_value_without_a_declared_type():
    assert [read_value(text) for text in ("3", "0.5", "avg", "None", "[1, 2]", "True")] == [
        3,
        0.5,
        "avg",
        None,
        [1, 2],
        True,
    ]
