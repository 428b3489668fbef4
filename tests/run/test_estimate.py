"""A dry run: its figures against counts made by hand, and its time against a run that is timed."""

from dataclasses import replace

import pytest
import torch

from atlib.loading import ShardSpec
from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun import estimate as dry_run
from atrun import estimate as measure_steps
from atrun.config import RunConfig
from atrun.configure import configure
from atrun.estimate import (
    RandomImages,
    Timing,
    estimate,
    flops_of,
    memory_of,
    moments,
    parameter_groups,
    state_per_weight,
    time_steps,
)
from atrun.estimate_text import as_text

GLYPHS = RunConfig.of(
    recipe_name="mine",
    method="scratch",
    model=Architecture("glyphs"),
    data="atbook.worlds:marked_glyphs",
    recipe=Recipe(steps=100, batch_size=32, warmup=0.1, lr=1e-2, min_lr=1e-3, weight_decay=0.3),
)
PATCH, WIDTH, CLASSES, TOKENS, DEPTH = 8 * 8 * 3, 64, 8, 17, 4  # of the "glyphs" ViT


def test_parameter_groups_are_those_that_decay_and_those_that_do_not():
    block = 4 * WIDTH * WIDTH + 2 * 4 * WIDTH * WIDTH
    matrices = PATCH * WIDTH + DEPTH * block + WIDTH * CLASSES
    in_block = 4 * WIDTH + 4 * WIDTH + WIDTH + 4 * WIDTH  # biases of q, k, v, output; of the MLP; two norms
    # patches, blocks, last norm, head, token, positions
    rest = WIDTH + DEPTH * in_block + 2 * WIDTH + CLASSES + WIDTH + TOKENS * WIDTH
    vit = GLYPHS.skeleton(8)
    decayed, plain = parameter_groups(vit, GLYPHS)
    assert (decayed.weight_decay, decayed.numbers, decayed.tensors) == (0.3, matrices, 1 + DEPTH * 4 + 1)
    assert (plain.weight_decay, plain.numbers, plain.tensors) == (0.0, rest, 1 + DEPTH * 8 + 2 + 1 + 2)
    assert decayed.factors == plain.factors == (1.0, 1.0)
    config = replace(GLYPHS, recipe=replace(GLYPHS.recipe, layer_decay=0.5))
    decayed, plain = parameter_groups(vit, config)
    assert plain.factors == pytest.approx((0.5 ** (DEPTH + 1), 1.0)), (
        "the embedding is depth + 1 layers below the head"
    )


def test_moments_of_the_schedule():
    found = moments(GLYPHS, parameter_groups(GLYPHS.skeleton(8), GLYPHS))
    assert {name: step for name, (step, _, _) in found.items()} == {
        "first step": 0,
        "end of warm-up": 9,
        "middle": 50,
        "last step": 99,
    }
    assert found["first step"][1:] == pytest.approx((1e-3, 1e-3))
    assert found["end of warm-up"][2] == pytest.approx(1e-2)
    assert 1e-3 < found["last step"][2] < 1.01e-3


def test_a_minimum_above_the_peak_is_said():
    config = replace(GLYPHS, recipe=replace(GLYPHS.recipe, lr=1e-3, min_lr=2e-3))
    skeleton = config.skeleton(8)
    groups = parameter_groups(skeleton, config)
    found = dry_run.Estimate(
        config, 320, skeleton, groups, moments(config, groups), None, memory_of(config, 8), None, None
    )
    text = as_text(found, ("An oddity.",))
    assert "min_lr 0.002 is above lr 0.001" in text
    assert "not estimated: no step fits" in text and "FLOPs are not counted" in text
    assert "100 steps of 32 images: 10 an epoch, 10 epochs" in text
    assert "\noddities of the published recipe\n    An oddity.\n" in text and "changed against" not in text
    assert "\nchanged against the published recipe\n    lr 1 instead of 2\nmemory of a step\n" in as_text(
        found, config_diff=["lr 1 instead of 2"]
    )


def test_memory_grows_with_the_part_of_the_batch_and_holds_teacher_and_average():
    numbers = sum(each.numel() for each in GLYPHS.skeleton(8).parameters())
    whole = memory_of(GLYPHS, 8)
    found = whole.weights, whole.gradients, whole.optimizer, whole.teacher
    assert found == (4 * numbers, 4 * numbers, 8 * numbers, 0)
    half, double, averaged = (
        memory_of(replace(GLYPHS, recipe=replace(GLYPHS.recipe, **change)), 8)
        for change in ({"accumulate": 2}, {"batch_size": 64}, {"ema": 0.9})
    )
    assert double.saved - whole.saved == 2 * (whole.saved - half.saved) > 0
    assert averaged.weights == 8 * numbers
    copied = memory_of(replace(GLYPHS, method="copy", plan=Plan(), teacher="glyphs"), 8)
    assert copied.teacher == 4 * (numbers - 65 * 8), "the teacher is without its class head"


@pytest.mark.parametrize(
    "name, numbers", [("adamw", 2), ("lamb", 2), ("sgd", 1), ("lion", 1), ("rmsprop", 2), ("mars", 3)]
)
def test_an_optimisers_memory_is_its_own(name, numbers):
    found = memory_of(replace(GLYPHS, recipe=replace(GLYPHS.recipe, optimizer=name)), 8)
    assert found.optimizer == numbers * found.weights


