"""A run's config: what is found wrong before anything is touched, and that nothing is lost on the way through
JSON."""

import json
from dataclasses import replace

import pytest

from atlib.data.transforms import Augmentation
from atlib.plan import Plan
from atlib.run.config import RunConfig, read_config, write_config
from atlib.run.configure import config_diff, configure, data_name
from atlib.run.recipes import PUBLISHED
from atlib.train.recipe import Recipe
from atlib.vit import Architecture

GLYPHS = RunConfig("mine", "scratch", Architecture("glyphs"), "marked-glyphs", Recipe())


def asked(recipe, *changes, data="marked-glyphs", **options):
    """What `configure` takes."""
    changed = dict(each.split("=", 1) for each in changes)
    return {"recipe": recipe, "data": data, "changes": changed, **options}


@pytest.mark.parametrize(
    "config",
    [
        GLYPHS,
        RunConfig(
            "copy-vit-large",
            "copy",
            Architecture("vit_tiny_patch16_224", {"global_pool": "avg", "img_size": 64}),
            "imagenet-1k",
            Recipe(betas=(0.8, 0.9), clip=None, ema=0.99),
            teacher="/a/file.pth",
            data_path="/data",
            data_size=7,
            image_column="picture",
            streaming=True,
            augmentation=Augmentation(64, rand_augment="rand-m9-mstd0.5-inc1"),
            plan=Plan(layers={0: 1, 1: 0}, heads={0: range(2)}, unequal_prefix="drop"),
            drop_path=0.1,
            evaluate_every=3,
            on_corrupt="skip",
            workers=2,
            save_every=5,
            keep=3,
            seed=11,
        ),
        RunConfig(
            "distill",
            "distill",
            Architecture("glyphs"),
            "marked-glyphs",
            Recipe(),
            teacher="t",
            plan=Plan(how="distill", layers=range(3), heads=(0, 2)),
        ),
    ],
    ids=["small", "everything", "lists"],
)
def test_json_and_back(tmp_path, config):
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    assert json.loads((tmp_path / "config.json").read_text()) == config.describe()


def test_changes_reach_run_recipe_parts_and_model():
    config = configure(
        **asked(
            "built-in-distill",
            "lr=1e-3",
            "steps=7",
            "save_every=3",
            "plan.what=q",
            "model.depth=2",
            "plan.layers=[0]",
            "transfer_weight=2",
            teacher=__file__,
        )
    )
    assert (config.recipe.lr, config.recipe.steps, config.save_every, config.recipe.transfer_weight) == (
        1e-3,
        7,
        3,
        2.0,
    )
    assert config.plan == Plan("q", "distill", layers=(0,)) and config.model.overrides["depth"] == 2
    assert len(config.skeleton(8).blocks) == 2


def test_two_changes_that_are_right_only_together():
    config = configure(
        **asked(
            "mae-scratch-vit-base",
            "augmentation.image_size=64",
            "model=vit_tiny_patch16_224",
            data="imagenet-1k",
        )
    )
    assert config.skeleton(10).patch_embed.img_size == (64, 64) and config.skeleton(10).embed_dim == 192
    with pytest.raises(ValueError, match="images of .224, 224. pixels, the augmentation makes them of 64"):
        configure(
            **asked(
                "mae-scratch-vit-base", "augmentation.image_size=64", "model.img_size=224", data="imagenet-1k"
            )
        )


def test_changes_that_mend_the_published_run_only_together():
    """A ViT-L of 224 pixels cannot be trained on the built-in world; with another model it is another run,
    and the published one need not fit."""
    config = configure(
        **asked("copy-vit-large", "model=glyphs", "model.global_pool=token", "steps=3", teacher=__file__)
    )
    assert (
        config.skeleton(8).patch_embed.img_size == (32, 32)
        and config.recipe.steps == 3
        and config.plan.how == "copy"
    )
    with pytest.raises(
        ValueError, match="takes images of .224, 224. pixels, those of marked-glyphs have 32 x 32"
    ):
        configure(**asked("copy-vit-large", teacher=__file__))


def test_what_a_run_changed_against_its_published_recipe():
    def changed(*changes, recipe="distill-vit-large", data="imagenet-1k"):
        return config_diff(configure(**asked(recipe, *changes, data=data)), 10_240)

    assert (
        changed() == []
        and changed("workers=3", "drop_path=0.1") == []
        and changed("steps=5", recipe="mae", data="marked-glyphs") == []
    )
    assert changed("batch_size=256") == [
        "steps 8000 instead of 1000",
        "batch_size 256 instead of 2048",
        "lr 0.0001 instead of 0.0008",
    ]
    assert changed("batch_size=256", "lr=8e-4", "steps=1000") == ["batch_size 256 instead of 2048"]
    assert changed("steps=2000") == ["steps 2000 instead of 1000"], "the warm-up keeps its share"
    assert changed("betas=[0.9, 0.999]") == ["betas [0.9, 0.999] instead of [0.9, 0.95]"]


