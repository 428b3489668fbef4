"""Run a ViT block by block, hand back what every attention layer saw, and replace what is asked for.

No hooks and no rewritten model: `walk` calls the ViT's own modules in the order of its `forward`. What
happened inside is a return value, with gradients; what should happen instead is an argument; nothing is
stored on the modules. What differs between libraries, how images are embedded, what a block computes and
what the head is, an adapter says (`atlib.adapters`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atlib._util import in_eval_mode
from atlib.adapters.adapter import Adapter, Unwalkable
from atlib.adapters.choose import adapter_of
from atlib.adapters.timm import EvaViT, ViT, is_plain
from atlib.attention import DropPathMasks, Instead, Layer, Seen, see

__all__ = [
    "DropPathMasks",
    "Instead",
    "Seen",
    "Unwalkable",
    "Walk",
    "adapter_of",
    "check_exact",
    "check_timm",
    "check_walkable",
    "sample_drop_path",
    "walk",
    "walk_tokens",
]


class Walk(NamedTuple):
    """The outcome of a walk."""

    #: (B, classes), or what a model without classes returns; None after `stop_after` or without `head`.
    logits: Tensor | None
    #: What each layer that was walked saw.
    layers: tuple[Seen, ...]
    #: The residual stream where the walk ended, (B, N, D), before the final norm.
    tokens: Tensor
    #: The residual stream after every block that was run, (B, N, D) each.
    stream: tuple[Tensor, ...]


def walk(
    vit: nn.Module | Adapter,
    images: Tensor,
    *,
    replace: Mapping[int, Instead] | None = None,
    stop_after: int | None = None,
    values: bool = False,
    head: bool = True,
    drop_path: Sequence[DropPathMasks] | None = None,
    checked: bool = False,
) -> Walk:
    """Compute what `vit(images)` computes, and return what every attention layer saw on the way.

    `vit`: a ViT of timm, transformers, torchvision or open_clip, or an `atlib.adapters.Adapter` for a class
    of your own. `images`: (B, 3, height, width). `replace` maps a layer's index to what its attention shall
    use instead. `stop_after=i` ends the walk as soon as layer i's q and k are known: its values, its
    attention, its MLP, all later layers and the head are not computed, and `logits` is None; with `values`
    that layer's v is computed too. `head=False` runs all blocks but neither the final norm nor the head:
    `logits` is None. `drop_path` gives the stochastic-depth masks of every layer (`sample_drop_path`), so
    that two models can share them; None leaves them to the ViT's own modules.

    Every walk checks that the model can be walked, unless `checked` says that the caller did: a module that
    holds a ViT calls `check_walkable` once, when it is built, and then walks on and on. What changes when a
    model is trained is looked at all the same: its mode, and the classes of its blocks, which FSDP replaces.

    Raises `atlib.walking.Unwalkable` for a model that cannot be walked faithfully (by name, with the reason),
    and `ValueError` for a layer out of range or a replacement of the wrong shape.
    """
    adapter = adapter_of(vit)
    if not (checked and adapter.still_walkable()):
        adapter.check()

    def whole(images: Tensor) -> Walk:
        tokens, layers = adapter.embed(images)
        outcome = _walk_layers(adapter, tokens, layers, replace, stop_after, values, drop_path)
        if stop_after is not None or not head:
            return outcome
        return outcome._replace(logits=adapter.head(outcome.tokens))

    return _as_forward(adapter.model, whole, images)


def walk_tokens(vit: nn.Module, tokens: Tensor, *, stop_after: int | None = None) -> Walk:
    """Walk the blocks from tokens (B, N, D) that are embedded already, positions included, such as those of
    the visible patches of masked auto-encoding. `logits` is None.

    `stop_after` is that of `walk`. Raises as `walk` does, and `Unwalkable` for another model than timm's
    `VisionTransformer`: rotations and biases by position would have to be chosen with the tokens.
    """
    adapter = adapter_of(vit)
    if not isinstance(adapter, ViT):
        kind = type(adapter.model).__name__
        raise Unwalkable(
            f"cannot walk a {kind} from tokens alone: it may rotate q and k by place, or add a bias by place"
        )
    adapter.check()
    return _walk_layers(adapter, tokens, adapter.layers(), stop_after=stop_after)


def _walk_layers(
    adapter: Adapter,
    tokens: Tensor,
    layers: Sequence[Layer],
    replace: Mapping[int, Instead] | None = None,
    stop_after: int | None = None,
    values: bool = False,
    drop_path: Sequence[DropPathMasks] | None = None,
) -> Walk:
    """The walk through the layers alone, from embedded tokens (B, N, D): without logits."""
    replace = dict(replace or {})
    _check_numbers(len(layers), replace, stop_after, drop_path)
    all_seen: list[Seen] = []
    stream: list[Tensor] = []
    for index, layer in enumerate(layers):
        instead = replace.get(index, Instead())
        if index == stop_after:
            all_seen.append(_as_forward(layer.module, _look, layer, tokens, instead, index, values))
            break
        masks = None if drop_path is None else drop_path[index]
        step = _step_again if adapter.checkpointing and torch.is_grad_enabled() else _step
        tokens, seen = _as_forward(layer.module, step, layer, tokens, instead, masks, index)
        all_seen.append(seen)
        stream.append(tokens)
    return Walk(None, tuple(all_seen), tokens, tuple(stream))


def _step(
    layer: Layer, tokens: Tensor, instead: Instead, masks: DropPathMasks | None, index: int
) -> tuple[Tensor, Seen]:
    """One block's forward with the inside visible."""
    x = layer.before(tokens)
    seen = see(layer, x, instead, index)
    mixed = layer.mix(seen).transpose(1, 2).flatten(2)  # (B, N, H·d)
    return layer.after(tokens, x, mixed, masks), seen


