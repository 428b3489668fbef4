"""What a run would be and cost, without training: parameter groups, schedule, memory, time, FLOPs."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from atfamily.detection.objects import ObjectBatch, Objects
from atfamily.measures import accounting
from atfamily.measures.accounting import Memory, shape_of, step_memory
from atlib.baselines import StoredMaps
from atlib.cast_once import CastOnce
from atlib.loading import Batch, ShardSpec, steps_per_epoch
from atlib.pair import IMAGENET
from atlib.plan import Plan
from atlib.processes import processes_asked, runs_on_gpu
from atlib.recipe import Recipe
from atlib.train import make_optimizer, schedule, train
from atlib.vit import VITS, without_weights
from atrun.build import image_size, joined, looks_of, loss_of, teacher_architecture, with_detector
from atrun.config import UNTRAINED, RunConfig, built_for
from atrun.method import Method
from atrun.runner import free_memory
from atrun.teachers.build import headless, on_meta

STEPS = 4  # timed; the first is thrown away
LIMIT = 20  # seconds that they may take in all
SAFE_SHARE = 0.6  # of the memory that is free
EFFICIENCY = 0.4  # of a matrix product's speed that a step reaches: a guess
# Of Copy and of Distill with ViT-L on ImageNet-1k: the cost table of arXiv 2411.09702.
PAPER_GPU_HOURS, PAPER_EPOCHS = 2735, 100
PAPER_RECIPES = ("copy-vit-large", "distill-vit-large")
GIB = 2**30


class Group(NamedTuple):
    """Parameters alike but for their rate. numbers: that are trained; factors: on lr, least and largest."""

    weight_decay: float
    tensors: int
    numbers: int
    factors: tuple[float, float]


class Estimate(NamedTuple):
    """What `estimate` found. moments: {when: (step, lr of the smallest factor, lr of the largest)}; flops: of
    one image, None where not counted; memory, seconds: of a step, the second None where not known; timed: the
    images of the steps that were timed, None where seconds come from FLOPs."""

    config: RunConfig
    count: int
    skeleton: nn.Module
    groups: list[Group]
    moments: dict[str, tuple[int, float, float]]
    flops: int | None
    memory: Memory
    seconds: float | None
    timed: int | None
    processes: int = 1

    @property
    def images(self) -> int:
        """Of a step, on one device."""
        return -(-self.config.recipe.batch_size // self.processes)

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.count, self.config.recipe.batch_size)


def estimate(config: RunConfig, count: int, outputs: int, processes: int = 1) -> Estimate:
    """What the run would be on `count` images, divided among processes with a device each: a few steps are
    timed on random numbers, in some `LIMIT` seconds; where that is too short, the time comes from FLOPs."""
    config, skeleton = config.on(count), config.skeleton(outputs)
    with without_weights():
        model = assembled(config, outputs)
    groups = parameter_groups(model, config)
    flops = flops_of_detector(config, outputs) if config.detects else flops_of(config, skeleton)
    batch = -(-config.recipe.batch_size // processes)  # of one device
    share = replace(config, recipe=replace(config.recipe, batch_size=batch))
    memory = memory_of(share, outputs)
    timed, seconds = time_steps(share, outputs, flops, memory, LIMIT) or (None, None)
    if timed is not None:
        seconds = seconds * batch / timed
    elif flops is not None:
        seconds = flops * batch / speed()
    when = moments(config, groups)
    return Estimate(config, count, skeleton, groups, when, flops, memory, seconds, timed, processes)


def assembled(config: RunConfig, outputs: int) -> nn.Module:
    """The model to train with first weights throughout, its teacher's too."""
    student, teacher = config.architecture(outputs).build_classifier(), None
    if config.method is Method.MEAN_MAPS:
        tokens = student.num_prefix_tokens + student.patch_embed.num_patches
        heads = (block.attn.num_heads for block in student.blocks)
        return StoredMaps(student, [torch.full((1, h, tokens, tokens), 1 / tokens) for h in heads])
    if config.method is Method.FINE_TUNE:
        return with_detector(config, student, outputs)
    if config.method.reads_logits:
        teacher = teacher_architecture(config).build_classifier()
    elif config.method.needs_teacher:  # of its sizes, as far as they are known, else of the student's
        teacher = config.architecture(outputs)
        if (native := teacher_architecture(config)) is not None:
            teacher = headless(native, config.teacher_image_size or image_size(config))
        teacher = teacher.build()
    return with_detector(config, joined(config, student, teacher, IMAGENET), outputs)


