"""Which teacher can teach which student under a plan: all that differs is named, with the way out."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from timm.layers import GluMlp, Mlp, PatchEmbed, SwiGLU
from torch import Tensor, nn

from atlib._util import in_eval_mode, out_of_memory
from atlib.attention import Unwalkable, find_projections
from atlib.pair import usual_image_size
from atlib.plan import Plan
from atlib.unread import Projections

# Activations of MLPs, as `describe` names them, in the names of timm's act_layer=.
TIMM_ACTIVATIONS = {
    "GELU": "gelu",
    "GELU tanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "SiLU": "silu",
}
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
    """One input for a model: an image of noise in its size, or that of the model `beside` it; a clip of such
    frames; what transformers gives as an example for other models. Raises `Unwalkable` where nothing says
    the size."""
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


def examine(model: nn.Module, beside: nn.Module | None = None) -> tuple[Sizes, Projections]:
    """What one forward in eval mode, of noise, shows of a model: its sizes, and where q, k and v come from.
    A model that does not say its image size is given that of the one `beside` it.

    Raises `Unwalkable` where its attention cannot be seen, or its layers have other shapes each.
    """
    kind = type(model).__name__
    if (reason := getattr(model, "not_walkable", None)) is not None:
        raise Unwalkable(f"cannot walk a {kind}: {reason}")
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
    """What must fit between a model and another. Raises as `examine` does."""
    return examine(model)[0]


def _tokens(
    model: nn.Module, tokens: int, image: tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """The patch grid, and the kinds of prefix tokens, of a model that makes so many tokens of an image."""
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
    has_class = any(name in ("cls_token", "class_token", "class_embedding", "class_embed") for name in names)
    distilled = any(name in ("dist_token", "distillation_token") for name in names)
    of_class = min(prefix, int(has_class or not any("reg" in name for name in names)))
    of_distillation = min(prefix - of_class, int(distilled))
    return tuple(grid), (of_class, of_distillation, prefix - of_class - of_distillation)


class Pairing(NamedTuple):
    """How a teacher's attention fits a student's."""

    layers: tuple[tuple[int, int], ...]  # (student's, teacher's)
    teacher_tokens: tuple[int, ...] | None  # those that both have, None where that is all of them
    student_tokens: tuple[int, ...] | None  # the same tokens in the student
    teacher_grid: tuple[int, int]  # patches down and across
    student_grid: tuple[int, int]
    common_prefix: int  # how many of the common tokens are prefix tokens
    heads_differ: bool
    widths_differ: bool
    components: dict[str, tuple]  # native ones that differ: {name: (teacher's, student's)}
    # The student's tokens that the teacher lacks and that keep their share of every row. With them maps have
    # all of the student's tokens, else the common ones.
    own_keys: tuple[int, ...] = ()
    queries: tuple[int, ...] | None = (
        None  # the tokens of these maps whose rows are transferred, None for all
    )


def pair_up(
    teacher: nn.Module, student: nn.Module, plan: Plan, sizes: tuple[Sizes, Sizes] | None = None
) -> Pairing:
    """How `teacher` teaches `student` under `plan`; `sizes`: of both, where they are known. Raises
    `ValueError` naming all that stands in the way."""
    of_teacher, of_student = (sizes_of(teacher), sizes_of(student)) if sizes is None else sizes
    components = differences(teacher, student)
    obstacles = [*_obstacles(of_teacher, of_student, plan), *_component_obstacles(components, plan)]
    if getattr(getattr(student, "patch_drop", None), "prob", 0) > 0:
        obstacles.append("patches: the student drops some in training (patch_drop_rate=0)")
    if obstacles:
        raise ValueError(f"teacher and student differ in {'; '.join(obstacles)}")
    layers = plan.pairs_of(of_student.depth, of_teacher.depth)
    for layer, _ in layers:
        plan.heads_of(layer, of_student.heads)
    if plan.heads and isinstance(plan.heads[0], tuple) and (stray := dict(plan.heads).keys() - dict(layers)):
        raise ValueError(f"heads= names layers {sorted(stray)}, which the plan does not transfer")
    if plan.average == "layers" and len(layers) < 2:
        raise ValueError("average='layers' needs at least two transferred layers, this plan has one")
    common = _common_prefix(of_teacher, of_student)
    own_keys = tuple(range(common, of_student.prefix)) if plan.unequal_prefix == "own" else ()
    return Pairing(
        layers,
        _kept(of_teacher, common),
        _kept(of_student, common),
        of_teacher.grid,
        of_student.grid,
        common,
        of_teacher.heads != of_student.heads,
        of_teacher.head_width != of_student.head_width,
        components,
        own_keys,
        _queries(plan.rows, of_student, common, own_keys),
    )


def _obstacles(teacher: Sizes, student: Sizes, plan: Plan) -> list[str]:
    """What differs though the plan says no way with it, each with the way out."""
    obstacles, maps = [], plan.what == "map"

    def require_equal(name: str, of_teacher: Any, of_student: Any, unless: bool, remedy: str) -> None:
        if of_teacher != of_student and not unless:
            obstacles.append(f"{name}: teacher {of_teacher}, student {of_student} ({remedy})")

    def on_maps(remedy: str) -> str:
        return remedy if maps else "what='map'"

    paired = bool(plan.layers) and isinstance(plan.layers[0], tuple)
    require_equal("depth", teacher.depth, student.depth, paired, "depth=, or layers={student's: teacher's}")
    merged = plan.unequal_heads is not None
    require_equal("heads", teacher.heads, student.heads, merged, on_maps("num_heads=, or unequal_heads="))
    require_equal("head width", teacher.head_width, student.head_width, maps, "what='map'")
    # images of another size are resized for the teacher (`Pair.for_teacher`): what counts is the patches
    resampled = plan.unequal_grid is not None and 1 not in (*teacher.grid, *student.grid)
    remedy = on_maps("unequal_grid='resample', sides above 1")
    require_equal("patch grid", teacher.grid, student.grid, resampled, remedy)
    # a copied map says where each of the student's tokens looks
    lost = student.prefix > _common_prefix(teacher, student)
    settled = plan.unequal_prefix is not None and not (
        lost and plan.how == "copy" and plan.unequal_prefix == "drop"
    )
    prefixes = [
        one.prefix
        if teacher.prefix != student.prefix
        else f"{one.prefix} (class, distillation, registers: {one.prefix_kinds})"
        for one in (teacher, student)
    ]
    remedy = on_maps(f"unequal_prefix={'own' if lost else 'drop'!r}")
    require_equal("prefix tokens", *prefixes, settled, remedy)
    if plan.rows == "class" and not (teacher.prefix_kinds[0] and student.prefix_kinds[0]):
        obstacles.append("class tokens: one has none (rows='patches')")
    return obstacles


def _component_obstacles(components: dict[str, tuple], plan: Plan) -> list[str]:
    if plan.unequal_prefix is not None:  # the plan says what becomes of registers
        components = {name: values for name, values in components.items() if name != "registers"}
    if plan.mismatched or not components:
        return []
    named = ", ".join(f"{name}: teacher {t}, student {s}" for name, (t, s) in components.items())
    act = TIMM_ACTIVATIONS.get(components["activation"][0]) if "activation" in components else None
    remedy = "" if act is None else f", with act_layer={act!r}"
    ways = f"create_student(teacher, num_classes){remedy}, or mismatched=True"
    return [f"native components ({named}; arXiv 2605.07191: {ways})"]


def _common_prefix(teacher: Sizes, student: Sizes) -> int:
    """How many prefix tokens both have: all where they agree, else the class token at most."""
    if teacher.prefix_kinds == student.prefix_kinds:
        return teacher.prefix
    return min(teacher.prefix_kinds[0], student.prefix_kinds[0])


def _queries(
    rows: str | None, student: Sizes, common: int, own_keys: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Which rows of the maps are transferred; None for all. Their tokens are all of the student's where some
    are its own, else the common ones."""
    if rows == "class":
        return (0,)
    prefix = student.prefix if own_keys else common
    patches = tuple(range(prefix, prefix + student.grid[0] * student.grid[1]))
    queries = patches if rows == "patches" else (*range(common), *patches)
    return None if len(queries) == prefix + len(patches) else queries


