"""Let a model run its own forward, watch its attention, and put something else in its place.

All of today's libraries make one call for attention, `F.scaled_dot_product_attention`. While a watch is open, this
module's function stands in that place: it notes q, k and v of every call, and computes with what a plan gives
instead. Nothing of the model is rewritten, so what it computes with nothing replaced is what it computes alone.

The function is swapped for the whole process, and other threads' calls pass through it unchanged; one walk runs at
a time. A layer is a call in which every query has a key (self-attention); attention pooling and cross-attention
pass through.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atlib.attention import FORBIDDEN, SDPA, Instead, Seen, attend, merged

_LINEAR = F.linear  # torch's own
_ONE_AT_A_TIME = threading.RLock()


class Unwalkable(TypeError):
    """A model whose attention cannot be watched; the message says why, in one sentence."""


class Sites(NamedTuple):
    """Where the layers of a model are: what one watched forward finds, and the next ones need not look for."""

    #: The modules that make the call, in its order.
    attention: tuple[nn.Module, ...]
    #: The blocks that they are in, elements of a `ModuleList` or `Sequential`; () where they are in none.
    blocks: tuple[nn.Module, ...]
    #: Of each layer the rows of v in a joint projection, (the module or parameter that holds its weight, its name
    #: there, first row, last row + 1); None where q, k and v have no joint projection.
    values: tuple[tuple[nn.Module, str, int, int] | None, ...]


class Watched(NamedTuple):
    """The outcome of a watched forward."""

    #: What the model returned; None where it was stopped.
    output: Any
    #: What each layer saw.
    layers: tuple[Seen, ...]
    #: What each block returned, (B, N, D).
    stream: tuple[Tensor, ...]
    #: What the block of the last layer was given, (B, N, D); None without blocks.
    entered: Tensor | None
    sites: Sites


class _Stop(Exception):
    """The teacher is run no further."""


class _Watch:
    """The function that stands in place of attention, and what it has noted."""

    def __init__(self, replace: Mapping[int, Instead], stop_after: int | None, sites: Sites | None):
        self.replace, self.stop_after, self.sites = replace, stop_after, sites
        self.seen: list[Seen] = []
        self.callers: list[nn.Module] = []
        self.running: list[nn.Module] = []
        self.entered: dict[nn.Module, Tensor] = {}
        self.returned: dict[nn.Module, Tensor] = {}
        self.made: list[tuple[Tensor, Tensor]] = []  # (weight, product), while sites are looked for
        self.values: list[tuple[Tensor, int, int] | None] = []
        self.thread = None if torch.compiler.is_compiling() else threading.get_ident()

    def __call__(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        """`F.scaled_dot_product_attention`, noted, with what replaces its own."""
        q, k, v = query, key, value
        elsewhere = not torch.compiler.is_compiling() and threading.get_ident() != self.thread
        if elsewhere or q.ndim != 4 or q.shape[2] != k.shape[2]:
            options = {"scale": scale, "enable_gqa": enable_gqa} if enable_gqa else {"scale": scale}
            return SDPA(q, k, v, attn_mask, dropout_p, is_causal, **options)
        if self.sites is None:
            self.values.append(_rows_of_v(self.made, q, v))
        index, own = self._index(), _own(q, k, v, attn_mask, is_causal, scale)
        if index in self.replace:
            seen = merged(own, self.replace[index], index)
            self.seen.append(seen)
        else:
            self.seen.append(own)
        if index == self.stop_after and not torch.compiler.is_compiling():
            raise _Stop
        if index in self.replace:
            return attend(seen, dropout_p)
        options = {"enable_gqa": True} if enable_gqa else {}  # exactly what the model asked for
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)

    def _index(self) -> int:
        """Which layer is running."""
        if self.running:
            self.callers.append(self.running[-1])
        return len(self.seen)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`, noted."""
        output = _LINEAR(x, weight, bias)
        self.made.append((weight, output))
        return output

    def _enter(self, module: nn.Module, inputs: tuple) -> None:
        self.running.append(module)
        if inputs and isinstance(inputs[0], Tensor):
            self.entered[module] = inputs[0]

    def _leave(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        self.running.pop()
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            self.returned[module] = first


class _Again(_Watch):
    """The same while a backward pass computes parts of the forward again (activation checkpointing): a layer is
    then known by its module, since calls come in another order."""

    def __init__(self, replace: Mapping[int, Instead], sites: Sites):
        super().__init__(replace, None, sites)
        self.layer_of = {module: layer for layer, module in enumerate(sites.attention)}

    def _index(self) -> int:
        self.seen.clear()
        if not self.running:
            return -1
        return self.layer_of[self.running[-1]]


def watched(
    model: nn.Module,
    call: Callable[[], Any],
    *,
    replace: Mapping[int, Instead] | None = None,
    stop_after: int | None = None,
    sites: Sites | None = None,
    masks: Sequence[tuple[nn.Module, Tensor]] = (),
) -> Watched:
    """Run `call`, in which the model or parts of it run, and note what every attention layer of the model saw.

    replace: {layer: what its attention uses instead}; a layer is counted from 0, in the order of calls.
    stop_after: the last layer that is needed; nothing after its q and k is computed (a compiled graph drops by
    itself what nobody uses). sites: what an earlier forward of this model has found; without them the model is
    looked through once more. masks: what modules of stochastic depth multiply their input with, in place of what
    they draw; a module that stands several times takes one after the other. Where both q and k of a layer are replaced, their rows of a joint projection are
    not computed. Raises `Unwalkable` for a model in which not every block makes the call.
    """
    replace = dict(replace or {})
    watch = _Watch(replace, stop_after, sites)
    output = None
    with _open(watch, model, sites, masks):
        try:
            output = call()
        except _Stop:
            pass
    if sites is None:
        sites = _sites(model, watch)
    if (replace or masks) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _replace_again(model, output, replace, sites, masks)
    blocks = sites.blocks
    stream = tuple(watch.returned[block] for block in blocks if block in watch.returned)
    last = blocks[len(watch.seen) - 1] if blocks and watch.seen else None
    return Watched(output, tuple(watch.seen), stream, watch.entered.get(last), sites)


@contextmanager
def _open(watch: _Watch, model: nn.Module, sites: Sites | None, masks: Sequence[tuple[nn.Module, Tensor]]):
    """Within it, `watch` stands in place of attention, and masks in place of those that are drawn."""
    if torch.compiler.is_compiling():  # a graph has no hooks and no other threads
        before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, watch
        handles = _hooked(masks)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = before
            for handle in handles:
                handle.remove()
        return
    modules = model.modules() if sites is None else {*sites.attention, *sites.blocks}
    with _ONE_AT_A_TIME, _switched(model):
        handles = [
            handle
            for module in modules
            for handle in (
                module.register_forward_pre_hook(watch._enter),
                module.register_forward_hook(watch._leave, always_call=True),
            )
        ] + _hooked(masks)
        before = F.scaled_dot_product_attention, F.linear
        F.scaled_dot_product_attention = watch
        if sites is None:
            F.linear = watch.linear
        elif skipped := _skipped(watch.replace, sites):
            F.linear = _linear_without(skipped)
        try:
            yield
        finally:
            F.scaled_dot_product_attention, F.linear = before
            for handle in handles:
                handle.remove()


def _hooked(masks: Sequence[tuple[nn.Module, Tensor]]) -> list:
    """Let modules of stochastic depth use these masks; the handles of their hooks."""
    of_module: dict[nn.Module, list[Tensor]] = {}
    for module, mask in masks:
        of_module.setdefault(module, []).append(mask)

    def masked(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        turn = of_module[module]
        turn.append(turn.pop(0))
        return inputs[0] * turn[-1].to(inputs[0].dtype)

    return [module.register_forward_hook(masked) for module in of_module]


def _own(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None) -> Seen:
    """What a call computes with: grouped keys and values repeated, what is added to its scores apart.

    A mask of bools, and that of causal attention, forbids; one of numbers is a bias.
    """
    k, v = (x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = mask = None
    if is_causal:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = q.new_zeros(allowed.shape).masked_fill(~allowed, FORBIDDEN)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = _few_axes(q.new_zeros(attn_mask.shape).masked_fill(~attn_mask, FORBIDDEN))
    elif attn_mask is not None:
        bias = _few_axes(attn_mask)
    return Seen(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, bias=bias, mask=mask)


def _few_axes(x: Tensor) -> Tensor:
    """What is added to scores without leading axes of length 1: (N, N), (H, N, N) or (B, H, N, N)."""
    while x.ndim > 2 and x.shape[0] == 1:
        x = x[0]
    return x


# --- Rows of a joint projection that nobody reads ---


def _rows_of_v(made: list[tuple[Tensor, Tensor]], q: Tensor, v: Tensor) -> tuple[Tensor, int, int] | None:
    """The rows of a joint projection that v is made of, found by where its numbers lie in memory, so that no name
    of a module counts: (its weight, first row, last row + 1); None where there is no such projection."""
    width = v.shape[1] * v.shape[3]
    for weight, output in reversed(made):
        rows = len(weight)
        if rows > width and _storage(output) == _storage(v):
            start = v.storage_offset() - output.storage_offset()
            # one head after the other, in rows that lie together
            together = v.stride()[1:] == (v.shape[3], rows, 1)
            return (weight, start, start + width) if together and 0 <= start <= rows - width else None
    return None


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # the same object, also where a tensor has no memory


def _skipped(replace: Mapping[int, Instead], sites: Sites | None) -> list[tuple[nn.Module, str, int, int]]:
    """The projections of which v alone is needed: those of layers whose q and k, or whose map, are replaced in
    whole."""
    if sites is None:
        return []
    found = []
    for layer, instead in replace.items():
        whole = instead.heads is None and instead.own is None and instead.v is None
        if whole and (instead.map is not None or instead.q is not None and instead.k is not None):
            if layer < len(sites.values) and sites.values[layer] is not None:
                found.append(sites.values[layer])
    return found


def _linear_without(skipped: list[tuple[nn.Module, str, int, int]]) -> Callable[..., Tensor]:
    """`F.linear` that computes the rows of v alone for these projections, and 0 for those of q and k."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        for module, name, start, stop in skipped:
            if weight is getattr(module, name):
                v = _LINEAR(x, weight[start:stop], None if bias is None else bias[start:stop])
                return F.pad(v, (start, weight.shape[0] - stop))
        return _LINEAR(x, weight, bias)

    return linear


# --- Activation checkpointing ---


def _replace_again(
    model: nn.Module,
    output: Any,
    replace: Mapping[int, Instead],
    sites: Sites,
    masks: Sequence[tuple[nn.Module, Tensor]],
) -> None:
    """Let the same stand in place of attention while the backward pass of this output runs: what activation
    checkpointing computes again is then what was computed before."""
    results = output.values() if isinstance(output, Mapping) else output
    for result in results if isinstance(output, (Mapping, tuple, list)) else [output]:
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda grad: _begin_again(model, replace, sites, masks))
            return


_BEGUN: list[Any] = []  # contexts of the backward pass that runs: at most one


def _begin_again(model: nn.Module, replace: Mapping, sites: Sites, masks: Sequence) -> None:
    _end_again()
    context = _open(_Again(replace, sites), model, sites, masks)
    context.__enter__()
    _BEGUN.append(context)
    torch.autograd.Variable._execution_engine.queue_callback(_end_again)


def _end_again() -> None:
    while _BEGUN:
        _BEGUN.pop().__exit__(None, None, None)


# --- What a model must be made to do, and what it cannot be ---


@contextmanager
def _switched(model: nn.Module):
    """Within it, attention that could make the call makes it: timm's with `fused_attn`, transformers' with
    "sdpa", torch's own `MultiheadAttention` outside of its fast path."""
    unfused = [part for part in model.modules() if getattr(part, "fused_attn", True) is False]
    config = getattr(model, "config", None)
    eager = getattr(config, "_attn_implementation", None) not in (None, "sdpa") and hasattr(
        model, "set_attn_implementation"
    )
    implementation = config._attn_implementation if eager else None
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for part in unfused:
            part.fused_attn = True
        if eager:
            model.set_attn_implementation("sdpa")
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        if eager:
            model.set_attn_implementation(implementation)
        for part in unfused:
            part.fused_attn = False


def _sites(model: nn.Module, watch: _Watch) -> Sites:
    """What a forward has found. Raises `Unwalkable` where some blocks make the call and others like them do
    not."""
    names = {module: name for name, module in model.named_modules()}
    blocks = [_block_of(model, names.get(caller, "")) for caller in watch.callers]
    known = [block for block in blocks if block is not None]
    if known and watch.stop_after is None:
        container = names[known[0]].rpartition(".")[0]
        alike = [part for part in model.get_submodule(container).children() if type(part) is type(known[0])]
        if missing := [part for part in alike if part not in known]:
            kind = type(model).__name__
            raise Unwalkable(
                f"{len(missing)} of {len(alike)} blocks of this {kind} make no scaled_dot_product_attention call"
            )
    holders = {
        id(weight): (module, name)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
    }
    values = [
        None if rows is None or id(rows[0]) not in holders else (*holders[id(rows[0])], *rows[1:])
        for rows in watch.values
    ]
    return Sites(tuple(watch.callers), tuple(known) if len(known) == len(blocks) else (), tuple(values))


def _block_of(model: nn.Module, name: str) -> nn.Module | None:
    """The nearest ancestor of a module, or itself, that is an element of a list of modules."""
    while name:
        above = name.rpartition(".")[0]
        if isinstance(model.get_submodule(above), (nn.ModuleList, nn.Sequential)):
            return model.get_submodule(name)
        name = above
    return None
