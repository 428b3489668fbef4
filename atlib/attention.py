"""See what the attention layers of a model compute, and put something else in its place.

The model runs its own forward. While it is walked, a function of this file stands in the place of
`torch.nn.functional.scaled_dot_product_attention`: it notes q, k and v of every call with as many queries as
keys, and computes with what it was given instead. A graph of torch.compile has no exceptions, hooks or
context variables; there the compiler drops what nobody uses.
"""

import copy
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from atlib._util import in_eval_mode
from atlib.maps import keep_own

SDPA, LINEAR = F.scaled_dot_product_attention, F.linear  # torch's own

# A layer's stochastic-depth factors for the attention and the MLP branch: (B, 1, 1), 0 or 1 / (1 - rate).
DropPathMasks = tuple[Tensor, Tensor]

# Attention of another kind than softmax: queries, keys (B, H, N, d) and values (B, H, N, w) to (B, H, N, w),
# the values mixed by weights that depend on queries and keys alone and sum to 1.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# Added to the score of a token that must not be looked at. Its share is exactly 0, and unlike minus infinity
# it leaves 0 · log 0 = 0 in a cross-entropy.
FORBIDDEN = -1e9
LOW = -1e4  # what models add to such a score is at most this

# In names of modules that attend, and have no map of all tokens.
OTHERS = re.compile("pool|channel", re.I)


class Unwalkable(TypeError):
    """A model whose attention cannot be seen; the message says why."""


class Seen(NamedTuple):
    """What one attention layer saw and used: q and k *after* norms and rotation by position (RoPE), shared
    keys and values repeated for every head."""

    q: Tensor | None  #: Queries, (B, H, N, d); None where a whole map was put in.
    k: Tensor | None  #: Keys, as q.
    v: Tensor | None  #: Values, (B, H, N, d); None at the layer where a walk stops.
    scale: float  #: The factor on q kᵀ, usually 1/√d.
    given: Tensor | None = None  #: The whole map that was put in, (B, H, N, N).
    bias: Tensor | None = None  #: Added to the scores (relative positions): (H, N, N), or (N, N) for all.
    #: (N, N), or (B, 1, N, N) where images differ, constant, added to the scores of every head: 0 where a
    #: query may look and `FORBIDDEN` where it must not. It belongs to the layer, and stays.
    mask: Tensor | None = None
    attend: Attend | None = None  #: What mixes the values in place of softmax attention.

    @property
    def scores(self) -> Tensor:
        """Attention logits z = scale · q kᵀ + bias + mask: (B, H, N, N); with `attend`, the map's log."""
        if self.given is not None:
            raise ValueError("this layer was given a map: it has no attention logits")
        if self.attend is not None:
            return self.map.log()
        return plus(self.scale * self.q @ self.k.mT, self.added)

    @property
    def added(self) -> Tensor | None:
        """The sum of bias and mask; None for nothing."""
        return plus(self.bias, self.mask)

    @property
    def map(self) -> Tensor:
        """The attention map the layer used, softmax(z): (B, H, N, N), rows sum to 1."""
        if self.attend is not None:  # what it makes of the identity as values
            tokens = torch.eye(self.k.shape[2], dtype=self.k.dtype, device=self.k.device)
            return forbid(self.attend(self.q, self.k, tokens.expand(*self.k.shape[:2], -1, -1)), self.mask)
        return self.scores.softmax(-1) if self.given is None else self.given

    def without(self, mask: Tensor | None) -> "Seen":
        """The same layer, had it not looked at what a mask (N, N) forbids too."""
        given = None if self.given is None else forbid(self.given, mask)
        return self._replace(given=given, mask=plus(self.mask, mask))


class Instead(NamedTuple):
    """What a layer's attention shall use instead of its own; None: its own. What a layer forbids
    (`Seen.mask`) stays forbidden: a new map loses those entries, rows renormalised."""

    q: Tensor | None = None  #: Queries, (B, H, N, d), as `Seen` has them.
    k: Tensor | None = None  #: Keys, as q.
    v: Tensor | None = None  #: Values, as q.
    map: Tensor | None = None  #: A whole map, (B, H, N, N), in place of q and k.
    scale: float | None = None  #: The factor that belongs to new q and k.
    heads: Sequence[int] | None = None  #: The heads to replace, H being their number; None for all.
    #: Of a replaced map, the queries whose rows stay the layer's own, and the keys that keep their weight in
    #: every other row (`atlib.maps.keep_own`).
    kept: tuple[Sequence[int], Sequence[int]] | None = None
    bias: Tensor | None = None  #: The bias that belongs to new q and k: (N, N), or (H, N, N).
    mask: Tensor | None = None  #: (N, N), on top of what the layer forbids, with new q and k of all heads.
    attend: Attend | None = None  #: Mixes the layer's values in place of softmax, without dropout; alone.


