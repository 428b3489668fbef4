"""What two processes do together, one worker each, started by the tests: a program for `accelerate launch`.

    ... tests/two.py FOLDER

Everything that several tests look at is done in one start, because a start costs seconds; rank 0 leaves what
came out in FOLDER. At the end of it one of them dies.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from safetensors.torch import save_file

from atbook.worlds import glyph_images
from atbook.worlds.glyphs import generate
from atfamily.contrast import Dino, MoCo, contrast_loss
from atlib import AttentionTransfer, Plan, processes
from atlib.evaluate import evaluate as evaluate_alone
from atlib.evaluate import evaluate_together
from atlib.recipe import Recipe
from atlib.train import NonFiniteLoss, Preempted, student_loss, train
from atrun import __main__ as command
from atrun.checkpoint_manager import CheckpointManager
from atrun.data.views import looks, small_views
from tests.helpers import tiny

# 71 images in steps of 16: the last step of a pass has 7, four for one process and three for the other.
RECIPE = Recipe(steps=7, batch_size=16, lr=1e-3)
quietly = partial(train, progress=None, cpu=True)


def images(dtype=torch.float32):
    found = glyph_images(generate("train", 71))
    scaled = found._scaled
    found._scaled = lambda pixels: scaled(pixels).to(dtype)
    return found


def looked_at(views):
    """Views of the images, computed in float64."""
    found = images(torch.float64)
    scaled, found = found._scaled, found.with_augment(small_views(looks((0.2, 1.0), views - 2)))
    found._scaled = scaled
    return found


def contrasted(kind, **options):
    torch.manual_seed(5)
    return kind(tiny(num_classes=0), hidden=16, **options)


# What learns from views: how many, and the module.
VIEWS = {
    "moco": (2, lambda: contrasted(MoCo, projection=8)),
    "dino": (4, lambda: contrasted(Dino, outputs=10, bottleneck=6, frozen=0.0)),
}
RUNS = {
    **{name: (build, RECIPE) for name, (_, build) in VIEWS.items()},
    "plain": (tiny, RECIPE),
    "accumulated": (tiny, replace(RECIPE, accumulate=3)),
    "averaged": (tiny, replace(RECIPE, ema=0.8)),
    "copy": (
        lambda: AttentionTransfer(tiny(1, qk_norm=True), tiny(2, qk_norm=True), Plan(how="copy")),
        RECIPE,
    ),
    "distill": (lambda: AttentionTransfer(tiny(1), tiny(2), Plan(how="distill")), RECIPE),
}


def trained(name, **options):
    """The weights, the history and the losses of each step of one of `RUNS`, all computed in float64."""
    build, recipe = RUNS[name]
    model, steps = build().double(), []
    views = VIEWS[name][0] if name in VIEWS else 0
    average = tiny().double() if recipe.ema else None
    seen, loss = (looked_at(views), contrast_loss) if views else (images(torch.float64), student_loss)

    def log(entry):
        if entry["event"] == "step":
            steps.append(entry["loss"])

    history = quietly(model, seen, recipe, loss=loss, average_into=average, log=log, **options)
    weights = dict((average or model).state_dict())
    return weights, history, steps


def everything(folder: Path, rank: int) -> dict:
    found = {}
    for name in RUNS:
        weights, history, steps = trained(name)
        found[name] = {"history": history, "steps": steps}
        found[name]["sums"] = gather_object([sum(value.double().sum().item() for value in weights.values())])
        if rank == 0:
            save_file(
                {key: value.contiguous() for key, value in weights.items()}, folder / f"{name}.safetensors"
            )

    found["world"] = dist.get_world_size()

    # A teacher of its own on each process: were it broadcast or averaged, the two would become one.
    pair = AttentionTransfer(tiny(10 + rank), tiny(2), Plan(how="distill"))
    before = {name: value.clone() for name, value in pair.teacher.state_dict().items()}
    quietly(pair, images(), RECIPE)
    found["teacher kept"] = gather_object(
        [all(torch.equal(value, before[name]) for name, value in pair.teacher.state_dict().items())]
    )

    # Metrics: five batches of 15 for two processes, the last of eleven images.
    model = tiny(3)
    together = evaluate_together(model, images(), 15)
    found["evaluation"] = gather_object([[together.accuracy, together.loss, together.count]])
    drawn = []

    def evaluate(model):
        drawn.append(rank)
        return {"accuracy": evaluate_together(model, images()).accuracy, "rank": rank}

    quietly(tiny(), images(), replace(RECIPE, steps=2), evaluate=evaluate)
    found["evaluated on"] = gather_object(drawn)

    # What is measured is the network that the first process keeps.
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 8, 8), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.LazyLinear(8)
    )
    network(images().take([0, 1])[0])
    measure = lambda model: {"measured": evaluate_together(model, images(), 15).loss}  # noqa: E731
    measured = quietly(network, images(), RECIPE, evaluate=measure)[-1]["measured"]
    found["batch norm"] = gather_object([[measured, evaluate_alone(network, images()).loss]])

    # Restored after 4 steps, gone on with by new models: the bits of the run that was not stopped. Stochastic
    # depth differs on the processes.
    def moving(**options):
        model = tiny(drop_path_rate=0.3)
        history = quietly(model, images(), replace(RECIPE, mixup=0.8, ema=0.9), **options)
        return model.state_dict(), history

    whole = moving()
    moving(keeper=CheckpointManager(folder / "kept", every=3), stop_at=4)
    pieces = moving(keeper=CheckpointManager(folder / "kept", every=3))
    found["resumed"] = gather_object(
        [all(torch.equal(whole[0][name], pieces[0][name]) for name in whole[0]) and whole[1] == pieces[1]]
    )

    # What one of them meets ends the step for both.
    def bad(model, images, targets, recipe):
        value = student_loss(model, images, targets, recipe)
        return value * float("nan") if rank == 1 else value

    try:
        quietly(tiny(), images(), RECIPE, loss=bad)
        raised = "nothing"
    except NonFiniteLoss as error:
        raised = error.step
    found["not finite"] = gather_object([raised])

    def signalled(model, images, targets, recipe):
        signalled.calls += 1
        if rank == 1 and signalled.calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return student_loss(model, images, targets, recipe)

    signalled.calls = 0
    try:
        keeper = CheckpointManager(folder / "signalled", every=100)
        quietly(tiny(), images(), RECIPE, loss=signalled, keeper=keeper)
        raised = "nothing"
    except Preempted as error:
        raised = error.checkpoint.name
    found["preempted"] = gather_object([raised])

    # The command line, which finds out by itself that there are two; imported here, the others need it not.
    from atbook.worlds import glyphs
    from tests.stopped_runs import HELD_OUT, asked

    glyphs.SIZES |= HELD_OUT
    asked_for = asked("find-scratch", folder / "commanded", evaluation_split="validation")
    found["commanded"] = gather_object([command.main(asked_for)])
    return found


def dead(rank: int) -> None:
    """Rank 1 ends without a word in the middle of its third step."""

    def loss(model, images, targets, recipe):
        loss.calls += 1
        if rank == 1 and loss.calls == 3:
            os._exit(1)
        return student_loss(model, images, targets, recipe)

    loss.calls = 0
    quietly(tiny(), images(), replace(RECIPE, steps=1000), loss=loss)


if __name__ == "__main__":
    torch.set_num_threads(1)
    processes.WAIT = timedelta(seconds=60)
    place, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    result = everything(place, rank)
    if rank == 0:
        (place / "found.json").write_text(json.dumps(result))
    dead(rank)