def _kept(sizes: Sizes, common: int) -> tuple[int, ...] | None:
    """The indices of the common tokens of one ViT, None for all; the class token is first, patches last."""
    if sizes.prefix == common:
        return None
    return (*range(common), *range(sizes.prefix, sizes.prefix + sizes.grid[0] * sizes.grid[1]))


# --- Native components (arXiv 2605.07191) ---

# What `describe` says of a standard ViT: the student of arXiv 2411.09702 and of most of timm's supervised
# ViTs.
STANDARD: Mapping[str, Any] = {
    "layer_scale": "none",
    "registers": 0,
    "pre_norm": False,
    "activation": "GELU",
    "pooling": "token",
    "positions": "learned",
    "qk_norm": False,
    "mlp": "plain",
    "norm": "LayerNorm 1e-06",
    "qkv_bias": "q k v",
    "grouped_queries": False,
    "tokeniser": "PatchEmbed",
}
COMPONENTS: tuple[str, ...] = tuple(STANDARD)


def describe(vit: nn.Module) -> dict[str, Any]:
    """What a ViT of timm has in place of each of the `COMPONENTS`, read off its modules: short strings,
    numbers or booleans. Raises `ValueError` for a model that is built otherwise."""
    embed = getattr(vit, "embeds", getattr(vit, "patch_embed", None))
    if embed is None or not hasattr(vit, "blocks") or not hasattr(vit, "global_pool"):
        raise ValueError(f"the components of a {type(vit).__name__} are not known: it is no ViT of timm")
    holder = embed if hasattr(vit, "embeds") else vit  # NaFlexVit embeds all tokens in one module
    block = vit.blocks[0]
    attn, mlp = getattr(block, "attn", block), getattr(block, "mlp", None)
    activation = block.mlp_act if mlp is None else getattr(mlp, "act", mlp)
    cls_token, registers = getattr(holder, "cls_token", None), getattr(holder, "reg_token", None)
    block_norm = getattr(block, "norm1", getattr(block, "in_norm", None))
    after = getattr(block, "attn_out_proj", None) or getattr(block, "out_proj", None)
    branches = [present(getattr(block, f"ls{i}", getattr(block, f"gamma_{i}", None))) for i in (1, 2)]
    branches = [present(block.ls)] * 2 if hasattr(block, "ls") else branches
    pooling = {
        "no class token": cls_token is None,
        "distillation token": hasattr(vit, "dist_token"),
        "norm after it": present(vit.fc_norm),
        "prefix included": getattr(vit, "pool_include_prefix", False),
    }
    norm = {
        "inside attention": present(getattr(attn, "norm", None)),
        "inside the MLP": present(getattr(mlp, "norm", None)),
        "on patches": isinstance(embed, PatchEmbed) and present(embed.norm),
        "none at the end": not present(vit.norm) and not present(vit.fc_norm),
        "after attention and MLP": any(kind in type(block).__name__ for kind in ("PostNorm", "ResPost")),
    }
    tanh = " tanh" if getattr(activation, "approximate", "none") == "tanh" else ""
    scaled = {(True, True): "attention and MLP", (True, False): "attention", (False, False): "none"}
    kind = "beside attention" if mlp is None else type(mlp).__name__
    return {
        "layer_scale": scaled[tuple(branches)],
        "registers": 0 if registers is None else registers.shape[1],
        "pre_norm": present(getattr(vit, "norm_pre", None)),
        "activation": type(activation).__name__ + tanh,
        "pooling": _with(vit.global_pool or "none", pooling),
        "positions": _positions(vit, holder, attn),
        "qk_norm": present(getattr(attn, "q_norm", None)),
        "mlp": "gated" if isinstance(mlp, (GluMlp, SwiGLU)) else "plain" if type(mlp) is Mlp else kind,
        "norm": _with(f"{type(block_norm).__name__} {getattr(block_norm, 'eps', None) or 0.0:g}", norm),
        "qkv_bias": _with(
            " ".join(_biases(attn)) or "none",
            {"none after attention": getattr(getattr(attn, "proj", after), "bias", None) is None},
        ),
        "grouped_queries": any(
            getattr(one.attn, "num_kv_heads", one.attn.num_heads) != one.attn.num_heads
            for one in vit.blocks
            if hasattr(one, "attn")
        ),
        "tokeniser": type(embed).__name__,
    }