class Walk(NamedTuple):
    """The outcome of a walk."""

    #: (B, classes), or what a model without classes returns; None after `stop_after` or without `head`.
    logits: Any
    layers: tuple[Seen, ...]  #: What each layer that was walked saw.
    #: The residual stream where the walk ended, (B, N, D), before the final norm. None in a compiled graph,
    #: and where layers stand in no list of blocks.
    tokens: Tensor | None
    stream: tuple[Tensor, ...]  #: The residual stream after every block; () where `tokens` is None.
    passed: tuple[str, ...] = ()  #: Modules whose attention is no layer: pooling, cross-attention.


# --- What a layer uses ---


def attend(seen: Seen, dropout: float = 0.0, on_fused: bool = True) -> Tensor:
    """Mix the values with the map: (B, H, N, d), fused or dense; or as `seen.attend` does."""
    if seen.attend is not None:
        return seen.attend(seen.q, seen.k, seen.v)
    if seen.given is None and on_fused:
        return fused_attention(seen.q, seen.k, seen.v, seen.scale, dropout, seen.added)
    return F.dropout(seen.map, dropout, training=dropout > 0).to(seen.v.dtype) @ seen.v


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """torch's fused attention, with `bias` (N, N) or (H, N, N) on the scores."""
    # Kernels want one width for all three, or maps get stored; columns of zeros change nothing.
    width = max(q.shape[-1], v.shape[-1])
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    mask = None if bias is None else bias.to(q.dtype)
    return SDPA(*padded, mask, dropout, scale=scale)[..., : v.shape[-1]]


def plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of both; None adds nothing."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def forbid(p: Tensor, mask: Tensor | None) -> Tensor:
    """Maps (..., N, N) without what a mask (N, N) forbids, rows renormalised."""
    if mask is None:
        return p
    # A share that has underflowed is not known; all that remain of a row may be such ones.
    return (p.clamp(min=torch.finfo(p.dtype).tiny).log() + mask).softmax(-1).to(p.dtype)


def put_in(layer: Seen, new: Instead, index: int) -> Seen:
    """What a layer uses where something stands in place of its own, in all heads or in some. Raises
    `ValueError` for a replacement of the wrong shape."""
    _check_instead(new, layer, f"layer {index}:")
    if new.attend is not None:
        return layer._replace(attend=new.attend)
    heads = None if new.heads is None else torch.tensor([*new.heads], device=layer.q.device)

    def put(current: Tensor, value: Tensor | None) -> Tensor:
        if value is None:
            return current
        return value if heads is None else current.index_copy(1, heads, value.to(current.dtype))

    v, mask = put(layer.v, new.v), plus(layer.mask, new.mask)
    if new.map is not None:
        p = forbid(new.map, mask)
        if heads is not None or new.kept is not None:
            current = layer.map
            if new.kept is not None:
                of_heads = current if heads is None else current[:, heads]
                p = keep_own(p.to(current.dtype), of_heads, *new.kept)
            p = put(current, p)
        return Seen(None, None, v, layer.scale, p, mask=mask)
    q, scale, bias = new.q, layer.scale, layer.bias
    if q is not None and new.k is not None:
        if heads is None:
            scale, bias = scale if new.scale is None else new.scale, new.bias
        else:
            # a layer has one scale: the rest goes into the new q
            q = q if new.scale is None else q * (new.scale / scale)
            bias = _bias_of_some(layer, heads, new.bias)
    return Seen(put(layer.q, q), put(layer.k, new.k), v, scale, bias=bias, mask=mask)


