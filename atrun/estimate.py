"""What a run would be and cost, without training: parameter groups, schedule, memory, time, FLOPs."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from atfamily.measures.accounting import (
    Memory,
    copy,
    distill,
    feature_distillation,
    fine_tuning,
    shape_of,
    step_memory,
    teacher,
)
from atlib.attention_transfer import AttentionTransfer
from atlib.baselines import FeatureDistillation, LogitDistillation, StoredMaps
from atlib.loading import Batch, ShardSpec, steps_per_epoch
from atlib.optim import make_optimizer, schedule
from atlib.pair import IMAGENET
from atlib.plan import Plan
from atlib.recipe import Recipe
from atlib.train import train
from atlib.vit import VITS
from atrun.build import (
    SMALL_SCALE,
    feature_layers,
    image_size,
    looks_of,
    loss_of,
    plan_for,
    teacher_architecture,
    with_detector,
)
from atrun.config import RunConfig, built_for
from atrun.method import Method
from atrun.parts import Contrast, Detect
from atrun.teachers.build import headless, on_meta

# --- Time a few training steps on random numbers, and say from them how long a step of any size takes ---

STEPS = 4  # timed; the first is thrown away
SAFE_SHARE = 0.6  # of the memory that is free
EFFICIENCY = 0.4  # of a matrix product's speed that a step reaches: a guess, which chooses how much is timed


class Timing(NamedTuple):
    """Seconds of a step, `measured` with two `batches` (the same twice: the whole one), `on` what device."""

    batches: tuple[int, int]
    measured: tuple[float, float]
    on: str

    @property
    def whole(self) -> bool:
        """Whether a step of the run's own size was timed."""
        return self.batches[0] == self.batches[1]

    def seconds(self, batch: int) -> float:
        """Seconds of a step of `batch` images: measured, or on the line through the two that were."""
        (small, large), (first, second) = self.batches, self.measured
        if self.whole:
            return second * batch / large
        # noise must not make images free
        per_image = max((second - first) / (large - small), 0.5 * second / large)
        return second + per_image * (batch - large)


