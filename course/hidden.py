"""What hidden tests are given and how they compare. They run outside of the cage, where no answer is; an
answer comes as a function that runs inside (`atbook.cage.outside.Answer`), and what it returns is plain."""

import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from atbook.cage.outside import Cage


@dataclass(frozen=True)
class Asked:
    """A submission, and the edition by which it is graded."""

    # The name that the student filled in; "" where there is none.
    student: str
    # The label of the edition.
    edition: str
    # {task: the letter of its variant}.
    variants: Mapping[str, str]
    # The key of the hidden numbers.
    key: str
    # Where the files are that students got.
    files: Path
    # A cage for what has to be measured on what a student decides.
    cage: Cage
    # {name: content} of the files that came with the notebook.
    uploads: Mapping[str, bytes] = field(default_factory=dict)

    def seed(self, task: str) -> int:
        """A seed of this student for this task, which depends on the instructor's secret."""
        code = hmac.new(self.key.encode(), f"{self.student.lower()}/{task}".encode(), hashlib.sha256)
        return int(code.hexdigest()[:8], 16)

    def named(self) -> str:
        """The student's name. Raises `AssertionError` where it is not filled in."""
        if not self.student:
            raise AssertionError("STUDENT is not filled in")
        return self.student


def normal(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers in double precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(got, want: Tensor, what: str, tolerance: float = 1e-6) -> None:
    """Raise `AssertionError`, which names the first difference and the largest, where a result is wrong."""
    if isinstance(got, bool) or not isinstance(got, (int, float, list, Tensor)):
        raise AssertionError(f"{what}: expected a tensor, got {type(got).__name__}")
    try:
        numbers = torch.as_tensor(got, dtype=torch.float64)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise AssertionError(f"{what}: expected a tensor, got a list of something else") from None
    if numbers.shape != want.shape:
        raise AssertionError(f"{what}: expected the shape {tuple(want.shape)}, got {tuple(numbers.shape)}")
    wanted = want.detach().double()
    right = torch.isclose(numbers, wanted, rtol=tolerance, atol=tolerance)
    if not right.all():
        g, w = numbers.flatten(), wanted.flatten()
        at = int((~right.flatten()).nonzero()[0])
        apart = float((g - w).abs().nan_to_num(math.inf).max())
        raise AssertionError(
            f"{what}: number {at} of the result is {float(g[at]):.6g}, not {float(w[at]):.6g}; the largest"
            f" difference is {apart:.3g}"
        )
