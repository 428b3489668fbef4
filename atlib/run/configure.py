"""From what was asked on the command line to a checked run, before data or weights are touched."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_type_hints

import torch

from atlib._util import require_known
from atlib.data.catalogue import CATALOGUE, find
from atlib.data.transforms import Augmentation
from atlib.run.config import BUILT_IN, PRETRAINING, RunConfig, with_settings
from atlib.run.log import require_tensorboard
from atlib.run.overrides import read
from atlib.run.recipes import Published, published
from atlib.teachers.load import is_file
from atlib.train import recipe as recipes
from atlib.vit import Architecture, create_vit

GUESSED_COUNT = 10_000  # images, to check what was asked for while their number is not known
# What no run is made from: another one would change nothing but what the record says about it.
WORDS = ("name", "source", "oddities")
# Fields of a published recipe that can be set, with their types.
PUBLISHED_KINDS = {name: kind for name, kind in get_type_hints(Published).items() if kind is not Augmentation}
# As the scale "cifar10" pre-trains (`atlib.lab.scales`).
SMALL_PHOTOGRAPHS = Augmentation(32, crop="padded", padding=4, crop_pct=1.0, mean=(0.5,) * 3, std=(0.25,) * 3)


class TrainRequest(NamedTuple):
    """A run as it was asked for. recipe: a published recipe's name, or a pre-training task; data: a name or a
    path; changes: some of `settings()`, and fields of the published recipe as `published.NAME`, as texts."""

    recipe: str
    data: str
    teacher: str | None = None
    changes: Mapping[str, str] = {}
    seed: int = 0
    tensorboard: bool = False


def configure(asked: TrainRequest, count: int | None = None) -> RunConfig:
    """The run on `count` training images, into which epochs are converted (None: not known yet, a guess
    stands in).

    `published.epochs` changes the published recipe before it is converted, all other names the run
    that comes of it. Raises `ValueError` or `FileNotFoundError`, with the way out, for everything that can be
    found wrong without reading data or weights.
    """
    of_published = {
        key.removeprefix("published."): text
        for key, text in asked.changes.items()
        if key.startswith("published.")
    }
    changes = {key: text for key, text in asked.changes.items() if not key.startswith("published.")}
    if "data_path" in changes:  # in full, so that the run can go on from another folder
        changes["data_path"] = str(Path(changes["data_path"]).resolve())
    data = data_name(asked.data, changes.get("data_path"))
    common = {
        "recipe_name": asked.recipe,
        "data": data,
        "seed": asked.seed,
        "tensorboard": asked.tensorboard,
        "evaluation_split": evaluated_split(data),
    }
    if asked.tensorboard:
        require_tensorboard()
    if asked.recipe in PRETRAINING:
        if of_published:
            raise ValueError(
                f"published.{next(iter(of_published))}: {asked.recipe} is no published recipe; set"
                " steps, lr, ... themselves"
            )
        given = {
            "method": asked.recipe,
            "model": Architecture("glyphs" if data == BUILT_IN else "cifar"),
            "recipe": recipes.RETRIEVAL if asked.recipe == "retrieval" else recipes.MAE,
            "augmentation": None if data == BUILT_IN else SMALL_PHOTOGRAPHS,
        }
    else:
        source = _source(asked.recipe, of_published)
        teacher = source.teacher if asked.teacher is None else asked.teacher
        given = {
            "method": source.method,
            "model": Architecture(source.model, dict(source.options)),
            "recipe": source.recipe(count or GUESSED_COUNT),
            "teacher": None if teacher is None else _teacher(teacher),
            "plan": source.plan(),
            "drop_path": source.drop_path,
            "augmentation": None if data == BUILT_IN else source.augmentation,
        }
    config = with_settings({**given, **common}, changes)
    config.require_use(of_published)
    config.recipe.require_optimizer()
    return config


def oddities(recipe: str) -> tuple[str, ...]:
    """What is odd about a published recipe; nothing for pre-training."""
    return () if recipe in PRETRAINING else published(recipe).oddities


def config_diff(asked: TrainRequest, config: RunConfig, count: int) -> list[str]:
    """How the run's recipe differs from the published one it came from, on `count` images: "lr 0.001 instead
    of 0.008". Nothing for pre-training."""
    if asked.recipe in PRETRAINING:
        return []
    then, now = published(asked.recipe).recipe(count).describe(), config.recipe.describe()
    own = set(asked.changes)
    lines = []
    for name in then:
        if then[name] == now[name]:
            continue
        line = f"{name} {_short(now[name])} instead of {_short(then[name])}"
        if name == "batch_size" and name in own and not {"lr", "published.batch_size"} & own:
            line += (
                f": the published rate was scaled for {then[name]} and stays;"
                f" published.batch_size={now[name]} scales rate and steps"
            )
        lines.append(line)
    return lines


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _source(name: str, changes: Mapping[str, str]) -> Published:
    """A published recipe with some of its fields changed."""
    for each in changes:
        if each in WORDS:
            raise ValueError(
                f"published.{each} would change nothing: it is what the recipe is called, not what is"
                " run; choose another recipe instead"
            )
    return replace(published(name), **read(changes, PUBLISHED_KINDS))


def data_name(name_or_path: str, path: str | None = None) -> str:
    """A data set's name as it is, a path in full, so that the run can go on from another folder. Raises where
    there is nothing of that name."""
    if name_or_path == BUILT_IN:
        return name_or_path
    if "/" not in name_or_path and not Path(name_or_path).exists():  # neither a hub id nor a path
        require_known("data set", name_or_path, [BUILT_IN, *CATALOGUE])
    place = find(name_or_path, path)
    return str(place.path.resolve()) if path is None and place.path is not None else name_or_path


def evaluated_split(data: str) -> str:
    """The split on which results are reported."""
    if data == BUILT_IN:
        return "test"
    return CATALOGUE[data].evaluated if data in CATALOGUE else "validation"


def _teacher(name_or_path: str) -> str:
    """A timm name as it is, a file's path in full. Raises where there is neither a file nor a model of that
    name."""
    if is_file(name_or_path):
        if not Path(name_or_path).exists():
            raise FileNotFoundError(
                f"the teacher {name_or_path} does not exist: pre-training makes one, and"
                " timm.list_pretrained('vit_*') lists names"
            )
        return str(Path(name_or_path).resolve())
    with torch.device("meta"):
        create_vit(name_or_path)
    return name_or_path