def differences(teacher: nn.Module, student: nn.Module) -> dict[str, tuple[Any, Any]]:
    """The components in which two ViTs differ: {name: (teacher's, student's)}. Sizes, such as width or depth,
    are no components. Of models that are not timm's, those alone that every library shows."""
    try:
        of_teacher, of_student = describe(teacher), describe(student)
    except ValueError:
        of_teacher, of_student = _shown(teacher), _shown(student)
    both = {name: (of_teacher[name], of_student[name]) for name in COMPONENTS if name in of_teacher}
    return {name: (left, right) for name, (left, right) in both.items() if left != right}


def _shown(model: nn.Module) -> dict[str, Any]:
    """What can be told of a model of any library, by the names and shapes of its weights."""
    names = [name.lower() for name, _ in model.named_parameters()]
    scales = ("gamma", "lambda_", "layer_scale", "layerscale", ".ls1", ".ls2", "ls_1", "ls_2")
    registers = [weight for name, weight in model.named_parameters() if "reg" in name.split(".")[-1]]
    kinds = [type(part).__name__.lower() for part in model.modules()]
    rotary = any("rope" in kind or "rotary" in kind for kind in kinds)
    relative = any("relative_position" in name or "rel_pos" in name for name in names)
    return {
        "layer_scale": "some" if any(scale in name for name in names for scale in scales) else "none",
        "registers": sum(weight.shape[-2] for weight in registers if weight.ndim > 1),
        "positions": "rotary" if rotary else "relative" if relative else "learned",
        "qk_norm": any(f"{part}_norm" in name for name in names for part in "qk"),
    }


