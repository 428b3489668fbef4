"""The training loop: AdamW, schedule and clipping by hand, the same run twice, and how it fails."""

import math
import pickle
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from torch import nn

from atlib import AttentionTransfer, Plan
from atlib.attention_transfer import Transferred
from atlib.data import UNLABELLED, Images
from atlib.evaluate import evaluate
from atlib.objectives import task_loss
from atlib.processes import start_processes
from atlib.recipe import Recipe
from atlib.train import SKIPPED_STEPS, NonFiniteLoss, Preempted, all_learn, schedule, student_loss, train
from atrun.checkpoint_manager import CheckpointManager
from tests.helpers import random_images, same, state_of, tiny

SHORT = Recipe(steps=7, batch_size=24)  # of 64 images three steps a pass


def trained(data, recipe=SHORT, model=None, **options):
    model = tiny() if model is None else model
    history = train(model, data, recipe, progress=None, **options)
    return state_of(model), history


# --- schedule and optimiser


class Line(nn.Module):
    """One weight matrix and one bias: small enough to do AdamW by hand."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, images):
        return self.layer(images.double().mean((2, 3)))


def squared(model, images, targets, recipe):
    return (model(images) - 5).square().mean()


def test_five_steps_by_hand():
    """Gradient, clipping to a total norm, AdamW with decay of the matrix alone, warm-up and cosine."""
    data = Images(torch.randint(0, 255, (4, 3, 2, 2), dtype=torch.uint8), torch.zeros(4))
    recipe = Recipe(
        steps=5, batch_size=4, lr=0.1, min_lr=0.01, warmup=0.4, weight_decay=0.2, betas=(0.8, 0.9), clip=0.5
    )
    model = Line()
    W, b = (p.detach().clone() for p in model.layer.parameters())
    x = (data.pixels.double() / 255 - 0.5).div(0.25).mean((2, 3))
    m, v, losses = [torch.zeros_like(W), torch.zeros_like(b)], [torch.zeros_like(W), torch.zeros_like(b)], []
    for step in range(5):
        error = x @ W.T + b - 5
        losses.append(error.square().mean().item())
        gradients = [2 * error.T @ x / error.numel(), 2 * error.sum(0) / error.numel()]
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        assert norm > 0.5, "clipping must have something to do"
        lr = 0.1 * ((step + 1) / 2 if step < 2 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / 3)))
        for index, (value, decay) in enumerate(((W, 0.2), (b, 0.0))):
            g = gradients[index] * 0.5 / norm
            m[index] = 0.8 * m[index] + 0.2 * g
            v[index] = 0.9 * v[index] + 0.1 * g**2
            value -= lr * decay * value
            mean, square = m[index] / (1 - 0.8 ** (step + 1)), v[index] / (1 - 0.9 ** (step + 1))
            value -= lr * mean / (square.sqrt() + 1e-8)
    history = train(model, data, recipe, loss=squared, progress=None)
    # float32 images make the inputs exact only to 1e-7.
    torch.testing.assert_close(model.layer.weight.detach(), W, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.layer.bias.detach(), b, rtol=1e-5, atol=1e-6)
    assert [entry["loss"] for entry in history] == pytest.approx(losses, rel=1e-5)


# --- the same run


@pytest.fixture
def moving(glyphs64):
    """Augmented images."""

    def shifted(images, seeds):
        return torch.stack([image.roll(seed % 4, -1) for image, seed in zip(images, seeds.tolist())])

    return glyphs64.with_augment(shifted)


def test_the_same_seed_gives_the_same_weights_bit_for_bit(moving):
    def run(seed, before):
        model = tiny(drop_path_rate=0.3)
        torch.manual_seed(before)  # what was drawn earlier must not matter
        return trained(moving, model=model, seed=seed)

    first, again, other = run(5, before=1), run(5, before=2), run(6, before=1)
    assert same(first[0], again[0]) and first[1] == again[1]
    assert not same(first[0], other[0])


def test_a_recipe_in_epochs_is_trained_for_the_steps_that_they_are_on_these_data(glyphs64):
    in_epochs = Recipe(epochs=2, warmup_epochs=0.5, base_lr=0.016, batch_size=16)
    in_steps = Recipe(steps=8, warmup=0.25, lr=1e-3, batch_size=16)
    (model, history), (other, expected) = (trained(glyphs64, recipe) for recipe in (in_epochs, in_steps))
    assert same(model, other) and history == expected and history[-1]["step"] == 8


# --- what is reported


@pytest.mark.parametrize("every, passes", [(0, [3]), (1, [1, 2, 3]), (2, [2, 3])])
def test_evaluation_after_every_nth_and_the_last_pass(glyphs64, every, passes):
    _, history = trained(glyphs64, evaluate=lambda model: {"score": 1}, evaluate_every=every)
    assert [entry["epoch"] for entry in history if "score" in entry] == passes


def test_an_evaluation_that_leaves_the_model_in_eval_mode_changes_no_training(glyphs64):
    """In eval mode a pair that distills has no transfer loss; what is dropped is drawn as without."""

    def steps_of(**options):
        student, entries = tiny(2, drop_path_rate=0.3), []
        pair = AttentionTransfer(tiny(1), student, Plan(how="distill"))
        train(pair, glyphs64, Recipe(steps=6, batch_size=32), progress=None, log=entries.append, **options)
        return [entry["transfer_loss"] for entry in entries if entry["event"] == "step"]

    def measured(model):
        return evaluate(model.eval(), glyphs64)._asdict()

    losses = steps_of()
    careless = steps_of(evaluate=measured, evaluate_every=1)
    looking = steps_of(after_pass=lambda model, entry: model.eval())
    assert min(losses) > 0 and careless == looking == losses


def test_a_run_that_was_kept_goes_on_with_no_other_plan(glyphs64, tmp_path):
    keeper, recipe = CheckpointManager(tmp_path, every=2), Recipe(steps=4, batch_size=32)
    pair, other = (AttentionTransfer(tiny(1), tiny(2), Plan(how=how)) for how in ("distill", "copy"))
    train(pair, glyphs64, recipe, progress=None, keeper=keeper, stop_at=2)
    with pytest.raises(ValueError):
        train(other, glyphs64, recipe, progress=None, keeper=keeper)
    assert "forward" not in vars(other), "what Accelerate puts around it is taken off"


# --- when it fails


def failing(at, kind):
    """A loss that is not finite at one step, or its gradient; what the model was before is in `.before`."""

    def loss(model, images, targets, recipe):
        value = student_loss(model, images, targets, recipe)
        if loss.step == at:
            loss.before = state_of(model)
            # The square root's slope at 0 is infinite, and 0 times infinity is NaN.
            value = value * float(kind) if kind != "gradient" else value + (0 * value).sqrt()
        loss.step += 1
        return value

    loss.step = 0
    return loss


@pytest.mark.parametrize("kind", ["inf", "gradient"])
def test_a_loss_that_is_not_finite_leaves_the_last_finite_steps_weights(glyphs64, kind):
    model, loss = tiny(), failing(5, kind)
    with pytest.raises(NonFiniteLoss) as caught:
        train(model, glyphs64, SHORT, loss=loss, progress=None)
    assert caught.value.step == 5 and caught.value.checkpoint is None
    assert same(state_of(model), loss.before)


@pytest.mark.parametrize("has_scaler", [False, True])
def test_fp16_skips_some_steps_but_not_all(glyphs64, monkeypatch, has_scaler):
    """Steps were skipped to the end of the run; and on a CPU, where fp16 has no scaler, none was: each step
    with a NaN gradient was taken."""

    def with_scaler(*arguments):
        accelerator = start_processes(*arguments)
        accelerator.scaler = torch.amp.GradScaler("cpu")
        return accelerator

    if has_scaler:
        monkeypatch.setattr("atlib.train.start_processes", with_scaler)
    model = tiny()
    before, seen = state_of(model), []

    def loss(model, images, targets, recipe):
        seen.append(len(images))
        value = student_loss(model, images, targets, recipe)
        return value + (0 * value).sqrt()  # its gradient is NaN

    with pytest.warns(UserWarning, match="fp16"), pytest.raises(NonFiniteLoss) as caught:
        train(model, glyphs64, replace(SHORT, steps=60, mixed_precision="fp16"), loss=loss, progress=None)
    assert caught.value.step == len(seen) - 1 == (SKIPPED_STEPS - 1 if has_scaler else 0)
    assert same(state_of(model), before)


def test_after_an_error_the_model_is_a_plain_one(glyphs64):
    model = tiny()
    recipe = replace(SHORT, mixed_precision="bf16", checkpoint_activations=True)

    def stop(entry):
        assert model.grad_checkpointing
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, glyphs64, recipe, log=stop, progress=None)
    assert "forward" not in vars(model) and not model.grad_checkpointing
    assert model(random_images(1, 3, 32, 32)).dtype == torch.float32


def test_labels_that_are_missing_need_one_part_and_one_process(glyphs64, monkeypatch):
    """The mean over labelled images is no mean over the parts' means."""
    images, labels = glyphs64.take(range(4))
    labels[1] = UNLABELLED
    assert student_loss(tiny(), images, labels, SHORT).isfinite()
    with pytest.raises(ValueError):
        student_loss(tiny(), images, labels, replace(SHORT, accumulate=2))
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(ValueError):
        student_loss(tiny(), images, labels, SHORT)


