"""Recipes by name, the papers' and this project's: the TOML files beside.

A table is a recipe. `like` names those from which it takes what it does not say itself; `oddities` are
sentences, or names of `notes`; `also` adds some to those taken; `after` is the recipe that makes its teacher;
"none" is None."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from atlib._util import require_known
from atlib.plan import Plan
from atlib.recipe import Recipe
from atrun.data.transforms import Augmentation
from atrun.method import Method


class Published(NamedTuple):
    """A recipe as its source prints it, with its length in epochs and its rate per 256 images.

    source: paper with table or section; model: a timm name, a preset, or its authors' name; options: of the
    model's constructor; teacher: a timm name, None where a run must name one; drop_path: of the last block;
    pretext, detection: fields of a run; oddities: what looks like a slip, and where we depart.
    """

    source: str
    model: str
    method: Method
    recipe: Recipe
    augmentation: Augmentation | None = None
    options: Mapping = {}
    teacher: str | None = None
    plan: Plan | None = None
    drop_path: float = 0.0
    pretext: Mapping = {}
    detection: Mapping = {}
    oddities: tuple[str, ...] = ()


_TABLES: dict[str, dict[str, Any]] = {}
_NOTES: dict[str, str] = {}
for _name in ("transfer", "mae", "contrast", "deit", "other_networks", "detection", "own", "shared"):
    _read = tomllib.loads(Path(__file__).with_name(f"{_name}.toml").read_text(encoding="utf-8"))
    _NOTES |= _read.pop("notes", {})
    _TABLES |= _read


def shared(name: str) -> dict[str, Any]:
    """A table, of a recipe or of what several share, with what it takes from others; lists are tuples."""
    table, whole = _TABLES[name], {}
    parents = table.get("like", [])
    for parent in [parents] if isinstance(parents, str) else parents:
        whole = _merged(whole, shared(parent))
    return _merged(whole, {key: value for key, value in table.items() if key != "like"})


def _merged(below: Mapping, above: Mapping) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, dict):
            value = _merged(below.get(key, {}), value)
        merged[key] = tuple(value) if isinstance(value, list) else None if value == "none" else value
    return merged


@cache
def published(name: str) -> Published:
    """A recipe by name: a paper's, or "SCALE-METHOD" as this project chose it, such as "find-copy"."""
    require_known("recipe", name, (*names(), *TASKS, *FOR_PYTHON))
    values = {key: value for key, value in shared(name).items() if key not in ("for_python", "task")}
    oddities = (*values.pop("oddities", ()), *values.pop("also", ()))
    if (after := values.pop("after", None)) is not None:
        oddities += (f"It starts from what `{after}` ends with: name those weights as its teacher.",)
    method = values["method"] = Method(values["method"])
    if method.transfers:
        values["plan"] = Plan(how=method, **values.get("plan", {}))
    if "augmentation" in values:
        values["augmentation"] = Augmentation(**values["augmentation"])
    values["recipe"] = Recipe(**values["recipe"])
    return Published(oddities=tuple(_NOTES.get(sentence, sentence) for sentence in oddities), **values)


def names() -> tuple[str, ...]:
    """The names of all recipes that `python -m atlib` runs: the papers' and ours. Nothing is built."""
    return tuple(name for name in _TABLES if name[0] != "_" and name not in (*FOR_PYTHON, *TASKS))


# Those whose network the command line does not know: `atlib.train.train` takes their recipe.
FOR_PYTHON = tuple(name for name in _TABLES if name[0] != "_" and "for_python" in shared(name))
# What `pretrain` runs beside the papers' recipes, on small photographs.
TASKS = tuple(name for name in _TABLES if name[0] != "_" and "task" in shared(name))
# What `pretrain` runs of them.
PRETRAINING = tuple(name for name in names() if Method(shared(name)["method"]).pretrains)
