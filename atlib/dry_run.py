"""What a run would be and cost, without training: model, parameter groups, schedule, steps, memory, time, FLOPs."""

from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from atlib.analysis.accounting import Memory, copy, distill, fine_tuning, shape_of, step_memory
from atlib.feed import steps_per_epoch
from atlib.measure_steps import Timing, speed, time_steps
from atlib.pretrain import MaskedAutoencoder
from atlib.recipes import PLAIN, Recipe, try_optimizer
from atlib.run import RunConfig
from atlib.train import make_optimizer, schedule
from atlib.transfer import AttentionTransfer


class Group(NamedTuple):
    """Parameters that are treated alike but for their learning rate. numbers: trained numbers; factors: on lr, the smallest and the largest."""

    weight_decay: float
    tensors: int
    numbers: int
    factors: tuple[float, float]


class Estimate(NamedTuple):
    """What `estimate` found. moments: {when: (step, lr of the smallest factor, lr of the largest)}; flops: of one image, None where they are not
    counted; memory: of a step; seconds: of one step on this machine, None where not known; timing: what was measured for that, None where it comes
    from FLOPs."""

    config: RunConfig
    count: int
    skeleton: nn.Module
    groups: list[Group]
    moments: dict[str, tuple[int, float, float]]
    flops: int | None
    memory: Memory
    seconds: float | None
    timing: Timing | None

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.count, self.config.recipe.batch_size)

    @property
    def epochs(self) -> float:
        return self.config.recipe.steps / self.steps_per_epoch

    @property
    def hours(self) -> float | None:
        """Of the whole run on one device such as this machine's."""
        return None if self.seconds is None else self.config.recipe.steps * self.seconds / 3600


def estimate(config: RunConfig, count: int, outputs: int, limit: float = 20.0) -> Estimate:
    """What the run would be on `count` training images with so many outputs. No weights are read, nothing is trained.

    A few steps are timed on random numbers with freshly initialised models, in about `limit` seconds; where that is too short for one
    image, the time comes from FLOPs and the speed of a matrix product here. The teacher is taken to be of the student's architecture.
    """
    skeleton = config.skeleton(outputs)
    with torch.device("meta"):
        model = assembled(config, outputs)
    groups, flops, memory = parameter_groups(model, config), flops_of(config, skeleton), memory_of(config, outputs)
    each = memory.saved // part_of(config)
    timing = time_steps(config, lambda: assembled(config, outputs), outputs, flops, memory.total - memory.saved, each, limit)
    seconds = None
    if timing is not None:
        seconds = timing.seconds(config.recipe.batch_size)
    elif flops is not None:
        seconds = flops * config.recipe.batch_size / speed()
    return Estimate(config, count, skeleton, groups, moments(config, groups), flops, memory, seconds, timing)


def assembled(config: RunConfig, outputs: int) -> nn.Module:
    """The model to train with first weights throughout, its teacher's too."""
    student = config.architecture(outputs).build()
    if config.method == "mae":
        return MaskedAutoencoder(student, config.mask_ratio, config.decoder_width)
    if config.plan is None:
        return student
    return AttentionTransfer(config.architecture(outputs).build(), student, config.plan)


def parameter_groups(model: nn.Module, config: RunConfig) -> list[Group]:
    """The optimiser's groups, one line for each weight decay."""
    by_decay: dict[float, list[dict]] = {}
    for group in make_optimizer(model, config.recipe).param_groups:
        by_decay.setdefault(group["weight_decay"], []).append(group)
    return [Group(decay, sum(len(group["params"]) for group in groups), sum(each.numel() for group in groups for each in group["params"]),
                  (min(group["lr"] for group in groups) / config.recipe.lr, max(group["lr"] for group in groups) / config.recipe.lr))
            for decay, groups in sorted(by_decay.items(), reverse=True)]


def moments(config: RunConfig, groups: list[Group]) -> dict[str, tuple[int, float, float]]:
    """Learning rates along the schedule: {when: (step, the smallest group's, the largest group's)}."""
    recipe = config.recipe
    warm = round(recipe.warmup * recipe.steps)
    smallest, largest = min(group.factors[0] for group in groups), max(group.factors[1] for group in groups)
    when = {"first step": 0, "end of warm-up": max(0, warm - 1), "middle": recipe.steps // 2, "last step": recipe.steps - 1}
    lr = {name: recipe.lr * schedule(step, recipe) for name, step in when.items()}
    return {name: (step, smallest * lr[name], largest * lr[name]) for name, step in when.items()}


def flops_of(config: RunConfig, skeleton: nn.Module) -> int | None:
    """The fewest FLOPs that training takes an image (`atlib.analysis.accounting`); None where they are not counted: other kinds of ViT, masked
    auto-encoding, and transfers of something else than maps."""
    try:
        shape = shape_of(skeleton)
    except ValueError:
        return None
    if config.method == "mae" or config.plan is not None and config.plan.what != "map":
        return None
    if config.plan is None:
        return fine_tuning(shape)
    return {"copy": copy, "distill": distill}[config.method](shape, len(config.plan.layers_of(shape.depth)))


def memory_of(config: RunConfig, outputs: int) -> Memory:
    """The memory of one step on one device, in float32, for one of the `accumulate` parts of the batch; counted on shapes, nothing is allocated.

    What is kept for the backward pass is linear in the batch: counted for one image and for two. It is 0 for masked auto-encoding, where it is
    not counted.
    """
    size = config.skeleton(outputs).patch_embed.img_size
    with torch.device("meta"):
        model = assembled(config, outputs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()  # with its teacher, which moves along
        if config.method == "mae":
            weights = sum(each.numel() * each.element_size() for each in model.parameters())
            one = two = Memory(weights, weights, 2 * weights, 0, 0)
        else:
            one, two = (step_memory(model, torch.empty(images, 3, *size)) for images in (1, 2))
    averaged = one.weights if config.recipe.ema is not None else 0
    moments = int(one.optimizer / 2 * state_per_weight(config.recipe))  # counted for AdamW, which has two
    return one._replace(saved=one.saved + (part_of(config) - 1) * (two.saved - one.saved), weights=one.weights + averaged, optimizer=moments)


def state_per_weight(recipe: Recipe, width: int = 256) -> float:
    """Numbers of float32 size that the optimiser keeps for each weight, between steps: 2 for AdamW. Counted on a layer of `width` x `width` weights."""
    if recipe.optimizer in PLAIN:
        return 2.0
    state = try_optimizer(recipe.optimizer, recipe.betas, width).state
    kept = [each for of_weight in state.values() for value in of_weight.values() for each in (value if isinstance(value, (list, tuple)) else [value])]
    # What has no dimension counts steps, and does not grow with the model.
    return sum(each.numel() * each.element_size() for each in kept if isinstance(each, torch.Tensor) and each.ndim) / (4 * width * width)


def part_of(config: RunConfig) -> int:
    """Images that are computed at one time on one device."""
    return -(-config.recipe.batch_size // config.recipe.accumulate)
