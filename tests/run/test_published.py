"""Published recipes: the sources' own numbers, and what becomes of them in steps, groups and schedules,
against MAE's rules written out."""

import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import timm
import torch
from torch.optim.lr_scheduler import LambdaLR

from atlib import create_vit
from atlib.data.transforms import Augmentation
from atlib.lab.scales import scales
from atlib.run.configure import configure
from atlib.run.recipes import METHODS, PUBLISHED, Published, names, published
from atlib.train import make_optimizer, schedule
from atlib.train.recipe import Recipe
from atlib.vit import Architecture

IMAGENET = 1_281_167  # training images of ImageNet-1k
RECORDS = Path(__file__).resolve().parents[2] / "results" / "transfer"
COPY, DISTILL = PUBLISHED["copy-vit-large"], PUBLISHED["distill-vit-large"]


# --- what the sources print


def test_the_two_recipes_of_attention_transfer():
    """Issue 5's table, copied by hand: peak rates are 8 times the base, 626 steps an epoch."""
    shared = {
        "optimizer": "adamw",
        "batch_size": 2048,
        "label_smoothing": 0.1,
        "mixup": 0.8,
        "cutmix": 1.0,
        "ema": 0.9999,
        "clip": None,
        "repeats": 1,
        "binary": False,
    }
    of_copy = {
        "betas": (0.9, 0.999),
        "lr": 8e-3,
        "min_lr": 2e-3,
        "weight_decay": 0.05,
        "layer_decay": 0.75,
        "steps": 62_600,
    }
    of_distill = {
        "betas": (0.9, 0.95),
        "lr": 8e-4,
        "min_lr": 0.0,
        "weight_decay": 0.3,
        "layer_decay": None,
        "steps": 125_200,
        "transfer_weight": 3.0,
    }
    for found, expected in ((COPY.recipe.on(IMAGENET), of_copy), (DISTILL.recipe.on(IMAGENET), of_distill)):
        for name, value in (shared | expected).items():
            assert getattr(found, name) == pytest.approx(value), name
    assert round(COPY.recipe.on(IMAGENET).warmup * 62_600) == 5 * 626
    assert round(DISTILL.recipe.on(IMAGENET).warmup * 125_200) == 20 * 626
    assert (COPY.drop_path, DISTILL.drop_path) == (0, 0.2)
    for each in (COPY, DISTILL):
        assert each.augmentation == Augmentation(
            224, crop="random-resized", rand_augment="rand-m9-mstd0.5-inc1", random_erasing=0.25
        )
    assert COPY.plan.how == "copy" and COPY.plan.layers_of(24) == tuple(range(24))
    assert DISTILL.plan.how == "distill" and DISTILL.plan.layers_of(24) == tuple(range(18))
    partial = PUBLISHED["partial-copy-vit-large"]
    assert partial.recipe.betas == (0.9, 0.95) and partial.plan.layers_of(24) == tuple(range(21))
    assert replace(partial.recipe, betas=COPY.recipe.betas) == COPY.recipe
    own = ("name", "source", "recipe", "plan", "oddities")
    assert replace(partial, **{name: getattr(COPY, name) for name in own}) == COPY


@pytest.mark.parametrize(
    "name, epochs, peak, smallest, decay, layer_decay, drop_path, batch_size",
    [
        ("mae-fine-tune-vit-base", 100, 2e-3, 1e-6, 0.05, 0.65, 0.1, 1024),
        ("mae-fine-tune-vit-large", 50, 4e-3, 1e-6, 0.05, 0.75, 0.2, 1024),
        ("mae-fine-tune-vit-huge", 50, 4e-3, 1e-6, 0.05, 0.75, 0.3, 1024),
        ("mae-scratch-vit-base", 300, 1.6e-3, 0, 0.3, None, 0.1, 4096),
        ("mae-scratch-vit-large", 200, 1.6e-3, 0, 0.3, None, 0.2, 4096),
        ("mae-scratch-vit-huge", 200, 1.6e-3, 0, 0.3, None, 0.2, 4096),
        ("deit-small", 300, 1e-3, 1e-5, 0.05, None, 0.1, 1024),
        ("deit3-small", 800, 4e-3, 1e-5, 0.05, None, 0.05, 2048),
        ("deit3-base", 800, 3e-3, 1e-5, 0.05, None, 0.2, 2048),
        ("deit3-fine-tune-large", 20, 1e-5, 1e-5, 0.1, None, 0.45, 512),
    ],
)
def test_numbers_of_the_tables(name, epochs, peak, smallest, decay, layer_decay, drop_path, batch_size):
    found = PUBLISHED[name]
    recipe = found.recipe.on(IMAGENET)
    assert (found.recipe.epochs, found.drop_path, recipe.batch_size) == (epochs, drop_path, batch_size)
    assert (recipe.weight_decay, recipe.layer_decay) == (decay, layer_decay)
    assert recipe.lr == pytest.approx(peak) and recipe.min_lr == pytest.approx(smallest)
    assert recipe.steps == epochs * math.ceil(IMAGENET / batch_size)


