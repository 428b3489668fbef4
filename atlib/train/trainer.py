"""What a training run holds: model, optimiser and the rest on Accelerate, where it is, and how it is kept and
gone on with."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate.utils import DistributedType, broadcast_object_list, gather_object, set_seed
from torch import Tensor, nn

from atlib._util import in_eval_mode
from atlib.data.identity import identity_of
from atlib.data.sampler import Batch, ShardSpec, TrainingData
from atlib.losses import noted
from atlib.pair import Pair, student_of
from atlib.plan import Plan
from atlib.train.checkpoint_manager import CheckpointManager, digest_of_model, digest_of_tensors
from atlib.train.distributed import start_processes, to_train, whole_weights
from atlib.train.objectives import Loss, mixed
from atlib.train.optim import EMA, make_optimizer, schedule, set_weight_decay
from atlib.train.recipe import Recipe


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient became NaN or infinite; the message names the step, the last good checkpoint
    and the images.

    step: from 0; indices: the places in the data of this process's images of that step; checkpoint: None if
    none was kept.
    """

    def __init__(self, message: str, step: int, indices: list[int], checkpoint: Path | None):
        super().__init__(message)
        self.step, self.indices, self.checkpoint = step, indices, checkpoint

    def __reduce__(self):  # a process that runs it for another hands it on
        return type(self), (str(self), self.step, self.indices, self.checkpoint)


class Preempted(RuntimeError):
    """SIGTERM or Ctrl-C came: the step in progress was finished, and the run kept at `checkpoint`, from which
    it goes on."""

    def __init__(self, checkpoint: Path):
        super().__init__(f"stopped; everything up to here is kept in {checkpoint}")
        self.checkpoint = checkpoint

    def __reduce__(self):
        return type(self), (self.checkpoint,)


class StepLoss(NamedTuple):
    """What a step makes small, and what it is made of."""

    #: (1 + parts + 1,), without a graph: the loss, its parts without their weights, and the share of the
    #: step's images that they are of, below 1 where some could not be decoded
    values: Tensor
    #: the names of the parts, in that order
    parts: tuple[str, ...]

    def over_all(self, sums: Tensor) -> "StepLoss":
        """The means over the images that were seen, (1 + parts,), from what all processes agreed on."""
        # of no image all sums are 0; to ask whether it is so would be to wait for the device
        return self._replace(values=sums[:-1] / sums[-1].clamp(min=torch.finfo(sums.dtype).tiny))


