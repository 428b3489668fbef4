"""What a loss needs of other processes' images."""

import torch
from torch import Tensor


def summed(value: Tensor) -> Tensor:
    """The sum of a tensor over the processes, through which gradients flow: each process must call it."""
    return value if _alone() else _Sum.apply(value)


class _Sum(torch.autograd.Function):
    """Each process's value is in every process's sum, so that its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return _reduced(value)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _reduced(gradient)


def _reduced(value: Tensor) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total)
    return total


def gathered(rows: Tensor) -> tuple[Tensor, int]:
    """The rows (B, ...) of all processes, one process after the other, without gradients, and which of them
    is this process's first. Processes may have unequal numbers of them; each must call it."""
    rows = rows.detach()
    if _alone():
        return rows, 0
    dist = torch.distributed
    row_count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(row_count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, row_count)
    numbers = [int(count) for count in counts]
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(parts, padded)
    whole = torch.cat([part[:number] for part, number in zip(parts, numbers)])
    return whole, sum(numbers[: dist.get_rank()])


def _alone() -> bool:
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())