def test_a_model_without_a_classifier_is_refused_before_anything_is_trained(glyphs64):
    """timm's head is then an identity, and cross-entropy would take the features for logits."""
    for model in (tiny(num_classes=0), AttentionTransfer(tiny(1), tiny(num_classes=0), Plan(how="distill"))):
        before = state_of(model)
        with pytest.raises(ValueError):
            train(model, glyphs64, SHORT, progress=None)
        assert same(state_of(model), before)


# --- what a recipe can ask for besides


close = partial(torch.testing.assert_close, rtol=0)


def weights_after(recipe, data, build=tiny, **options):
    return trained(data, recipe, build(), **options)[0]


# One step of it moves the weights by lr · gradient.
DESCENT = Recipe(steps=1, batch_size=16, lr=1.0, warmup=0, clip=None, optimizer="momentum", weight_decay=0)


def test_the_gradient_in_parts_is_that_of_the_whole(glyphs64):
    """Unequal parts (16 in 3) weigh by their images; of steps of 60 the second has four, in five parts."""
    step, last = replace(DESCENT, label_smoothing=0.0), replace(DESCENT, steps=2, batch_size=60, lr=0.1)
    distilling = lambda: AttentionTransfer(tiny(1), tiny(2), Plan(how="distill"))  # noqa: E731
    for build, recipe, parts in ((tiny, step, 3), (distilling, step, 3), (tiny, last, 5)):
        parted = weights_after(replace(recipe, accumulate=parts), glyphs64, build)
        close(parted, weights_after(recipe, glyphs64, build), atol=2e-6)