def parameter_groups(model: nn.Module, config: RunConfig) -> list[Group]:
    """The optimiser's groups, one line for each weight decay."""
    groups, lines = make_optimizer(model, config.recipe).param_groups, []
    for decay in sorted({group["weight_decay"] for group in groups}, reverse=True):
        alike = [group for group in groups if group["weight_decay"] == decay]
        tensors = [weight for group in alike for weight in group["params"]]
        factors = [group["lr"] / config.recipe.lr for group in alike]
        numbers = sum(weight.numel() for weight in tensors)
        lines.append(Group(decay, len(tensors), numbers, (min(factors), max(factors))))
    return lines


def moments(config: RunConfig, groups: list[Group]) -> dict[str, tuple[int, float, float]]:
    """Learning rates along the schedule: {when: (step, the smallest group's, the largest group's)}."""
    recipe, last = config.recipe, config.recipe.steps - 1
    when = {"first step": 0, "end of warm-up": max(0, round(recipe.warmup * recipe.steps) - 1)}
    if recipe.milestones is None:
        when["middle"] = recipe.steps // 2
    for number, share in enumerate(recipe.milestones or (), 1):
        when[f"milestone {number}"] = min(round(share * recipe.steps), last)
    when["last step"] = last
    low, high = min(group.factors[0] for group in groups), max(group.factors[1] for group in groups)
    rates = {name: recipe.lr * schedule(step, recipe) for name, step in when.items()}
    return {name: (step, low * rates[name], high * rates[name]) for name, step in when.items()}


# --- Time a few training steps on random numbers ---


class Repeated:
    """The same batch in each of some steps."""

    corrupt: Mapping[int, str] = {}

    def __init__(self, images: Tensor, targets: Tensor, steps: int):
        self.batch, self.steps = Batch(images, targets, list(range(len(images))), 1.0), steps

    def __len__(self) -> int:
        return len(self.batch.images) * self.steps

    def epoch(self, part: ShardSpec, workers: int = 0) -> Iterator[Batch]:
        return repeat(self.batch, self.steps - part.start)


