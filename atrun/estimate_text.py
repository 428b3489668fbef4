"""A dry run's estimate in words and figures, each with where it comes from."""

from collections.abc import Sequence

from atfamily.measures.accounting import transferred_numbers
from atlib.vit import VITS
from atrun.build import teacher_architecture
from atrun.config import RunConfig
from atrun.estimate import Estimate, part_of
from atrun.parts import Detect
from atrun.untrained import UNTRAINED

PAPER_GPU_HOURS, PAPER_EPOCHS = 2735, 100  # of ViT-L on ImageNet-1k: quoted from arXiv 2411.09702
GIB = 2**30


def as_text(estimate: Estimate, oddities: Sequence[str] = (), config_diff: Sequence[str] = ()) -> str:
    """What `--dry-run` prints. oddities: of the published recipe, which need not hold of this run;
    config_diff: how this run differs from it."""
    sections = {
        "run": _run(estimate),
        "model": _model(estimate),
        "parameter groups": _groups(estimate),
        "schedule": _schedule(estimate),
        "steps": _steps(estimate),
        "changed against the published recipe": config_diff,
        "oddities of the published recipe": oddities,
        "memory of a step": _memory(estimate),
        "time": _time(estimate),
        "cost": _cost(estimate),
    }
    return "\n".join("\n    ".join([name, *lines]) for name, lines in sections.items() if lines)


def _run(estimate: Estimate) -> list[str]:
    config = estimate.config
    teacher = "" if config.teacher is None else f", from {config.teacher}"
    if config.method.keeps_weights_apart:
        known = config.teacher == UNTRAINED or teacher_architecture(config) is not None
        taken = "" if known else " (taken to be of the same architecture)"
        teacher = f", teacher {config.teacher}{taken}"
    if config.student_weights is not None:
        teacher += f", the student starts from {config.student_weights}"
    return [
        f"{config.recipe_name}: {config.method}{teacher}, seed {config.seed}",
        f"data {config.data}: {estimate.count:,} training images",
    ]


def _named(config: RunConfig) -> str:
    """The model's name in timm; of one that was read off a file of weights, that it is one."""
    return config.model.name if isinstance(config.model.name, str) else "a ViT as the weights have it"


def _model(estimate: Estimate) -> list[str]:
    vit, config = estimate.skeleton, estimate.config
    if not isinstance(vit, VITS):
        weights = sum(weight.numel() for weight in vit.parameters())
        return [f"{_named(config)}: {weights:,} parameters, a {type(vit).__name__}, which has no maps"]
    attention, patches, prefix = vit.blocks[0].attn, vit.patch_embed.num_patches, vit.num_prefix_tokens
    weights, grid = sum(weight.numel() for weight in vit.parameters()), vit.patch_embed.grid_size
    tokens = f"{patches + prefix} tokens ({grid[0]} x {grid[1]} patches and {prefix} more)"
    lines = [
        f"{_named(config)}: {weights:,} parameters, {len(vit.blocks)} layers of width {vit.embed_dim}",
        f"{tokens}, {attention.num_heads} heads of width {attention.head_dim}",
    ]
    if isinstance(task := config.task, Detect):
        lines.append(
            f"{task.detector} on it ({task.detector_sizes}): {estimate.on_vit:,} parameters in pyramid and"
            " heads"
        )
    if config.plan is not None:
        pairs = config.plan.pairs_of(len(vit.blocks), None)
        how = f"{config.plan.how} {config.plan.what}"
        lines.append(f"{how} of {len(pairs)} layers, {pairs[0][0]} to {pairs[-1][0]}")
        if any(layer != of_teacher for layer, of_teacher in pairs):
            said = ", ".join(f"{layer} from {of_teacher}" for layer, of_teacher in pairs)
            lines.append(f"the student's layers, and the teacher's: {said}")
    return [*lines, *_handed_over(estimate)]


def _handed_over(estimate: Estimate) -> list[str]:
    """How many numbers of the teacher the student is given for an image, as the paper counts them."""
    vit, plan = estimate.skeleton, estimate.config.plan
    if plan is None or plan.what != "map" or plan.heads is not None or plan.average is not None:
        return []
    share = len(plan.layers_of(len(vit.blocks))) / len(vit.blocks)
    numbers = transferred_numbers(vit)
    return [
        f"for an image that is {share * numbers.map / 1e6:.3g} million numbers of maps, or the"
        f" {share * (numbers.q + numbers.k) / 1e6:.3g} million of q and k that they are made of"
    ]


