"""A dry run: its figures against counts made by hand, and its time against a run that is timed."""

from dataclasses import replace

import pytest

from atfamily.measures.accounting import Memory
from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.vit import Architecture
from atrun import __main__ as command
from atrun import estimate as measure_steps
from atrun.build import published_size
from atrun.config import RunConfig
from atrun.data.transforms import Augmentation
from atrun.estimate import as_text, estimate, flops_of, memory_of, moments, parameter_groups, time_steps

GLYPHS = RunConfig(
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
    assert plain.factors == pytest.approx((0.5 ** (DEPTH + 1), 1.0))


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
    copy = replace(GLYPHS, method="copy", plan=Plan(), teacher="glyphs")
    teacher = 4 * (numbers - 65 * 8)  # without its class head
    assert memory_of(copy, 8).teacher == teacher
    in_half = memory_of(replace(copy, recipe=replace(copy.recipe, mixed_precision="bf16")), 8)
    biases = WIDTH + DEPTH * (4 * WIDTH + 5 * WIDTH)
    layers = PATCH * WIDTH + DEPTH * 12 * WIDTH * WIDTH + biases
    assert in_half.teacher == teacher + 2 * layers, "linear layers and the patches are kept in half precision"


def test_processes_share_a_step(monkeypatch):
    """33 images on 4 devices: 9 on one. What is measured is a step of these."""
    asked = []
    monkeypatch.setattr(measure_steps, "time_steps", lambda share, *rest: asked.append(share) or (3, 0.5))
    config = replace(GLYPHS, recipe=replace(GLYPHS.recipe, batch_size=33, accumulate=2))
    found = estimate(config, 330, 8, processes=4)
    assert found.images == asked[0].recipe.batch_size == 9 and found.steps_per_epoch == 10
    assert found.memory == memory_of(asked[0], 8) and found.seconds == 0.5 * 9 / 3
    text = as_text(found)
    assert "33 images, 9 on each of 4 devices, computed in 2 parts" in text and "for 5 images at once" in text
    hours = 100 * found.seconds / 3600
    assert f"{hours:.3g} hours in all on 4 devices such as this, {4 * hours:.3g} hours of a device" in text
    assert f"{33 / found.seconds:.3g} images/s" in text


@pytest.mark.parametrize(
    "name, numbers", [("adamw", 2), ("lamb", 2), ("sgd", 1), ("lion", 1), ("rmsprop", 2), ("mars", 3)]
)
def test_an_optimisers_memory_is_its_own(name, numbers):
    found = memory_of(replace(GLYPHS, recipe=replace(GLYPHS.recipe, optimizer=name)), 8)
    assert found.optimizer == numbers * found.weights


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
    eva = replace(GLYPHS, model=Architecture("eva02_tiny_patch14_224"), data="imagenet-1k")
    assert flops_of(eva, eva.skeleton(8)) is None


def test_what_takes_too_long_or_too_much_memory_is_not_measured(monkeypatch):
    monkeypatch.setattr(measure_steps, "assembled", lambda *given: pytest.fail("a model was built"))
    memory = Memory(601, 0, 0, 32, 0)
    assert time_steps(GLYPHS, 8, 10**15, memory, limit=1.0) is None
    monkeypatch.setattr(measure_steps, "free_memory", lambda: 1000.0)
    assert time_steps(GLYPHS, 8, 1, memory, limit=1.0) is None, "six tenths of what is free"


@pytest.mark.parametrize("seconds, expected", [(0.001, [1, 32]), (0.1, [1, 10]), (0.2, [1, 5]), (1.0, [1])])
def test_as_many_images_are_timed_as_the_limit_allows(monkeypatch, seconds, expected):
    """Four steps of so many images, in four seconds."""
    asked = []
    monkeypatch.setattr(measure_steps, "_step", lambda *given: asked.append(given[3]) or seconds * given[3])
    timed = time_steps(GLYPHS, 8, None, Memory(0, 0, 0, 32, 0), limit=4.0)
    assert asked == expected and timed == (asked[-1], seconds * asked[-1])


def test_the_papers_recipe_without_data_weights_or_a_model_of_that_size(capsys, monkeypatch, no_network):
    # ViT-L is then not built: one image takes longer than the limit allows; counting its bytes takes 20 s
    monkeypatch.setattr(measure_steps, "speed", lambda: 1e11)
    monkeypatch.setattr(measure_steps, "memory_of", lambda *given: Memory(0, 0, 0, 0, 0))
    assert command.main(["train", "--recipe", "distill-vit-large", "--data", "imagenet-1k", "--dry-run"]) == 0
    text = capsys.readouterr().out
    for part in (
        "1,281,167 training images",
        "304,326,632 parameters, 24 layers of width 1024",
        "distill map of 18 layers, 0 to 17",
        "125,200 steps of 2,048 images: 626 an epoch, 200 epochs",
        "2,735 GPU-hours for 100 epochs of its Copy and of its Distill, so 5,470 for the 200",
        "lr 0.0008",
    ):
        assert part in text


def test_a_copy_of_a_published_set_is_counted():
    named = replace(GLYPHS, data="cifar10", augmentation=Augmentation(32))
    assert published_size(named) == (45_000, 10) and published_size(replace(named, data_size=20)) == (20, 10)
    assert published_size(replace(named, data_path="/somewhere")) is None


def test_a_run_on_the_cpu_is_not_said_to_be_on_the_gpu(monkeypatch):
    """`accelerate launch --cpu` on a machine with a GPU."""
    found = measure_steps.Estimate(
        GLYPHS, 320, GLYPHS.skeleton(8), [], {}, None, memory_of(GLYPHS, 8), seconds=1.0, timed=32
    )
    for name, value in {"is_available": True, "get_device_name": "NVIDIA X", "mem_get_info": (1, 1)}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
    assert measure_steps.free_memory() == 1
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert measure_steps.free_memory() > 1
    assert "NVIDIA" not in "".join(measure_steps._time_and_cost(found)["time"])