def test_a_factored_state_is_small():
    assert 0 < state_per_weight(replace(GLYPHS.recipe, optimizer="adafactorbv")) < 1


def test_flops_are_counted_for_what_is_transferred():
    skeleton = GLYPHS.skeleton(8)
    d = WIDTH
    mixing, projection = 2 * TOKENS * TOKENS * d, 2 * TOKENS * d * d
    block = 4 * projection + 2 * mixing + 2 * (2 * TOKENS * d * 4 * d)
    embed, head = 2 * 16 * PATCH * d, 2 * d * CLASSES
    scratch = 2 * embed + 3 * (DEPTH * block + head)
    assert flops_of(GLYPHS, skeleton) == scratch
    distilled = replace(GLYPHS, method="distill", plan=Plan(how="distill", layers=range(2)), teacher="glyphs")
    assert flops_of(distilled, skeleton) == scratch + embed + block + 2 * projection + mixing
    assert flops_of(replace(distilled, plan=Plan(what="q", how="distill")), skeleton) is None
    eva = RunConfig.of(
        recipe_name="mine",
        method="scratch",
        model=Architecture("eva02_tiny_patch14_224"),
        data="imagenet-1k",
        recipe=Recipe(),
    )
    assert flops_of(eva, eva.skeleton(8)) is None


def test_a_line_through_two_batch_sizes():
    timing = Timing((10, 20), (3.0, 5.0), "here")  # 1 s, and 0.2 s an image
    assert timing.seconds(100) == pytest.approx(21.0) and not timing.whole
    assert Timing((8, 8), (2.0, 2.0), "here").seconds(8) == 2.0
    assert Timing((10, 20), (5.0, 5.0), "here").seconds(200) > 5.0, "noise must not make images free"


def test_random_images_note_when_each_step_is_asked_for(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(measure_steps.time, "perf_counter", lambda: float(next(now)))
    images = RandomImages((3, 32, 32), lambda count: torch.zeros(count), 4, 3)
    batches = list(images.epoch(ShardSpec(0, 0, 4)))
    assert len(images) == 12 and images.times == [0.0, 1.0, 2.0, 3.0]
    assert [batch.images.shape for batch in batches] == [(4, 3, 32, 32)] * 3


def test_what_takes_too_long_or_too_much_memory_is_not_measured(monkeypatch):
    def never():
        raise AssertionError("a model was built")

    assert time_steps(GLYPHS, never, 8, 10**15, 0, 1, limit=1.0) is None
    monkeypatch.setattr(measure_steps, "free_memory", lambda: 1000.0)
    assert time_steps(GLYPHS, never, 8, 1, 601, 1, limit=1.0) is None, "six tenths of what is free"


def test_a_short_limit_measures_two_smaller_batches(monkeypatch):
    asked = []
    monkeypatch.setattr(
        measure_steps, "_step", lambda *given: asked.append(given[3]) or 0.1 + 0.01 * given[3]
    )
    monkeypatch.setattr(measure_steps, "speed", lambda: 1e9)
    flops = 10**6
    limit = 16 * 2 * measure_steps.STEPS * flops / (measure_steps.EFFICIENCY * 1e9) * 1.01
    timing = time_steps(GLYPHS, lambda: None, 8, flops, 0, 1, limit=limit)
    assert asked == [8, 16] and timing.batches == (8, 16)
    assert timing.seconds(32) == pytest.approx(0.1 + 0.01 * 32)


def test_without_a_count_of_flops_two_images_are_tried_first(monkeypatch):
    asked = []
    monkeypatch.setattr(measure_steps, "_step", lambda *given: asked.append(given[3]) or 0.1 * given[3])
    timing = time_steps(GLYPHS, lambda: None, 8, None, 0, 1, limit=measure_steps.STEPS * 0.2 * 12.5)
    assert asked == [2, 6, 12] and timing.seconds(32) == pytest.approx(3.2)


def test_a_small_run_is_timed_at_its_own_size():
    """How near the estimate comes to a real epoch is measured in benchmarks/dry_run.py: a test cannot rely on
    the machine's speed."""
    config = configure("find-distill", "atbook.worlds:marked_glyphs", __file__, {"batch_size": "32"})
    found = estimate(config, 256, 8)
    assert found.timing.whole and found.timing.batches == (32, 32) and found.steps_per_epoch == 8
    assert found.seconds == found.timing.measured[1] > 0


def test_the_papers_recipe_without_data_weights_or_a_model_of_that_size(capsys, monkeypatch, no_network):
    # ViT-L is then not built: one image takes longer than the limit allows
    monkeypatch.setattr(measure_steps, "speed", lambda: 1e11)
    assert command.main(["train", "--recipe", "distill-vit-large", "--data", "imagenet-1k", "--dry-run"]) == 0
    text = capsys.readouterr().out
    for part in (
        "1,281,167 training images",
        "304,326,632 parameters, 24 layers of width 1024",
        "197 tokens (14 x 14 patches and 1 more), 16 heads of width 64",
        "distill map of 18 layers, 0 to 17",
        "125,200 steps of 2,048 images: 626 an epoch, 200 epochs",
        "NOT measured",
        "2,735 GPU-hours for 100 epochs of ViT-L on ImageNet-1k, so 5,470 for the 200 epochs of this run",
        "lr 0.0008",
    ):
        assert part in text