def test_the_average_by_hand(glyphs64):
    """decay · average + (1 - decay) · weights after every step; the weights train as without."""
    recipe, states, measured = replace(SHORT, ema=0.75), [], []
    model, average = tiny(), tiny(5)
    states.append(state_of(model))

    def watching(model, images, targets, recipe):
        states.append(state_of(model))
        return student_loss(model, images, targets, recipe)

    def accuracy(model):
        measured.append(state_of(model))
        return {"accuracy": float(len(measured))}

    with pytest.raises(ValueError):  # without an average
        trained(glyphs64, SHORT, tiny(), average_into=average)
    options = {"evaluate": accuracy, "average_into": average}
    weights, history = trained(glyphs64, recipe, model, loss=watching, **options)
    expected = {name: value.double() for name, value in states[0].items()}
    for state in [*states[2:], weights]:  # before step 1, 2 ... is after step 0, 1 ...
        expected = {name: 0.75 * value + 0.25 * state[name].double() for name, value in expected.items()}
    close({name: value.double() for name, value in state_of(average).items()}, expected, atol=1e-6)
    assert same(weights, weights_after(SHORT, glyphs64))
    assert same(measured[0], weights) and same(measured[1], state_of(average))
    assert history[-1]["accuracy"] == 1 and history[-1]["average_accuracy"] == 2