def _bias_of_some(layer: Seen, heads: Tensor, new: Tensor | None) -> Tensor | None:
    """A layer's bias with another one, or none, in some heads: (H, N, N)."""
    if layer.bias is None and new is None:
        return None
    shape = layer.q.shape[1], layer.q.shape[2], layer.k.shape[2]
    current = layer.q.new_zeros(shape) if layer.bias is None else layer.bias.expand(shape)
    new = current.new_zeros(shape[1:]) if new is None else new.to(current.dtype)
    return current.index_copy(0, heads, new.expand(len(heads), *shape[1:]))


def _check_instead(new: Instead, layer: Seen, at: str) -> None:
    """Raise `ValueError` for what would broadcast, or be left out, without a word."""
    B, H, N, d = layer.q.shape
    q_and_k = new.q is not None and new.k is not None
    heads = H if new.heads is None else len(new.heads)
    alone = all(part is None for part in new._replace(attend=None))
    if new.attend is not None and not (alone and layer.added is None):
        raise ValueError(f"{at} attend= takes q, k and v alone, without a bias or a mask")
    if new.map is not None and (new.q is not None or new.k is not None):
        raise ValueError(f"{at} a map is made of q and k: replace the map or q and k, not both")
    if new.kept is not None and new.map is None:
        raise ValueError(f"{at} kept= is of a map: give map=")
    for name in ("scale", "bias", "mask"):
        if getattr(new, name) is not None and (not q_and_k or name == "mask" and new.heads is not None):
            raise ValueError(f"{at} {name}= belongs to new q and k (a mask, of all heads): replace both")
    if new.heads is not None and (not heads or len({*new.heads} & {*range(H)}) < heads):
        raise ValueError(f"{at} heads={[*new.heads]}: distinct, at least one, from 0 to {H - 1}")
    # q and k need a common width, but not the layer's own: a wider teacher can teach a narrow student
    width = new.q.shape[-1] if q_and_k and new.heads is None else d
    of_scores = (N, N), (heads, N, N), (B, 1, N, N), (B, heads, N, N)
    fits = {"q": [(B, heads, N, width)], "k": [(B, heads, N, width)], "v": [(B, heads, N, d)]}
    fits |= {"map": [(B, heads, N, N)], "bias": of_scores, "mask": of_scores}
    for name, shapes in fits.items():
        value = getattr(new, name)
        if value is not None and tuple(value.shape) not in shapes:
            raise ValueError(f"{at} {name} has shape {tuple(value.shape)}, this layer needs {shapes[0]}")


# --- Rows of projections that nobody reads need not be multiplied: with them Copy costs 1.33 of fine-tuning's
# products, without 1.15 (ViT-B) ---

# Rows of a projection's weight: (first, last + 1) of each part.
Rows = tuple[nn.Module, tuple[tuple[int, int], ...]]
# The rows that each layer's "q", "k", "v" come from; "qk" together, where norms or rotations copied both.
Projections = Sequence[Mapping[str, Rows]]


def rows_of(layer: Seen, products: Sequence[tuple[nn.Linear, Tensor]]) -> dict[str, Rows]:
    """The rows that parts of a layer come from, found by where numbers lie in memory, never by name; of
    products: (projection, what it made)."""
    rows = {}
    for name in "qkv":
        part = getattr(layer, name)
        for projection, product in reversed(products):
            # `_cdata` is there also without memory
            if product.untyped_storage()._cdata == part.untyped_storage()._cdata:
                start = part.storage_offset() - product.storage_offset()
                height, width = product.shape[-1], part.shape[1] * part.shape[3]
                together = part.stride()[1:] == (part.shape[3], height, 1) and product.is_contiguous()
                if together and 0 <= start <= height - width:
                    rows[name] = projection, ((start, start + width),)
                break
    if rows.keys() == {"v"}:
        projection, ((start, stop),) = rows["v"]
        height = projection.out_features
        if height == 3 * (stop - start):  # nothing but q, k and v
            rows["qk"] = projection, tuple(span for span in ((0, start), (stop, height)) if span[0] < span[1])
    spans = [(name, part.weight, *span) for name, (part, ranges) in rows.items() for span in ranges]
    shared = {
        name
        for name, weight, start, stop in spans
        for other, others_weight, from_, to in spans
        if name != other and weight is others_weight and start < to and from_ < stop
    }
    return {name: of_part for name, of_part in rows.items() if name not in shared}


