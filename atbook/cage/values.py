"""What passes between a cage and the outside: plain numbers, texts, lists, dicts and tensors, as JSON and
safetensors. Nothing is pickled, and nothing that is read can run."""

import json
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

DEEPEST, MOST = 20, 100_000  # nested lists, and values that are no numbers of a tensor
LARGEST_INTEGER = 2**63
LONGEST = 4_000_000  # bytes of JSON that are read: parsed they take fifty times as much
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8}
DTYPES |= {torch.int8, torch.int16, torch.int32, torch.int64}
TENSOR, TUPLE, TABLE, MODEL = "tensor", "tuple", "table", "model"


class Model(NamedTuple):
    """A ViT that is made anew on the other side."""

    # The arguments of timm's `VisionTransformer`.
    options: dict
    # Its weights, by name.
    weights: dict[str, Tensor]


def pack(value: Any) -> bytes:
    """A value as bytes. Raises `TypeError` or `ValueError`, which says what is no plain value."""
    tensors: dict[str, Tensor] = {}
    left = [MOST]
    text = json.dumps(_tree(value, tensors, left, 0)).encode()
    return len(text).to_bytes(8, "little") + text + save(tensors)


def _tree(value: Any, tensors: dict[str, Tensor], left: list[int], depth: int) -> Any:
    """A value as JSON's own types; tensors are left out, and named by their number."""
    left[0] -= 1
    if left[0] < 0 or depth > DEEPEST:
        raise ValueError("more than can be compared: a tensor, or a short list of them, is enough")
    if value is None or type(value) in (bool, str):
        if value and len(str(value)) > MOST:
            raise ValueError(f"a text of {len(value)} letters")
        return value
    if isinstance(value, Model):
        return {MODEL: [value.options, _tree(value.weights, tensors, left, depth + 1)]}
    if isinstance(value, (list, tuple)):
        parts = [_tree(part, tensors, left, depth + 1) for part in value]
        return {TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, dict):
        if not all(type(key) in (str, int) for key in value):
            raise TypeError("a dict whose keys are neither texts nor whole numbers")
        return {TABLE: [[key, _tree(part, tensors, left, depth + 1)] for key, part in value.items()]}
    if type(value).__module__ == "numpy":
        if getattr(value, "ndim", 0) == 0 and hasattr(value, "item"):
            return _tree(value.item(), tensors, left, depth + 1)
        if hasattr(value, "dtype") and value.dtype.kind in "fiub":
            value = torch.from_numpy(value.copy())
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES:
            raise TypeError(f"a tensor of {value.dtype}")
        plain = torch.empty(value.shape, dtype=value.dtype)  # contiguous, and no subclass
        name = str(len(tensors))
        tensors[name] = plain.copy_(value.detach())
        return {TENSOR: name}
    if type(value) is int:
        if abs(value) >= LARGEST_INTEGER:
            raise ValueError(f"a whole number of {value.bit_length()} bits")
        return value
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"a {type(value).__name__}")


def unpack(content: bytes) -> Any:
    """The value in some bytes. Raises `ValueError` where they hold none."""
    try:
        size = int.from_bytes(content[:8], "little")
        if max(size, int.from_bytes(content[8 + size : 16 + size], "little")) > LONGEST:
            raise ValueError("too long a text")
        tree = json.loads(content[8 : 8 + size].decode())
        return _value(tree, load(content[8 + size :]))
    except Exception as error:  # they may come from a cage, and be anything
        raise ValueError(f"no values that can be read ({type(error).__name__})") from error


def _value(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_value(part, tensors) for part in tree]
    if isinstance(tree, dict):
        ((kind, content),) = tree.items()
        if kind == TENSOR:
            return tensors[content]
        if kind == TUPLE:
            return tuple(_value(part, tensors) for part in content)
        if kind == TABLE:
            return {key: _value(part, tensors) for key, part in content}
        if kind == MODEL:
            return Model(content[0], _value(content[1], tensors))
        raise ValueError(f"unknown kind {kind!r}")
    if isinstance(tree, int) and abs(tree) >= LARGEST_INTEGER:
        raise ValueError("a whole number that is too large")
    return tree