def time_steps(
    config: RunConfig, outputs: int, flops: int | None, memory: Memory, limit: float
) -> tuple[int, float] | None:
    """(images of a step, its seconds), of as many images as fit into memory and some `limit` seconds; None
    where the fewest do not, as far as `flops` of an image and `memory` tell."""
    few, recipe = fewest(config, outputs), config.recipe
    per_image = max(memory.saved // -(-recipe.batch_size // recipe.accumulate), 1)
    room = SAFE_SHARE * free_memory() - (memory.total - memory.saved)
    most = min(recipe.batch_size, room // per_image * recipe.accumulate)
    if most < few or flops is not None and 2 * STEPS * flops * few > limit * EFFICIENCY * speed():
        return None
    model, timed = assembled(config, outputs), None
    try:
        timed = few, _step(config, model, outputs, few)
        larger = int(min(most, few * limit / (STEPS * timed[1])))
        if larger >= 2 * few or few < larger == most:
            timed = larger, _step(config, model, outputs, larger)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return timed


def _step(config: RunConfig, model: nn.Module, outputs: int, batch: int) -> float:
    """Seconds of one step of `batch` images: the median of a few, the first left out."""
    accumulate = config.recipe.accumulate if batch == config.recipe.batch_size else 1
    recipe = replace(config.recipe, steps=STEPS, batch_size=batch, accumulate=accumulate, repeats=1)
    views = (len(looks_of(config)),) if config.method.contrasts else ()
    pixels = torch.randn(batch, *views, 3, *_size(config, outputs))
    images = Repeated(pixels, made_up(config, outputs, batch), STEPS)
    log: list[dict] = []
    train(model, images, recipe, loss=loss_of(config), progress=None, log=log.append)
    rate = statistics.median(entry["images_per_second"] for entry in log[1:STEPS])
    return batch * processes_asked() / rate  # each process has made so many


def speed() -> float:
    """FLOPs a second of a large matrix product on this machine, float32."""
    device, size = ("cuda", 8192) if runs_on_gpu() else ("cpu", 1024)
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        float((left @ right)[0, 0])  # reading a number waits for a GPU
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def fewest(config: RunConfig, outputs: int) -> int:
    """The fewest images of a step: two where there may be batch norm."""
    return 1 if isinstance(config.skeleton(outputs), VITS) else 2


def made_up(config: RunConfig, outputs: int, count: int):
    """Targets without meaning: classes, or objects, seven in an image, as COCO has on average."""
    if not config.detects:
        return torch.randint(max(1, outputs), (count,))  # without labels there are no classes
    height, width = config.skeleton(outputs).patch_embed.img_size
    down, across = torch.arange(height)[:, None], torch.arange(width)
    images = []
    for _ in range(count):
        corner = torch.rand(7, 2) * torch.tensor([0.7 * width, 0.7 * height])
        boxes = torch.cat([corner, corner + (0.05 + 0.25 * torch.rand(7, 2)) * min(height, width)], dim=1)
        left, top, right, bottom = boxes.T[:, :, None, None]
        masks = (across >= left) & (across < right) & (down >= top) & (down < bottom)
        images.append(Objects(boxes, torch.randint(outputs, (7,)), masks, torch.zeros(7, dtype=torch.bool)))
    return ObjectBatch(images)


# --- Count FLOPs and bytes ---


def flops_of(config: RunConfig, skeleton: nn.Module) -> int | None:
    """The fewest FLOPs that training takes an image (`atfamily.measures.accounting`); None where they are not
    counted: other kinds of ViT, most pre-training, mean maps, logits, transfers of queries, keys or values.
    """
    method, native = config.method, teacher_architecture(config)
    uncounted = method is Method.MEAN_MAPS or method.reads_logits or not isinstance(skeleton, VITS)
    if uncounted or method.has_pretext:
        return None
    if config.plan is not None and config.plan.what != "map":
        return None
    try:
        shape = teacher = shape_of(skeleton)
        if config.plan is None and not method.distils_features:
            return accounting.fine_tuning(shape)
        if native is not None:
            teacher = shape_of(on_meta(headless(native, config.teacher_image_size or image_size(config))))
    except ValueError:  # it has products that are not counted
        return None
    pairs = (config.plan or Plan(layers=config.feature_layers)).pairs_of(shape.depth, None)
    last = 1 + max(layer for _, layer in pairs)  # the teacher runs up to it, whichever layers are transferred
    if method.distils_features:
        projectors = 0 if shape.width == teacher.width else len(pairs)
        return accounting.feature_distillation(shape, last, teacher, projectors)
    transfer = accounting.copy if method is Method.COPY else accounting.distill
    of_student = transfer(shape, len(pairs)) - accounting.teacher(shape, len(pairs))
    return of_student + accounting.teacher(teacher, last)


def flops_of_detector(config: RunConfig, outputs: int) -> int:
    """FLOPs of a training step of one image with made-up objects, as PyTorch counts them."""
    model, objects = assembled(config, outputs).train(), made_up(config, outputs, 1)
    # PyTorch does not count the in-place form of baddbmm, which the map-free loss uses
    mapping = {torch.ops.aten.baddbmm_: lambda onto, left, right, **_: 2 * math.prod(left) * right[2]}
    # unfused: PyTorch 2.6 does not count the CPU's fused attention, and later ones count its scores twice
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        images = torch.randn(1, 3, *_size(config, outputs))
        loss_of(config)(model, images, objects, config.recipe).backward()
    return counter.get_total_flops()


def memory_of(config: RunConfig, outputs: int) -> Memory:
    """The memory of one step on one device, in float32, for one of the `accumulate` parts of the batch,
    counted on shapes; of a detector measured on an image with made-up objects. What is kept for the backward
    pass is linear in the batch: counted for one image and for two, and 0 for pre-training without labels.
    """
    size, few = _size(config, outputs), fewest(config, outputs)
    part = -(-config.recipe.batch_size // config.recipe.accumulate)
    if config.detects:
        model, objects = assembled(config, outputs).train(), made_up(config, outputs, 1)
        cast, loss = CastOnce(model).bytes, loss_of(config)
        memory = step_memory(
            model, torch.randn(1, 3, *size), lambda model, images: loss(model, images, objects, config.recipe)
        )
        saved = part * memory.saved
    else:
        with without_weights():
            model = assembled(config, outputs)
        cast = CastOnce(model).bytes
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = model.to_empty(device="cpu").train()  # with its teacher, which moves along
            if config.method.pretrains:
                weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
                memory, saved = Memory(weights, weights, 2 * weights, 0, 0), 0
            else:
                memory, more = (step_memory(model, torch.empty(n, 3, *size)) for n in (few, few + 1))
                saved = memory.saved + (part - few) * (more.saved - memory.saved)
    averaged = memory.weights if config.recipe.ema is not None else 0
    optimizer = int(memory.optimizer / 2 * state_per_weight(config.recipe))  # in place of AdamW's two
    teacher = memory.teacher + (cast if config.recipe.mixed_precision in ("bf16", "fp16") else 0)
    weights = memory.weights + averaged
    return memory._replace(weights=weights, optimizer=optimizer, saved=saved, teacher=teacher)


def state_per_weight(recipe: Recipe) -> float:
    """Numbers of float32 size that the optimiser keeps for each weight, between steps: 2 for AdamW."""
    width = 256
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        layer = torch.nn.Linear(width, width, bias=False)
        optimizer = make_optimizer(layer, replace(recipe, base_lr=None, layer_decay=None))
        layer(torch.ones(1, width)).sum().backward()
        optimizer.step()
    kept = tree_leaves(list(optimizer.state.values()))
    # What has no dimension counts steps, and does not grow with the model.
    tensors = [value for value in kept if isinstance(value, Tensor) and value.ndim]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / (4 * width * width)


def _size(config: RunConfig, outputs: int) -> tuple[int, int]:
    return built_for(config.skeleton(outputs)) or (image_size(config),) * 2


# --- In words and figures ---


def as_text(estimate: Estimate, config_diff: Sequence[str] = ()) -> str:
    """What `--dry-run` prints. config_diff: how this run differs from the published one."""
    config, recipe = estimate.config, estimate.config.recipe
    teacher = "" if config.teacher is None else f", from {config.teacher}"
    if config.method.keeps_weights_apart:
        is_known = config.teacher == UNTRAINED or teacher_architecture(config) is not None
        teacher = f", teacher {config.teacher}{'' if is_known else ' (taken to be of the same architecture)'}"
    if config.student_weights is not None:
        teacher += f", the student starts from {config.student_weights}"
    parts = "" if recipe.accumulate == 1 else f", computed in {recipe.accumulate} parts"
    decisive = [f"drop_path {config.drop_path}"]  # to be held against a paper's table
    for name in ("augmentation", "plan", "recipe"):
        if (part := config.flat().get(name)) is not None:
            values = [f"{key} {value}" for key, value in part.describe().items() if value is not None]
            decisive.insert(0, f"{name}: {', '.join(values)}")
    devices = estimate.processes
    among = "" if devices == 1 else f", {estimate.images:,} on each of {devices} devices"
    sections = {
        "run": [
            f"{config.recipe_name}: {config.method}{teacher}, seed {config.seed}",
            f"data {config.data}: {estimate.count:,} training images",
        ],
        "model": model_lines(estimate),
        "parameter groups": [
            f"{recipe.optimizer}, weight decay {decay:g}: {numbers:,} numbers in {tensors} tensors, lr times "
            + (f"{most:g}" if least == most else f"{least:.3g} (first layers) to {most:.3g} (head)")
            for decay, tensors, numbers, (least, most) in estimate.groups
        ],
        "schedule": [
            f"{when} ({step:,}): lr {most:.3g}"
            + ("" if least == most else f" down to {least:.3g} in the first layers")
            for when, (step, least, most) in estimate.moments.items()
        ],
        "steps": [
            f"{recipe.steps:,} steps of {recipe.batch_size:,} images{among}{parts}:"
            f" {estimate.steps_per_epoch:,} an epoch, {recipe.steps / estimate.steps_per_epoch:.4g} epochs"
        ],
        "all that decides a result": decisive,
        "changed against the published recipe": config_diff,
        "memory of a step": _memory_lines(estimate),
        **_time_and_cost(estimate),
    }
    return "\n".join("\n    ".join([name, *lines]) for name, lines in sections.items() if lines)


def model_lines(estimate: Estimate) -> list[str]:
    """The model, its sizes, and what is transferred."""
    vit, config, plan = estimate.skeleton, estimate.config, estimate.config.plan
    # of one that was read off a file of weights, that it is one
    name = config.model.name if isinstance(config.model.name, str) else "a ViT as the weights have it"
    numbers = sum(weight.numel() for weight in vit.parameters())
    name = f"{name}: {numbers:,} parameters"
    if not isinstance(vit, VITS):
        return [f"{name}, a {type(vit).__name__}, which has no maps"]
    attention, patches, prefix = vit.blocks[0].attn, vit.patch_embed.num_patches, vit.num_prefix_tokens
    down, across = vit.patch_embed.grid_size
    lines = [
        f"{name}, {len(vit.blocks)} layers of width {vit.embed_dim}",
        f"{patches + prefix} tokens ({down} x {across} patches and {prefix} more),"
        f" {attention.num_heads} heads of width {attention.head_dim}",
    ]
    if config.detects:
        more = sum(group.numbers for group in estimate.groups) - numbers
        on_it = f"{more:,} parameters in pyramid and heads"
        lines.append(f"{config.detector} on it ({config.detector_sizes}): {on_it}")
    if plan is not None:
        pairs = plan.pairs_of(len(vit.blocks), None)
        lines.append(f"{plan.how} {plan.what} of {len(pairs)} layers, {pairs[0][0]} to {pairs[-1][0]}")
        if any(layer != of_teacher for layer, of_teacher in pairs):
            listed = ", ".join(f"{layer} from {of_teacher}" for layer, of_teacher in pairs)
            lines.append(f"the student's layers, and the teacher's: {listed}")
    return lines


def _memory_lines(estimate: Estimate) -> list[str]:
    memory, config = estimate.memory, estimate.config
    images = -(-estimate.images // config.recipe.accumulate)
    parts = ", ".join(f"{name} {value / GIB:.3g}" for name, value in memory._asdict().items() if value)
    total = f"{memory.total / GIB:.3g} GiB on one device"
    lines = [f"{total} for {images:,} images at once, float32: {parts}"]
    if memory.saved:
        rest, per_image = (memory.total - memory.saved) / GIB, memory.saved / images / GIB
        measured = "measured on one image with seven made-up objects; memory depends on the objects found"
        how = measured if config.detects else "counted from shapes"
        lines += [
            f"that is {rest:.3g}, and {per_image:.3g} for each image on a device",
            f"{how}; what comes and goes within an operation is extra",
        ]
    else:
        lines.append("what pre-training keeps for the backward pass is not counted")
    if config.recipe.checkpoint_activations:
        lines.append("without activation checkpointing, which this run has: it keeps less")
    if config.recipe.mixed_precision in ("bf16", "fp16"):
        lines.append(f"in {config.recipe.mixed_precision} about half as much is saved")
    return lines


def _time_and_cost(estimate: Estimate) -> dict[str, list[str]]:
    config, recipe, devices = estimate.config, estimate.config.recipe, estimate.processes
    seconds, timed, cost = estimate.seconds, estimate.timed, []
    if seconds is None:
        lines = ["not estimated: no step fits into this machine's memory, and FLOPs are not counted"]
    else:
        cpu = f"{torch.get_num_threads()} threads of a CPU"
        where = torch.cuda.get_device_name() if runs_on_gpu() else cpu
        how = f"measured: steps of {timed} images on {where}"
        if timed is None:
            how = "NOT measured: FLOPs at the speed of a matrix product on this machine, so at least that"
        elif timed < estimate.images:
            how += f", in proportion for {estimate.images:,}"
        rate, epoch = recipe.batch_size / seconds, seconds * estimate.steps_per_epoch / 60
        lines = [
            f"{seconds:.3g} s a step, {rate:.3g} images/s, {epoch:.3g} minutes an epoch",
            how + (", without what processes send each other" if devices > 1 else ""),
            "reading and changing images is not counted: see `benchmarks/data.py`",
        ]
        hours = recipe.steps * seconds / 3600
        on = "one device such as this"
        if devices > 1:
            on = f"{devices} devices such as this, {devices * hours:.3g} hours of a device"
        cost.append(f"{hours:.3g} hours in all on {on}")
    if estimate.flops is None:
        cost.append("FLOPs are not counted for this kind of model or method")
    else:
        per_image, whole = estimate.flops / 1e9, estimate.flops * recipe.batch_size * recipe.steps
        cost.append(f"at least {per_image:.4g} GFLOPs an image in training, {whole:.3g} FLOPs in all")
    if config.recipe_name in PAPER_RECIPES and config.data == "imagenet-1k":
        epochs = recipe.steps / estimate.steps_per_epoch
        cost.append(
            f"the paper (arXiv 2411.09702): {PAPER_GPU_HOURS:,} GPU-hours for {PAPER_EPOCHS} epochs of its"
            f" Copy and of its Distill, so {PAPER_GPU_HOURS * epochs / PAPER_EPOCHS:,.0f} for the"
            f" {epochs:.4g} of this run"
        )
    return {"time": lines, "cost": cost}
