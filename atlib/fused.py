"""The cross-entropy between two attention maps as Triton kernels: the loss and its gradients, as
`atlib.map_free` derives them, for a GPU, no map in its memory.

A program takes one head of one image. **Up to 256 tokens** (17, 50, 197: most of vision) a tile holds all
keys, so that a row's softmax is whole: one pass over the queries gives loss, ∂/∂q and ∂/∂k with four matrix
products a tile, and the backward pass only multiplies by what arrives from above. **With more tokens** the
forward pass goes over the keys with a running maximum m and sum of student and teacher, as FlashAttention
does for one of them, and carries the third sum that the loss needs,

    E = Σ_j exp(z_t - m_t) (z - m),    loss = log Σ_j exp(z - m)  -  E / Σ_j exp(z_t - m_t).

(When m grows by δ, E loses δ · Σ exp(z_t - m_t); relative to m, no digits are lost where scores are large.)
It keeps two numbers a row, both log-sum-exps. From these the backward pass makes both maps again, tile by
tile, as in FlashAttention-2 (Dao 2023, arXiv 2307.08691): a kernel over queries sums Σ_j (p_s - p_t) k_j,
one over keys Σ_i (p_s - p_t) q_i, neither with atomics, so that the same inputs give the same bits.

Products are of the inputs' type and summed in float32; the difference of the maps is taken in float32 and
only then rounded for the products that follow. Scores are kept in bits (times log₂ e), because a GPU has
2^x. StreamKL (arXiv 2606.20005) reaches the same memory for a Kullback-Leibler loss with kernels of its
own.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from torch.utils.flop_counter import register_flop_formula

from atlib._util import refuse_second_derivative
from atlib.attention import Seen

# The widest head that the kernels take.
WIDEST = 128
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below any score, even a forbidden one, yet finite: differences of it are numbers.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _tile(x, row, N, stride, WIDTH: tl.constexpr, D: tl.constexpr):
    """Rows of one head, (rows, D); 0 beyond N and beyond the head's WIDTH."""
    column = tl.arange(0, D)
    there = (row[:, None] < N) & (column[None, :] < WIDTH)
    return tl.load(x + row[:, None] * stride + column[None, :], mask=there, other=0.0)


@triton.jit
def _store(x, tile, row, N, WIDTH: tl.constexpr, D: tl.constexpr):
    """Writes (rows, D) as rows of one head, (N, WIDTH), in its number type."""
    column = tl.arange(0, D)
    there = (row[:, None] < N) & (column[None, :] < WIDTH)
    tl.store(x + row[:, None] * WIDTH + column[None, :], tile, mask=there)


@triton.jit
def _scores(left, right, scale, added, head, query, key, N, PRECISION: tl.constexpr):
    """Scores in bits, left · rightᵀ: queries by keys, or keys by queries; `query` and `key` lie along their
    axes. head: where in `added` that of the head begins."""
    # to float32: a compiled step hands numbers over in float64, and all that follows would be in it
    z = tl.dot(left, tl.trans(right), input_precision=PRECISION) * tl.full([], scale * LOG2_E, tl.float32)
    if added is not None:
        there = (query < N) & (key < N)
        z += tl.load(added + head + query * N + key, mask=there, other=0.0).to(tl.float32) * LOG2_E
    return z


@triton.jit
def _of_head(q, k, index, H, image, head):
    """Where q and k begin, of the head of that index, counted through all images."""
    at = index // H * image + index % H * head
    return q + at, k + at


