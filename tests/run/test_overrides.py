"""Settings on the command line: what is read from the text, what is refused, and what the refusal names."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields

import pytest

from atlib.recipe import Recipe
from atrun.commands import settings_of
from atrun.config import settings
from atrun.overrides import Setting, help_text, pairs, read

KINDS = {
    "steps": int, "lr": float, "clip": float | None, "name": str, "path": str | None, "compile": bool,
    "betas": tuple[float, float], "layers": Iterable[int] | Mapping[int, int] | None, "model": str,
}  # fmt: skip


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("lr", "2", 2.0),
        ("clip", "none", None),
        ("name", "none", "none"),
        ("name", "12", "12"),
        ("path", "1:30", "1:30"),
        ("betas", "[0.9, 1]", (0.9, 1.0)),
        ("layers", "[3, 4, 5]", [3, 4, 5]),
        ("layers", "{0: 2, 1: 3}", {0: 2, 1: 3}),
        ("model.x", "1e-5", 1e-5),
        ("model.x", "avg", "avg"),
        ("model.x", "None", None),
    ],
)
def test_text_becomes_what_the_field_declares(name, text, value):
    found = read({name: text}, KINDS)[name]
    assert found == value and type(found) is type(value)


def test_options_in_both_spellings():
    found = pairs("--lr 1e-3 --plan.what=q --path /a=b --shift -1 --on-corrupt skip".split())
    assert found == {"lr": "1e-3", "plan.what": "q", "path": "/a=b", "shift": "-1", "on_corrupt": "skip"}


def test_a_speed_names_settings_which_others_replace():
    asked = Namespace(settings=["--mixed_precision", "fp16"], speed="compiled")
    assert settings_of(asked) == {"mixed_precision": "fp16", "compile": "true"}


def test_the_help_says_each_setting_in_words_with_its_type_and_default():
    text = " ".join(help_text({"Of it": {"lr": Setting(float, "100 % of the rate", 0.25)}}).split())
    assert text.startswith("Of it: --lr") and "100 % of the rate (type: float, default: 0.25)" in text
    text = help_text(settings())
    for title, section in settings().items():
        assert title in text and all(f"--{name}" in text and one.says for name, one in section.items())
    names = {name for section in settings().values() for name in section}
    assert names > {field.name for field in fields(Recipe)} | {"plan.what", "augmentation.flip", "lengths"}