class Training:
    """One run of `train`: its parts, prepared by Accelerate, and its position. kept: where the last good
    weights are."""

    def __init__(
        self, model: nn.Module, data: TrainingData, recipe: Recipe, loss: Loss, seed: int, cpu: bool
    ):
        set_seed(seed)
        self.data, self.recipe, self.loss, self.seed = data, recipe, loss, seed
        self.home = next(model.parameters()).device
        self.config = {"recipe": recipe.describe(), "seed": seed, "images": len(data), "model": _said(model)}
        self.config["loss"] = _name_of(loss)
        self.accelerator = start_processes(recipe, cpu)
        if self.accelerator.num_processes > 1:
            set_seed(seed, device_specific=True)  # other images on each process, so other stochastic depth
        self.given, model = model.train(), to_train(model.train(), self.accelerator)
        self.student = student_of(model)
        if recipe.checkpoint_activations:
            if not hasattr(self.student, "set_grad_checkpointing"):
                raise ValueError(
                    f"checkpoint_activations=True: a {type(self.student).__name__} has no"
                    " set_grad_checkpointing, which timm's ViTs have; accumulate= saves memory too"
                )
            self.checkpointed = getattr(self.student, "grad_checkpointing", False)
            self.student.set_grad_checkpointing(True)
        optimizer = make_optimizer(model, recipe)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, recipe))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.average = None if recipe.ema is None else EMA(self.model, recipe.ema)
        self.position = Position(torch.zeros(1, device=self.accelerator.device))
        self.kept: Path | None = None
        self.has_keeper = False

    @property
    def main(self) -> bool:
        """Whether this is the process that reports and writes."""
        return self.accelerator.is_main_process

    @property
    def lr(self) -> float:
        """The learning rate of the step to come; with layer-wise decay the highest, which is the head's."""
        return max(self.scheduler.get_last_lr())

    @property
    def plain(self) -> nn.Module:
        """The model without what Accelerate and torch.compile put around it."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def part(self) -> ShardSpec:
        """What this process asks of the pass in progress."""
        return ShardSpec(
            self.seed,
            self.position.epoch,
            self.recipe.batch_size,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.position.done,
            self.recipe.repeats,
        )

    def backward(self, batch: Batch) -> StepLoss:
        """Add up the gradient of the step's mean loss, part by part where the recipe accumulates, and return
        the loss."""
        device, parts = self.accelerator.device, self.recipe.accumulate
        images, targets = (part.to(device, non_blocking=True) for part in (batch.images, batch.targets))
        draw = (self.seed, self.position.step, self.accelerator.process_index)
        classes = getattr(self.student, "num_classes", None)
        images, targets = mixed(images, targets, self.recipe, classes, draw)
        total: dict[str, Tensor] = {}  # of the loss, "", and of what is noted of it
        for some, their in zip(images.tensor_split(parts), targets.tensor_split(parts)):
            weight = batch.weight * len(some) / len(images)
            if len(some) == 0:  # fewer images than parts: every process must do as many parts as the others
                some, their = images[:1], targets[:1]
            # gradients are averaged over the processes in the last part only
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast(), noted() as notes:
                    value = weight * self.loss(self.model, some, their, self.recipe)
                self.accelerator.backward(value * parts)  # Accelerate divides by their number
            # the parts of parts come last
            noted_parts = {name: weight * notes[name] for name in sorted(notes, key=lambda name: "/" in name)}
            for name, part in {"": value.detach(), **noted_parts}.items():
                total[name] = total.get(name, torch.zeros((), device=device)) + part
        share = torch.full((), batch.weight, device=device)
        return StepLoss(torch.stack([*total.values(), share]), tuple(total)[1:])

    def clip(self) -> Tensor:
        """Clip the gradient to the recipe's norm, and return the norm that it had, (1,)."""
        limit = math.inf if self.recipe.clip is None else self.recipe.clip
        norm = torch.as_tensor(self.accelerator.clip_grad_norm_(self.model.parameters(), limit))
        return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).reshape(1)

    def step(self, loss: StepLoss) -> None:
        """Change the weights, and count a step with that loss."""
        lr = self.lr  # of this step, not of the next
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.model)
        self.position.count(loss, lr)
        set_weight_decay(self.optimizer, self.position.step, self.recipe)
        if hasattr(self.plain, "follow"):  # a copy that moves after the step, as in `atfamily.contrast`
            self.plain.follow(self.position.step, self.recipe.steps)

    def measure(self, evaluate: Callable[[nn.Module], dict] | None) -> dict:
        """The metrics of the weights and, beginning with ``average_``, of the averaged ones; the same on all
        processes. None for no evaluation."""
        if evaluate is None:
            return {}
        with in_eval_mode(self.plain):  # and back, whatever `evaluate` does
            metrics = dict(evaluate(self.plain))
            if self.average is not None:
                with self.average.in_place_of(self.model):
                    metrics |= {f"average_{name}": value for name, value in evaluate(self.plain).items()}
        return self._of_main(metrics)

    def close(self, metrics: dict) -> None:
        """The pass is over: its entry, with `metrics` and, where images were corrupt, how many and which,
        goes into the history."""
        indices = self.corrupt()
        corrupt = {"corrupt": len(indices), "corrupt_indices": indices} if indices else {}
        self.position.close(self.position.entry() | metrics | corrupt)

    def so_far(self, evaluate: Callable[[nn.Module], dict] | None) -> list[dict]:
        """The history of a run that is stopped along the way, with an entry for the pass in progress and the
        metrics of this moment."""
        entries = [*self.position.history, *([self.position.entry()] if self.position.done else [])]
        return [*entries[:-1], entries[-1] | self.measure(evaluate)] if entries else []

    def due(self, keeper: CheckpointManager, metrics: dict) -> bool:
        """Whether a checkpoint is to be written now; only after an evaluation do the processes have to ask
        the main one."""
        if not metrics:
            return keeper.due(self.position.step, metrics)
        return self._of_main(keeper.due(self.position.step, metrics))

    def keep(self, keeper: CheckpointManager, metrics: dict) -> None:
        """Write a checkpoint from which `resume` goes on."""
        facts = self.position.facts() | {"corrupt": self.corrupt()}
        own, shared = {"total": self.position.total}, {}
        if self.average is not None:  # each process has its shards of it, or all have the same
            sharded = self.accelerator.distributed_type == DistributedType.FSDP
            (own if sharded else shared).update(self.average.tensors())
        self.kept = keeper.save(self.accelerator, facts, self.config, own, shared, metrics)

    def resume(self, keeper: CheckpointManager) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        self.has_keeper = True
        if isinstance(targets := getattr(self.data, "targets", None), Tensor):
            self.config["targets"] = digest_of_tensors({"targets": targets})
        # files can be seen otherwise elsewhere: the main process's answer counts
        self.config["data"] = self._of_main(identity_of(self.data) if self.main else None)
        if pairs := [part for part in self.given.modules() if isinstance(part, Pair)]:
            # here, and not for every run: reading a large teacher takes a second
            self.config["teachers"] = [digest_of_model(each) for pair in pairs for each in pair.teachers]
            self.config["normalisation"] = [
                pair.normalisation and pair.normalisation.describe() for pair in pairs
            ]
            self.config["views"] = [view.describe() for pair in pairs for view in pair.views]
        found = keeper.restore(self.accelerator, self.config)
        if found is None:
            return
        total = found.tensors["total"].to(self.accelerator.device)
        self.kept, self.position = found.path, Position(total, **found.facts)
        if self.average is not None:
            self.average.load(found.tensors)

    def corrupt(self) -> list[int]:
        """The indices of the images that could not be decoded in the pass in progress, on all processes
        together, also before the run was last taken up. Every process must call it."""
        if self.position.done == 0:
            return []  # a new pass begins with none
        return sorted({*self.position.corrupt, *gather_object(list(self.data.corrupt))})

    def images_of(self, batch: Batch) -> float:
        """How many images the step had over all processes."""
        return self.accelerator.num_processes * len(batch.indices) / batch.weight if batch.weight else 0.0

    def not_finite(self, value: float, norm: float, batch: Batch) -> NonFiniteLoss:
        """The error that says what is not finite, where, and what to do."""
        what, number = ("gradient", norm) if math.isfinite(value) else ("loss", value)
        ways = "" if self.has_keeper else ": out= keeps one after each pass, keeper= more often"
        step, kept = self.position.step, self.kept or f"none was kept yet{ways}"
        return NonFiniteLoss(
            f"the {what} is {number} at step {step} (lr {self.lr:.3g}); last good checkpoint: {kept}. "
            "Lower lr, clip harder, or use mixed_precision='no'. Or one of the step's images is to blame: "
            f"they are those at {batch.indices} of the data.",
            step,
            batch.indices,
            self.kept,
        )

    def _of_main(self, value):
        """The main process's value, on every process."""
        return value if self.accelerator.num_processes == 1 else broadcast_object_list([value])[0]

    def finish(self, average_into: nn.Module | None) -> None:
        """Give the averaged weights away if they are asked for, and leave the model as a plain one where it
        came from."""
        if average_into is not None:
            with self.average.in_place_of(self.model):
                prefix = "" if self.student is self.plain else "student."
                weights = whole_weights(self.plain)
                own = {n.removeprefix(prefix): value for n, value in weights.items() if n.startswith(prefix)}
                average_into.load_state_dict(own)
        self.whole()
        self.put_back()

    @contextmanager
    def put_back_on_error(self) -> Iterator[None]:
        """Within it, an error leaves the caller's model as a plain one where it came from, too."""
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # a device that failed gives nothing back; the first error counts
                self.put_back()
            raise

    def put_back(self) -> None:
        """Take what this run put around and into the caller's model off again."""
        if self.given is self.plain:
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
            # Accelerate's autocast around the class's own forward, of no use after training
            vars(self.given).pop("forward", None)
        self.given.to(self.home)
        if self.recipe.checkpoint_activations:
            self.student.set_grad_checkpointing(self.checkpointed)

    def whole(self) -> nn.Module:
        """The caller's model with the weights of this moment; where they are divided, every process must call
        it."""
        if self.given is not self.plain:  # what is trained is a copy
            self.given.load_state_dict(whole_weights(self.plain))
        return self.given


