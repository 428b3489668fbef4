"""The judge: what it says of answers that are right, wrong, of a wrong kind, endless, unfinished."""

import contextlib
import math
import time

import pytest
import torch

from atbook.exercises import judge
from atbook.exercises.judging import Exercise


def exercise(right, *cases, **options) -> Exercise:
    named = {f"case {i}": (lambda case=case: case()) for i, case in enumerate(cases)}
    return Exercise("99.1", right, named, **{"wrong": {}} | options)


def numbers():
    return (torch.arange(4.0, dtype=torch.float64).reshape(2, 2),)


DOUBLE = exercise(lambda x: 2 * x, numbers, wrong={"You took it three times.": lambda x: 3 * x})


def test_right_wrong_and_known_wrong():
    assert judge(DOUBLE, lambda x: x + x).passed
    known = judge(DOUBLE, lambda x: x + x + x)
    assert not known.passed and known.mistake == "You took it three times." and "three times" in known.says
    other = judge(DOUBLE, lambda x: 2 * x**2 + 2 * x)
    assert not other.passed and other.mistake is None
    assert "expected 2, got 4 at (0, 1); 3 of 4 entries differ" in other.says and "0 of 1" in other.says


@pytest.mark.parametrize("answer", [lambda x: None, lambda x: ..., lambda x: _raise(NotImplementedError())])
def test_an_untouched_starter_is_not_done(answer):
    assert judge(DOUBLE, answer).mistake == "not done"


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (lambda x: _raise(KeyError("mine")), "KeyError: 'mine'"),
        (lambda x: 2 * x[0], r"expected the shape (2, 2), got (2,)"),
        (lambda x: [2 * x], r"expected the shape (2, 2), got (1, 2, 2)"),
        (lambda x: "2x", "got a str"),
        (lambda x: x * math.nan, "4 of 4 numbers are nan or infinite"),
        (lambda x: x.mul_(2), "changed its arguments"),
    ],
)
def test_what_is_wrong_is_told(answer, named):
    verdict = judge(DOUBLE, answer)
    assert not verdict.passed and verdict.mistake is None and named in verdict.says


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: (2 * x).tolist(),
        lambda x: x @ torch.tensor([[2.0, 0.0], [0.0, 2.0]]),  # in single precision, as in the chapters
    ],
)
def test_a_right_result_may_be_written_in_other_ways(answer):
    assert judge(DOUBLE, answer).passed


def test_a_teacher_may_be_frozen_by_the_answer():
    def frozen(a, b):
        a.requires_grad_(False)
        return (a * b).sum()

    def inputs():
        return torch.ones(2).double(), torch.ones(2).double()

    assert judge(exercise(lambda a, b: (a.detach() * b).sum(), inputs, grads=("a", "b")), frozen).passed


def test_an_answer_that_runs_for_ever_is_ended_even_where_it_catches_exceptions(monkeypatch):
    monkeypatch.setattr("atbook.exercises.judging.LIMIT", 0.2)

    def endless(x):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    start = time.monotonic()
    verdict = judge(DOUBLE, endless)
    assert not verdict.passed and "did not end within 0.2 s" in verdict.says
    assert time.monotonic() - start < 5


def test_gradients_are_judged_where_they_count():
    known = {"Not that.": lambda x: 2 * x}
    counted = exercise(lambda x: 2 * x.detach(), numbers, grads=("x",), wrong=known)
    assert judge(counted, lambda x: 2 * x.detach()).passed
    assert judge(counted, lambda x: 2 * x).mistake == "Not that."
    only = exercise(lambda x: 2 * x, numbers, grads=("x",), gradients_only=True)
    assert judge(only, lambda x: 2 * x + 7).passed and not judge(only, lambda x: 3 * x).passed


def test_a_tensor_that_is_too_large_is_told_although_the_numbers_are_right():
    small = exercise(lambda x: x.sum(), numbers, largest=4)
    assert judge(small, lambda x: x.sum()).passed
    verdict = judge(small, lambda x: x.expand(5, 2, 2).clone().sum() / 5)
    assert not verdict.passed and "(5, 2, 2)" in verdict.says


def test_results_that_are_dicts_lists_and_words():
    mixed = exercise(lambda x: {"sum": x.sum(), "list": [1, "a", True]}, numbers)
    assert judge(mixed, lambda x: {"list": (1, "a", True), "sum": float(x.sum())}).passed
    for wrong in (
        {"sum": 6.0},
        {"sum": 6.0, "list": [1, "a"]},
        {"sum": 6.0, "list": [1, "b", True]},
        {"sum": True, "list": [1, "a", True]},
    ):
        assert not judge(mixed, lambda x: wrong).passed


def test_randomness_is_the_same_for_every_answer_and_the_students_own_is_untouched():
    noisy = exercise(lambda x: x + torch.rand(2, 2), numbers)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert judge(noisy, lambda x: x + torch.rand(2, 2)).passed
    assert torch.equal(torch.rand(1), expected)