def test_which_recipes_repeat_augmentation_use_lamb_and_train_classes_one_by_one():
    def named(**values):
        return {
            name
            for name, each in PUBLISHED.items()
            if all(getattr(each.recipe.on(IMAGENET), key) == value for key, value in values.items())
        }

    from_scratch = {f"deit3-{size}" for size in ("small", "base", "large", "huge")}
    assert named(repeats=3) == from_scratch | {"deit-tiny", "deit-small", "deit-base"}
    assert named(repeats=1) == set(PUBLISHED) - named(repeats=3)
    assert named(optimizer="lamb", binary=True, label_smoothing=0.0, clip=1.0) == from_scratch
    assert {name for name, each in PUBLISHED.items() if each.augmentation.three_augment} == from_scratch
    assert named(ema=0.9999) == {
        name for name in PUBLISHED if name.startswith(("copy", "distill", "partial", "mae-scratch"))
    }
    assert named(mixup=0.8, cutmix=1.0) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_recipe_names_its_source_model_and_teacher(name):
    each = PUBLISHED[name]
    assert each.name == name and ("arXiv" in each.source or "github.com" in each.source) and each.oddities
    assert timm.is_model(each.model) and (
        each.teacher is None or each.teacher in timm.list_pretrained(each.model + "*")
    )
    assert each.method in METHODS and (None if each.plan is None else each.plan.how) == (
        each.method if each.method in ("copy", "distill") else None
    )
    assert each.method != "scratch" or each.teacher is None
    assert each.augmentation.image_size == each.options.get("img_size", 224)
    with pytest.raises(FrozenInstanceError):
        each.drop_path = 1


@pytest.mark.parametrize("name", ["distill-vit-large", "mae-scratch-vit-base", "deit-tiny", "deit3-huge"])
def test_the_student_is_the_published_model(name):
    each = PUBLISHED[name]
    student = configure(name, "imagenet-1k").architecture(10)
    with torch.device("meta"):  # shapes without memory, and three blocks are enough
        vit = create_vit(student.name, **{**student.overrides, "depth": 3})
    width, patch = {"large": (1024, 16), "base": (768, 16), "tiny": (192, 16), "huge": (1280, 14)}[
        name.split("-")[-1]
    ]
    assert vit.embed_dim == width and vit.patch_embed.patch_size == (patch, patch) and vit.num_classes == 10
    assert [block.drop_path1.drop_prob if each.drop_path else 0 for block in vit.blocks[1:]] == pytest.approx(
        [each.drop_path / 2, each.drop_path]
    )
    size = each.augmentation.image_size
    assert vit(torch.empty(1, 3, size, size, device="meta")).shape == (1, 10)
    pooled = name.startswith(("distill", "mae"))
    assert vit.global_pool == ("avg" if pooled else "token")
    assert isinstance(vit.fc_norm, torch.nn.LayerNorm) == pooled
    if name.startswith("deit3"):
        assert hasattr(vit.blocks[0].ls1, "gamma") and vit.no_embed_class


# --- what the optimiser gets


def small(each: Published, depth=3):
    """A small ViT built as the recipe builds its own."""
    options = {name: value for name, value in each.options.items() if name != "img_size"}
    return create_vit("glyphs", depth=depth, embed_dim=16, num_heads=2, **options)


def factor_by_mae(name: str, depth: int, decay: float) -> float:
    """Layer-wise decay as MAE's published code numbers layers: embeddings 0, block i is i + 1, norm before
    the head and head depth + 1."""
    if name.startswith(("cls_token", "pos_embed", "patch_embed")):
        return decay ** (depth + 1)
    return decay ** (depth - int(name.split(".")[1])) if name.startswith("blocks") else 1.0


@pytest.mark.parametrize(
    "name",
    [
        "copy-vit-large",
        "distill-vit-large",
        "mae-fine-tune-vit-base",
        "mae-scratch-vit-huge",
        "deit-tiny",
        "deit3-small",
    ],
)
def test_parameter_groups(name):
    each = PUBLISHED[name]
    recipe, model = each.recipe.on(IMAGENET), small(each)
    optimizer, found = make_optimizer(model, recipe), {}
    assert type(optimizer).__name__.lower() == recipe.optimizer
    assert all(tuple(group["betas"]) == each.recipe.betas for group in optimizer.param_groups)
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert of[id(parameter)] not in found, "in two groups"
            found[of[id(parameter)]] = group["lr"], group["weight_decay"]
    assert set(found) == set(of.values())
    for parameter_name, _ in model.named_parameters():
        kind = parameter_name.rsplit(".", 1)[-1]
        free = kind in ("bias", "gamma", "cls_token", "pos_embed") or "norm" in parameter_name
        factor = (
            1.0
            if each.recipe.layer_decay is None
            else factor_by_mae(parameter_name, 3, each.recipe.layer_decay)
        )
        assert found[parameter_name] == (
            pytest.approx(recipe.lr * factor),
            0.0 if free else each.recipe.weight_decay,
        ), parameter_name


def test_lamb_in_timm_clips_at_the_norm_that_the_recipe_names():
    optimizer = make_optimizer(small(PUBLISHED["deit3-small"]), PUBLISHED["deit3-small"].recipe.on(IMAGENET))
    assert optimizer.defaults["max_grad_norm"] == PUBLISHED["deit3-small"].recipe.clip