def _name_of(loss: Callable) -> str:
    """A loss by its name; a `partial` with the plain values that it was given, since others make another."""
    if not isinstance(loss, partial):
        return getattr(loss, "__qualname__", type(loss).__name__)

    def told(value: object) -> str:
        return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__

    given = [*map(told, loss.args), *(f"{name}={told(value)}" for name, value in loss.keywords.items())]
    return f"{_name_of(loss.func)}({', '.join(given)})"


def _said(model: nn.Module) -> dict:
    """What is trained, as a checkpoint says it: a pair with its plan."""
    plan = getattr(model, "plan", None)
    return {"kind": type(model).__name__} | ({"plan": plan.describe()} if isinstance(plan, Plan) else {})


# --- Where a training run is: its steps and its history ---


@dataclass
class Position:
    """Steps and passes that are done."""

    #: (1 + parts,) of the pass in progress: the sums over its steps of the loss, and of its parts
    total: Tensor
    #: steps done in all
    step: int = 0
    #: passes done
    epoch: int = 0
    #: steps done of the pass in progress
    done: int = 0
    #: the rate of the last step
    lr: float = 0.0
    #: the names of the parts in `total`: those that every step of the pass has
    parts: list[str] = field(default_factory=list)
    #: the images of the pass that could not be decoded before the run was last taken up
    corrupt: list[int] = field(default_factory=list)
    #: one entry per pass that was completed
    history: list[dict] = field(default_factory=list)

    def count(self, loss: StepLoss, lr: float) -> None:
        """A step was done, at that rate."""
        values, parts = loss.values, list(loss.parts)
        if self.done == 0:
            self.total, self.parts = torch.zeros_like(values), parts
        elif parts != self.parts:  # what only some steps have, has no mean over the pass
            self.total, self.parts, values = self.total.reshape(-1)[:1], [], values[:1]
        self.total, self.step, self.done, self.lr = self.total + values, self.step + 1, self.done + 1, lr

    def entry(self) -> dict:
        """What the history says about the pass in progress: of the loss and its parts, means over its
        steps."""
        loss, *parts = (self.total.reshape(-1) / self.done).tolist()
        means = {"loss": loss, **dict(zip(self.parts, parts))}
        return {"epoch": self.epoch + 1, "step": self.step, **means, "lr": self.lr}

    def close(self, entry: dict) -> None:
        """The pass is over."""
        self.history.append(entry)
        self.total, self.parts = torch.zeros(1, device=self.total.device), []
        self.epoch, self.done, self.corrupt = self.epoch + 1, 0, []

    def facts(self) -> dict:
        """The position as JSON values; `total` is not among them, being a tensor."""
        return {name: value for name, value in vars(self).items() if name != "total"}
