"""The one training loop, on one process or many."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from timm.models.vision_transformer import VisionTransformer
from timm.optim import create_optimizer_v2, get_optimizer_info
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from atlib._util import in_eval_mode
from atlib.cast_once import CastOnce
from atlib.data import as_data
from atlib.loading import Batch, ShardSpec, TrainingData, steps_per_epoch
from atlib.losses import noted
from atlib.objectives import Loss, check_labels, mixed, student_loss
from atlib.pair import Normalisation, Pair, attach, check_normalisation, inside, student_of
from atlib.plan import Plan
from atlib.processes import (
    accelerate_as_it_was,
    agree,
    divide,
    start_processes,
    stop_noticed,
    to_train,
    whole_weights,
)
from atlib.recipe import Recipe

# Of fp16, in a row, after which a run ends: halved so often, the loss's scale is 0 in half precision.
SKIPPED_STEPS = 50


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient became NaN or infinite, at `step` (from 0), whose images on this process have
    these indices. checkpoint: the last good one, or None."""

    def __init__(self, message: str, step: int, indices: list[int], checkpoint: Path | None):
        super().__init__(message, step, indices, checkpoint)  # all of it, so that it can be pickled
        self.step, self.indices, self.checkpoint = step, indices, checkpoint

    def __str__(self) -> str:
        return self.args[0]


class Preempted(RuntimeError):
    """SIGTERM or Ctrl-C came: the run is kept at `checkpoint`, after the step that was in progress."""

    def __init__(self, checkpoint: Path):
        super().__init__(checkpoint)
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"stopped; everything up to here is kept in {self.checkpoint}"


