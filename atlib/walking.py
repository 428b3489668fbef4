"""Run a ViT, hand back what every attention layer saw, and replace what is asked for.

The model runs its own forward (`atlib.watching`). What happened inside is a return value, with gradients; what should
happen instead is an argument; nothing is stored on the modules.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from timm.models import checkpoint_seq
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.adapters.adapter import Adapter
from atlib.adapters.choose import adapter_of
from atlib.adapters.timm import EvaViT, ViT, is_plain
from atlib.attention import DropPathMasks, Instead, Seen
from atlib.watching import Sites, Unwalkable, watched

__all__ = [
    "DropPathMasks",
    "Instead",
    "Seen",
    "Unwalkable",
    "Walk",
    "adapter_of",
    "check_timm",
    "check_walkable",
    "sample_drop_path",
    "sites_of",
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
    sites: Sites | None = None,
    checked: bool = False,
) -> Walk:
    """Run `vit(images)`, and return what every attention layer saw on the way.

    `vit`: any model that makes the call `F.scaled_dot_product_attention`, such as a ViT of timm, transformers,
    torchvision or open_clip, or one of your own. `images`: (B, 3, height, width), or what else the model takes.
    `replace` maps a layer's index to what its attention shall use instead. `stop_after=i` ends the walk as soon as
    layer i's q and k are known: nothing after them is computed, and `logits` is None; with `values` that layer's v
    is kept too. `head=False` leaves `logits` out. `drop_path` gives the stochastic-depth masks of every layer
    (`sample_drop_path`), so that two models can share them; None leaves them to the ViT's own modules. `sites`:
    what `sites_of` has found, so that the model need not be looked through again.

    Raises `Unwalkable` for a model that cannot be watched, with the reason, and `ValueError` for a layer out of
    range or a replacement of the wrong shape.
    """
    adapter = adapter_of(vit)
    if not (checked and adapter.still_walkable()):
        adapter.check()
    return _outcome(
        adapter, lambda: adapter.output(images), replace, stop_after, values, head, drop_path, sites
    )


def walk_tokens(vit: nn.Module, tokens: Tensor, *, stop_after: int | None = None) -> Walk:
    """Walk the blocks from tokens (B, N, D) that are embedded already, positions included, such as those of
    the visible patches of masked auto-encoding. `logits` is None.

    `stop_after` is that of `walk`. Raises as `walk` does, and `Unwalkable` for another model than timm's
    `VisionTransformer`: rotations and biases by position would have to be chosen with the tokens.
    """
    if not isinstance(vit, VisionTransformer):
        raise Unwalkable(f"cannot walk a {type(vit).__name__} from tokens alone: it may rotate or bias by place")
    adapter = adapter_of(vit)
    adapter.check()

    def blocks() -> Tensor:
        if vit.grad_checkpointing and vit.training:
            return checkpoint_seq(vit.blocks, tokens)
        return vit.blocks(tokens)

    return _outcome(adapter, blocks, None, stop_after, False, False, None, None)


def sites_of(vit: nn.Module | Adapter, images: Tensor) -> Sites:
    """Where the layers of a model are, by running it on one image: what the next walks need not look for."""
    from atlib._util import in_eval_mode
    import torch

    adapter = adapter_of(vit)
    with torch.no_grad(), in_eval_mode(adapter.model):
        return watched(adapter.model, lambda: adapter.output(images[:1])).sites


def _outcome(
    adapter: Adapter,
    call: Callable[[], Tensor],
    replace: Mapping[int, Instead] | None,
    stop_after: int | None,
    values: bool,
    head: bool,
    drop_path: Sequence[DropPathMasks] | None,
    sites: Sites | None,
) -> Walk:
    _check_numbers(len(adapter.blocks), replace or {}, stop_after, drop_path)
    masks = [
        (module, mask)
        for modules, of_layer in zip(adapter.drop_paths(), drop_path or ())
        for module, mask in zip(modules, of_layer)
        if module is not None
    ]
    seen = watched(
        adapter.model, call, replace=replace, stop_after=stop_after, sites=sites, masks=masks
    )
    layers, stream = seen.layers, seen.stream
    if stop_after is not None:
        layers = layers[: stop_after + 1]
        if not values:
            layers = (*layers[:-1], layers[-1]._replace(v=None))
        return Walk(None, layers, seen.entered, stream[:stop_after])
    return Walk(seen.output if head else None, layers, stream[-1] if stream else None, stream)


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
    """Raise `Unwalkable`, naming the class and the reason, for a model that cannot be walked."""
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