def test_a_published_recipe_is_what_is_run():
    published = PUBLISHED["distill-vit-large"]
    config = configure("distill-vit-large", "imagenet-1k")
    assert (
        config.recipe == published.recipe
        and config.plan == published.plan
        and config.augmentation == published.augmentation
    )
    resolved = config.on(1_281_167)
    assert resolved == replace(config, recipe=published.recipe.on(1_281_167)) == resolved.on(3)
    assert resolved.recipe.steps == 200 * 626, "626 steps of 2,048 images an epoch, the last one smaller"
    assert (config.method, config.teacher, config.drop_path, config.evaluation_split) == (
        "distill",
        "vit_large_patch16_224.mae",
        0.2,
        "validation",
    )
    assert config.architecture(1000).overrides == {
        **published.options,
        "drop_path_rate": 0.2,
        "num_classes": 1000,
        "img_size": 224,
    }


def test_changes_in_epochs_reach_the_steps():
    changes = ("epochs=50", "batch_size=1024", "warmup_epochs=5")
    recipe = configure(**asked("distill-vit-large", *changes, data="imagenet-1k")).on(10_240).recipe
    assert (
        recipe.steps == 50 * 10
        and recipe.lr == pytest.approx(1e-4 * 1024 / 256)
        and recipe.warmup == pytest.approx(0.1)
    )
    mae = configure(**asked("mae", "epochs=3", "base_lr=1e-3", "batch_size=64")).on(128).recipe
    assert (mae.steps, mae.lr, mae.warmup) == (6, 2.5e-4, 0.1), "also where the recipe is in steps"


@pytest.mark.parametrize(
    "given, says",
    [
        (asked("built-in-scrach"), "unknown recipe 'built-in-scrach'. Did you mean 'built-in-scratch'"),
        (asked("built-in-scratch", "stepz=3"), "unknown setting --stepz. Did you mean --steps"),
        (asked("built-in-scratch", "recipe.stepz=3"), "unknown setting --recipe.stepz"),
        (asked("built-in-scratch", "plans.what=q"), "unknown setting --plans.what. Did you mean --plan.what"),
        (asked("built-in-scratch", "plan.what=q"), "this run has no plan .method 'scratch'"),
        (asked("built-in-scratch", "epoch=3"), "unknown setting --epoch. Did you mean --epochs"),
        (asked("built-in-scratch", "published.epochs=3"), "unknown setting --published.epochs"),
        (asked("built-in-scratch", "epochs=3", "steps=9"), "steps and epochs exclude each other"),
        (asked("built-in-scratch", "epochs=3"), "warmup_epochs=12.5, epochs=3.0"),
        (asked("built-in-scratch", "steps=1.5"), "--steps 1.5: the value is int"),
        (asked("built-in-scratch", "steps=0"), "steps must be above 0"),
        (asked("built-in-scratch", "betas=[2,3]"), "betas=.2.0, 3.0.*: both must be at least 0, below 1"),
        (asked("built-in-scratch", "lr=Infinity"), "--lr Infinity: the value is float"),
        (
            asked("built-in-scratch", "optimizer=adahessian"),
            "optimizer='adahessian' needs second derivatives",
        ),
        (asked("built-in-scratch", "recipe_name=copy-vit-large"), "unknown setting --recipe_name"),
        (asked("built-in-scratch", "data=/tmp"), "unknown setting --data"),
        (asked("built-in-copy", "teacher=here", teacher=__file__), "unknown setting --teacher"),
        (asked("built-in-scratch", "seed=3"), "unknown setting --seed"),
        (asked("built-in-scratch", "tensorboard=true"), "unknown setting --tensorboard"),
        (asked("built-in-scratch", seed=2**32), "seed must be below 2..32 = 4294967296"),
        (asked("built-in-scratch", seed=10**23), "seed must be below 2..32"),
        (asked("built-in-scratch", "model.depth=0"), "the model 'glyphs' has no blocks"),
        (asked("built-in-scratch", "model.init_values=NaN"), "init_values': 'NaN'"),
        (
            asked("mae-scratch-vit-base", "augmentation.mean=[0, 0, Infinity]", data="imagenet-1k"),
            "--augmentation.mean .*Infinity.*: the value is tuple",
        ),
        (asked("mae", "mask_ratio=2"), "mask_ratio=2.0 leaves -16 of 16 patches visible"),
        (asked("mae", "mask_ratio=0.99"), "mask_ratio=0.99 leaves 0 of 16 patches visible"),
        (asked("mae", "decoder_width=10"), "decoder_width=10 makes no decoder .*a multiple of 4"),
        (asked("built-in-scratch", "save_every=0"), "save_every=0.: save_every must be at least 1"),
        (asked("built-in-scratch", "workers=-1"), "workers=-1.: workers must be at least 0"),
        (asked("built-in-scratch", "drop_path=1"), "drop_path must be at least 0 and below 1"),
        (asked("built-in-scratch", "on_corrupt=ignore"), "unknown on_corrupt 'ignore'"),
        (asked("built-in-scratch", "method=copying"), "unknown method 'copying'"),
        (asked("built-in-scratch", "method=copy"), "copy needs a teacher"),
        (asked("built-in-scratch", "model.deepth=3"), "cannot be built with .*deepth"),
        (
            asked("built-in-scratch", "model=vit_tiny_patch16_224"),
            "images of .224, 224. pixels, those of marked-glyphs have 32 x 32",
        ),
        (asked("built-in-scratch", "model.depth=-1"), "cannot be built with .*depth"),
        (
            asked("built-in-copy", "plan.layers=[[0,[1]]]", teacher=__file__),
            "--plan.layers .*: the value is Iterable",
        ),
        (
            asked("built-in-copy", "plan.layers=[[[0],1]]", teacher=__file__),
            "--plan.layers .*: the value is Iterable",
        ),
        (asked("built-in-copy"), "copy needs a teacher"),
        (
            asked("built-in-copy", teacher="vit_tinny_patch16_224"),
            "no ViT is called 'vit_tinny_patch16_224'. Close names: vit_tiny_patch16_224",
        ),
        (
            asked("built-in-copy", "plan.layers=[7]", teacher=__file__),
            "the plan transfers layer 7, but the depth is 4",
        ),
        (asked("built-in-copy", "plan.how=distill", teacher=__file__), "do not go together"),
        (asked("built-in-scratch", teacher=__file__), "scratch has no teacher"),
        (
            asked("built-in-scratch", data="marked-glyph"),
            "unknown data set 'marked-glyph'. Did you mean 'marked-glyphs'",
        ),
        (asked("retrieval", data="cifar10"), "retrieval is a task of the built-in world"),
    ],
)
def test_what_is_wrong_is_said_before_data_or_weights_are_touched(given, says, no_network):
    with pytest.raises(ValueError, match=says):
        configure(**given)