def test_binary_cross_entropy_by_hand():
    """Every class is a question of its own; a class with any share of a mixed image counts as a full yes."""
    logits, recipe = torch.randn(3, 4), Recipe(binary=True, label_smoothing=0.2)
    for labels, yes in (
        (torch.tensor([0, 3, 1]), [{0}, {3}, {1}]),
        (torch.tensor([[0.7, 0.3, 0, 0], [0, 0, 0, 1.0], [0, 0.5, 0.5, 0]]), [{0, 1}, {3}, {1, 2}]),
    ):
        expected = 0.0
        for row, those in zip(logits.tolist(), yes):
            for index, value in enumerate(row):
                target, p = 0.05 + (0.8 if index in those else 0), 1 / (1 + math.exp(-value))
                expected -= (target * math.log(p) + (1 - target) * math.log(1 - p)) / 12
        assert task_loss(logits, labels, recipe).item() == pytest.approx(expected, rel=1e-5)


def test_no_clipping(glyphs64):
    """A step of plain descent is lr · gradient, whatever its norm; clipped to 1e-3 it is that long."""
    step = replace(DESCENT, batch_size=64)
    norms, start = [], state_of(tiny())

    def log(entry):
        if entry["event"] == "step":
            norms.append(entry["grad_norm"])

    for clip in (None, 1e-3):
        after = weights_after(replace(step, clip=clip), glyphs64, log=log)
        length = math.sqrt(sum((after[name] - start[name]).double().square().sum().item() for name in start))
        assert length == pytest.approx(norms[0] if clip is None else clip, rel=1e-3)
    assert norms[0] == norms[1] > 0.1, "the norm that is reported is the one before clipping"


