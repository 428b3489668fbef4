"""Blocks around PyTorch's own `nn.MultiheadAttention`: those of torchvision and of open_clip."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from atlib.attention import DropPathMasks, Layer


class Parts(NamedTuple):
    """The parts of a block, in the order in which they are called; None for what it does not have."""

    norm1: nn.Module
    attention: nn.MultiheadAttention
    #: Dropout or layer scale after attention.
    after_attention: nn.Module | None
    norm2: nn.Module
    mlp: nn.Module
    after_mlp: nn.Module | None


class MultiheadLayer(Layer):
    """x + attention(norm(x)), then x + MLP(norm(x)), with an `nn.MultiheadAttention`."""

    def __init__(self, block: nn.Module, parts: Parts):
        self.module, self.parts, self.attn = block, parts, parts.attention
        self.heads, self.width = self.attn.num_heads, self.attn.head_dim
        self.scale = self.width**-0.5
        self.dropout = self.attn.dropout if self.attn.training else 0.0

    def before(self, tokens: Tensor) -> Tensor:
        """See `Layer`."""
        return self.parts.norm1(tokens)

    def project(self, x: Tensor, needed: str) -> dict[str, Tensor]:
        """See `Layer`."""
        attn, width = self.attn, self.attn.embed_dim
        parts = {}
        for index, name in enumerate("qkv"):
            if name in needed:
                rows = slice(index * width, (index + 1) * width)
                bias = None if attn.in_proj_bias is None else attn.in_proj_bias[rows]
                flat = F.linear(x, attn.in_proj_weight[rows], bias)
                parts[name] = flat.unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        return parts

    def after(self, tokens: Tensor, x: Tensor, mixed: Tensor, drop_path: DropPathMasks | None) -> Tensor:
        """See `Layer`."""
        parts, out = self.parts, self.attn.out_proj
        routed = F.linear(mixed, out.weight, out.bias)
        tokens = tokens + _masked(_through(parts.after_attention, routed), drop_path, 0)
        local = parts.mlp(parts.norm2(tokens))
        return tokens + _masked(_through(parts.after_mlp, local), drop_path, 1)


def _through(module: nn.Module | None, x: Tensor) -> Tensor:
    return x if module is None else module(x)


def _masked(branch: Tensor, masks: DropPathMasks | None, which: int) -> Tensor:
    return branch if masks is None else masks[which].to(branch.dtype) * branch