# --- what the schedule does


def rate_by_mae(epoch: float, each: Recipe) -> float:
    """The rate of a group without layer decay at a fractional epoch, as MAE's published code has it."""
    peak = each.base_lr * each.batch_size / 256
    if epoch < each.warmup_epochs:
        return peak * epoch / each.warmup_epochs
    done = (epoch - each.warmup_epochs) / (each.epochs - each.warmup_epochs)
    return each.min_lr + (peak - each.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


@pytest.mark.parametrize(
    "name", ["copy-vit-large", "distill-vit-large", "mae-fine-tune-vit-base", "deit3-fine-tune-base"]
)
def test_the_cosine_per_step_is_maes(name):
    each = PUBLISHED[name].recipe
    recipe, per_epoch = each.on(IMAGENET), math.ceil(IMAGENET / each.batch_size)
    warm = each.warmup_epochs * per_epoch
    for step in [*range(0, recipe.steps, 997), warm - 1, warm, recipe.steps]:
        # In the warm-up ours is one step ahead, so that the first step is not spent at rate 0.
        expected = rate_by_mae(
            (step + 1) / per_epoch if step < warm - 1 else max(step, warm) / per_epoch, each
        )
        assert schedule(step, recipe) * recipe.lr == pytest.approx(expected, rel=1e-9, abs=1e-12), step


def test_a_smallest_rate_above_the_base_rate_is_a_quarter_of_the_peak_in_every_group():
    """Copy's oddity, through the optimiser: the smallest rate is scaled by layer like the peak."""
    each = replace(COPY.recipe, epochs=10)
    recipe = each.on(4 * each.batch_size)
    model = small(COPY)
    optimizer = make_optimizer(model, recipe)
    steps = LambdaLR(optimizer, lambda step: schedule(step, recipe))
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    assert recipe.steps == 40 and recipe.min_lr > each.base_lr
    for step in range(40):
        if step >= 20:  # five epochs of four steps are the warm-up
            for group in optimizer.param_groups:
                factor = factor_by_mae(of[id(group["params"][0])], 3, 0.75)
                assert group["lr"] == pytest.approx(rate_by_mae(step / 4, each) * factor)
        optimizer.step()
        steps.step()
    assert max(group["lr"] for group in optimizer.param_groups) == pytest.approx(8e-3 / 4)


def test_at_a_small_batch_that_smallest_rate_makes_the_rate_rise():
    recipe = replace(COPY.recipe, batch_size=256).on(IMAGENET)
    rates = [schedule(step, recipe) * recipe.lr for step in range(0, recipe.steps + 1, recipe.steps // 100)]
    assert rates == sorted(rates)
    assert (recipe.lr, rates[-1]) == pytest.approx((1e-3, 2e-3), rel=1e-3)


def test_a_fine_tuning_of_deit3_does_not_anneal():
    recipe = PUBLISHED["deit3-fine-tune-base"].recipe.on(IMAGENET)
    assert {round(schedule(step, recipe), 9) for step in range(5 * 2503, recipe.steps, 500)} == {1.0}


# --- our own


def recorded(method):
    """What the committed records of Find hold of a method: its trials in order, and a run."""
    lines = (RECORDS / "find.jsonl").read_text().splitlines()
    records = [each for each in map(json.loads, lines) if each["method"] == method]
    trials = sorted((each for each in records if each["kind"] == "trial"), key=lambda each: each["trial"])
    return *trials, next(each for each in records if each["kind"] == "run")


@pytest.mark.parametrize("method", METHODS)
def test_ours_are_what_the_tuning_chose_and_what_was_run(method):
    each = published(f"find-{method}")
    *trials, run = recorded(method)
    best = max(trials, key=lambda trial: trial["results"]["validation_accuracy"])
    assert each.source.endswith(f"results/transfer/find.jsonl, {method}, trial {best['trial']}")
    found = json.loads(json.dumps(each.recipe.on(run["config"]["labels"]).describe()))
    # What these records are too old to say is off.
    off = Recipe().describe()
    assert found == json.loads(json.dumps(off)) | best["config"]["recipe"] | run["config"]["recipe"]
    assert {"name": each.model, "overrides": each.options} == run["config"][
        "student"
    ] and each.method == method


@pytest.mark.parametrize("method", METHODS)
def test_ours_that_was_fixed_in_advance(method):
    each, scale = published(f"cifar10-cpu-{method}"), scales()["cifar10-cpu"]
    assert each.recipe.on(scale.labels) == scale.training
    assert Architecture(each.model, each.options) == scale.student
    assert each.augmentation == Augmentation(
        32, crop="padded", padding=4, crop_pct=1.0, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
    )


def test_names_are_those_of_all_recipes():
    assert all(published(name).name == name for name in names()) and set(names()) > set(PUBLISHED)


def test_an_unknown_name_names_the_close_ones():
    with pytest.raises(ValueError, match="'copy-vit-lage'.*'copy-vit-large'"):
        published("copy-vit-lage")
