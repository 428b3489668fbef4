"""A run's config: found wrong before anything is touched, and whole after JSON."""

import json
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

import pytest

from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.vit import Architecture
from atrun.commands import settings_of
from atrun.config import RunConfig, read_config, settings, write_config
from atrun.configure import config_diff, configure, data_name
from atrun.data.transforms import Augmentation
from atrun.overrides import Setting, help_text, pairs, read
from atrun.recipes import published

GLYPHS = RunConfig(
    recipe_name="mine",
    method="scratch",
    model=Architecture("glyphs"),
    data="atbook.worlds:marked_glyphs",
    recipe=Recipe(),
)


def asked(recipe, *changes, data="atbook.worlds:marked_glyphs", **options):
    """What `configure` takes."""
    changed = dict(each.split("=", 1) for each in changes)
    return {"recipe": recipe, "data": data, "changes": changed, **options}


OPTIONS = {"teacher": "/a/file.pth", "data_path": "/data", "data_size": 7, "image_column": "picture"}
OPTIONS |= {"streaming": True, "drop_path": 0.1, "evaluate_every": 3, "on_corrupt": "skip", "workers": 2}


@pytest.mark.parametrize(
    "config",
    [
        GLYPHS,
        RunConfig(
            recipe_name="copy-vit-large",
            method="copy",
            model=Architecture("vit_tiny_patch16_224", {"global_pool": "avg", "img_size": 64}),
            data="imagenet-1k",
            recipe=Recipe(betas=(0.8, 0.9), clip=None, ema=0.99),
            augmentation=Augmentation(64, rand_augment="rand-m9-mstd0.5-inc1"),
            plan=Plan(layers={0: 1, 1: 0}, heads={0: range(2)}, unequal_prefix="drop"),
            **OPTIONS | {"save_every": 5, "keep": 3, "seed": 11},
        ),
        configure("vitdet-scratch-vit-base", "coco", changes={"detector": "fcos"}),
        configure("mae", "cifar10", changes={"mask_ratio": "0.5", "training_split": "train+validation"}),
    ],
    ids=["small", "everything", "detection", "masked auto-encoding"],
)
def test_json_and_back(tmp_path, config):
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    assert json.loads((tmp_path / "config.json").read_text()) == config.describe()


def test_changes_reach_run_recipe_parts_and_model():
    changes = "lr=1e-3 steps=7 save_every=3 plan.what=q model.depth=2 plan.layers=[0] transfer_weight=2"
    config = configure(**asked("find-distill", *changes.split(), teacher=__file__))
    recipe = config.recipe
    assert (recipe.lr, recipe.steps, recipe.transfer_weight, config.save_every) == (1e-3, 7, 2.0, 3)
    assert config.plan == Plan("q", "distill", layers=(0,)) and config.model.overrides["depth"] == 2
    assert len(config.skeleton(8).blocks) == 2


def test_what_a_run_changed_against_its_published_recipe(monkeypatch):
    monkeypatch.setattr("atrun.configure.check_fits", lambda config: None)  # walks a ViT-L each time

    def changed(*changes):
        return config_diff(configure(**asked("distill-vit-large", *changes, data="imagenet-1k")), 10_240)

    assert changed("workers=3") == []
    assert changed("batch_size=256") == [
        "recipe.batch_size was 2048 and is 256",
        "recipe.lr was 0.0008 and is 0.0001",
        "recipe.steps was 1000 and is 8000",
    ]
    assert changed("plan.layers=[0, 1]", "augmentation.flip=0", "drop_path=0.1") == [
        "augmentation.flip was 0.5 and is 0.0",
        "drop_path was 0.2 and is 0.1",
        f"plan.layers was {list(range(18))} and is [0, 1]",
    ]


def test_a_published_recipe_is_what_is_run():
    source = published("distill-vit-large")
    config = configure("distill-vit-large", "imagenet-1k")
    for part in ("recipe", "plan", "augmentation"):
        assert getattr(config, part) == getattr(source, part)
    resolved = config.on(1_281_167)
    assert resolved == replace(config, recipe=source.recipe.on(1_281_167)) == resolved.on(3)
    assert resolved.recipe.steps == 200 * 626, "626 steps of 2,048 images an epoch, the last one smaller"
    found = config.method, config.teacher, config.drop_path, config.evaluation_split
    assert found == ("distill", "vit_large_patch16_224.mae", 0.2, "validation")
    more = {"drop_path_rate": 0.2, "num_classes": 1000, "img_size": 224}
    assert config.architecture(1000).overrides == source.options | more


def test_paths_are_kept_in_full_for_another_working_folder(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    (tmp_path / "teacher.pth").touch()
    given = configure(**asked("find-copy", teacher=__file__))
    monkeypatch.chdir(tmp_path)
    assert data_name("images") == str(tmp_path / "images") and data_name("owner/name") == "owner/name"
    assert data_name("pets") == "pets"
    (tmp_path / "pets").mkdir()
    with pytest.raises(ValueError, match="./pets"):  # not silently the published set
        data_name("pets")
    assert data_name("./pets") == str(tmp_path / "pets") and data_name("pets", "images") == "pets"
    assert given.teacher == __file__


def test_what_must_not_change_when_a_run_goes_on():
    free = {"workers": 3, "on_device": 0.0, "save_every": 7, "keep": 9, "tracker": "mlflow"}
    fixed = {"seed": 1, "recipe": Recipe(lr=1.0), "drop_path": 0.1, "data_size": 5}
    for name, value in (free | fixed).items():
        changed = replace(GLYPHS, **{name: value})
        assert (changed.fingerprint() == GLYPHS.fingerprint()) == (name in free), name
    photographs = configure("mae-scratch-vit-base", "imagenet-1k")
    assert replace(photographs, on_corrupt="skip").fingerprint() == photographs.fingerprint()
    assert replace(photographs, streaming=True).fingerprint() != photographs.fingerprint()


# --- Settings on the command line: what is read from the text, and what the help says


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
