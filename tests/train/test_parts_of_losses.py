"""What a step's loss is made of: the parts that are logged, against losses by hand, and their sum."""

import json

import pytest
import torch
import torch.nn.functional as F

from atlib import AttentionTransfer, Plan, walk
from atlib.loading import Batch, ShardSpec
from atlib.losses import note, noted
from atlib.recipe import Recipe
from atlib.train import Position, student_loss, train
from tests.helpers import randomise, tiny

RECIPE = Recipe(steps=1, batch_size=64, task_weight=0.5, transfer_weight=3.0, label_smoothing=0.1)
PLANS = {
    "map": Plan(how="distill"),
    "one layer of two": Plan(how="distill", layers=[1]),
    "q": Plan(how="distill", what="q"),
    "averaged": Plan(how="distill", average="queries"),
}


def pair_of(plan):
    return AttentionTransfer(randomise(tiny(), 1), randomise(tiny(), 2), plan)


def by_hand(pair, images, labels):
    """The task's loss, and the transfer loss of each layer, from maps that are written out."""
    with torch.no_grad():
        student, teacher = walk(pair.student, images), walk(pair.teacher, images, head=False)
        shares = F.one_hot(labels, 8) * 0.9 + 0.1 / 8
        task = -(shares * student.logits.log_softmax(-1)).sum(-1).mean()
        losses = {}
        for layer in pair.layers:
            own, theirs = student.layers[layer], teacher.layers[layer]
            if pair.plan.what == "q":
                losses[layer] = (own.q - theirs.q).square().mean().item()
                continue
            target = theirs.map
            if pair.plan.average is not None:
                target = target.mean(2, keepdim=True).expand_as(target)
            losses[layer] = -(target * own.map.log()).sum(-1).mean().item()
    return task.item(), losses


@pytest.mark.parametrize("plan, accumulate", [*zip(PLANS, (1, 3, 1, 3))])
def test_logged_parts_are_those_of_losses_by_hand(glyphs64, plan, accumulate):
    pair, entries = pair_of(PLANS[plan]), []
    task, layers = by_hand(pair, *glyphs64.take(range(64)))
    recipe = Recipe(**{**RECIPE.describe(), "accumulate": accumulate})
    (entry,) = train(pair, glyphs64, recipe, progress=None, log=entries.append)
    assert entry["task_loss"] == pytest.approx(task, rel=1e-5)
    for layer, loss in layers.items():
        assert entry[f"transfer_loss/layer_{layer}"] == pytest.approx(loss, rel=1e-4)
    assert [name for name in entry if "/" in name] == [f"transfer_loss/layer_{layer}" for layer in layers]
    assert entry["transfer_loss"] == pytest.approx(sum(layers.values()), rel=1e-4)
    assert entry["loss"] == pytest.approx(0.5 * task + 3 * sum(layers.values()), rel=1e-4)
    step, _ = entries
    assert (step["task_loss"], step["transfer_loss"]) == (entry["task_loss"], entry["transfer_loss"])


def test_a_pass_has_the_means_of_its_steps(glyphs64):
    entries = []
    recipe = Recipe(steps=7, batch_size=20, mixup=0.8)
    history = train(pair_of(Plan(how="distill")), glyphs64, recipe, progress=None, log=entries.append)
    steps = [entry for entry in entries if entry["event"] == "step"]
    for of_pass, those in zip(history, (steps[:4], steps[4:])):
        for name in ("loss", "task_loss", "transfer_loss"):
            assert of_pass[name] == pytest.approx(sum(entry[name] for entry in those) / len(those))
        layers = [of_pass[f"transfer_loss/layer_{layer}"] for layer in (0, 1)]
        assert sum(layers) == pytest.approx(of_pass["transfer_loss"])
    for entry in steps + history:
        assert entry["loss"] == pytest.approx(entry["task_loss"] + 3 * entry["transfer_loss"])


def test_notes_are_of_the_innermost_block_and_carry_no_graph():
    value = torch.ones((), requires_grad=True)
    assert note("nowhere", value) is value
    with noted() as outer:
        note("a", value), note("a", 2 * value)
        with noted() as inner:
            note("b", value)
        note("c", value)
    assert (outer, inner) == ({"a": 3, "c": 1}, {"b": 1})
    assert not any(part.requires_grad for part in outer.values())


def test_a_checkpoint_from_before_there_were_parts():
    """Its total is a scalar, and it names no parts: of that pass the loss alone has a mean."""
    position = Position(torch.tensor(6.0), step=2, epoch=0, done=2)
    position.count(["task_loss"], torch.tensor([3.0, 1.0]), lr=0.1)
    assert position.entry() == {"epoch": 1, "step": 3, "loss": 3.0, "lr": 0.1}
    position.close(position.entry())
    position.count(["task_loss"], torch.tensor([3.0, 1.0]), lr=0.1)
    assert position.entry() == {"epoch": 2, "step": 4, "loss": 3.0, "task_loss": 1.0, "lr": 0.1}
    assert json.loads(json.dumps(position.facts()))["parts"] == ["task_loss"]


def test_a_step_without_an_image_that_is_corrupt_reports_the_mean_of_the_others(glyphs64):
    """Its gradient counts for less; what the log says of the loss is a mean over images all the same."""

    class Gap(type(glyphs64)):
        def epoch(self, part, workers=0):
            for batch in super().epoch(part, workers):
                kept = len(batch.indices) // 2
                some = batch.images[:kept], batch.targets[:kept], batch.indices[:kept]
                yield Batch(*some, 0.5 * batch.weight)

    images = Gap(glyphs64.pixels, glyphs64.targets, glyphs64.classes)
    recipe, entries = Recipe(steps=2, batch_size=32, lr=1e-9, warmup=0), []
    model = tiny()
    history = train(model, images, recipe, log=entries.append, progress=None)
    steps = [entry for entry in entries if entry["event"] == "step"]
    with torch.no_grad():
        for entry, batch in zip(steps, images.epoch(ShardSpec(0, 0, 32))):
            expected = student_loss(model, batch.images, batch.targets, recipe)
            assert entry["loss"] == pytest.approx(expected.item(), rel=1e-4)
            assert entry["task_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert history[-1]["loss"] == pytest.approx(sum(entry["loss"] for entry in steps) / 2, rel=1e-5)