@triton.jit
def _short(
    q, k, q_t, k_t, added, added_t, loss, grad_q, grad_k,
    scale, scale_t, H, N, image, head, token, image_t, head_t, token_t, added_head, added_head_t,
    WIDTH: tl.constexpr, WIDTH_T: tl.constexpr, D: tl.constexpr, D_T: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    GRADIENTS: tl.constexpr, SHARED_KEYS: tl.constexpr,
):  # fmt: skip
    """One head with all of its keys in a tile, some queries at a time: the loss of every query, (B, H, N),
    and Σ_j (p_s - p_t) k_j and Σ_i (p_s - p_t) q_i, (B, H, N, d), which the backward pass scales."""
    # Maps are made transposed, keys by queries: as their difference lies in registers it enters the product
    # for the keys, without a way through shared memory.
    index = tl.program_id(0).to(tl.int64)
    q, k = _of_head(q, k, index, H, image, head)
    q_t, k_t = _of_head(q_t, k_t, index, H, image_t, head_t)
    added_head, added_head_t = index % H * added_head, index % H * added_head_t
    j = tl.arange(0, KEYS)
    keys, keys_t = _tile(k, j, N, token, WIDTH, D), _tile(k_t, j, N, token_t, WIDTH_T, D_T)
    sum_k = tl.zeros([KEYS, D], tl.float32)
    for start in range(0, N, QUERIES):
        i = start + tl.arange(0, QUERIES)
        queries = _tile(q, i, N, token, WIDTH, D)
        queries_t = _tile(q_t, i, N, token_t, WIDTH_T, D_T)
        z = _scores(keys, queries, scale, added, added_head, i[None, :], j[:, None], N, PRECISION)
        z = tl.where(j[:, None] < N, z, LOWEST)
        z -= tl.max(z, 0)[None, :]
        z_t = _scores(keys_t, queries_t, scale_t, added_t, added_head_t, i[None, :], j[:, None], N, PRECISION)
        z_t = tl.where(j[:, None] < N, z_t, LOWEST)
        p_t = tl.exp2(z_t - tl.max(z_t, 0)[None, :])
        p_t /= tl.sum(p_t, 0)[None, :]
        p = tl.exp2(z)
        total = tl.sum(p, 0)
        bits = tl.log2(total) - tl.sum(p_t * z, 0)
        tl.store(loss + index * N + i, bits * LN_2, mask=i < N)
        if GRADIENTS:
            difference = (p / total[None, :] - p_t).to(keys.dtype)
            sum_k = tl.dot(difference, queries, sum_k, input_precision=PRECISION)
            if SHARED_KEYS:  # the keys as they lie in shared memory for the product above
                sum_q = tl.trans(tl.dot(tl.trans(keys), difference, input_precision=PRECISION))
            else:
                sum_q = tl.dot(tl.trans(difference), keys, input_precision=PRECISION)
            _store(grad_q + index * N * WIDTH, sum_q, i, N, WIDTH, D)
    if GRADIENTS:
        _store(grad_k + index * N * WIDTH, sum_k, j, N, WIDTH, D)


@triton.jit
def _forward(
    q, k, q_t, k_t, added, added_t, loss, lse, lse_t,
    scale, scale_t, H, N, image, head, token, image_t, head_t, token_t, added_head, added_head_t,
    WIDTH: tl.constexpr, WIDTH_T: tl.constexpr, D: tl.constexpr, D_T: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some queries of one head, over all keys: the loss of every query and, in bits, the log-sum-exp of its
    scores and of the teacher's, (B, H, N) each."""
    blocks = tl.cdiv(N, QUERIES)
    index = (tl.program_id(0) // blocks).to(tl.int64)
    q, k = _of_head(q, k, index, H, image, head)
    q_t, k_t = _of_head(q_t, k_t, index, H, image_t, head_t)
    added_head, added_head_t = index % H * added_head, index % H * added_head_t
    i = tl.program_id(0) % blocks * QUERIES + tl.arange(0, QUERIES)
    queries, queries_t = _tile(q, i, N, token, WIDTH, D), _tile(q_t, i, N, token_t, WIDTH_T, D_T)
    highest, highest_t = tl.full([QUERIES], LOWEST, tl.float32), tl.full([QUERIES], LOWEST, tl.float32)
    total, total_t = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES], tl.float32)
    expected = tl.zeros([QUERIES], tl.float32)
    for start in range(0, N, KEYS):
        j = start + tl.arange(0, KEYS)
        valid = j[None, :] < N
        keys, keys_t = _tile(k, j, N, token, WIDTH, D), _tile(k_t, j, N, token_t, WIDTH_T, D_T)
        z = _scores(queries, keys, scale, added, added_head, i[:, None], j[None, :], N, PRECISION)
        z = tl.where(valid, z, LOWEST)
        z_t = _scores(queries_t, keys_t, scale_t, added_t, added_head_t, i[:, None], j[None, :], N, PRECISION)
        z_t = tl.where(valid, z_t, LOWEST)
        higher, higher_t = tl.maximum(highest, tl.max(z, 1)), tl.maximum(highest_t, tl.max(z_t, 1))
        z -= higher[:, None]
        p_t = tl.exp2(z_t - higher_t[:, None])
        shrink_t = tl.exp2(highest_t - higher_t)
        expected = (expected - (higher - highest) * total_t) * shrink_t + tl.sum(p_t * z, 1)
        total_t = total_t * shrink_t + tl.sum(p_t, 1)
        total = total * tl.exp2(highest - higher) + tl.sum(tl.exp2(z), 1)
        highest, highest_t = higher, higher_t
    row = index * N + i
    tl.store(loss + row, (tl.log2(total) - expected / total_t) * LN_2, mask=i < N)
    tl.store(lse + row, highest + tl.log2(total), mask=i < N)
    tl.store(lse_t + row, highest_t + tl.log2(total_t), mask=i < N)


