"""Helpers of the hidden tests: the student's own numbers, and a comparison that no answer can reach.

The file is imported before an answer runs and keeps the functions that it needs, so that changes to torch do
not matter to it. It takes plain tensors only, and compares their numbers as Python's own.
"""

import hashlib
import hmac
import json
import math

import torch

EDITION = json.loads(open("edition.json", encoding="utf-8").read())  # noqa: SIM115
_tolist, _Tensor, _isclose = torch.Tensor.tolist, torch.Tensor, math.isclose


def variant(task: str) -> str:
    """The letter of a task's variant in this edition."""
    return EDITION["variants"][task]


def seed(env: dict, task: str) -> int:
    """A seed of this student for this task, which depends on the instructor's secret."""
    student = str(env.get("STUDENT", "")).strip().lower()
    code = hmac.new(EDITION["key"].encode(), f"{student}/{task}".encode(), hashlib.sha256)
    return int(code.hexdigest()[:8], 16)


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Standard normal numbers in double precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(got, want: torch.Tensor, what: str, tolerance: float = 1e-6) -> None:
    """Raise `AssertionError`, which names the first difference, where a result is wrong."""
    if type(got) is not _Tensor:
        raise AssertionError(f"{what}: expected a tensor, got {type(got).__name__}")
    if tuple(got.shape) != tuple(want.shape):
        raise AssertionError(f"{what}: expected the shape {tuple(want.shape)}, got {tuple(got.shape)}")
    for at, (g, w) in enumerate(zip(_flat(_tolist(got)), _flat(_tolist(want)))):
        if not _isclose(g, w, rel_tol=tolerance, abs_tol=tolerance):
            raise AssertionError(f"{what}: number {at} of the result is {g:.6g}, not {w:.6g}")


def _flat(numbers) -> list:
    if not isinstance(numbers, list):
        return [numbers]
    return [number for part in numbers for number in _flat(part)]
