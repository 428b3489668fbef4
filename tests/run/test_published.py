"""Published recipes: the sources' numbers, and their steps, groups and schedules by MAE's rules."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch

from atbook.lab.scales import scales
from atfamily.detection.detector import mask_rcnn
from atlib import AttentionTransfer, Plan, create_vit
from atlib.recipe import Recipe
from atlib.train import make_optimizer, schedule
from atlib.vit import Architecture
from atrun.configure import configure
from atrun.data.transforms import Augmentation
from atrun.recipes import FOR_PYTHON, PRETRAINING, names, published

IMAGENET = 1_281_167  # training images of ImageNet-1k
METHODS = ("scratch", "fine-tune", "copy", "distill")
RECORDS = Path(__file__).resolve().parents[2] / "results" / "transfer"


# --- what the sources print


@pytest.mark.parametrize(
    "name, parts", [("mae-pretrain-vit-base", (49, 512, 8, 16)), ("mae-lite-pretrain", (49, 96, 1, 3))]
)
def test_the_decoder_is_the_published_one(name, parts):
    """Visible patches, width, blocks and heads: models_mae.py of both repositories."""
    config = configure(name, "imagenet-1k", changes={"model.depth": "1"})
    with torch.device("meta"):
        model = config.pretext(config.skeleton(1000))
    blocks = model.decoder[: parts[2]]
    assert (model.visible, model.mask_token.shape[-1], len(blocks), blocks[0].attn.num_heads) == parts
    assert len(model.decoder) == parts[2] + 2, "blocks, a norm and a layer to pixels"
    heads = {"base": 12, "large": 16, "pretrain": 12}[name.split("-")[-1]]
    assert model.vit.blocks[0].attn.num_heads == heads


@pytest.mark.parametrize(
    "size, millions",
    [
        ("xxs24", 12.0),
        ("xs36", 38.6),
        ("m48", 356.0),  # arXiv 2103.17239; table 3.15 of the thesis ends with M-36
    ],
)
def test_a_cait_has_as_many_weights_as_its_table_says(size, millions):
    model = configure(f"cait-{size}", "imagenet-1k").skeleton(1000)
    weights = sum(weight.numel() for weight in model.parameters())
    assert weights / 1e6 == pytest.approx(millions, abs=0.06)


def test_every_recipe_is_whole():
    """Its model and its teacher are timm's, and each name of a note was found."""
    for name in (*names(), *FOR_PYTHON):
        recipe = published(name)
        assert timm.is_model(recipe.model) or recipe.model == "glyphs" or name in FOR_PYTHON, name
        assert recipe.teacher is None or recipe.teacher in timm.list_pretrained(), name
        assert (recipe.plan is not None) == recipe.method.transfers, name
        assert all(" " in one for one in recipe.oddities), name
        assert recipe.method.pretrains == (name in PRETRAINING) == bool(recipe.pretext), name
    with pytest.raises(ValueError, match="copy-vit-large"):
        published("copy-vit-lage")
    with pytest.raises(ValueError, match="Python"):
        configure(FOR_PYTHON[0], "imagenet-1k")


# --- what the optimiser gets


def factor_by_mae(name: str, depth: int, decay: float) -> float:
    """As MAE's code numbers layers: embeddings 0, block i is i + 1, last norm and head depth + 1."""
    if name.startswith(("cls_token", "pos_embed", "patch_embed")):
        return decay ** (depth + 1)
    return decay ** (depth - int(name.split(".")[1])) if name.startswith("blocks") else 1.0