def _groups(estimate: Estimate) -> list[str]:
    lines = []
    for decay, tensors, numbers, (least, most) in estimate.groups:
        factor = f"{most:g}" if least == most else f"{least:.3g} (first layers) to {most:.3g} (head)"
        group = f"{estimate.config.recipe.optimizer}, weight decay {decay:g}"
        lines.append(f"{group}: {numbers:,} numbers in {tensors} tensors, lr times {factor}")
    return lines


def _schedule(estimate: Estimate) -> list[str]:
    lines = []
    for when, (step, smallest, largest) in estimate.moments.items():
        down = "" if smallest == largest else f" down to {smallest:.3g} in the first layers"
        lines.append(f"{when} ({step:,}): lr {largest:.3g}{down}")
    lr, min_lr = estimate.config.recipe.lr, estimate.config.recipe.min_lr
    if min_lr > lr:
        lines.append(f"min_lr {min_lr:g} is above lr {lr:g}: after warm-up the learning rate rises")
    return lines


def _steps(estimate: Estimate) -> list[str]:
    recipe = estimate.config.recipe
    parts = "" if recipe.accumulate == 1 else f", computed in {recipe.accumulate} parts"
    return [
        f"{recipe.steps:,} steps of {recipe.batch_size:,} images{parts}: {estimate.steps_per_epoch:,} an"
        f" epoch, {estimate.epochs:.4g} epochs"
    ]


def _memory(estimate: Estimate) -> list[str]:
    memory, images = estimate.memory, part_of(estimate.config)
    parts = ", ".join(f"{name} {value / GIB:.3g}" for name, value in memory._asdict().items() if value)
    total = f"{memory.total / GIB:.3g} GiB on one device"
    lines = [f"{total} for {images:,} images at once, float32: {parts}"]
    if memory.saved:
        rest, per_image = (memory.total - memory.saved) / GIB, memory.saved / images / GIB
        lines += [
            f"that is {rest:.3g}, and {per_image:.3g} for each image on a device",
            f"{_counted(estimate)}; what comes and goes within an operation is extra",
        ]
    else:
        lines.append("what pre-training keeps for the backward pass is not counted")
    if estimate.config.recipe.checkpoint_activations:
        lines.append("without activation checkpointing, which this run has: it keeps less")
    if estimate.config.recipe.mixed_precision != "no":
        lines.append(f"in {estimate.config.recipe.mixed_precision} about half as much is saved")
    return lines


def _counted(estimate: Estimate) -> str:
    if not isinstance(estimate.config.task, Detect):
        return "counted from shapes"
    return "measured on one image with seven made-up objects; what is kept hangs on what is found"


def _time(estimate: Estimate) -> list[str]:
    recipe, timing = estimate.config.recipe, estimate.timing
    if estimate.seconds is None:
        return ["not estimated: no step fits into this machine's memory, and FLOPs are not counted"]
    if timing is None:
        how = (
            "NOT measured (one image takes too long or too much memory here): FLOPs at the speed of a matrix"
            " product on this machine, so at least that"
        )
    elif timing.whole:
        how = f"measured: steps of {timing.batches[1]:,} images on {timing.on}"
    else:
        (small, large), (first, second) = timing.batches, timing.measured
        how = (
            f"measured with {small} and {large} images on {timing.on} ({first:.3g} s and {second:.3g} s),"
            f" extrapolated to {recipe.batch_size:,}"
        )
    rate, epoch = recipe.batch_size / estimate.seconds, estimate.seconds * estimate.steps_per_epoch / 60
    return [
        f"{estimate.seconds:.3g} s a step, {rate:.3g} images/s, {epoch:.3g} minutes an epoch",
        how,
        "reading and changing images is not counted: see `benchmarks/data.py`",
    ]


def _cost(estimate: Estimate) -> list[str]:
    lines, recipe = [], estimate.config.recipe
    if estimate.hours is not None:
        lines.append(f"{estimate.hours:.3g} hours in all on one device such as this")
    if estimate.flops is None:
        lines.append("FLOPs are not counted for this kind of model or method")
    else:
        per_image, whole = estimate.flops / 1e9, estimate.flops * recipe.batch_size * recipe.steps
        lines.append(f"at least {per_image:.4g} GFLOPs an image in training, {whole:.3g} FLOPs in all")
    if isinstance(estimate.config.task, Detect):
        return lines  # the paper's hours are of classification
    paper = f"{PAPER_GPU_HOURS:,} GPU-hours for {PAPER_EPOCHS} epochs of ViT-L on ImageNet-1k"
    if _named(estimate.config).startswith("vit_large") and "imagenet" in estimate.config.data:
        hours = PAPER_GPU_HOURS * estimate.epochs / PAPER_EPOCHS
        paper += f", so {hours:,.0f} for the {estimate.epochs:.4g} epochs of this run"
    return [*lines, f"the paper (arXiv 2411.09702): {paper}"]
