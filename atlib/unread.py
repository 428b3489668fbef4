"""Rows of projections that nobody reads, as something stands in place of what they make: they need not be
multiplied. With them Copy costs 1.15 of fine-tuning's products, and without 1.33 (ViT-B)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from atlib.attention import Instead, Seen


class Rows(NamedTuple):
    """Where a layer's q, k or v comes from: rows of a projection's weight."""

    projection: nn.Module
    spans: tuple[tuple[int, int], ...]  # (first, last + 1)


# Of each layer, the rows of "q", "k", "v"; of "qk" together, where norms or rotations made copies of both.
Projections = Sequence[Mapping[str, Rows]]


def rows_of(layer: "Seen", products: Sequence[tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, tuple]]:
    """{part of a layer: (weight, spans of its rows)}, found by where numbers lie in memory, never by name;
    products: (weight, what it made)."""
    rows = {}
    for name in "qkv":
        part = getattr(layer, name)
        for weight, product in reversed(products):
            if part.untyped_storage()._cdata != product.untyped_storage()._cdata:  # also without memory
                continue
            start = part.storage_offset() - product.storage_offset()
            height, width = len(weight), part.shape[1] * part.shape[3]
            together = part.stride()[1:] == (part.shape[3], height, 1) and product.is_contiguous()
            if together and 0 <= start <= height - width:
                rows[name] = weight, ((start, start + width),)
            break
    if rows.keys() == {"v"}:
        weight, ((start, stop),) = rows["v"]
        if len(weight) == 3 * (stop - start):  # nothing but q, k and v
            spans = ((0, start), (stop, len(weight)))
            rows["qk"] = weight, tuple(span for span in spans if span[0] < span[1])
    return rows


def unread_of(
    replace: Mapping[int, "Instead"], projections: Projections, stop_after: int | None
) -> dict[int, list[Rows]]:
    """By layer, the rows that nobody reads under these replacements, where a walk ends before the values of
    `stop_after`."""
    unread = {}
    for layer, rows in enumerate(projections):
        new, parts = replace.get(layer), {"v"} if layer == stop_after else set()
        if new is not None and new.heads is None and new.kept is None:
            parts |= {name for name in "qkv" if getattr(new, name) is not None}
            parts |= {"q", "k", "qk"} if new.map is not None or {"q", "k"} <= parts else set()
        spans: dict[nn.Module, list] = {}
        for part in parts & rows.keys():
            spans.setdefault(rows[part].projection, []).extend(rows[part].spans)
        unread[layer] = [Rows(projection, tuple(sorted(ranges))) for projection, ranges in spans.items()]
    return unread
