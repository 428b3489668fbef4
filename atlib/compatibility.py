"""Which teacher can teach which student under a plan: what differs is named, with the way out."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from atlib._util import in_eval_mode, out_of_memory
from atlib.attention import Projections, Unwalkable, check_walkable, find_projections
from atlib.pair import inside, usual_image_size
from atlib.plan import Plan
from atlib.student import differences

MOST_PREFIX = 32  # tokens before the patches: with more, tokens are no grid of patches


class Sizes(NamedTuple):
    """What must fit between two models."""

    depth: int
    heads: int
    head_width: int
    grid: tuple[int, int]  # patches down and across; where tokens are no grid of patches, (1, tokens)
    image: tuple[int, int] | None  # pixels down and across; None for a model that takes no images
    prefix_kinds: tuple[int, int, int]  # class tokens, distillation tokens, registers before the patches
    masked: bool = False  # whether a layer forbids pairs of tokens (`Seen.mask`)

    @property
    def prefix(self) -> int:
        """All prefix tokens."""
        return sum(self.prefix_kinds)


def example_of(model: nn.Module, beside: nn.Module | None = None) -> Tensor:
    """One input for a model: an image of noise, or a clip of such, in its size or that of the model `beside`
    it; what transformers gives as an example for other models."""
    weight, image = next(model.parameters()), usual_image_size(model)
    if image is None and hasattr(model, "dummy_inputs"):
        return next(iter(model.dummy_inputs.values()))[:1].to(weight.device)
    if image is None and (beside is None or (image := usual_image_size(beside)) is None):
        raise Unwalkable(f"a {type(model).__name__} does not say its size: set image_size = (height, width)")
    channels = next((part.in_channels for part in model.modules() if isinstance(part, nn.Conv2d)), 3)
    config = getattr(model, "config", None)
    frames = [config.num_frames] if hasattr(config, "num_frames") else []
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, *frames, channels, *image, generator=generator, device="cpu")
    return noise.to(weight.device, weight.dtype)


def examine(model: nn.Module, beside: nn.Module | None = None) -> tuple[Sizes, Projections | None]:
    """What one forward in eval mode, of noise, shows of a model: its sizes, and where q, k and v come from.
    Raises `Unwalkable` where its attention cannot be seen, or its layers have other shapes each."""
    kind = type(model).__name__
    check_walkable(model)
    if inner := inside(model):
        raise Unwalkable(f"a {kind} hides what it wraps: give model.{inner}")
    example = example_of(model, beside)
    image = tuple(example.shape[2:]) if example.ndim == 4 else None
    try:
        with in_eval_mode(model):
            seen, projections = find_projections(model, example)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        first = str(error).splitlines()[0]
        raise Unwalkable(f"a {kind} does not take an input {tuple(example.shape)}: {first}") from error
    shapes = {tuple(layer.q.shape) for layer in seen.layers}
    if len(shapes) > 1:
        raise Unwalkable(f"the layers of a {kind} have q of other shapes each: {sorted(shapes)}")
    _, heads, tokens, width = shapes.pop()
    grid, kinds = _tokens(model, tokens, image)
    masked = any(layer.mask is not None for layer in seen.layers)
    return Sizes(len(seen.layers), heads, width, grid, image, kinds, masked), projections


def sizes_of(model: nn.Module) -> Sizes:
    """What must fit between a model and another."""
    return examine(model)[0]


def _tokens(
    model: nn.Module, tokens: int, image: tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """The patch grid and the kinds of prefix tokens."""
    config, embed = getattr(model, "config", None), getattr(model, "patch_embed", None)
    grid = getattr(embed, "grid_size", None)
    if grid is None and image is not None:
        holders = (model, getattr(model, "embeds", None), config, getattr(config, "vision_config", None))
        patches = (getattr(holder, "patch_size", None) for holder in holders)
        patch = next((size for size in patches if size is not None), None)
        if patch is None:
            kernels = (part.stride for part in model.modules() if isinstance(part, nn.Conv2d))
            patch = next((stride for stride in kernels if max(stride) > 1), (1, 1))
        patch = (patch, patch) if isinstance(patch, int) else tuple(patch)[-2:]
        grid = image[0] // patch[0], image[1] // patch[1]
    if grid is None or not 0 <= tokens - grid[0] * grid[1] <= MOST_PREFIX:
        return (1, tokens), (0, 0, 0)
    prefix = tokens - grid[0] * grid[1]
    names = [name.rpartition(".")[2] for name, _ in model.named_parameters()]
    has_class = any(name == "cls" or name.startswith(("cls_", "class_")) for name in names)
    distilled = any(name in ("dist_token", "distillation_token") for name in names)
    of_class = min(prefix, int(has_class or not any("reg" in name for name in names)))
    of_distillation = min(prefix - of_class, int(distilled))
    return tuple(grid), (of_class, of_distillation, prefix - of_class - of_distillation)


class Pairing(NamedTuple):
    """How a teacher's attention fits a student's."""

    layers: tuple[tuple[int, int], ...]  # (student's, teacher's)
    teacher_tokens: tuple[int, ...] | None  # those that both have, None where that is all of them
    student_tokens: tuple[int, ...] | None  # the same tokens in the student
    common_prefix: int  # prefix tokens among them
    components: dict[str, tuple]  # native ones that differ: {name: (teacher's, student's)}
    # The student's tokens that the teacher lacks and that keep their share of every row.
    own_keys: tuple[int, ...]
    tokens: int  # of a transferred map: all of the student's where some are its own, else the common ones
    queries: tuple[int, ...]  # of these, those whose rows are transferred
    rest: tuple[int, ...]  # and those whose rows stay the student's own


def pair_up(
    teacher: nn.Module, student: nn.Module, plan: Plan, sizes: tuple[Sizes, Sizes] | None = None
) -> Pairing:
    """How `teacher` teaches `student` under `plan`; `sizes`: of both, where they are known. Raises
    `ValueError` for what differs without a way in the plan, and for layers and heads that there are not."""
    of_teacher, of_student = sizes or (sizes_of(teacher), sizes_of(student))
    components = differences(teacher, student)
    common = of_teacher.prefix
    if of_teacher.prefix_kinds != of_student.prefix_kinds:  # the class token at most
        common = min(of_teacher.prefix_kinds[0], of_student.prefix_kinds[0])
    _check_fit(of_teacher, of_student, components, plan, common)
    if getattr(getattr(student, "patch_drop", None), "prob", 0) > 0:
        raise ValueError("the student drops patches in training: patch_drop_rate=0")
    layers = plan.pairs_of(of_student.depth, of_teacher.depth)
    for layer, _ in layers:
        plan.heads_of(layer, of_student.heads)
    if plan.heads and isinstance(plan.heads[0], tuple) and (stray := dict(plan.heads).keys() - dict(layers)):
        raise ValueError(f"heads= names layers {sorted(stray)}, which the plan does not transfer")
    if plan.average == "layers" and len(layers) < 2:
        raise ValueError("average='layers' needs at least two transferred layers, this plan has one")
    own_keys = tuple(range(common, of_student.prefix)) if plan.unequal_prefix == "own" else ()
    prefix = of_student.prefix if own_keys else common
    tokens = prefix + of_student.grid[0] * of_student.grid[1]
    patches = tuple(range(prefix, tokens))
    queries = {None: (*range(common), *patches), "class": (0,), "patches": patches}[plan.rows]
    return Pairing(
        layers,
        _common_tokens(of_teacher, common),
        _common_tokens(of_student, common),
        common,
        components,
        own_keys,
        tokens,
        queries,
        tuple(sorted({*range(tokens)} - {*queries})),
    )


def _check_fit(teacher: Sizes, student: Sizes, components: dict[str, tuple], plan: Plan, common: int) -> None:
    """Raise `ValueError` for the first thing that differs though the plan says no way with it."""

    def refuse(what: str, of_teacher: object, of_student: object, way: str) -> None:
        sides = f"teacher {of_teacher}, student {of_student}"
        raise ValueError(f"teacher and student differ in {what}: {sides} ({way})")

    maps, lost = plan.what == "map", student.prefix > common
    if teacher.depth != student.depth and not (plan.layers and isinstance(plan.layers[0], tuple)):
        refuse("depth", teacher.depth, student.depth, "depth=, or layers={student's: teacher's}")
    if teacher.heads != student.heads and plan.unequal_heads is None:
        way = "num_heads=, or unequal_heads=" if maps else "what='map'"
        refuse("heads", teacher.heads, student.heads, way)
    if teacher.head_width != student.head_width and not maps:
        refuse("head width", teacher.head_width, student.head_width, "what='map'")
    # images of another size are resized for the teacher (`Pair.for_teacher`): what counts is the patches
    resampled = plan.unequal_grid is not None and 1 not in (*teacher.grid, *student.grid)
    if teacher.grid != student.grid and not resampled:
        way = "unequal_grid='resample'" if maps else "what='map'"
        if 1 in (teacher.grid[0], student.grid[0]):
            way = "of one the patches are not known: set model.patch_size"
        refuse("patch grid", teacher.grid, student.grid, way)
    # a copied map says where each of the student's tokens looks
    dropped = plan.unequal_prefix == "drop" and not (lost and plan.how == "copy")
    if teacher.prefix_kinds != student.prefix_kinds and not (dropped or plan.unequal_prefix == "own"):
        way = f"unequal_prefix={'own' if lost else 'drop'!r}" if maps else "what='map'"
        kinds = (f"{one.prefix_kinds} (class, distillation, registers)" for one in (teacher, student))
        refuse("prefix tokens", *kinds, way)
    if plan.rows == "class" and not (teacher.prefix_kinds[0] and student.prefix_kinds[0]):
        raise ValueError("rows='class' needs class tokens, and one has none (rows='patches')")
    for name, (of_teacher, of_student) in components.items():
        # unequal_prefix= says what becomes of registers too
        if not plan.mismatched and (name != "registers" or plan.unequal_prefix is None):
            refuse(name, of_teacher, of_student, "create_student(teacher, num_classes), or mismatched=True")


def _common_tokens(sizes: Sizes, common: int) -> tuple[int, ...] | None:
    """The indices of the common tokens of one ViT, None for all; the class token is first, patches last."""
    if sizes.prefix == common:
        return None
    return (*range(common), *range(sizes.prefix, sizes.prefix + sizes.grid[0] * sizes.grid[1]))