def read_elsewhere(model: nn.Module, images: Tensor, layers: Sequence[Seen], rows: Projections) -> bool:
    """Whether anything but its layer's attention reads such rows, a gate, say: they are made NaN in a second
    forward, in which attention computes with what its `layers` saw in the first."""
    watch = _Watch()
    watch.look_at(model)
    watch.first, watch.filling = layers, math.nan
    watch.unread = {index: [*of_layer.values()] for index, of_layer in enumerate(rows)}
    try:
        with in_eval_mode(model), _watching(watch):
            output = outputs(model, images)
    except Exception:  # of a model that refuses NaN
        return True

    answers = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    strays = [
        getattr(seen, name)
        for seen, of_layer in zip(watch.layers, rows)
        for name in {*"qkv"} - {*"".join(of_layer)}
    ]
    return not answers or any(x.isnan().any() for x in answers + strays)


def unread_of(new: Instead | None, rows: Mapping[str, Rows], stops: bool) -> list[Rows]:
    """A layer's rows that nobody reads under a replacement, or where a walk `stops` before its values."""
    parts = {"v"} if stops else set()
    if new is not None and new.heads is None and new.kept is None:
        parts |= {name for name in "qkv" if getattr(new, name) is not None}
        parts |= {"q", "k", "qk"} if new.map is not None or {"q", "k"} <= parts else set()
    spans: dict[nn.Module, list] = {}
    for part in (name for name in rows if name in parts):
        spans.setdefault(rows[part][0], []).extend(rows[part][1])
    return [(projection, tuple(sorted(ranges))) for projection, ranges in spans.items()]


# --- The calls that stand in place of torch's ---


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    mix: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Attention of a module that has more to say than `scaled_dot_product_attention` takes: (B, H, N, d).
    mix: how the map (B, H, N, N) and v become the result, for a layer that rounds its map, say."""
    layer, watch = Seen(q, k, v, scale, mask=mask), _current()
    if watch is not None and q.shape[2] == k.shape[2]:
        layer = watch.note(layer)
    return attend(layer, dropout) if mix is None else mix(layer.map, layer.v)


def watched_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """`F.scaled_dot_product_attention`, noted, with what replaces its own."""
    watch = _current()
    if watch is not None and query.ndim == 4 and query.shape[2] == key.shape[2]:
        shared = query.shape[1] // key.shape[1]
        k, v = (x if shared == 1 else x.repeat_interleave(shared, 1) for x in (key, value))
        bias, mask = _bias_and_mask(attn_mask, is_causal, query)
        scale_of_call = query.shape[-1] ** -0.5 if scale is None else scale
        layer = Seen(query, k, v, scale_of_call, bias=bias, mask=mask)
        used = watch.note(layer)
        if used is not layer:
            return attend(used, dropout_p)
    elif watch is not None:
        watch.passed.append(name_of_caller())
    return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _bias_and_mask(
    attn_mask: Tensor | None, is_causal: bool, q: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """What a call adds to its scores."""
    exact = torch.promote_types(q.dtype, torch.float32)  # fp16 cannot hold FORBIDDEN
    if is_causal:
        attn_mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if attn_mask is None:
        return None, None
    if attn_mask.shape[-2:] != (q.shape[2], q.shape[2]):  # of padding: one row for all queries
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], q.shape[2], q.shape[2])
    while attn_mask.ndim > 2 and (
        attn_mask.shape[0] == 1 or attn_mask.ndim == 4 and attn_mask.stride(0) == 0
    ):
        attn_mask = attn_mask[0]  # one for all images, or all heads
    if attn_mask.dtype == torch.bool:
        allowed = torch.zeros(attn_mask.shape, dtype=exact, device=q.device)
        return None, allowed.masked_fill(~attn_mask, FORBIDDEN)
    if attn_mask.requires_grad or attn_mask.is_meta or torch.compiler.is_compiling():
        return attn_mask, None
    low = attn_mask <= LOW
    if not low.any():
        return attn_mask, None
    bias = attn_mask.masked_fill(low, 0.0)
    return bias if bias.any() else None, attn_mask.masked_fill(~low, 0.0).to(exact).clamp(min=FORBIDDEN)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, without the rows of a projection that nobody reads."""
    watch = _current()
    unread = () if watch is None else watch.unread_rows(weight)
    if not unread:
        output = LINEAR(input, weight, bias)
        if watch is not None and watch.products is not None:
            modules = _caller().modules()  # BEiT's attention takes the weight of its projection
            holders = (part for part in modules if type(part) is nn.Linear and part.weight is weight)
            watch.products.extend((holder, output) for holder in holders)
        return output
    edges = [0, *(edge for span in unread for edge in span), len(weight)]
    read = [(start, stop) for start, stop in zip(edges[::2], edges[1::2]) if start < stop]
    parts, before = [], 0
    for start, stop in read or [(0, 0)]:
        part = LINEAR(input, weight[start:stop], None if bias is None else bias[start:stop])
        parts.append(_between(part, start - before, 0, watch.filling))
        before = stop
    joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return _between(joined, 0, len(weight) - before, watch.filling)