class Keeper(Protocol):
    """What keeps a run along the way, called by every process (`atrun.checkpoint_manager`). `resume` and
    `keep` return where the run is kept; `due` says whether to keep it after a step."""

    def resume(self, run: "Training") -> Path | None: ...

    def due(self, step: int) -> bool: ...

    def keep(self, run: "Training") -> Path: ...


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
    progress: str | None = "training",
    cpu: bool = False,
    keeper: Keeper | None = None,
    log: Callable[[dict], None] | None = None,
    workers: int = 0,
    stop_at: int | None = None,
    average_into: nn.Module | None = None,
) -> list[dict]:
    """Train `model` in place for `recipe.steps` steps; return one dict of metrics per pass over the data.

    data: what `atlib.data.as_data` takes. seed: of order, augmentation, stochastic depth and the global
    generators; on one CPU with one number of threads a run repeats bit for bit. evaluate: adds its metrics
    after the last pass and every `evaluate_every`-th, those of the averaged weights with ``average_`` before
    their names. after_pass: is called with the model and the history's new entry. log: gets {"event": "step"
    or "epoch", ...} with the loss and its parts (`atlib.losses.noted`), of a pass the means. stop_at: ends
    after so many of the recipe's steps. average_into: a model like the student, for the averaged weights.

    Under `accelerate launch` or `torchrun` every process calls it, with the same arguments; `log` and the
    progress bar are the main process's. Where weights are divided (FSDP2) `model` gets the whole ones at the
    end.

    Raises `NonFiniteLoss`, the model then holding the last finite step's weights; `Preempted` after SIGTERM
    or Ctrl-C if there is a keeper; `ValueError` for what cannot be trained.
    """
    data = as_data(data, recipe.batch_size)
    if len(data) == 0:
        raise ValueError("no images to train on")
    recipe, student = recipe.on(len(data)), student_of(model)
    classes = getattr(student, "num_classes", None)
    targets = getattr(data, "targets", None)  # of data that are read item by item they come with the batches
    learns_labels = loss is student_loss and recipe.task_weight > 0
    if learns_labels and classes == 0:
        raise ValueError("the model has no classifier (num_classes=0): build it with num_classes=")
    if learns_labels and targets is not None:
        check_labels(targets, classes)
    if half := {str(p.dtype) for p in model.parameters() if p.requires_grad and p.dtype.itemsize < 4}:
        # under autocast it would run, and most steps, and all of an average, be rounded away
        raise ValueError(f"weights in {min(half)} lose small steps: model.float(), with mixed_precision=")
    if average_into is not None and recipe.ema is None:
        raise ValueError("average_into= needs a recipe with ema=")
    check_normalisation(model, data)
    images = getattr(data, "normalisation", None)
    for trained in (student, average_into):
        if None not in (trained, images) and Normalisation.of(trained) is not None:
            attach(trained, images)  # from now on
    run = Training(model, data, recipe, loss, seed, cpu)
    end = recipe.steps if stop_at is None else min(stop_at, recipe.steps)
    steps, main = steps_per_epoch(len(data), recipe.batch_size), run.accelerator.is_main_process
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    signals = nullcontext([]) if keeper is None else stop_noticed()
    bar = tqdm(
        total=recipe.steps,
        desc=f"{progress} on {world} x {run.accelerator.device.type}",
        disable=progress is None or not main,
        mininterval=2.0,
        ncols=110,
    )
    skipped = 0  # steps in a row
    with closing(run), signals as noticed, bar:
        if keeper is not None:
            run.kept = keeper.resume(run)
        position = run.position
        bar.initial = bar.n = position.step
        began = time.perf_counter()  # of the step: it includes waiting for images
        while position.step < end:
            part = ShardSpec(
                seed, position.epoch, recipe.batch_size, rank, world, position.done, recipe.repeats
            )
            for batch in data.epoch(part, workers):
                if position.epoch > part.epoch:
                    raise ValueError(f"the data gave more than {steps} batches for {len(data)} images")
                if learns_labels and targets is None:
                    check_labels(batch.targets, classes)
                (names, values), norm = run.backward(batch), run.clip()
                sums, stop = agree(run.accelerator, values, bool(noticed))
                # means over the images that could be decoded; to ask whether there are any would be to wait
                values = sums[:-1] / sums[-1].clamp(min=torch.finfo(sums.dtype).tiny)
                # The one time in a step that the device is waited for.
                value, *parts, norm = torch.cat([values, norm]).tolist()
                # One step with a NaN gradient would ruin all weights. In fp16 it is normal: Accelerate then
                # skips the step.
                scaled = run.accelerator.scaler is not None and math.isfinite(value)
                skipped = 0 if math.isfinite(norm) else skipped + 1
                if not math.isfinite(value + norm) and not (scaled and skipped < SKIPPED_STEPS):
                    raise NonFiniteLoss(
                        f"loss {value}, gradient's norm {norm} at step {position.step} (lr {run.lr:.3g};"
                        f" {skipped} in a row), images {batch.indices}: lower lr, clip, or"
                        f" mixed_precision='no'; kept: {run.kept}",
                        position.step,
                        batch.indices,
                        run.kept,
                    )
                run.step(names, values)
                seen = world * len(batch.indices) / batch.weight if batch.weight else 0.0
                images_per_second = seen / (time.perf_counter() - began)
                bar.set_postfix_str(f"loss {value:.3g}, {images_per_second:,.1f} images/s", refresh=False)
                bar.update()
                if log is not None and main:
                    log(
                        {"event": "step", "step": position.step, "epoch": position.epoch + 1, "loss": value}
                        | {name: x for name, x in zip(names, parts) if "/" not in name}
                        | {"lr": position.lr, "grad_norm": norm}
                        | {"images_per_second": images_per_second}
                    )
                last, metrics = position.done == steps, {}  # of the pass
                if last or position.step == recipe.steps:
                    every = evaluate_every and (position.epoch + 1) % evaluate_every == 0
                    metrics = run.measure(evaluate if every or position.step == recipe.steps else None)
                    if corrupt := run.corrupt():
                        metrics = metrics | {"corrupt": len(corrupt), "corrupt_indices": corrupt}
                    position.close(metrics)
                    if log is not None and main:
                        log({"event": "epoch"} | position.history[-1])
                    if after_pass is not None:
                        with in_eval_mode(run.plain):
                            after_pass(run.plain, position.history[-1])
                if keeper is not None and (stop or position.step == end or keeper.due(position.step)):
                    run.kept = keeper.keep(run)
                if stop and position.step < end:
                    raise Preempted(run.kept)
                if position.step == end and not last:
                    break
                began = time.perf_counter()
            else:
                if position.epoch == part.epoch:
                    raise ValueError(f"the data gave {position.done} batches, {len(data)} images are {steps}")
        history = [*position.history]
        if position.step < recipe.steps:  # stopped along the way: with the metrics of this moment
            if position.done:
                history.append(position.entry())
            if history:
                history[-1] = history[-1] | run.measure(evaluate)
        run.give_back(average_into)
    return history


