"""The cross-entropy between two attention maps, and its gradients, without ever storing a map.

With z = scale · q kᵀ the student's logits and p_s, p_t the row-softmax maps of student and teacher, one
query's loss is

    -Σ_j p_t(i,j) log p_s(i,j)  =  logsumexp_j z(i,j) - scale · q_i · Σ_j p_t(i,j) k_j

and its gradient with respect to z is p_s - p_t, so that

    ∂/∂q_i = scale · Σ_j (p_s - p_t)(i,j) k_j        ∂/∂k_j = scale · Σ_i (p_s - p_t)(i,j) q_i.

Both sums can be had from pieces. `by_blocks` takes a few queries at a time; `by_fused_attention` notes that
Σ_j p(i,j) k_j is attention with the keys as values and leaves it to the platform's fused kernels; and on a
GPU `atlib.fused` makes loss and gradients in one kernel. Memory is O(N d) a head, not O(N²). The how-to
*Never store a map* derives this step by step.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from atlib._util import refuse_second_derivative
from atlib.attention import Seen, fused_attention

BLOCK = 64  # queries at a time: measured fastest on CPUs, N = 197 and 785 (benchmarks/transfer_step.py)


def map_free_cross_entropy(student: Seen, teacher: Seen, value: bool = True) -> Tensor:
    """Mean over batch, heads and queries of the cross-entropy from the teacher's map to the student's: a
    scalar, in nats; with `value=False` 0 with the same gradients. The teacher's q and k, of any width, are
    constants; what the student must not look at (`Seen.mask`) its map loses too."""
    return _way(student, teacher)(student, teacher, value)


def _way(student: Seen, teacher: Seen) -> Callable[[Seen, Seen, bool], Tensor]:
    # no fused kernel knows float64
    if not student.q.is_cuda or student.q.dtype == torch.float64 or _learns_bias(student):
        return by_blocks
    if not _runs_triton(student.q.device):
        return by_fused_attention
    from atlib.fused import by_kernel, takes  # not at the top: it imports Triton

    return by_kernel if takes(student, teacher) else by_fused_attention


@torch.compiler.assume_constant_result
def _runs_triton(device: torch.device) -> bool:
    """Whether the kernels are for this device: tensor cores know bf16 from sm_80 on; AMD's, and Triton before
    PyTorch 2.11, were not tried."""
    installed = torch.version.hip is None and importlib.util.find_spec("triton") is not None
    tried = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    return installed and tried and torch.cuda.get_device_capability(device) >= (8, 0)


def by_blocks(student: Seen, teacher: Seen, value: bool = True) -> Tensor:
    """`map_free_cross_entropy` for `BLOCK` queries at a time: (B, H, BLOCK, N) is the largest tensor."""
    q, k, scale, bias = student.q, student.k, student.scale, student.added
    learns_bias = _learns_bias(student)
    # asked here: inside the Function gradients are always off
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or learns_bias)
    target = teacher.without(student.mask)
    return _ByBlocks.apply(q, k, scale, bias, target, value, learns, learns_bias)


def by_fused_attention(student: Seen, teacher: Seen, value: bool = True) -> Tensor:
    """`map_free_cross_entropy` with the gradients through `scaled_dot_product_attention` alone, the value by
    blocks; none for a bias."""
    teacher = teacher.without(student.mask)
    loss = 0.0
    if value:
        with torch.no_grad():
            loss = by_blocks(student, teacher)
    scale, bias = student.scale, student.added
    exact = torch.promote_types(student.q.dtype, torch.float32)
    q, k = _DifferentiableOnce.apply(student.q), _DifferentiableOnce.apply(student.k)
    q_t, k_t = teacher.q.detach().to(k.dtype), teacher.k.detach().to(k.dtype)
    # Σ_j p_s k_j, with a gradient to k as value, and Σ_j p_t k_j
    expected_student = fused_attention(q.detach(), k.detach(), k, scale, bias=bias).to(exact)
    expected_target = fused_attention(q_t, k_t, k, teacher.scale, bias=teacher.added).to(exact)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    same_gradient = scale / rows * (q.to(exact) * (expected_student - expected_target)).sum()
    return same_gradient - same_gradient.detach() + loss  # the value of one, the gradient of the other


class _ByBlocks(torch.autograd.Function):
    """Gradients are made in the forward pass, while a block's maps exist: two (B, H, N, d) tensors wait for
    the backward pass. q and k come apart from the rest, because autograd sees no tensor inside a `Seen`."""

    @staticmethod
    def forward(ctx, q, k, scale, bias, teacher, value, learns, learns_bias):
        B, H, N, _ = q.shape
        bias_t = teacher.added
        # bf16 products would cost the softmax three digits
        exact = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            q_s, k_s, q_t, k_t = (x.to(exact).reshape(B * H, N, -1) for x in (q, k, teacher.q, teacher.k))
            total = q_s.new_zeros(())
            grad_q, grad_k = (torch.empty_like(q_s), torch.zeros_like(k_s)) if learns else (None, None)
            grad_bias = torch.empty_like(bias, dtype=exact) if learns_bias else None
            for start in range(0, N, BLOCK):
                block = slice(start, start + BLOCK)
                log_p_s = _scores(q_s, k_s, scale, bias, block, H).log_softmax(-1)  # (B·H, BLOCK, N)
                p_t = _scores(q_t, k_t, teacher.scale, bias_t, block, H).softmax(-1)
                if value:
                    total = total - torch.dot(p_t.flatten(), log_p_s.flatten())
                if learns:
                    difference = log_p_s.exp_().sub_(p_t)  # ∂/∂z; log_p_s is used up
                    grad_q[:, block] = torch.bmm(difference, k_s)
                    grad_k.baddbmm_(difference.mT, q_s[:, block])
                    if learns_bias:
                        of_block = grad_bias[..., block, :]  # summed over images and heads that share it
                        of_block.copy_(difference.unflatten(0, (B, H)).sum_to_size(of_block.shape))
            if learns:
                # applied last: this small number would leave few digits of an fp16 gradient
                ctx.factor, ctx.scale = scale / (B * H * N), scale
                if learns_bias:
                    grad_bias = grad_bias.to(bias.dtype)
                grads = (grad.view_as(like).to(like.dtype) for grad, like in ((grad_q, q), (grad_k, k)))
                ctx.save_for_backward(*grads, grad_bias)
        return total / (B * H * N)

    @staticmethod
    def backward(ctx, above):
        refuse_second_derivative()
        # in float32 at least: an fp16 run scales its loss by more than fp16 can hold
        factor = above * ctx.factor
        grad_q, grad_k, grad_bias = ctx.saved_tensors
        grad_q, grad_k = ((grad.to(factor.dtype) * factor).to(grad.dtype) for grad in (grad_q, grad_k))
        if grad_bias is not None:
            # its scores are not scaled
            grad_bias = (grad_bias / ctx.scale).to(factor.dtype).mul(factor).to(grad_bias.dtype)
        return grad_q, grad_k, None, grad_bias, None, None, None, None


class _DifferentiableOnce(torch.autograd.Function):
    """The same tensor. A second derivative is refused: it would miss that the maps depend on q and k."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, above):
        refuse_second_derivative()
        return above


def _learns_bias(student: Seen) -> bool:
    return student.bias is not None and student.bias.requires_grad and torch.is_grad_enabled()


def _scores(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, block: slice, heads: int) -> Tensor:
    """The scores z of a block of queries, from q and k (B·H, N, d): (B·H, BLOCK, N)."""
    z = torch.bmm(scale * q[:, block], k.mT)
    if bias is not None:
        z.unflatten(0, (-1, heads)).add_(bias[..., block, :])
    return z