def _between(x: Tensor, before: int, after: int, filling: float) -> Tensor:
    return F.pad(x, (before, after), value=filling) if before or after else x  # of nothing, it would copy


# --- A walk ---


class _Stop(Exception):
    """The rest of the model is not needed."""


class _Watch:
    """What is noted in one forward of a model, and what stands in place of its own."""

    def __init__(
        self,
        replace: Mapping[int, Instead] | None = None,
        masks: Sequence[DropPathMasks] | None = None,
        stop_after: int | None = None,
        head: bool = True,
    ):
        self.replace, self.masks, self.stop_after, self.head = replace or {}, masks, stop_after, head
        self.unread: Mapping[int, Sequence[Rows]] = {}  # rows that nobody reads, by layer
        self.filling = 0.0  # what stands in their place
        self.first: Sequence[Seen] | None = None  # what layers saw in a first forward, and use again
        self.batch: int | None = None
        self.stops = True  # whether an exception may end the forward early
        self.index = self.branch = 0  # the next layer, and how many branches of the last were dropped
        self.layers: list[Seen] = []
        self.passed: list[str] = []
        self.products: list[tuple[nn.Linear, Tensor]] | None = None  # (projection, output), to find rows
        self.rows: list[dict[str, Rows]] = []
        # in eager mode:
        self.elements: dict[nn.Module, nn.Module] = {}  # those of lists of modules, and the list
        self.running: list[tuple[nn.Module, tuple]] = []  # such ones, with their inputs
        self.slots: frozenset[nn.Module] = frozenset()  # places of stochastic depth
        self.switches: list[tuple[Any, str, Any]] = []  # (object, attribute, value): modules make the call
        self.blocks: list[nn.Module] = []
        self.open: nn.Module | None = None  # the block that runs, once its attention was noted
        self.tokens: Tensor | None = None
        self.stream: list[Tensor] = []
        self.learns = False  # whether gradients are kept

    def from_here(self) -> "_Watch":
        """A watch for what is computed again from here on; it holds no layer that was seen so far."""
        again = copy.copy(self)
        again.stop_after, again.head, again.tokens, again.open = None, True, None, None
        again.layers, again.passed, again.running, again.blocks, again.stream = [], [], [], [], []
        return again

    def look_at(self, model: nn.Module) -> None:
        """Note a model's lists of modules, its places of stochastic depth, what must be switched in it."""
        slots = set()
        for module in model.modules():
            config = vars(module).get("config")
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                self.elements |= dict.fromkeys(module.children(), module)
            if hasattr(type(module), "unshard"):  # FSDP2 has to see every module's end
                self.stops = False
            if vars(module).get("fused_attn") is False:  # timm
                self.switches.append((module, "fused_attn", True))
            elif getattr(config, "_attn_implementation", None) not in (None, "sdpa"):  # transformers
                self.switches.append((config, "_attn_implementation", "sdpa"))
            if self.masks is not None:
                slots |= {part for name, part in module.named_children() if name.startswith("drop_path")}
        self.slots = frozenset(slots)
        if self.masks is not None and not slots:
            raise ValueError(f"drop_path= has masks, and a {type(model).__name__} no such modules")
        self.learns = torch.is_grad_enabled() and model.training

    def note(self, layer: Seen) -> Seen:
        """Note what a layer computes with; what it shall use."""
        index = self.index
        self.index += 1
        if self.batch is not None and len(layer.q) != self.batch:
            windows = len(layer.q) / self.batch
            kind = name_of_caller()
            raise Unwalkable(f"{kind} attends in {windows:g} windows an image: no map of all tokens")
        if self.products is not None:
            self.rows.append(rows_of(layer, self.products))
            self.products.clear()
        if self.first is not None:
            self.layers.append(layer)
            return self.first[index]
        if index in self.replace:
            if self.unread.get(index):
                layer = layer._replace(v=layer.v.clone())  # without the rows of zeros beside it
            layer = put_in(layer, self.replace[index], index)
        self.layers.append(layer)
        self.branch = 0
        if self.running:
            self._note_place()
        hidden = self.learns and not torch.is_grad_enabled()
        if hidden and any(weight.requires_grad for weight in _caller().parameters()):
            raise Unwalkable("reentrant checkpointing hides q and k from gradients: use_reentrant=False")
        if index == self.stop_after and self.stops and not torch.compiler.is_compiling():
            raise _Stop
        return layer

    def _note_place(self) -> None:
        block, inputs = self.running[0]
        for place in self.running:  # the outermost of several of a class: a list inside a block is part of it
            if sum(type(part) is type(place[0]) for part in self.elements[place[0]].children()) > 1:
                block, inputs = place
                break
        if block is self.open:
            raise Unwalkable(f"a {type(block).__name__} attends more than once: its layer has no single map")
        self.blocks.append(block)
        self.open = block
        if inputs and isinstance(inputs[0], Tensor):
            self.tokens = inputs[0]

    def unread_rows(self, weight: Tensor) -> tuple[tuple[int, int], ...]:
        """The rows of a weight that nobody reads at this place of the forward."""
        for projection, spans in self.unread.get(self.index, ()):
            hooked = projection._forward_hooks or projection._forward_pre_hooks
            if weight is projection.weight and not hooked:
                return spans
        return ()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Within it this watch sees where elements of lists begin and end, and stochastic depth drops."""
        places = [part.register_forward_pre_hook(self.enter) for part in self.elements]
        places += [part.register_forward_hook(self.leave, always_call=True) for part in self.elements]
        places += [part.register_forward_hook(self.drop) for part in self.slots]
        try:
            yield
        finally:
            for place in places:
                place.remove()

    def enter(self, module: nn.Module, inputs: tuple) -> None:
        """An element of a list begins."""
        if _current() is self:  # not another walk of the same model
            self.running.append((module, inputs))

    def leave(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        """An element of a list ends, by an exception too (output None)."""
        if _current() is not self:
            return
        self.running.pop()
        if module is self.open and output is not None:
            self.open = None
            self.tokens = output[0] if isinstance(output, (tuple, list)) else output
            self.stream.append(self.tokens)
            parts = [*self.elements[module]]  # one that is there several times runs as often
            ends = module is parts[-1] and self.blocks.count(module) >= parts.count(module)
            if not self.head and ends and self.stops:
                raise _Stop

    def drop(self, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
        """What a place of stochastic depth hands on, with the masks of this walk."""
        layer = self.index - 1
        if _current() is not self or layer >= len(self.masks):
            return None
        self.branch += 1
        return self.masks[layer][self.branch - 1].to(inputs[0].dtype) * inputs[0]


def _caller() -> nn.Module | None:
    """The module whose forward makes a call, found in Python's stack: hooks on every module take as long as a
    fifth of a small ViT's forward. None in a compiled graph."""
    # The caller's frame: this one, asked for its variables, would keep itself, and all tensors, alive.
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def name_of_caller() -> str:
    """Its class, for a message."""
    module = _caller()
    return "this model" if module is None else type(module).__name__