@pytest.mark.parametrize(
    "given, belongs_to",
    [
        (asked("built-in-distill", "mask_ratio=0.5", teacher=__file__), "masked auto-encoding"),
        (asked("built-in-scratch", "streaming=true"), "data that are read"),
        (asked("built-in-scratch", "data_path=/somewhere"), "data that are read"),
        (asked("built-in-copy", "transfer_weight=1", teacher=__file__), "Distill"),
        (asked("built-in-scratch", "transfer_weight=1"), "Distill"),
        (asked("built-in-scratch", "teacher_heads=2"), "a teacher"),
        (asked("mae", "evaluate_every=1"), "training with labels"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(given, belongs_to):
    with pytest.raises(
        ValueError, match=f"would change nothing: it belongs to {belongs_to}, not to a run of"
    ):
        configure(**given)


def test_settings_where_they_have_a_use():
    assert configure(**asked("mae", "mask_ratio=0.5", "decoder_width=32")).mask_ratio == 0.5
    assert (
        configure(
            **asked("built-in-distill", "transfer_weight=1", "evaluate_every=2", teacher=__file__)
        ).recipe.transfer_weight
        == 1
    )
    assert configure(
        **asked("distill-vit-large", "streaming=true", "on_corrupt=skip", data="imagenet-1k")
    ).streaming


def test_files_that_are_not_there():
    with pytest.raises(FileNotFoundError, match="the teacher nowhere.safetensors does not exist: .*pretrain"):
        configure(**asked("built-in-copy", teacher="nowhere.safetensors"))
    with pytest.raises(FileNotFoundError, match="nowhere/x.parquet does not exist"):
        configure(**asked("built-in-scratch", data="nowhere/x.parquet"))


def test_paths_are_kept_in_full_for_another_working_folder(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    (tmp_path / "teacher.pth").touch()
    given = configure(**asked("built-in-copy", teacher=__file__))
    monkeypatch.chdir(tmp_path)
    assert data_name("images") == str(tmp_path / "images") and data_name("owner/name") == "owner/name"
    assert given.teacher == __file__


def test_what_must_not_change_when_a_run_goes_on():
    same = [
        replace(GLYPHS, on_corrupt="skip"),
        replace(GLYPHS, workers=3),
        replace(GLYPHS, save_every=7),
        replace(GLYPHS, keep=9),
        replace(GLYPHS, tensorboard=True),
    ]
    other = [
        replace(GLYPHS, seed=1),
        replace(GLYPHS, recipe=Recipe(lr=1.0)),
        replace(GLYPHS, drop_path=0.1),
        replace(GLYPHS, data_size=5),
    ]
    assert all(each.fingerprint() == GLYPHS.fingerprint() for each in same)
    assert not any(each.fingerprint() == GLYPHS.fingerprint() for each in other)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"recipe_name": "x"}', '{"mode": 1}'])
def test_a_damaged_config_is_named_and_left(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(OSError, match="config.json does not describe a run"):
        read_config(tmp_path)
    assert (tmp_path / "config.json").read_text() == content


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run, config.json is missing: start one with"):
        read_config(tmp_path)
