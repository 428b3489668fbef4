"""The one training loop: pre-training, scratch, fine-tuning, Copy and Distill all run through it, on one
process or many."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from atlib._util import in_eval_mode
from atlib.checkpoint import save_weights
from atlib.data.images import UNLABELLED
from atlib.data.sampler import TrainingData, steps_per_epoch
from atlib.data.torch_data import as_data
from atlib.pair import check_normalisation, student_of
from atlib.train.checkpoint_manager import CheckpointManager
from atlib.train.distributed import accelerate_as_it_was, agree, stop_noticed
from atlib.train.objectives import Loss, student_loss
from atlib.train.recipe import Recipe
from atlib.train.trainer import Preempted, Training


@accelerate_as_it_was()
def train(
    model: nn.Module,
    data: TrainingData | Dataset | DataLoader,
    recipe: Recipe,
    *,
    loss: Loss = student_loss,
    seed: int = 0,
    evaluate: Callable[[nn.Module], dict] | None = None,
    evaluate_every: int = 0,
    after_pass: Callable[[nn.Module, dict], None] | None = None,
    out: Path | None = None,
    progress: str | None = "training",
    cpu: bool = False,
    keeper: CheckpointManager | None = None,
    log: Callable[[dict], None] | None = None,
    workers: int = 0,
    stop_at: int | None = None,
    average_into: nn.Module | None = None,
) -> list[dict]:
    """Train `model` in place for `recipe.steps` steps and return one dict of metrics per pass over the data
    (a recipe in epochs: for as many steps as they are on these data).

    data: what `atlib.data` opens, or a torch `Dataset` of (image, label), such as torchvision's
    `ImageFolder`, or the `DataLoader` of one, whose order and batch size give way to the recipe's
    (`atlib.data.torch_data.as_data`).

    It trains on the accelerator if there is one (not with `cpu=True`) and is back on its own device
    afterwards. `seed` fixes order, augmentation and stochastic depth: on one CPU with one number of threads a
    run repeats bit for bit; on a GPU the attention and convolution kernels may sum in another order. It seeds
    the global generators of torch, NumPy and Python. `evaluate(model)`, if given, adds its metrics after the
    last pass, and after every `evaluate_every`-th where that is above 0; those of the averaged weights, where
    the recipe has an average, begin with ``average_``. `after_pass(model, entry)` is called after each pass
    with what the history says of it, to look at the model, not to change it. For both the model is in eval
    mode. With `out`, the last good weights are kept in `out/last.safetensors` once per pass.

    With a `keeper` the run is kept along the way and goes on where it was kept last, with the same bits as if
    it had not been interrupted (on one CPU). `log` gets a dict after each step and each pass,
    {"event": "step" or "epoch", ...}: the loss and what it is made of (`atlib.losses.noted`: task_loss,
    transfer_loss), without weights; those of a pass are means over its steps, also of each layer. The
    device is waited for once a step, for all numbers together. `stop_at` ends after that many steps of
    the recipe's schedule: the metrics of that moment are returned, but are no part of the run that may go
    on from there. `average_into`, a model built like the student, gets the averaged weights.

    Under `accelerate launch` or `torchrun` every process calls it with the same arguments, and `evaluate` and
    `after_pass` on every process too; `log`, `out` and the progress bar belong to the main process. A step's
    images are divided among the processes, whose gradients are averaged. Where weights are divided too
    (FSDP2, configs/accelerate), a copy is trained, and `model` gets the whole weights at the end, on all
    processes.

    Raises `ValueError` for a model without a classifier that is to learn labels, labels that it has no class
    for, no images, images that are normalised otherwise than a pair was told, and for a keeper whose run was
    started otherwise; `NonFiniteLoss` as soon as the loss or its gradient is not finite, the model then still
    holding the last finite step's weights; `Preempted` after SIGTERM or Ctrl-C if there is a keeper;
    `atlib.train.checkpoint_manager.CheckpointError` when a checkpoint cannot be written.
    """
    data = as_data(data, recipe.batch_size)
    if len(data) == 0:
        raise ValueError(f"there are no images to train on in this {type(data).__name__}")
    recipe = recipe.on(len(data))
    _check(model, recipe, loss, average_into)
    learns_labels, classes = loss is student_loss and recipe.task_weight > 0, _classes_of(model)
    targets = getattr(data, "targets", None)  # of data that are read item by item they come with the batches
    if learns_labels:
        _check_labels(targets, classes)
    check_normalisation(model, data)
    run = Training(model, data, recipe, loss, seed, cpu)
    if keeper is not None:
        with run.put_back_on_error():
            run.resume(keeper)
    position, end = run.position, recipe.steps if stop_at is None else min(stop_at, recipe.steps)
    steps = steps_per_epoch(len(data), recipe.batch_size)
    bar = tqdm(
        total=recipe.steps,
        desc=progress,
        initial=position.step,
        disable=progress is None or not run.main,
        mininterval=2.0,
        ncols=80,
    )
    began = time.perf_counter()  # of the step: it includes waiting for images
    with run.put_back_on_error(), stop_noticed(keeper is not None) as noticed, bar:
        while position.step < end:
            part = run.part()
            for batch in data.epoch(part, workers):
                if position.epoch > part.epoch:
                    raise ValueError(f"the data gave more than {steps} batches, which {len(data)} images are")
                if learns_labels and targets is None:
                    _check_labels(batch.targets, classes)
                loss_of_step, norm = run.backward(batch), run.clip()
                sums, stop = agree(run.accelerator, loss_of_step.values, bool(noticed))
                loss_of_step = loss_of_step.over_all(sums)
                # The one time in a step that the device is waited for.
                value, *parts, norm = torch.cat([loss_of_step.values, norm]).tolist()
                # One step with a NaN gradient would ruin all weights. In fp16 it is normal: Accelerate then
                # skips the step.
                if not math.isfinite(value) or not math.isfinite(norm) and recipe.mixed_precision != "fp16":
                    raise run.not_finite(value, norm, batch)
                run.step(loss_of_step)
                bar.update()
                if log is not None and run.main:
                    log(
                        {
                            "event": "step",
                            "step": position.step,
                            "epoch": position.epoch + 1,
                            "loss": value,
                            **{name: x for name, x in zip(loss_of_step.parts, parts) if "/" not in name},
                            "lr": position.lr,
                            "grad_norm": norm,
                            "images_per_second": run.images_of(batch) / (time.perf_counter() - began),
                        }
                    )
                last, metrics = position.done == steps, {}  # of the pass
                if last or position.step == recipe.steps:
                    due = (
                        position.step == recipe.steps
                        or evaluate_every
                        and (position.epoch + 1) % evaluate_every == 0
                    )
                    metrics = run.measure(evaluate if due else None)
                    run.close(metrics)
                    if log is not None and run.main:
                        log({"event": "epoch"} | position.history[-1])
                    if after_pass is not None:
                        with in_eval_mode(run.plain):
                            after_pass(run.plain, position.history[-1])
                    if out is not None:
                        whole = run.whole()
                        run.kept = save_weights(Path(out) / "last.safetensors", whole) if run.main else None
                if keeper is not None and (stop or position.step == end or run.due(keeper, metrics)):
                    run.keep(keeper, metrics)
                if stop and position.step < end:
                    raise Preempted(run.kept)
                if position.step == end and not last:
                    break
                began = time.perf_counter()
            else:
                if position.epoch == part.epoch:
                    raise ValueError(
                        f"the data gave {position.done} of the {steps} batches that {len(data)} images are"
                    )
    history = position.history if position.step == recipe.steps else run.so_far(evaluate)
    run.finish(average_into)
    return history


def _classes_of(model: nn.Module) -> int | None:
    """How many classes a model, or a pair's student, tells apart; None where it does not say."""
    return getattr(student_of(model), "num_classes", None)