def present(part: Any) -> bool:
    """Whether an optional part is there: timm leaves `Identity` or None where it is not."""
    return part is not None and not isinstance(part, nn.Identity)


def _positions(vit: nn.Module, holder: nn.Module, attn: nn.Module) -> str:
    learned = present(getattr(holder, "pos_embed", None)) or hasattr(holder, "pos_embed_y")
    without_prefix = holder is not vit or getattr(vit, "no_embed_class", False)
    kinds = ["learned for patches" if without_prefix else "learned"] if learned else []
    if getattr(vit, "rope", None) is not None:
        kinds.append(f"rotary ({type(vit.rope).__name__.removeprefix('RotaryEmbedding')})")
    shared = getattr(vit, "rel_pos_bias", None) or getattr(vit, "shared_rel_pos", None)
    if shared is not None:
        kinds.append(f"relative ({type(shared).__name__} for all layers)")
    elif getattr(attn, "relative_position_bias_table", None) is not None:
        kinds.append("relative (a bias in each layer)")
    elif getattr(attn, "rel_pos", None) is not None:
        kinds.append(f"relative ({type(attn.rel_pos).__name__} in each layer)")
    return " and ".join(kinds) or "none"


def _biases(attn: nn.Module) -> str:
    """Which of the projections to q, k, v have a bias: letters of "qkv"."""
    if not hasattr(attn, "qkv"):  # one joint projection with that of the MLP
        return "qkv" if attn.in_proj.bias is not None else ""
    if attn.qkv is None:
        return "".join(name for name in "qkv" if getattr(attn, f"{name}_proj").bias is not None)
    if getattr(attn, "q_bias", None) is not None:
        return "qv"
    return "" if getattr(attn.qkv, "bias", None) is None else "qkv"


def _with(what: str, remarks: Mapping[str, bool]) -> str:
    return ", ".join([what, *(remark for remark, holds in remarks.items() if holds)])
