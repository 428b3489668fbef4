"""What changes the weights in a step: the optimiser, the schedule of its rate, and the running average."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info
from torch import Tensor, nn

from atlib.pair import student_of
from atlib.processes import divide
from atlib.recipe import Recipe


def schedule(step: int, recipe: Recipe) -> float:
    """The factor on the peak lr at `step` (from 0): linear warm-up, then a half cosine down to min_lr, or a
    tenth after each of the recipe's milestones."""
    warmup = round(recipe.warmup * recipe.steps)
    if step < warmup:
        return (step + 1) / warmup
    if recipe.milestones is not None:
        return 0.1 ** sum(step >= round(share * recipe.steps) for share in recipe.milestones)
    floor = recipe.min_lr / recipe.lr
    done = (step - warmup) / max(1, recipe.steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def set_weight_decay(optimizer: torch.optim.Optimizer, step: int, recipe: Recipe) -> None:
    """Let the groups that are decayed have the decay of `step` (from 0): the recipe's own, or on a half
    cosine from that to its `weight_decay_end`."""
    if recipe.weight_decay_end is None:
        return
    low, high = recipe.weight_decay_end, recipe.weight_decay
    decay = low + (high - low) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    for group in optimizer.param_groups:
        if group["weight_decay"] > 0:
            group["weight_decay"] = decay


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimiser over the student's weights, grouped by timm: no decay on biases, norms,
    positions and tokens; lr by layer. A departure from MAE's published code (arXiv 2111.06377): with layer
    decay timm counts the final norm to the last block, MAE's code to the head."""
    if recipe.base_lr is not None:
        raise ValueError(f"base_lr={recipe.base_lr!r} is a rate per 256 images: take recipe.on(images)")
    trained = student_of(model)
    betas = {"betas": recipe.betas} if get_optimizer_info(recipe.optimizer).has_betas else {}
    optimizer = create_optimizer_v2(
        trained,
        opt=recipe.optimizer,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay,
        **betas,
    )
    in_student = {id(parameter) for parameter in trained.parameters()}
    beside = [p for p in model.parameters() if id(p) not in in_student and p.requires_grad]
    # a projector or a head mapping: thrown away after training, so no layer decay and no special groups
    if beside:
        optimizer.add_param_group({"params": beside, "weight_decay": recipe.weight_decay})
    for group in optimizer.param_groups:  # timm leaves the factor of layer-wise decay to its own schedulers
        group["lr"] = recipe.lr * group.get("lr_scale", 1.0)
    return optimizer


# --- The running average of the weights (EMA), which many recipes evaluate in place of the last ones ---


class EMA:
    """average ← decay · average + (1 - decay) · weights after every step, starting from the first weights.

    It holds one tensor for each parameter of `model`, where and as the parameter is (a shard of it, where the
    model is sharded). Source: Polyak and Juditsky 1992; with decay 0.9999 in the recipes of DeiT (arXiv
    2012.12877) and of the paper (arXiv 2411.09702).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: nn.Module) -> None:
        """Take in the weights as they are now."""
        with torch.no_grad():
            torch._foreach_lerp_(self.values, list(model.parameters()), 1 - self.decay)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Within the block `model` has the averaged weights; afterwards its own again, bit for bit."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; of a sharded model this process's shards."""
        return {f"average.{index}": _local(value) for index, value in enumerate(self.values)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` returned."""
        for index, value in enumerate(self.values):
            _local(value).copy_(tensors[f"average.{index}"])

    def _swap(self, model: nn.Module) -> None:
        divide(model)
        with torch.no_grad():
            for value, parameter in zip(self.values, model.parameters(), strict=True):
                weights = parameter.detach().clone()
                parameter.copy_(value)
                value.copy_(weights)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value