def _check_labels(targets: Tensor | None, classes: int | None) -> None:
    """Find out before anything is trained that labels are no class indices, or beyond the model's classes."""
    if targets is None or targets.ndim != 1:
        return
    if targets.is_floating_point():
        raise ValueError(
            f"targets are {targets.dtype} {tuple(targets.shape)}, and labels are class indices, int64 (n,),"
            " or shares (n, classes): call .long() on them, or train with another loss="
        )
    known = targets[targets != UNLABELLED]
    wrong = known[(known < 0) | (known >= classes)] if classes else known[known < 0]
    if len(wrong):
        raise ValueError(
            f"{len(wrong)} of {len(targets)} labels are not among 0 to"
            f" {'' if classes is None else classes - 1}, such as {wrong[0].item()}: build the model with"
            f" num_classes=; images without a label have {UNLABELLED}"
        )


def _check(model: nn.Module, recipe: Recipe, loss: Loss, average_into: nn.Module | None) -> None:
    """Find out before anything is trained that there is nothing to train, or nowhere to put the average."""
    student = student_of(model)
    if loss is student_loss and recipe.task_weight > 0 and _classes_of(model) == 0:
        raise ValueError("the model has no classifier (num_classes=0): build it with num_classes=")
    if average_into is None:
        return
    if recipe.ema is None:
        raise ValueError(
            "average_into was given, but the recipe has no average: set its ema, for example to 0.9999"
        )
    if {name: value.shape for name, value in average_into.state_dict().items()} != {
        name: value.shape for name, value in student.state_dict().items()
    }:
        raise ValueError(
            "average_into is not built like the student that is trained: give it the same architecture"
        )