@triton.jit
def _backward(
    q, k, q_t, k_t, added, added_t, lse, lse_t, above, grad,
    factor, scale, scale_t, H, N, image, head, token, image_t, head_t, token_t, added_head, added_head_t,
    WIDTH: tl.constexpr, WIDTH_T: tl.constexpr, D: tl.constexpr, D_T: tl.constexpr,
    HERE: tl.constexpr, THERE: tl.constexpr, PRECISION: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Some queries of one head, over all keys: above · factor · Σ_j (p_s - p_t) k_j, (B, H, N, d). Or
    `OF_KEYS`: some keys, over all queries, Σ_i (p_s - p_t) q_i; then maps are made transposed, keys by
    queries."""
    blocks = tl.cdiv(N, HERE)
    index = (tl.program_id(0) // blocks).to(tl.int64)
    q, k = _of_head(q, k, index, H, image, head)
    q_t, k_t = _of_head(q_t, k_t, index, H, image_t, head_t)
    added_head, added_head_t = index % H * added_head, index % H * added_head_t
    if OF_KEYS:
        q, k, q_t, k_t = k, q, k_t, q_t
    i = tl.program_id(0) % blocks * HERE + tl.arange(0, HERE)
    here, here_t = _tile(q, i, N, token, WIDTH, D), _tile(q_t, i, N, token_t, WIDTH_T, D_T)
    if not OF_KEYS:
        row_lse = tl.load(lse + index * N + i, mask=i < N, other=0.0)[:, None]
        row_lse_t = tl.load(lse_t + index * N + i, mask=i < N, other=0.0)[:, None]
    total = tl.zeros([HERE, D], tl.float32)
    for start in range(0, N, THERE):
        j = start + tl.arange(0, THERE)
        there, there_t = _tile(k, j, N, token, WIDTH, D), _tile(k_t, j, N, token_t, WIDTH_T, D_T)
        if OF_KEYS:
            query, key = j[None, :], i[:, None]
            row_lse = tl.load(lse + index * N + j, mask=j < N, other=0.0)[None, :]
            row_lse_t = tl.load(lse_t + index * N + j, mask=j < N, other=0.0)[None, :]
        else:
            query, key = i[:, None], j[None, :]
        z = _scores(here, there, scale, added, added_head, query, key, N, PRECISION)
        z_t = _scores(here_t, there_t, scale_t, added_t, added_head_t, query, key, N, PRECISION)
        difference = tl.exp2(z - row_lse) - tl.exp2(z_t - row_lse_t)
        if not OF_KEYS:  # beyond N both maps of a query are made of zeros, and keys are not stored
            difference = tl.where(key < N, difference, 0.0)
        total = tl.dot(difference.to(there.dtype), there, total, input_precision=PRECISION)
    total *= tl.load(above) * tl.full([], factor, tl.float32)
    _store(grad + index * N * WIDTH, total, i, N, WIDTH, D)


def by_kernel(student: Seen, teacher: Seen, value: bool = True) -> Tensor:
    """`atlib.map_free.map_free_cross_entropy` as one operator: a scalar in float32, without a gradient for a
    bias."""
    teacher = teacher.without(student.mask)
    q, k = _alike(student.q, student.k)
    q_t, k_t = _alike(teacher.q.detach(), teacher.k.detach())
    added, added_t = (None if x is None else x.detach().contiguous() for x in (student.added, teacher.added))
    tensors = q, k, q_t, k_t, added, added_t, student.scale, teacher.scale
    if _fits_in_registers(q, q_t, added is not None or added_t is not None):
        learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
        loss, *_ = map_free_short(*tensors, learns)
    else:
        loss, *_ = map_free_long(*tensors)
    return loss if value else loss - loss.detach()


@triton_op("atlib::map_free_short", mutates_args=())
def map_free_short(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, added: Tensor | None, added_t: Tensor | None,
    scale: float, scale_t: float, learns: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss and, where it `learns`, its gradients to q and k but for the factor scale / (B·H·N), which an
    fp16 gradient would lose digits by. q, k: (B, H, N, d); added: (H, N, N) or (N, N)."""
    B, H, N, _ = q.shape
    tensors = _laid_out(q, k, q_t, k_t)
    rows = q.new_empty((B, H, N), dtype=torch.float32)
    grad_q, grad_k = (q.new_empty(q.shape if learns else (0,)) for _ in "qk")
    keys = _covering(N)
    with _on(q):
        wrap_triton(_short)[(B * H,)](
            *tensors, added, added_t, rows, grad_q, grad_k,
            scale, scale_t, H, N, *_strides(*tensors, added, added_t),
            **_widths(q, q_t), QUERIES=16 if keys == 16 or q.element_size() == 4 else 32, KEYS=keys,
            PRECISION=_precision(), GRADIENTS=learns, SHARED_KEYS=_has_wgmma(q.device),
            num_warps=8 if max(keys, q.shape[3], q_t.shape[3]) > 64 else 4, num_stages=1,
        )  # fmt: skip
    return rows.mean(), grad_q, grad_k


@triton_op("atlib::map_free_long", mutates_args=())
def map_free_long(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, added: Tensor | None, added_t: Tensor | None,
    scale: float, scale_t: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss and, in bits, both log-sum-exps of every query, (B, H, N); shapes as for `map_free_short`."""
    B, H, N, _ = q.shape
    tensors = _laid_out(q, k, q_t, k_t)
    rows, lse, lse_t = (q.new_empty((B, H, N), dtype=torch.float32) for _ in range(3))
    here, there, launch = _blocks(q, q_t, added is not None or added_t is not None)
    with _on(q):
        wrap_triton(_forward)[(B * H * triton.cdiv(N, here),)](
            *tensors, added, added_t, rows, lse, lse_t,
            scale, scale_t, H, N, *_strides(*tensors, added, added_t),
            **_widths(q, q_t), QUERIES=here, KEYS=there, PRECISION=_precision(), **launch,
        )  # fmt: skip
    return rows.mean(), lse, lse_t


@triton_op("atlib::map_free_long_backward", mutates_args=())
def map_free_long_backward(
    q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, added: Tensor | None, added_t: Tensor | None,
    scale: float, scale_t: float, lse: Tensor, lse_t: Tensor, above: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`above`, a scalar, times the gradients of the loss to q and k."""
    B, H, N, _ = q.shape
    tensors = _laid_out(q, k, q_t, k_t)
    grad_q, grad_k = (q.new_empty(q.shape) for _ in "qk")
    here, there, launch = _blocks(q, q_t, added is not None or added_t is not None)
    grid = (B * H * triton.cdiv(N, here),)
    with _on(q):
        for grad, of_keys in ((grad_q, False), (grad_k, True)):
            wrap_triton(_backward)[grid](
                *tensors, added, added_t, lse, lse_t, above, grad,
                scale / (B * H * N), scale, scale_t, H, N, *_strides(*tensors, added, added_t),
                **_widths(q, q_t), HERE=here, THERE=there, PRECISION=_precision(), OF_KEYS=of_keys, **launch,
            )  # fmt: skip
    return grad_q, grad_k


def _keep_gradients(ctx, inputs, output) -> None:
    q, scale = inputs[0], inputs[6]
    ctx.factor = scale / (q.shape[0] * q.shape[1] * q.shape[2])
    ctx.save_for_backward(*output[1:])


def _multiply(ctx, above, *_):
    refuse_second_derivative()
    # in float32: an fp16 run scales its loss by more than fp16 can hold
    factor = (above * ctx.factor).reshape(1)
    grad_q, grad_k = (torch.mul(grad, factor, out=torch.empty_like(grad)) for grad in ctx.saved_tensors)
    return grad_q, grad_k, None, None, None, None, None, None, None


def _keep_rows(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.scale_t = inputs
    ctx.save_for_backward(*tensors, *output[1:])


def _differentiate(ctx, above, *_):
    refuse_second_derivative()
    *tensors, lse, lse_t = ctx.saved_tensors
    grad_q, grad_k = map_free_long_backward(*tensors, ctx.scale, ctx.scale_t, lse, lse_t, above)
    return grad_q, grad_k, None, None, None, None, None, None


map_free_short.register_autograd(_multiply, setup_context=_keep_gradients)
map_free_long.register_autograd(_differentiate, setup_context=_keep_rows)


def _count(name: str, of_student: int, of_teacher: int, that_learn: int = 0) -> None:
    """Tell PyTorch's counter how many products of the student's and of the teacher's width an operator makes,
    and how many more where its last argument says that it learns."""

    def flops(q, k, q_t, *rest, **_) -> int:  # of their shapes
        B, H, N, width = q
        products = of_student + (that_learn if rest[-1] else 0)
        return 2 * B * H * N**2 * (products * width + of_teacher * q_t[3])

    register_flop_formula(getattr(torch.ops.atlib, name))(flops)


_count("map_free_short", 1, 1, that_learn=2)
_count("map_free_long", 1, 1)
_count("map_free_long_backward", 4, 2)


def takes(student: Seen, teacher: Seen) -> bool:
    """Whether the kernels know these number types and widths, and what is added is one for all images."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    parts = student.q, student.k, teacher.q, teacher.k
    of_all = all(x is None or x.ndim < 4 for x in (student.added, teacher.added))
    return of_all and all(x.dtype in dtypes and x.shape[-1] <= WIDEST for x in parts)


def _alike(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one number type; under autocast in that of the attention that they belong to."""
    dtype = torch.promote_types(q.dtype, k.dtype)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
    return q.to(dtype), k.to(dtype)


# How kernels are cut. All of it was found by compiling them for sm_80 and sm_90: nothing is spilled from
# registers, and 100 kB of shared memory are enough, as consumer cards have them (tests/core/test_fused.py).


def _fits_in_registers(q: Tensor, q_t: Tensor, is_added: bool) -> bool:
    """Whether one program can hold all keys of a head, their gradient, and some queries' maps."""
    keys = _covering(q.shape[2])
    if keys is None:
        return False
    area = 64 * 32 if q.element_size() == 4 else 256 * 32 if is_added else 256 * 64
    return keys * max(_covering(q.shape[3]), _covering(q_t.shape[3])) <= area


def _blocks(q: Tensor, q_t: Tensor, is_added: bool) -> tuple[int, int, dict[str, int]]:
    """The rows that a program keeps, those that it goes over at a time, and how it is compiled."""
    is_wide = max(q.shape[3], q_t.shape[3]) > 64
    if q.element_size() == 4:
        return 32, 16 if is_wide else 32, {"num_warps": 4, "num_stages": 1}
    if is_wide:
        return 64, 32, {"num_warps": 8, "num_stages": 2}
    return 64, 64, {"num_warps": 8 if is_added else 4, "num_stages": 2}


def _covering(size: int) -> int | None:
    """The smallest power of two that covers it, at least 16, as tensor cores ask for; None above 256."""
    return next((power for power in (16, 32, 64, 128, 256) if size <= power), None)


def _widths(q: Tensor, q_t: Tensor) -> dict[str, int]:
    """The head widths of student and teacher, and as padded."""
    width, width_t = q.shape[3], q_t.shape[3]
    return {"WIDTH": width, "WIDTH_T": width_t, "D": _covering(width), "D_T": _covering(width_t)}


def _laid_out(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor) -> tuple[Tensor, ...]:
    """The same tensors where q has the strides of its k, and a head is within 2³¹ numbers, as the kernels
    count there; else contiguous."""
    return tuple(
        x
        if x.stride(3) == 1 and x.stride() == other.stride() and x.shape[2] * x.stride(2) < 2**31
        else x.contiguous()
        for x, other in ((q, k), (k, q), (q_t, k_t), (k_t, q_t))
    )


def _strides(q: Tensor, k: Tensor, q_t: Tensor, k_t: Tensor, *added: Tensor | None) -> tuple[int, ...]:
    """From image to image, head to head and token to token, of student and teacher; then of what is added."""
    heads = (x.stride(0) if x is not None and x.ndim == 3 else 0 for x in added)
    return (*q.stride()[:3], *q_t.stride()[:3], *heads)


def _on(q: Tensor) -> AbstractContextManager:
    """Triton starts kernels on the current device, which need not be that of q; tensors that are only traced
    have none."""
    return torch.cuda.device(q.device) if type(q) is Tensor and q.is_cuda else nullcontext()


def _precision() -> str:
    """How float32 is multiplied: in TF32 where PyTorch's own products are."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _has_wgmma(device: torch.device) -> bool:
    """Whether the tensor cores read both factors of a product from shared memory (Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
