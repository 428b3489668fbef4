"""From what was asked on the command line to a checked run, before data or weights are touched."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm

from atlib._util import as_plain, require_known
from atlib.vit import PRESETS, Architecture, check_activation, create_vit, weights_file, without_weights
from atrun import generic
from atrun.build import check_fits
from atrun.checkpoint_manager import changes_between
from atrun.config import COCO, UNTRAINED, RunConfig, is_run, read_config, with_settings
from atrun.data.catalogue import CATALOGUE, find
from atrun.data.generated import is_generated, maker
from atrun.method import DERIVED
from atrun.recipes import FOR_PYTHON, TASKS, Published, names, published
from atrun.runner import result_path
from atrun.teachers.load import is_file


def configure(
    recipe: str, data: str, teacher: str | None = None, changes: Mapping[str, str] = {}, seed: int = 0
) -> RunConfig:
    """The run that was asked for, its recipe in epochs where it is published so (`RunConfig.on`).

    recipe: a published recipe's name, a pre-training task, or one of `DERIVED`, which counts images and
    looks at the teacher; data: a name, a path or a function; changes: some of `settings()`, as texts. No data
    or weights are read to say what is wrong."""
    return configured(recipe, data, teacher, changes, seed)[0]


def configured(
    recipe: str, data: str, teacher: str | None = None, changes: Mapping[str, str] = {}, seed: int = 0
) -> tuple[RunConfig, str]:
    """`configure`, and what was derived: a line for each value with its rule, "" where nothing was."""
    data, changes = data_name(data, changes.get("data_path")), _in_full(changes)
    if recipe in FOR_PYTHON:
        raise ValueError(f"the recipe {recipe!r} is for Python: no command trains its network")
    require_known("recipe", recipe, (*DERIVED, *TASKS, *names()))
    if teacher is None and recipe not in DERIVED:
        teacher = published(recipe).teacher
    teacher, rules = None if teacher is None else teacher_name(teacher), ""
    if recipe in DERIVED:
        derived = generic.derive(recipe, data, teacher, changes, seed)
        of_recipe, rules = derived.values, derived.text(changes)
    else:
        of_recipe = {**_as_published(published(recipe)), "teacher": teacher}
    common = {"recipe_name": recipe, "data": data, "seed": seed, "evaluation_split": evaluated_split(data)}
    common["training_split"] = "train2017" if data == COCO else "train"
    return _checked({**of_recipe, **common}, changes), rules


def _in_full(changes: Mapping[str, str]) -> dict[str, str]:
    """Settings with paths in full, so that the run can go on from another folder."""
    changes = dict(changes)
    if "data_path" in changes:
        changes["data_path"] = str(Path(changes["data_path"]).resolve())
    if changes.get("student_weights", "null").lower() not in ("none", "null"):
        changes["student_weights"] = _weights(changes["student_weights"], "student weights")
    return changes


def _checked(values: Mapping[str, Any], changes: Mapping[str, str]) -> RunConfig:
    config = with_settings(values, changes)
    check_fits(config)
    return config


def configure_again(
    path: str | Path,
    data: str | None = None,
    teacher: str | None = None,
    changes: Mapping[str, str] = {},
    seed: int | None = None,
    trust_data: bool = False,
) -> RunConfig:
    """The run that `path`, a run's config.json or its folder, describes, with other data, another teacher,
    some other settings or another seed where these are given. Its steps and its rate are as they were."""
    # other data are named by whoever asks
    values = read_config(Path(path), trust_data or data is not None).flat()
    if data is not None:
        if is_generated(data) != is_generated(values["data"]):
            raise ValueError(f"--data {data}: {values['data']} come in another way, start with --recipe")
        name = data_name(data, changes.get("data_path"))
        for of_old_data in ("data_path", "image_column", "label_column"):
            values.pop(of_old_data, None)
        values |= {"data": name, "evaluation_split": evaluated_split(data)}
    if teacher is not None:
        values["teacher"] = teacher_name(teacher)
    values |= {} if seed is None else {"seed": seed}
    return _checked(values, _in_full(changes))


def config_diff(config: RunConfig, images: int) -> list[str]:
    """How a run on so many images differs from the published one, but for its teacher, in sentences."""
    if config.recipe_name in DERIVED:
        return []
    now, then = config.on(images).flat(), _as_published(published(config.recipe_name))
    then["recipe"] = then["recipe"].on(images)
    names = now.keys() & then.keys()  # of generated images, none is augmented
    then, now = ({name: as_plain(values[name]) for name in names} for values in (then, now))
    return changes_between(then, now)


def _as_published(source: Published) -> dict[str, Any]:
    """The base of a run that a published recipe says, but for its teacher."""
    base = {name: getattr(source, name) for name in ("method", "recipe", "plan", "drop_path", "augmentation")}
    model = Architecture(source.model, dict(source.options))
    return {"model": model, **base, **source.pretext, **source.detection}


def data_name(name_or_path: str, path: str | None = None) -> str:
    """A data set's name as it is, a path in full. Raises where there is nothing of that name."""
    if is_generated(name_or_path):
        maker(name_or_path)
    if name_or_path == COCO or is_generated(name_or_path):
        return name_or_path
    entry = CATALOGUE.get(name_or_path) if path is None else None
    if entry is not None and Path(name_or_path).exists() and not is_run(Path(name_or_path)):
        hub = f" or {entry.hub}" if entry.hub else ""
        raise ValueError(f"{name_or_path}: a folder here, and a published set: ./{name_or_path}{hub}")
    _, place, _ = find(name_or_path, path)
    return str(place.resolve()) if path is None and place is not None else name_or_path


def evaluated_split(data: str) -> str:
    """The split on which results are reported."""
    if is_generated(data):
        return "test"
    if data == COCO:
        return "val2017"
    return CATALOGUE[data].evaluated if data in CATALOGUE else "validation"


def teacher_name(name: str) -> str:
    """A teacher's name as it is, a file's path in full, and for a run's folder that of its ViT."""
    return name if name == UNTRAINED else _weights(name, "teacher")


def _weights(name_or_path: str, what: str) -> str:
    """A timm name as it is, a file's path in full, and for a run's folder that of its ViT."""
    if is_file(name_or_path):
        path = Path(name_or_path)
        if not path.exists():
            raise FileNotFoundError(f"the {what} {name_or_path} does not exist: hf download OWNER/NAME")
        if is_run(path):
            run, path = path, result_path(path, read_config(path, trust_data=True).method)
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing: `python -m atlib resume {run}` goes on")
        return str(path.resolve())
    with without_weights():
        create_vit(name_or_path)  # refuses what is no ViT
    check_activation(name_or_path)
    of_timm = None if name_or_path in PRESETS else timm.get_pretrained_cfg(name_or_path)
    has_weights = of_timm is not None and of_timm.has_weights
    if not has_weights and not weights_file(name_or_path).exists():
        raise ValueError(f"the {what} {name_or_path} has no published weights: another name, or a file")
    return name_or_path