def all_learn(model: nn.Module, loss: Loss, recipe: Recipe) -> bool:
    """Whether every weight surely gets a gradient in every step: of timm's ViTs that learn labels, alone or
    with maps. Copied attention leaves some without one, a norm of q and k for one."""
    student, plan = student_of(model), getattr(model, "plan", None)
    follows = isinstance(model, Pair) and isinstance(plan, Plan) and plan.how == "distill"
    learns_labels = loss is student_loss and recipe.task_weight > 0
    return type(student) is VisionTransformer and learns_labels and (student is model or follows)


class Training:
    """One run of `train`: its parts, prepared by Accelerate, its position, and where it was kept last."""

    def __init__(
        self, model: nn.Module, data: TrainingData, recipe: Recipe, loss: Loss, seed: int, cpu: bool
    ):
        set_seed(seed)
        self.data, self.recipe, self.loss, self.seed = data, recipe, loss, seed
        self.home = next(model.parameters()).device
        self.accelerator = start_processes(recipe, cpu, all_learn(model, loss, recipe))
        if self.accelerator.num_processes > 1:
            set_seed(seed, device_specific=True)  # other images on each process, so other stochastic depth
        self.given, model = model.train(), to_train(model.train(), self.accelerator)
        self.student = student_of(model)
        if recipe.checkpoint_activations:
            if not hasattr(self.student, "set_grad_checkpointing"):
                raise ValueError(f"checkpoint_activations=True: not for a {type(self.student).__name__}")
            self.checkpointed = getattr(self.student, "grad_checkpointing", False)
            self.student.set_grad_checkpointing(True)
        optimizer = make_optimizer(model, recipe, fused=self.accelerator.device.type == "cuda")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, recipe))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        #: The model without what Accelerate and torch.compile put around it.
        self.plain = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self.cast = CastOnce(self.plain)
        self.average = None if recipe.ema is None else EMA(self.model, recipe.ema)
        self.position = Position(torch.zeros(1, device=self.accelerator.device))
        self.kept: Path | None = None

    @property
    def lr(self) -> float:
        """The learning rate of the step to come; with layer-wise decay the head's, the highest."""
        return max(self.scheduler.get_last_lr())

    def backward(self, batch: Batch) -> tuple[list[str], Tensor]:
        """Add up the gradient of the step's mean loss, part by part. Returns the names of what is noted of
        the loss, and (1 + names + 1,): the loss, what is noted, the share of images that could be decoded."""
        device, parts = self.accelerator.device, self.recipe.accumulate
        images, targets = (part.to(device, non_blocking=True) for part in (batch.images, batch.targets))
        draw = (self.seed, self.position.step, self.accelerator.process_index)
        classes = getattr(self.student, "num_classes", None)
        images, targets = mixed(images, targets, self.recipe, classes, draw)
        names, total = [], torch.zeros((), device=device)
        for part_images, part_targets in zip(images.tensor_split(parts), targets.tensor_split(parts)):
            weight = batch.weight * len(part_images) / len(images)
            # fewer images than parts: every process must do as many parts as the others
            if len(part_images) == 0:
                part_images, part_targets = images[:1], targets[:1]
            # gradients are averaged over the processes in the last part only
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast(), self.cast.in_use(device), noted() as notes:
                    value = self.loss(self.model, part_images, part_targets, self.recipe)
                self.accelerator.backward(value * (weight * parts))  # Accelerate divides by their number
            names = sorted(notes, key=lambda name: "/" in name)  # the parts of parts come last
            total = total + weight * torch.stack([value.detach(), *(notes[name] for name in names)])
        return names, nn.functional.pad(total, (0, 1), value=batch.weight)

    def clip(self) -> Tensor:
        """Clip the gradient, and return the norm that it had, (1,)."""
        limit = math.inf if self.recipe.clip is None else self.recipe.clip
        norm = torch.as_tensor(self.accelerator.clip_grad_norm_(self.model.parameters(), limit))
        return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).reshape(1)

    def step(self, names: list[str], values: Tensor) -> None:
        """Change the weights, and count a step with its loss and what is noted of it, (1 + names,)."""
        lr = self.lr  # of this step, not of the next
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.model)
        self.position.count(names, values, lr)
        set_weight_decay(self.optimizer, self.position.step, self.recipe)
        if hasattr(self.plain, "follow"):  # a copy that moves after the step, as in `atfamily.contrast`
            self.plain.follow(self.position.step, self.recipe.steps)

    def measure(self, evaluate: Callable[[nn.Module], dict] | None) -> dict:
        """The metrics of the weights and of the averaged ones, the same on all processes; {} of None."""
        if self.accelerator.num_processes > 1:  # batch norm's averages are of a process's own images
            for buffer in self.plain.buffers():
                torch.distributed.broadcast(buffer, 0)
        if evaluate is None:
            return {}
        with in_eval_mode(self.plain):  # and back, whatever `evaluate` does
            metrics = dict(evaluate(self.plain))
            if self.average is not None:
                with self.average.in_place_of(self.model):
                    metrics |= {f"average_{name}": value for name, value in evaluate(self.plain).items()}
        return self.of_main(metrics)

    def corrupt(self) -> list[int]:
        """The indices of this pass's images that could not be decoded, on all processes: each must call
        it."""
        if self.position.done == 0:
            return []  # a new pass begins with none
        return sorted({*self.position.corrupt, *gather_object(list(self.data.corrupt))})

    def of_main(self, value):
        """The main process's value, on every process."""
        return broadcast_object_list([value])[0] if self.accelerator.num_processes > 1 else value

    def give_back(self, average_into: nn.Module | None) -> None:
        """Give away the averaged weights, and the model's where a copy was trained."""
        if average_into is not None:
            with self.average.in_place_of(self.model):
                average_into.load_state_dict(whole_weights(student_of(self.plain)))
        if self.given is not self.plain:
            self.given.load_state_dict(whole_weights(self.plain))

    def close(self) -> None:
        """Take what this run put around and into the caller's model off again."""
        if self.given is self.plain:
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
            # Accelerate's autocast around the class's own forward, of no use after training
            vars(self.given).pop("forward", None)
        self.given.to(self.home)
        if self.recipe.checkpoint_activations:
            self.student.set_grad_checkpointing(self.checkpointed)


