"""Layers of one bit: sign with a gradient, linear layers whose weights and inputs are signs, attention maps
that say 0 or one learned share.

Sources: Le and Li 2023, "BinaryViT: Pushing Binary Vision Transformers Towards Convolutional Models" (arXiv
2306.16678), and what it takes from others: the sign's gradient from Bi-Real Net (Liu et al. 2018, arXiv
1808.00278), `RPReLU` from ReActNet (Liu et al. 2020, arXiv 2003.03488), the rounded map from BiT (Liu et al.
2022, arXiv 2205.13016). What is said here of "the published code" was read in
github.com/Phuoc-Hoan-Le/BinaryViT. Its sign of exactly 0 is 0; here it is 1. It has a row's two values up to
rounding only; here they are exact.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

# Of tokens (B, N, D), made from D.
Norm = type[nn.Module]


def sign(x: Tensor) -> Tensor:
    """1 where x >= 0, else -1, with the gradient of the piecewise polynomial that is nearest to it: 2 - 2
    abs(x) where abs(x) <= 1, else 0 (Bi-Real Net, arXiv 1808.00278, section 3.2)."""
    return _Sign.apply(x)


def signed_rows(weight: Tensor) -> Tensor:
    """Weights (out, ...) of one bit: each row's signs times the row's mean absolute value, so that a row has
    two values. The gradient is that of the identity where abs(w) <= 1, else 0; the factor is a constant in
    it."""
    factor = weight.detach().abs().flatten(1).mean(1).view(-1, *[1] * (weight.ndim - 1))
    return _Signed.apply(weight, factor)


def centred_signs(weight: Tensor) -> Tensor:
    """`signed_rows` of weights (out, in) less the mean of their row, with the factor of the uncentred: what
    linear layers have, and the published convolution has not."""
    factor = weight.detach().abs().mean(1, keepdim=True)
    return _Signed.apply(weight - weight.mean(1, keepdim=True), factor)


def rounded_map(p: Tensor, share: Tensor) -> Tensor:
    """Attention maps (B, H, N, N) of one bit: `share`, a learned scalar, where p is nearer to it than to 0,
    else 0. Rows no longer sum to 1, and may be all 0; so are all of them where the share is not above 0.

    p has the gradient of the identity where 0 <= p <= share, else 0; the share has that of its rounding: how
    far p / share was rounded up or down, and 1 where it was cut off at 1. Source: BiT (arXiv 2205.13016).
    """
    return _RoundedMap.apply(p, share)


class BinaryLinear(nn.Linear):
    """A linear layer, without bias, of the signs of its inputs and of its centred weights: (..., in) to (...,
    out). Each output is a whole number, which XNOR and a count of bits give, times the factor of its row."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return F.linear(sign(x), centred_signs(self.weight))


class BinaryPatchConv(nn.Conv2d):
    """A convolution without bias of the signs of its inputs and of its weights, which are not centred, on
    patches that do not overlap: (B, in, height, width) to (B, out, height / size, width / size)."""

    def __init__(self, in_channels: int, out_channels: int, size: int):
        super().__init__(in_channels, out_channels, size, stride=size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, height, width) to (B, out, height / size, width / size)."""
        return F.conv2d(sign(x), signed_rows(self.weight), stride=self.stride)


class RPReLU(nn.Module):
    """A PReLU with a shift before and after it, all of each channel's own: tokens (..., D) to the same
    (ReActNet, arXiv 2003.03488)."""

    def __init__(self, width: int):
        super().__init__()
        self.shift_in = nn.Parameter(torch.zeros(width))
        self.slope = nn.Parameter(torch.full((width,), 0.25))
        self.shift_out = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        x = x - self.shift_in
        return x + (self.slope - 1) * x.clamp(max=0) + self.shift_out  # faster than torch's PReLU


class TokenNorm(nn.BatchNorm1d):
    """Batch norm of tokens (B, N, D), over images and tokens: what the published runs have in place of layer
    norm. Before a sign it is a threshold, and costs nothing at inference."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) to (B, N, D)."""
        return super().forward(x.flatten(0, 1)).view_as(x)


class BinaryUnit(nn.Module):
    """What binary networks are made of: a `BinaryLinear` of shifted inputs, its norm, a shortcut around both,
    an `RPReLU`. Tokens (B, N, in) to (B, N, out).

    Where the sizes differ the shortcut repeats the channels, or takes the mean of neighbouring ones; one must
    be a multiple of the other.
    """

    def __init__(self, in_features: int, out_features: int, norm: Norm = TokenNorm):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(in_features))
        self.linear = BinaryLinear(in_features, out_features)
        self.norm = norm(out_features)
        self.act = RPReLU(out_features)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, in) to (B, N, out)."""
        return self.act(self.norm(self.linear(x + self.shift)) + resized(x, self.linear.out_features))


def resized(x: Tensor, width: int) -> Tensor:
    """Tokens (B, N, D) with `width` channels: the D channels one after another again and again, or means of
    neighbouring ones."""
    D = x.shape[-1]
    return x.repeat(1, 1, width // D) if width >= D else x.unflatten(-1, (width, -1)).mean(-1)


# --- The gradients ---


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _signs(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.abs().mul_(-2).add_(2).clamp_(min=0).mul_(grad)


class _Signed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return factor * _signs(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad * (weight.abs() <= 1), None


class _RoundedMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, p: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(p, share)
        rounded = (p / share).round().clamp(0, 1) * share
        return torch.where(share > 0, rounded, torch.zeros_like(p))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        p, share = ctx.saved_tensors
        steps = p / share
        between = (steps >= 0) & (steps <= 1)
        of_share = torch.where(between, steps.round() - steps, (steps > 1).to(steps.dtype))
        return grad * between, (grad * of_share).sum().view_as(share)


def _signs(x: Tensor) -> Tensor:
    return (x >= 0).to(x.dtype).mul_(2).sub_(1)