class RandomImages:
    """A data set of noise that notes when each step is asked for."""

    def __init__(self, shape: tuple[int, ...], targets: Callable[[int], Tensor], batch: int, steps: int):
        self.shape, self.target_of, self.batch, self.steps = shape, targets, batch, steps
        self.targets = targets(1)
        self.corrupt: dict[int, str] = {}
        self.times: list[float] = []

    def __len__(self) -> int:
        return self.batch * self.steps

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        images, targets = torch.randn(self.batch, *self.shape), self.target_of(self.batch)
        for _ in range(part.start, self.steps):
            self._note()
            yield Batch(images, targets, list(range(self.batch)), 1.0)
        self._note()

    def _note(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a GPU's step is over later than the call that asked for it
        self.times.append(time.perf_counter())


def time_steps(
    config: RunConfig,
    make: Callable[[], nn.Module],
    outputs: int,
    flops: int | None,
    at_rest: int,
    per_image: int,
    limit: float,
) -> Timing | None:
    """Time steps of the run's recipe with batches that fit into memory and into about `limit` seconds; None
    where one image does not.

    make: builds the model to train. flops: of one image, None where not known (then a step of two images is
    tried first). at_rest, per_image: bytes that the model takes between steps, and in a step for each image.
    """
    room, whole = SAFE_SHARE * free_memory() - at_rest, config.recipe.batch_size
    few = fewest(config, outputs)
    if room < 0:
        return None
    model = None
    if flops is None:
        model = make()
        in_time = max(2, int(limit / (STEPS * _step(config, model, outputs, 2))))
    else:
        in_time = int(limit * EFFICIENCY * speed() / (2 * STEPS * flops))
    parts = config.recipe.accumulate if in_time >= whole else 1
    batch = min(whole, in_time, int(room / max(per_image, 1)) * parts)
    if batch >= 1 and model is None:
        model = make()
    while batch >= 1:
        batches = (whole, whole) if batch == whole else (max(few, batch // 2), max(few + 1, batch))
        try:
            measured = [_step(config, model, outputs, size) for size in dict.fromkeys(batches)]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            batch //= 2
            continue
        cpu = f"CPU, {torch.get_num_threads()} threads"
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
        return Timing(batches, (measured[0], measured[-1]), where)
    return None


def speed() -> float:
    """FLOPs a second of a large matrix product on this machine, float32."""
    device, size = ("cuda", 8192) if torch.cuda.is_available() else ("cpu", 1024)
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        float((left @ right)[0, 0])  # reading a number waits for a GPU
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def fewest(config: RunConfig, outputs: int) -> int:
    """The fewest images of a step: two for other networks than ViTs, whose batch norm wants them where one
    pixel a channel is left."""
    return 1 if isinstance(config.skeleton(outputs), VITS) else 2


def free_memory() -> float:
    """Bytes free on the GPU if there is one, else in this machine; infinite where the system does not say."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return float("inf")


def _step(config: RunConfig, model: nn.Module, outputs: int, batch: int) -> float:
    """Seconds of one step of `batch` images: the median of a few, the first left out."""
    accumulate = config.recipe.accumulate if batch == config.recipe.batch_size else 1
    recipe = replace(config.recipe, steps=STEPS, batch_size=batch, accumulate=accumulate, repeats=1)
    size = _size(config, outputs)
    views = (len(looks_of(config, SMALL_SCALE)),) if isinstance(config.task, Contrast) else ()
    images = RandomImages((*views, 3, *size), lambda count: made_up(config, outputs, count), batch, STEPS)
    train(model, images, recipe, loss=loss_of(config), progress=None)
    return statistics.median(after - before for before, after in zip(images.times[1:], images.times[2:]))


def made_up(config: RunConfig, outputs: int, count: int):
    """Targets of the kind that a method learns, without meaning: classes, numbers, or objects, seven in an
    image, as many as COCO has on average."""
    if isinstance(config.task, Detect):
        return _made_up_objects(config, outputs, count)
    return torch.randint(max(1, outputs), (count,))  # without labels there are no classes


def _made_up_objects(config: RunConfig, classes: int, count: int):
    from atfamily.detection.objects import ObjectBatch, Objects

    height, width = config.skeleton(classes).patch_embed.img_size
    down, across = torch.arange(height)[:, None], torch.arange(width)
    images = []
    for _ in range(count):
        corner = torch.rand(7, 2) * torch.tensor([0.7 * width, 0.7 * height])
        boxes = torch.cat([corner, corner + (0.05 + 0.25 * torch.rand(7, 2)) * min(height, width)], dim=1)
        left, top, right, bottom = boxes.T[:, :, None, None]
        masks = (across >= left) & (across < right) & (down >= top) & (down < bottom)
        labels = torch.randint(classes, (7,))
        images.append(Objects(boxes, labels, masks, torch.zeros(7, dtype=torch.bool)))
    return ObjectBatch(images)


class Group(NamedTuple):
    """Parameters alike but for their rate. numbers: that are trained; factors: on lr, least and largest."""

    weight_decay: float
    tensors: int
    numbers: int
    factors: tuple[float, float]


class Estimate(NamedTuple):
    """What `estimate` found. moments: {when: (step, lr of the smallest factor, lr of the largest)}; flops: of
    one image, None where they are not counted; memory: of a step; seconds: of one step on this machine, None
    where not known; timing: what was measured for that, None where it comes from FLOPs; on_vit: numbers in
    the pyramid and heads of a detector, 0 of others."""

    config: RunConfig
    count: int
    skeleton: nn.Module
    groups: list[Group]
    moments: dict[str, tuple[int, float, float]]
    flops: int | None
    memory: Memory
    seconds: float | None
    timing: Timing | None
    on_vit: int = 0

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
    """What the run would be on `count` training images with so many outputs. No weights are read, nothing is
    trained.

    A few steps are timed on random numbers with freshly initialised models, in about `limit` seconds; where
    that is too short for one image, the time comes from FLOPs and the speed of a matrix product here. The
    teacher is taken to be of the student's architecture.
    """
    config, skeleton = config.on(count), config.skeleton(outputs)
    with torch.device("meta"):
        model = assembled(config, outputs)
    groups = parameter_groups(model, config)
    detects = isinstance(config.task, Detect)
    flops = flops_of_detector(config, outputs) if detects else flops_of(config, skeleton)
    memory = memory_of(config, outputs)
    at_rest, per_image = memory.total - memory.saved, memory.saved // part_of(config)
    make = partial(assembled, config, outputs)
    timing = time_steps(config, make, outputs, flops, at_rest, per_image, limit)
    seconds = None
    if timing is not None:
        seconds = timing.seconds(config.recipe.batch_size)
    elif flops is not None:
        seconds = flops * config.recipe.batch_size / speed()
    on_vit = 0
    if isinstance(config.task, Detect):
        of_vit = sum(weight.numel() for weight in model.backbone.parameters())
        on_vit = sum(weight.numel() for weight in model.parameters()) - of_vit
    when = moments(config, groups)
    return Estimate(config, count, skeleton, groups, when, flops, memory, seconds, timing, on_vit)


def rough_hours(config: RunConfig, count: int, outputs: int) -> float:
    """Hours of a run on `count` training images, from its FLOPs and the speed of a matrix product here; 0
    where they are not counted. Takes less than a second."""
    if isinstance(config.task, Detect):
        return 0.0
    flops, recipe = flops_of(config, config.skeleton(outputs)), config.on(count).recipe
    return (flops or 0) * recipe.batch_size * recipe.steps / (EFFICIENCY * speed() * 3600)


def assembled(config: RunConfig, outputs: int) -> nn.Module:
    """The model to train with first weights throughout, its teacher's too."""
    student = config.architecture(outputs).build_classifier()
    if config.method.pretrains and not config.method.is_unlabelled:
        twin = config.architecture(outputs).build() if config.method.needs_teacher else None
        return config.pretext(student, twin, IMAGENET)
    match config.method:
        case Method.COPY | Method.DISTILL | Method.DISTILL_UNLABELLED:
            twin = _twin(config, outputs)
            plan = plan_for(config, twin, student)
            student = AttentionTransfer(twin, student, plan, normalisation=IMAGENET)
        case Method.FEATURES | Method.FEATURES_UNLABELLED:
            twin = _twin(config, outputs)
            student = FeatureDistillation(twin, student, feature_layers(config), normalisation=IMAGENET)
        case Method.LOGITS | Method.HARD_LOGITS:
            twin = teacher_architecture(config).build_classifier()
            student = LogitDistillation(twin, student, normalisation=IMAGENET)
        case Method.MEAN_MAPS:
            tokens = student.num_prefix_tokens + student.patch_embed.num_patches
            heads = (block.attn.num_heads for block in student.blocks)
            student = StoredMaps(
                student, [torch.full((1, number, tokens, tokens), 1 / tokens) for number in heads]
            )
    return with_detector(config, student, outputs)


def _twin(config: RunConfig, outputs: int) -> nn.Module:
    """A model of the teacher's sizes, as far as they are known without its weights, else of the student's."""
    native = teacher_architecture(config)
    if native is None:
        return config.architecture(outputs).build()
    return headless(native, config.teacher_image_size or image_size(config)).build()


def parameter_groups(model: nn.Module, config: RunConfig) -> list[Group]:
    """The optimiser's groups, one line for each weight decay."""
    by_decay: dict[float, list[dict]] = {}
    for group in make_optimizer(model, config.recipe).param_groups:
        by_decay.setdefault(group["weight_decay"], []).append(group)
    by_line = []
    for decay, groups in sorted(by_decay.items(), reverse=True):
        tensors = [weight for group in groups for weight in group["params"]]
        factors = [group["lr"] / config.recipe.lr for group in groups]
        numbers = sum(tensor.numel() for tensor in tensors)
        by_line.append(Group(decay, len(tensors), numbers, (min(factors), max(factors))))
    return by_line


def moments(config: RunConfig, groups: list[Group]) -> dict[str, tuple[int, float, float]]:
    """Learning rates along the schedule: {when: (step, the smallest group's, the largest group's)}."""
    recipe = config.recipe
    warm = round(recipe.warmup * recipe.steps)
    smallest, largest = min(group.factors[0] for group in groups), max(group.factors[1] for group in groups)
    when = {"first step": 0, "end of warm-up": max(0, warm - 1)}
    if recipe.milestones is None:
        when["middle"] = recipe.steps // 2
    for number, share in enumerate(recipe.milestones or (), 1):
        when[f"milestone {number}"] = min(round(share * recipe.steps), recipe.steps - 1)
    when["last step"] = recipe.steps - 1
    lr = {name: recipe.lr * schedule(step, recipe) for name, step in when.items()}
    return {name: (step, smallest * lr[name], largest * lr[name]) for name, step in when.items()}


def flops_of(config: RunConfig, skeleton: nn.Module) -> int | None:
    """The fewest FLOPs that training takes an image (`atfamily.measures.accounting`); None where they are not
    counted: other kinds of ViT, pre-training without labels, mean maps, logits, transfers of queries, keys or
    values."""
    method = config.method
    uncounted = method is Method.MEAN_MAPS or method.reads_logits or not isinstance(skeleton, VITS)
    if uncounted or method.pretrains and not method.is_unlabelled:
        return None
    if config.plan is not None and config.plan.what != "map":
        return None
    try:
        shape = shape_of(skeleton)
    except ValueError:
        return None
    features = method in (Method.FEATURES, Method.FEATURES_UNLABELLED)
    if config.plan is None and not features:
        return fine_tuning(shape)
    of_teacher = shape
    if (native := teacher_architecture(config)) is not None:
        size = config.teacher_image_size or image_size(config)
        try:
            of_teacher = shape_of(on_meta(headless(native, size)))
        except ValueError:
            return None
    plan = config.plan or Plan(layers=feature_layers(config))
    pairs = plan.pairs_of(shape.depth, None)
    last = 1 + max(layer for _, layer in pairs)  # the teacher runs up to it, whichever layers are transferred
    if features:
        projectors = 0 if shape.width == of_teacher.width else len(pairs)
        return feature_distillation(shape, last, of_teacher, projectors)
    flops_of_transfer = copy if method is Method.COPY else distill
    of_student = flops_of_transfer(shape, len(pairs)) - teacher(shape, len(pairs))
    return of_student + teacher(of_teacher, last)


def _size(config: RunConfig, outputs: int) -> tuple[int, int]:
    """Height and width of a run's images."""
    return built_for(config.skeleton(outputs)) or (image_size(config),) * 2


def flops_of_detector(config: RunConfig, outputs: int) -> int:
    """FLOPs of a training step of one image with made-up objects, as PyTorch counts them while it runs:
    convolutions and matrix products, forward and backward. Of boxes that a head looks into, as many as it
    finds then; a trained one finds more."""
    model = assembled(config, outputs).train()
    size = config.skeleton(outputs).patch_embed.img_size
    objects = made_up(config, outputs, 1)
    # PyTorch does not count the in-place form of baddbmm, which the map-free loss uses
    also = {
        torch.ops.aten.baddbmm_: lambda onto, left, right, **_: 2 * left[0] * left[1] * left[2] * right[2]
    }
    with FlopCounterMode(display=False, custom_mapping=also) as counter:
        loss_of(config)(model, torch.randn(1, 3, *size), objects, config.recipe).backward()
    return counter.get_total_flops()


def memory_of(config: RunConfig, outputs: int) -> Memory:
    """The memory of one step on one device, in float32, for one of the `accumulate` parts of the batch;
    counted on shapes, nothing is allocated.

    What is kept for the backward pass is linear in the batch: counted for one image and for two. It is 0 for
    pre-training without labels, where it is not counted. Of a detector, whose shapes hang on what it finds,
    it is measured on an image with made-up objects.
    """
    size = _size(config, outputs)
    if isinstance(config.task, Detect):
        return _with_average(config, _memory_of_detector(config, outputs, size))
    with torch.device("meta"):
        model = assembled(config, outputs)
    few = fewest(config, outputs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()  # with its teacher, which moves along
        if config.method.pretrains:
            weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
            one = two = Memory(weights, weights, 2 * weights, 0, 0)
        else:
            one, two = (step_memory(model, torch.empty(images, 3, *size)) for images in (few, few + 1))
    saved = one.saved + (part_of(config) - few) * (two.saved - one.saved)
    return _with_average(config, one._replace(saved=saved))


def _with_average(config: RunConfig, memory: Memory) -> Memory:
    """What the recipe's average and its own optimiser take, in place of AdamW, which has two moments."""
    averaged = memory.weights if config.recipe.ema is not None else 0
    moments = int(memory.optimizer / 2 * state_per_weight(config.recipe))
    return memory._replace(weights=memory.weights + averaged, optimizer=moments)


def _memory_of_detector(config: RunConfig, outputs: int, size: tuple[int, int]) -> Memory:
    """From one forward pass of one image, taken to be linear in the images."""
    model = assembled(config, outputs).train()
    objects = made_up(config, outputs, 1)
    one = step_memory(
        model,
        torch.randn(1, 3, *size),
        lambda model, images: loss_of(config)(model, images, objects, config.recipe),
    )
    return one._replace(saved=part_of(config) * one.saved)


def state_per_weight(recipe: Recipe, width: int = 256) -> float:
    """Numbers of float32 size that the optimiser keeps for each weight, between steps: 2 for AdamW. Counted
    on a layer of `width` x `width` weights."""
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        layer = torch.nn.Linear(width, width, bias=False)
        optimizer = make_optimizer(layer, replace(recipe, base_lr=None))
        layer(torch.ones(1, width)).sum().backward()
        optimizer.step()
    kept = tree_leaves(list(optimizer.state.values()))
    # What has no dimension counts steps, and does not grow with the model.
    tensors = [value for value in kept if isinstance(value, Tensor) and value.ndim]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / (4 * width * width)


def part_of(config: RunConfig) -> int:
    """Images that are computed at one time on one device."""
    return -(-config.recipe.batch_size // config.recipe.accumulate)
