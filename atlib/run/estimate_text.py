"""A dry run's estimate in words and figures, each with where it comes from."""

from collections.abc import Sequence

from atlib.run.estimate import Estimate, part_of

PAPER_GPU_HOURS, PAPER_EPOCHS = 2735, 100  # of ViT-L on ImageNet-1k: quoted from arXiv 2411.09702
GIB = 2**30


def as_text(found: Estimate, oddities: Sequence[str] = (), config_diff: Sequence[str] = ()) -> str:
    """What `--dry-run` prints. oddities: of the published recipe, which need not hold of this run;
    config_diff: how this run's recipe differs from it."""
    sections = {
        "run": _run(found),
        "model": _model(found),
        "parameter groups": _groups(found),
        "schedule": _schedule(found),
        "steps": _steps(found),
        "changed against the published recipe": config_diff,
        "oddities of the published recipe": oddities,
        "memory of a step": _memory(found),
        "time": _time(found),
        "cost": _cost(found),
    }
    return "\n".join(
        line
        for name, lines in sections.items()
        if lines
        for line in (name, *(f"    {each}" for each in lines))
    )


def _run(found: Estimate) -> list[str]:
    config = found.config
    teacher = "" if config.teacher is None else f", from {config.teacher}"
    if config.plan is not None:
        teacher = f", teacher {config.teacher} (taken to be of the same architecture)"
    return [
        f"{config.recipe_name}: {config.method}{teacher}, seed {config.seed}",
        f"data {config.data}: {found.count:,} training images",
    ]


def _model(found: Estimate) -> list[str]:
    vit, config = found.skeleton, found.config
    attention, patches = vit.blocks[0].attn, vit.patch_embed.num_patches
    lines = [
        (
            f"{config.model.name}: {sum(each.numel() for each in vit.parameters()):,} parameters,"
            f" {len(vit.blocks)} layers of width {vit.embed_dim}"
        ),
        (
            f"{patches + vit.num_prefix_tokens} tokens ({' x '.join(map(str, vit.patch_embed.grid_size))}"
            f" patches and {vit.num_prefix_tokens} more), {attention.num_heads} heads of width"
            f" {attention.head_dim}"
        ),
    ]
    if config.plan is not None:
        layers = config.plan.layers_of(len(vit.blocks))
        lines.append(
            f"{config.plan.how} {config.plan.what} of {len(layers)} layers, {layers[0]} to {layers[-1]}"
        )
    return lines


def _groups(found: Estimate) -> list[str]:
    return [
        f"{found.config.recipe.optimizer}, weight decay {group.weight_decay:g}: {group.numbers:,} numbers in"
        f" {group.tensors} tensors, lr times "
        + (
            f"{group.factors[1]:g}"
            if group.factors[0] == group.factors[1]
            else f"{group.factors[0]:.3g} (first layers) to {group.factors[1]:.3g} (head)"
        )
        for group in found.groups
    ]


def _schedule(found: Estimate) -> list[str]:
    lines = [
        f"{when} ({step:,}): lr {largest:.3g}"
        + ("" if smallest == largest else f" down to {smallest:.3g} in the first layers")
        for when, (step, smallest, largest) in found.moments.items()
    ]
    recipe = found.config.recipe
    if recipe.min_lr > recipe.lr:
        lines.append(
            f"min_lr {recipe.min_lr:g} is above lr {recipe.lr:g}: after warm-up the learning rate rises"
        )
    return lines


def _steps(found: Estimate) -> list[str]:
    recipe = found.config.recipe
    parts = "" if recipe.accumulate == 1 else f", computed in {recipe.accumulate} parts"
    return [
        f"{recipe.steps:,} steps of {recipe.batch_size:,} images{parts}: {found.steps_per_epoch:,} an epoch,"
        f" {found.epochs:.4g} epochs"
    ]


def _memory(found: Estimate) -> list[str]:
    parts = {name: value for name, value in found.memory._asdict().items() if value}
    lines = [
        f"{found.memory.total / GIB:.3g} GiB on one device for {part_of(found.config):,} images at once,"
        " float32: " + ", ".join(f"{name} {value / GIB:.3g}" for name, value in parts.items())
    ]
    if found.memory.saved:
        rest, each = found.memory.total - found.memory.saved, found.memory.saved / part_of(found.config)
        lines += [
            f"that is {rest / GIB:.3g}, and {each / GIB:.3g} for each image on a device",
            (
                "counted from shapes (one image and two, extended in a line); what comes and goes within an"
                " operation is extra"
            ),
        ]
    else:
        lines.append("what masked auto-encoding keeps for the backward pass is not counted")
    if found.config.recipe.checkpoint_activations:
        lines.append("without activation checkpointing, which this run has: it keeps less")
    if found.config.recipe.mixed_precision != "no":
        lines.append(f"in {found.config.recipe.mixed_precision} about half as much is saved")
    return lines


def _time(found: Estimate) -> list[str]:
    recipe, timing = found.config.recipe, found.timing
    if found.seconds is None:
        return [
            "not estimated: no step fits into this machine's memory, and the FLOPs of this model are not"
            " counted"
        ]
    if timing is None:
        how = (
            "NOT measured (one image takes too long or too much memory here): FLOPs at the speed of a matrix"
            " product on this machine, so at least that"
        )
    elif timing.whole:
        how = f"measured: steps of {timing.batches[1]:,} images on {timing.on}"
    else:
        how = (
            f"measured with {timing.batches[0]} and {timing.batches[1]} images on {timing.on}"
            f" ({timing.measured[0]:.3g} s and {timing.measured[1]:.3g} s), extrapolated to"
            f" {recipe.batch_size:,}"
        )
    epoch = found.seconds * found.steps_per_epoch / 60
    return [
        (
            f"{found.seconds:.3g} s a step, {recipe.batch_size / found.seconds:.3g} images/s, {epoch:.3g}"
            " minutes an epoch"
        ),
        how,
        "reading and changing images is not counted: see `benchmarks/data.py`",
    ]


def _cost(found: Estimate) -> list[str]:
    lines = []
    if found.hours is not None:
        lines.append(f"{found.hours:.3g} hours in all on one device such as this")
    if found.flops is None:
        lines.append("FLOPs are not counted for this kind of model or method")
    else:
        recipe = found.config.recipe
        lines.append(
            f"at least {found.flops / 1e9:.4g} GFLOPs an image in training,"
            f" {found.flops * recipe.batch_size * recipe.steps:.3g} FLOPs in all"
        )
    paper = (
        f"the paper (arXiv 2411.09702): {PAPER_GPU_HOURS:,} GPU-hours for {PAPER_EPOCHS} epochs of ViT-L on"
        " ImageNet-1k"
    )
    if _like_the_paper(found):
        paper += (
            f", so {PAPER_GPU_HOURS * found.epochs / PAPER_EPOCHS:,.0f} for the {found.epochs:.4g} epochs of"
            " this run"
        )
    return [*lines, paper]


def _like_the_paper(found: Estimate) -> bool:
    return found.config.model.name.startswith("vit_large") and "imagenet" in found.config.data