def _step_again(*arguments: Any) -> tuple[Tensor, Seen]:
    """`_step`, computed again in the backward pass instead of kept."""
    return checkpoint(_step, *arguments, use_reentrant=False)


def _look(layer: Layer, tokens: Tensor, instead: Instead, index: int, values: bool) -> Seen:
    """What a layer's attention sees, without going on."""
    return see(layer, layer.before(tokens), instead, index, values=values)


def _as_forward(module: nn.Module, function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)`, and for a module whose weights FSDP2 divides among processes as if that were
    its forward: its hooks then gather the weights before, divide them again after, and reduce gradients."""
    if not hasattr(module, "unshard"):  # an FSDPModule; nothing else has it
        return function(*arguments)
    module.forward = function  # of this object alone, in place of its class's
    try:
        return module(*arguments)
    finally:
        del module.forward


def _check_numbers(
    depth: int, replace: Mapping[int, Instead], stop_after: int | None, drop_path: Sequence | None
) -> None:
    for index in [*replace, *([] if stop_after is None else [stop_after])]:
        if not 0 <= index < depth:
            raise ValueError(
                f"layer {index} does not exist: this ViT has depth {depth}, layers 0 to {depth - 1}"
            )
    if drop_path is not None and len(drop_path) != depth:
        raise ValueError(f"drop_path has masks for {len(drop_path)} layers, this ViT has depth {depth}")


def sample_drop_path(vit: nn.Module | Adapter, images: Tensor) -> list[DropPathMasks]:
    """Draw one set of stochastic-depth masks, at `vit`'s own rates, for a batch of `images` (B, ...): per
    layer two (B, 1, 1).

    The same distribution as timm's `DropPath`: a sample's branch is kept with probability 1 - rate and then
    scaled up by 1 / (1 - rate). Source: Huang et al. 2016, "Deep Networks with Stochastic Depth".
    """

    def mask(module: nn.Module | None) -> Tensor:
        keep = 1 - getattr(module, "drop_prob", 0.0)
        scale = keep if getattr(module, "scale_by_keep", True) and keep > 0 else 1.0
        return images.new_empty(len(images), 1, 1).bernoulli_(keep) / scale

    return [(mask(attention), mask(mlp)) for attention, mlp in adapter_of(vit).drop_paths()]


def check_walkable(vit: nn.Module | Adapter) -> None:
    """Raise `Unwalkable`, naming the class and the reason, unless `walk(vit, x)` computes exactly what
    `vit(x)` computes.

    It looks at the classes of the ViT, its blocks and their attention, at methods that were replaced, and at
    the mode; what classes do not show, `check_exact` compares. `walk` calls it every time;
    `AttentionTransfer` and the methods call it once for each model, when they are built, and again where a
    class or the mode has changed since.
    """
    adapter_of(vit).check()


def check_timm(vit: nn.Module) -> None:
    """Raise `Unwalkable` unless the model can be walked and is a `VisionTransformer` or `Eva` of timm with
    pre-norm blocks: for methods that read more of a ViT than its maps."""
    adapter = adapter_of(vit)
    adapter.check()
    plain = isinstance(adapter, (ViT, EvaViT)) and all(map(is_plain, adapter.blocks))
    if not plain:
        kinds = f"a {type(adapter.model).__name__} of {type(adapter.blocks[0]).__name__}s"
        raise Unwalkable(
            f"cannot take {kinds} here: AttentionTransfer copies and distills its maps, but this method reads"
            " more of a ViT, and knows timm's VisionTransformer of Blocks and Eva of EvaBlocks"
        )


@torch.no_grad()
def check_exact(
    vit: nn.Module | Adapter, images: Tensor | None = None, tolerance: float | None = None
) -> float:
    """The largest difference between what a walk and what the model itself computes, in eval mode: relative
    to the largest number of the model's output.

    `images`: (B, 3, height, width); None: one image of noise in the model's size and type. `tolerance`: None
    for 1e-5, and in half precision for what rounding explains, 8 units in the last place. Weights that are
    all 0, such as those of a head that torchvision has just built, are drawn at random meanwhile: behind
    them every walk would look right. The model's mode and weights stay as they were. Raises `Unwalkable` for
    a model that cannot be walked, and for a difference above `tolerance` or an output of another shape: then
    the adapter is wrong, or does not fit this version of the library.
    """
    adapter = adapter_of(vit)
    adapter.check()
    model, generator = adapter.model, torch.Generator().manual_seed(0)
    if images is None:
        weight = next(model.parameters())
        noise = torch.randn(1, 3, *adapter.sizes().image, generator=generator)
        images = noise.to(weight.device, weight.dtype)
    if tolerance is None:
        tolerance = max(1e-5, 8 * torch.finfo(images.dtype).eps)
    silent = [weight for weight in model.parameters() if weight.ndim > 1 and not weight.any()]
    try:
        for weight in silent:
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
        with in_eval_mode(model):
            own, seen = adapter.output(images), walk(adapter, images)
            walked = seen.logits
    finally:
        for weight in silent:
            weight.zero_()
    name = type(adapter).__name__
    for made, by in ((own, "output"), (walked, "head")):
        if not isinstance(made, Tensor):
            raise Unwalkable(
                f"cannot walk a {type(model).__name__}: {name}.{by} returns a {type(made).__name__}, and a"
                " tensor (B, classes) is asked for: choose it there, such as the logits of a dict"
            )
    if own.shape != walked.shape:
        shapes = f"{tuple(walked.shape)} where the model returns {tuple(own.shape)}"
        raise Unwalkable(f"cannot walk a {type(model).__name__}: {name}.head makes {shapes}")
    difference = ((own - walked).abs().max() / own.abs().max().clamp(min=1e-12)).item()
    if not difference <= tolerance:
        parts = model.named_modules()
        hooked = [name or "itself" for name, part in parts if part._forward_hooks or part._forward_pre_hooks]
        compare = "Compare its embed, its layers and its head with the model's forward, one after another"
        hooks = f"It has hooks on {', '.join(hooked[:3])}, which a walk may not call: remove them"
        raise Unwalkable(
            f"cannot walk a {type(model).__name__}: with {name} the walk differs from the model's own output"
            f" by {difference:.1e} of its largest number, more than {tolerance:g} (in"
            f" {str(images.dtype).removeprefix('torch.')}). {hooks if hooked else compare}"
        )
    _require_sizes(adapter, seen.layers, images)
    return difference


def _require_sizes(adapter: Adapter, layers: Sequence[Seen], images: Tensor) -> None:
    """That what an adapter says of its model's sizes is what a walk sees. Raises `Unwalkable` naming the
    field of `Sizes`."""
    sizes, (_, heads, tokens, width) = adapter.sizes(), layers[0].q.shape
    said_and_seen = {
        "depth": (sizes.depth, len(layers)),
        "heads": (sizes.heads, heads),
        "head_width": (sizes.head_width, width),
    }
    if tuple(images.shape[-2:]) == tuple(sizes.image):
        said_and_seen["prefix_kinds, with a grid of " + " x ".join(map(str, sizes.grid))] = (
            sizes.prefix + sizes.grid[0] * sizes.grid[1],
            tokens,
        )
    for name, (said, seen) in said_and_seen.items():
        if said != seen:
            raise Unwalkable(
                f"cannot walk a {type(adapter.model).__name__}: {type(adapter).__name__}.sizes() says {name}:"
                f" {said}, and the walk sees {seen}"
            )