def walk(
    model: nn.Module,
    images: Tensor,
    *,
    replace: Mapping[int, Instead] | None = None,
    stop_after: int | None = None,
    values: bool = False,
    head: bool = True,
    drop_path: Sequence[DropPathMasks] | None = None,
    projections: Projections | None = None,
) -> Walk:
    """Run `model(images)`, and return what every attention layer saw on the way.

    model: any that calls `F.scaled_dot_product_attention`; timm's and transformers' are switched to it
    meanwhile. images: (B, 3, height, width), or what else the model takes. stop_after: ends the walk at that
    layer's q and k, with `values` at its v; `head=False` ends it after the last block. drop_path: the
    stochastic-depth masks of every layer (`sample_drop_path`). projections: of `find_projections`; rows of q,
    k or v that are replaced in whole are then not computed.

    Raises `Unwalkable` for a model in which layers do not make the call, or attend in windows, and
    `ValueError` for a layer out of range or a replacement of the wrong shape.
    """
    check_walkable(model)
    watch = _Watch(replace, drop_path, stop_after, head)
    if projections is not None:
        last, rows = None if values else stop_after, enumerate(projections)
        watch.unread = {i: unread_of(watch.replace.get(i), of_layer, i == last) for i, of_layer in rows}
    return _walk(watch, model, images, values)