def test_compiled_training_is_the_same(glyphs64, monkeypatch):
    """With the backend that only traces."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    recipe = replace(SHORT, steps=1, ema=0.5, mixed_precision="bf16")

    def build():
        return AttentionTransfer(tiny(1, depth=1), tiny(2, depth=1), Plan(how="distill"))

    model, average, plain = build(), tiny(depth=1), tiny(depth=1)
    options = {"average_into": average, "evaluate": lambda model: {"model": type(model).__name__}}
    weights, _ = trained(glyphs64, replace(recipe, compile=True), model, **options)
    close(weights, weights_after(recipe, glyphs64, build, average_into=plain), atol=1e-6)
    close(state_of(average), state_of(plain), atol=1e-6)
    assert type(model) is AttentionTransfer and isinstance(model(random_images(2, 3, 32, 32)), Transferred)


def test_the_log_has_every_step_and_every_pass(glyphs64):
    entries = []
    recipe, options = Recipe(steps=6, batch_size=20), {"evaluate": lambda model: {"score": 3}}
    _, history = trained(glyphs64, recipe, log=entries.append, **options)
    order = [f"{entry['event']} {entry['step']}" for entry in entries]
    assert order == ["step 1", "step 2", "step 3", "step 4", "epoch 4", "step 5", "step 6", "epoch 6"]
    steps = [entry for entry in entries if entry["event"] == "step"]
    assert [entry["epoch"] for entry in steps] == [1, 1, 1, 1, 2, 2]
    assert all(entry["images_per_second"] > 0 for entry in steps)
    rates = [recipe.lr * schedule(step, recipe) for step in range(6)]
    assert [entry["lr"] for entry in steps] == rates, "of the step itself, not of the next"
    assert sum(entry["loss"] for entry in steps[4:]) / 2 == pytest.approx(history[1]["loss"])
    assert [entry["lr"] for entry in history] == [steps[3]["lr"], steps[5]["lr"]]
    passes = [entry for entry in entries if entry["event"] == "epoch"]
    assert [{"event": "epoch"} | entry for entry in history] == passes


def test_stopping_along_the_schedule(glyphs64):
    """The weights are those on the way of the whole run, not those of a shorter one."""
    on_the_way = {}

    def watching(model, images, targets, recipe):
        on_the_way[len(on_the_way)] = state_of(model)
        return student_loss(model, images, targets, recipe)

    trained(glyphs64, SHORT, loss=watching)
    stopped, history = trained(glyphs64, SHORT, stop_at=5, evaluate=lambda model: {"score": 1})
    assert same(stopped, on_the_way[5])
    assert not same(stopped, weights_after(replace(SHORT, steps=5), glyphs64))
    assert [(entry["step"], "score" in entry) for entry in history] == [(3, False), (5, True)]


@pytest.mark.parametrize("given", [2, 4])
def test_data_with_another_number_of_batches_are_an_error_and_no_endless_loop(glyphs64, given):
    wrong = glyphs64.with_augment(None)
    wrong.epoch = lambda part, workers: islice(cycle(glyphs64.epoch(part)), given)
    with pytest.raises(ValueError):
        train(tiny(), wrong, SHORT, progress=None)


def test_a_process_hands_on_why_a_run_of_another_stopped():
    for error in (NonFiniteLoss("step 3", 3, [1, 2], Path("c")), Preempted(Path("kept"))):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_an_accelerator_of_the_callers_stays_as_it_was(glyphs64):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(), GradientState._reset_state()  # of tests before
    try:
        own = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4, cpu=True)
        trained(glyphs64, replace(SHORT, steps=1))
        assert own.gradient_accumulation_steps == 4 == own.gradient_state.num_steps
        assert own.mixed_precision == "bf16" == Accelerator(cpu=True).mixed_precision
    finally:
        AcceleratorState._reset_state(), GradientState._reset_state()


def test_tf32_is_a_runs_and_not_the_processs(glyphs64):
    precisions = []
    note = lambda event: precisions.append(torch.get_float32_matmul_precision())  # noqa: E731
    trained(glyphs64, replace(SHORT, steps=1, mixed_precision="tf32"), log=note)
    assert precisions[0] == "high" and torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("before", [False, True])
def test_tiny_numbers_are_zero_in_a_run_and_then_what_they_were(glyphs64, before):
    if not torch.set_flush_denormal(before):
        pytest.skip("this CPU keeps them")
    tiny_product, within = lambda: (torch.full((4,), 1e-38) * 0.1).sum().item(), []
    try:
        trained(glyphs64, replace(SHORT, steps=1), log=lambda event: within.append(tiny_product()))
        assert within[0] == 0 and (tiny_product() == 0) == before
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("method", ["scratch", "distill", "learned heads", "copy", "no label"])
def test_where_every_weight_is_said_to_learn_it_does(glyphs64, method):
    """Else DDP would end the run: it is told not to look for weights without a gradient."""
    student = tiny(2, qk_norm=True)
    plans = {"copy": Plan(how="copy"), "learned heads": Plan(how="distill", unequal_heads="learn")}
    teacher = tiny(1, qk_norm=True, num_heads=4 if method == "learned heads" else 2)
    pair = AttentionTransfer(teacher, student, plans.get(method, Plan(how="distill")))
    model = student if method == "scratch" else pair
    recipe = replace(SHORT, task_weight=float(method != "no label"))
    student_loss(model.train(), *glyphs64.take(range(4)), recipe).backward()
    learned = [parameter.grad is not None for parameter in model.parameters()]
    assert all_learn(model, student_loss, recipe) == (method not in ("copy", "no label"))
    assert all(learned) or method in ("copy", "no label")