def schedule(step: int, recipe: Recipe) -> float:
    """The factor on the peak lr at `step` (from 0): linear warm-up, then a half cosine, or milestones."""
    warmup = round(recipe.warmup * recipe.steps)
    if step < warmup:
        return (step + 1) / warmup
    if recipe.milestones is not None:
        return 0.1 ** sum(step >= round(share * recipe.steps) for share in recipe.milestones)
    floor = recipe.min_lr / recipe.lr
    progress = (step - warmup) / max(1, recipe.steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def set_weight_decay(optimizer: torch.optim.Optimizer, step: int, recipe: Recipe) -> None:
    """Give the groups that are decayed the decay of `step` (from 0)."""
    if recipe.weight_decay_end is None:
        return
    low, high = recipe.weight_decay_end, recipe.weight_decay
    decay = low + (high - low) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    for group in optimizer.param_groups:
        if group["weight_decay"] > 0:
            group["weight_decay"] = decay


def make_optimizer(model: nn.Module, recipe: Recipe, fused: bool = False) -> torch.optim.Optimizer:
    """The recipe's optimiser over the student's weights, grouped by timm: no decay on weights of one
    dimension and on what `no_weight_decay` names; lr by layer, where timm counts the final norm to the last
    block, MAE's code to the head. fused: AdamW in one kernel."""
    if recipe.base_lr is not None:
        raise ValueError(f"base_lr={recipe.base_lr!r} is a rate per 256 images: take recipe.on(images)")
    trained = student_of(model)
    for part in (model, trained):
        if inner := inside(part):  # weights are called otherwise there than in `no_weight_decay`
            raise ValueError(f"a {type(part).__name__} hides what it wraps: give model.{inner}")
    options = {"betas": recipe.betas} if get_optimizer_info(recipe.optimizer).has_betas else {}
    if fused and recipe.optimizer == "adamw":
        options["fused"] = True
    optimizer = create_optimizer_v2(
        trained,
        opt=recipe.optimizer,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        **options,
    )
    in_student = {id(parameter) for parameter in trained.parameters()}
    extra = [p for p in model.parameters() if id(p) not in in_student and p.requires_grad]
    # a projector or a head mapping: thrown away after training, so no layer decay and no special groups
    if extra:
        optimizer.add_param_group({"params": extra, "weight_decay": recipe.weight_decay})
    for group in optimizer.param_groups:  # timm leaves the factor of layer-wise decay to its own schedulers
        group["lr"] = recipe.lr * group.get("lr_scale", 1.0)
    return optimizer


class EMA:
    """average ← decay · average + (1 - decay) · weights after every step: a tensor for each parameter of
    `model`, or its shard. Source: Polyak and Juditsky 1992."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: nn.Module) -> None:
        """Take in the weights of now."""
        with torch.no_grad():
            torch._foreach_lerp_(self.values, list(model.parameters()), 1 - self.decay)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Within the block `model` has the averaged weights."""
        divide(model)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            _copy(self.values, model)
            yield
        finally:
            divide(model)
            _copy(weights, model)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {f"average.{index}": _local(value) for index, value in enumerate(self.values)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` returned."""
        for index, value in enumerate(self.values):
            _local(value).copy_(tensors[f"average.{index}"])


@torch.no_grad()
def _copy(values: list[Tensor], model: nn.Module) -> None:
    for value, parameter in zip(values, model.parameters(), strict=True):
        parameter.copy_(value)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


@dataclass
class Position:
    """Steps and passes that are done."""

    total: Tensor  # (1 + parts,): the sums of the loss and of its parts over the steps of this pass
    step: int = 0  # done in all
    epoch: int = 0  # passes done
    done: int = 0  # steps of this pass
    lr: float = 0.0  # of the last step
    parts: list[str] = field(default_factory=list)  # in `total`: those that every step of the pass has
    corrupt: list[int] = field(default_factory=list)  # not decoded in this pass before the run was taken up
    history: list[dict] = field(default_factory=list)  # an entry a pass

    def count(self, parts: list[str], values: Tensor, lr: float) -> None:
        """Count a step."""
        if self.done == 0:
            self.total, self.parts = torch.zeros_like(values), parts
        elif parts != self.parts:  # what only some steps have, has no mean over the pass
            self.total, self.parts, values = self.total.reshape(-1)[:1], [], values[:1]
        self.total, self.step, self.done, self.lr = self.total + values, self.step + 1, self.done + 1, lr

    def entry(self) -> dict:
        """What the history says about the pass in progress, with the means over its steps."""
        loss, *parts = (self.total.reshape(-1) / self.done).tolist()
        means = {"loss": loss, **dict(zip(self.parts, parts))}
        return {"epoch": self.epoch + 1, "step": self.step, **means, "lr": self.lr}

    def close(self, more: dict) -> None:
        """End the pass."""
        self.history.append(self.entry() | more)
        self.total, self.parts = torch.zeros(1, device=self.total.device), []
        self.epoch, self.done, self.corrupt = self.epoch + 1, 0, []

    def facts(self) -> dict:
        """The position as JSON values, without `total`, a tensor."""
        return {name: value for name, value in vars(self).items() if name != "total"}