def check_walkable(model: nn.Module) -> None:
    """Raise `Unwalkable` for a model that says why it is not."""
    if (reason := getattr(model, "not_walkable", None)) is not None:
        raise Unwalkable(f"cannot walk a {type(model).__name__}: {reason}")


@torch.no_grad()
def find_projections(model: nn.Module, images: Tensor) -> tuple[Walk, Projections | None]:
    """A walk in the mode that the model is in, and which rows of a linear projection each layer's q, k and v
    come from; None where these rows are read elsewhere too."""
    watch = _Watch()
    watch.products = []
    seen, rows = _walk(watch, model, images, True), tuple(watch.rows)
    without_numbers = seen.layers[0].q.is_meta or isinstance(seen.layers[0].q, FakeTensor)
    if without_numbers or not any(rows):
        return seen, rows
    return seen, None if read_elsewhere(model, images, seen.layers, rows) else rows


def sample_drop_path(model: nn.Module, images: Tensor) -> list[DropPathMasks]:
    """Draw stochastic-depth masks, at the model's own rates, for a batch of `images` (B, ...): per layer two
    (B, 1, 1), each 0 or 1 / (1 - rate); [] for a model without any. Source: Huang et al. 2016."""

    def mask(module: nn.Module) -> Tensor:
        keep = 1 - getattr(module, "drop_prob", 0.0)  # a place where nothing is dropped is an Identity
        scale = keep if getattr(module, "scale_by_keep", True) and keep > 0 else 1.0
        return images.new_empty(len(images), 1, 1).bernoulli_(keep) / scale

    layers = (
        [part for name, part in block.named_children() if name.startswith("drop_path")]
        for block in model.modules()
    )
    return [(mask(places[0]), mask(places[-1])) for places in layers if places]