@pytest.mark.parametrize("paired", [False, True])
def test_parameter_groups_of_a_detector(paired):
    """The ViT's layers as a classifier's, all on it at the whole rate, as get_vit_lr_decay_rate of ViTDet's
    code has it; there the pyramid's and the heads' weights are decayed, norms and positions not."""
    each = published("vitdet-fine-tune-vit-base")
    recipe, vit = each.recipe.on(118_287), create_vit("glyphs", depth=3, num_classes=0)
    if paired:
        vit = AttentionTransfer(create_vit("glyphs", depth=3, num_classes=0), vit, Plan(how="distill"))
    model, found = mask_rcnn(vit, 5), {}
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in make_optimizer(model, recipe).param_groups:
        for parameter in group["params"]:
            found[of[id(parameter)]] = group["lr"], group["weight_decay"]
    assert set(found) == set(of.values())
    prefix = "backbone.vit.student." if paired else "backbone.vit."
    for name, parameter in model.named_parameters():
        own = name.removeprefix(prefix)
        factor = factor_by_mae(own, 3, 0.7)
        if own.startswith("norm."):  # timm counts it to the last block
            factor = 0.7
        free = parameter.ndim == 1 or own in ("cls_token", "pos_embed")
        assert found[name] == (pytest.approx(1e-4 * factor), 0.0 if free else 0.1), name


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
    each = published(name).recipe
    recipe, per_epoch = each.on(IMAGENET), math.ceil(IMAGENET / each.batch_size)
    warm = each.warmup_epochs * per_epoch
    for step in [*range(0, recipe.steps, 997), warm - 1, warm, recipe.steps]:
        # In the warm-up ours is one step ahead, so that the first step is not spent at rate 0.
        at = step + 1 if step < warm - 1 else max(step, warm)
        expected = rate_by_mae(at / per_epoch, each)
        assert schedule(step, recipe) * recipe.lr == pytest.approx(expected, rel=1e-9, abs=1e-12), step


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("vitdet")])
def test_the_steps_of_vitdets_rate(name):
    """mask_rcnn_vitdet_b_100ep.py: 184,375 steps of 64, tenths from 163,889 and 177,546 on, warm-up 250."""
    each = published(name).recipe
    recipe = each.on(118_287)
    assert recipe.lr == pytest.approx(1e-4) and recipe.batch_size == 64 and recipe.steps == 100 * 1849
    assert round(recipe.warmup * recipe.steps) == 250
    as_published = replace(recipe, steps=184_375, warmup=250 / 184_375)
    for step, factor in [(249, 1), (250, 1), (163_888, 1), (163_889, 0.1), (177_545, 0.1), (177_546, 0.01)]:
        assert schedule(step, as_published) == pytest.approx(factor), step
    assert schedule(99, as_published) == pytest.approx(0.4) and schedule(184_374, as_published) < 0.011


# --- our own


def recorded(method, scale="find"):
    """What the committed records of a scale hold of a method: its trials in order, and a run."""
    lines = (RECORDS / f"{scale}.jsonl").read_text().splitlines()
    records = [each for each in map(json.loads, lines) if each["method"] == method]
    trials = sorted((each for each in records if each["kind"] == "trial"), key=lambda each: each["trial"])
    return *trials, next(each for each in records if each["kind"] == "run")


@pytest.mark.parametrize("method", METHODS)
def test_ours_are_what_the_tuning_chose_and_what_was_run(method):
    each = published(f"find-{method}")
    *trials, run = recorded(method)
    best = max(trials, key=lambda trial: trial["results"]["validation_accuracy"])
    assert each.source.endswith("results/transfer/find.jsonl")
    found = json.loads(json.dumps(each.recipe.on(run["config"]["labels"]).describe()))
    # What these records are too old to say is off.
    off = Recipe().describe()
    assert found == json.loads(json.dumps(off)) | best["config"]["recipe"] | run["config"]["recipe"]
    assert {"name": each.model, "overrides": each.options} == run["config"]["student"]
    assert each.method == method


@pytest.mark.parametrize("method", METHODS)
def test_ours_of_photographs_is_what_was_run(method):
    each, scale = published(f"cifar10-cpu-{method}"), scales()["cifar10-cpu"]
    assert each.source.endswith("results/transfer/cifar10-cpu.jsonl")
    run = recorded(method, "cifar10-cpu")[-1]
    found = json.loads(json.dumps(each.recipe.on(scale.labels).describe()))
    assert found == json.loads(json.dumps(Recipe().describe())) | run["config"]["recipe"]
    assert Architecture(each.model, each.options) == scale.student
    assert each.augmentation == Augmentation(
        32, crop="padded", padding=4, crop_pct=1.0, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)
    )
