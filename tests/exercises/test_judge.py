"""The judge: what it says of answers that are right, wrong, of a wrong kind, endless, unfinished."""

import contextlib
import math
import time

import pytest
import torch

from atbook.exercises import check, find, judge
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
    assert "the largest difference is 18" in other.says


@pytest.mark.parametrize("answer", [lambda x: None, lambda x: ..., lambda x: _raise(NotImplementedError())])
def test_an_untouched_starter_is_not_done(answer):
    assert judge(DOUBLE, answer).mistake == "not done"


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (lambda x: _raise(KeyError("mine")), "KeyError: 'mine'"),
        (lambda x, y: x, "TypeError"),
        (lambda x: _raise(SystemExit(3)), "SystemExit"),
        (lambda x: 2 * x[0], r"expected the shape (2, 2), got (2,)"),
        (lambda x: [2 * x], r"expected the shape (2, 2), got (1, 2, 2)"),
        (lambda x: ["2x"], "expected a tensor, got a list"),
        (lambda x: "2x", "got a str"),
        (lambda x: x * math.nan, "4 of 4 numbers are nan or infinite"),
        (lambda x: x.mul_(2), "changed its arguments"),
    ],
)
def test_what_is_wrong_is_told(answer, named):
    verdict = judge(DOUBLE, answer)
    assert not verdict.passed and verdict.mistake is None and named in verdict.says


ROWS = exercise(lambda p: p.softmax(-1), lambda: (torch.arange(12.0).double().sin().reshape(2, 2, 3),))
MEAN = exercise(lambda x: x.mean(1), lambda: (torch.arange(1.0, 13).double().reshape(3, 4),))


@pytest.mark.parametrize(
    ("task", "answer", "said"),
    [
        (DOUBLE, lambda x: -2 * x, "the sign is turned round"),
        (DOUBLE, lambda x: 200 * x, "no per cent"),
        (DOUBLE, lambda x: 2 * x / math.log(2), "not log2"),
        (DOUBLE, lambda x: 2 * x.mT, "transposed"),
        (MEAN, lambda x: x.sum(1), "the size of axis 1 of `x`: it is 4 times too large: a sum"),
        (MEAN, lambda x: x.mean(1) / 4, "it is 1/4 of the right one: a mean"),
        (ROWS, lambda p: p.exp() * p.softmax(-1), "the rows of your result do not sum to 1"),
    ],
)
def test_how_a_wrong_result_is_related_to_the_right_one_is_told(task, answer, said):
    verdict = judge(task, answer)
    assert not verdict.passed and said in verdict.says


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: (2 * x).tolist(),
        lambda x: (2 * x).numpy(),
        lambda x: list(2 * x),
        lambda x: x @ torch.tensor([[2.0, 0.0], [0.0, 2.0]]),  # in single precision, as in the chapters
    ],
)
def test_a_right_result_may_be_written_in_other_ways(answer):
    assert judge(DOUBLE, answer).passed


def test_one_number_may_be_a_tensor_of_one_number():
    assert judge(exercise(lambda x: x.sum(), numbers), lambda x: x.sum().reshape(1)).passed


def test_a_teacher_may_be_frozen_by_the_answer():
    def frozen(a, b):
        a.requires_grad_(False)
        return (a * b).sum()

    def inputs():
        return torch.ones(2).double(), torch.ones(2).double()

    assert judge(exercise(lambda a, b: (a.detach() * b).sum(), inputs, grads=("a", "b")), frozen).passed


def test_an_error_of_the_check_is_no_fault_of_the_student():
    verdict = judge(exercise(lambda x: _raise(RuntimeError("mine")), numbers), lambda x: 2 * x)
    assert not verdict.passed and verdict.mistake == "the check" and "no mistake of yours" in verdict.says


def test_a_value_in_place_of_the_function():
    verdict = judge(DOUBLE, torch.zeros(2))
    assert not verdict.passed and "expected a function, got a Tensor" in verdict.says


def test_printing_in_place_of_returning(capsys):
    verdict = judge(DOUBLE, lambda x: print(2 * x))
    assert not verdict.passed and "return" in verdict.says and capsys.readouterr().out == ""


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


def test_gradients_of_lists_of_tensors():
    counted = exercise(lambda x: sum(x), lambda: ([*numbers(), *numbers()],), grads=("x",))
    assert judge(counted, lambda x: x[0] + x[1]).passed
    assert "gradient of x: entry 1" in judge(counted, lambda x: x[0] + x[1].detach()).says


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


def test_an_unknown_number_lists_the_close_ones(capsys):
    with pytest.raises(ValueError, match=r"6\.9"):
        find("6.9")
    check("6.9", print)  # never raises
    assert "'6.1'" in capsys.readouterr().out


def test_check_prints_the_verdict(capsys):
    check("6.1", lambda *maps: None)
    assert capsys.readouterr().out.startswith("Exercise 6.1: not done yet")