def outputs(model: nn.Module, images: Tensor) -> Any:
    """The model's logits, embeddings or last hidden state, by its own forward."""
    config = getattr(model, "config", None)
    if getattr(config, "mask_ratio", None):
        raise Unwalkable(f"a {type(model).__name__} hides patches at random: set its config.mask_ratio = 0")
    taken = inspect.signature(model.forward).parameters.values() if hasattr(config, "mask_ratio") else ()
    if not any(one.name == "noise" or one.kind is one.VAR_KEYWORD for one in taken):
        output = model(images)
    else:  # transformers' masked auto-encoder, which shuffles patches unless it is given their order
        patches = (config.image_size // config.patch_size) ** 2
        order = torch.arange(patches, device=images.device, dtype=torch.float32)
        output = model(images, noise=order.expand(len(images), -1))
    return output_tensor(output)


def output_tensor(output: Any) -> Any:
    """Of what a model of transformers returns, the logits, embeddings or last hidden state."""
    if not isinstance(output, Tensor):
        for name in ("logits", "image_embeds", "last_hidden_state"):
            if (value := getattr(output, name, None)) is not None:
                return value
    return output


def _walk(watch: _Watch, model: nn.Module, images: Tensor, values: bool) -> Walk:
    watch.batch = len(images) if isinstance(images, Tensor) else None
    if torch.compiler.is_compiling():
        if watch.masks:
            raise RuntimeError("a compiled graph shares no stochastic depth: Plan(share_drop_path=False)")
        output = _traced(watch, model, images)
    else:
        watch.look_at(model)
        with _watching(watch):
            try:
                output = outputs(model, images)
            except _Stop:
                output = None
        _check_layers(watch, model)
    layers, stream = watch.layers, watch.stream
    if watch.stop_after is not None:  # also where nothing stops, as in a compiled graph
        output, layers, stream = None, layers[: watch.stop_after + 1], stream[: watch.stop_after]
        if not values:
            layers[-1] = layers[-1]._replace(v=None)
    logits = output if watch.head else None
    return Walk(logits, tuple(layers), watch.tokens, tuple(stream), tuple(watch.passed))


def _check_layers(watch: _Watch, model: nn.Module) -> None:
    """Raise `Unwalkable` where layers made no call, and `ValueError` for layers that there are not."""

    def attends(block: nn.Module) -> bool:  # by their names alone, beside layers of another class
        kinds = {type(part).__name__ for part in block.modules()}
        named = (re.search("attention|attn", kind, re.I) for kind in kinds if not OTHERS.search(kind))
        return any(named) and kinds.isdisjoint(watch.passed)

    kind, depth, complete = type(model).__name__, len(watch.layers), watch.stop_after is None
    block = next(iter(watch.blocks), None)
    siblings = () if block is None else watch.elements[block].children()
    blocks = [part for part in siblings if type(part) is type(block) or attends(part)]
    blocks = blocks if complete else blocks[:depth]  # one that is not seen would give its number to the next
    seen = sum(part in watch.blocks for part in blocks)
    if not depth or seen < len(blocks):
        expected = len(blocks) or sum("attention" in type(part).__name__.lower() for part in model.modules())
        raise Unwalkable(
            f"a {kind}: {seen} of {expected} layers, uncompiled, call F.scaled_dot_product_attention"
        )
    indices = {*watch.replace} if complete else {watch.stop_after, *(i for i in watch.replace if i < 0)}
    if wrong := indices - {*range(depth)}:
        raise ValueError(f"layer {min(wrong)} does not exist: this {kind} has depth {depth}")
    if watch.masks is not None and complete and len(watch.masks) != depth:
        raise ValueError(f"drop_path has masks for {len(watch.masks)} layers, this {kind} has depth {depth}")


# --- Where torch's calls are swapped, and for whom ---

_WATCH: ContextVar[_Watch | None] = ContextVar("the walk that is going on", default=None)
_TRACED: _Watch | None = None  # the same in a graph of torch.compile
_LOCK, _SWAPPED, _WATCHES = threading.RLock(), ExitStack(), 0


def _current() -> _Watch | None:
    return _TRACED if torch.compiler.is_compiling() else _WATCH.get()


def _traced(watch: _Watch, model: nn.Module, images: Tensor) -> Any:
    global _TRACED
    before = F.scaled_dot_product_attention, F.linear
    _TRACED, F.scaled_dot_product_attention, F.linear = watch, watched_attention, _linear
    try:
        return outputs(model, images)
    finally:
        _TRACED = None
        F.scaled_dot_product_attention, F.linear = before


@contextmanager
def _set(places: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within it, attributes of objects have other values: (object, attribute, value)."""
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, value in places:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


@contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    """Within it `watch` notes what runs in this thread. Functions are swapped for the process, by the first
    watch of several, and ask whose walk this is."""
    global _WATCHES
    with _LOCK:
        if not _WATCHES:
            fast = torch.backends.mha.get_fastpath_enabled()  # of nn.MultiheadAttention: it makes no call
            torch.backends.mha.set_fastpath_enabled(False)
            _SWAPPED.callback(torch.backends.mha.set_fastpath_enabled, fast)
            swaps = (F, "scaled_dot_product_attention", watched_attention), (F, "linear", _linear)
            _SWAPPED.enter_context(_set([*swaps, (checkpointing, "_CheckpointFrame", _Frame)]))
        _WATCHES += 1
    token = _WATCH.set(watch)
    try:
        with _set(watch.switches), watch.hooked():
            yield
    finally:
        _WATCH.reset(token)
        with _LOCK:
            _WATCHES -= 1
            if not _WATCHES:
                _SWAPPED.close()


class _Frame(checkpointing._CheckpointFrame):
    """A part of a forward that activation checkpointing computes again in the backward pass: with what stood
    in place of the layers' own in the first."""

    def __init__(self, recompute, *options):
        watch = _WATCH.get()
        if watch is not None:
            plain, start = recompute, watch.from_here()

            def recompute(*inputs):
                with _watching(start.from_here()):
                    plain(*inputs)

        super().__init__(recompute, *options)
