"""The judge: what it says of answers that are right, wrong, of a wrong kind, endless, unfinished."""

import contextlib
import json
import math
import time

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from atbook.__main__ import main
from atbook.exercises import check, commands, find, judge
from atbook.exercises.judging import Exercise


def exercise(right, case, **options) -> Exercise:
    return Exercise("99.1", right, {"case 0": case}, **{"wrong": {}} | options)


def numbers():
    return (torch.arange(4.0, dtype=torch.float64).reshape(2, 2),)


def _raise(error):
    raise error


def frozen(a, b):
    a.requires_grad_(False)
    return (a * b).sum()


DOUBLE = exercise(lambda x: 2 * x, numbers, wrong={"You took it three times.": lambda x: 3 * x})
ROWS = exercise(lambda p: p.softmax(-1), lambda: (torch.arange(12.0).double().sin().reshape(2, 2, 3),))
MEAN = exercise(lambda x: x.mean(1), lambda: (torch.arange(1.0, 13).double().reshape(3, 4),))
SUM = exercise(lambda x: x.sum(), numbers)
SMALL = exercise(lambda x: x.sum(), numbers, largest=4)
OF_TEACHER = exercise(
    lambda a, b: (a.detach() * b).sum(), lambda: (torch.ones(2).double(),) * 2, grads=("a", "b")
)
DETACHED = exercise(lambda x: 2 * x.detach(), numbers, grads=("x",), wrong={"Not that.": lambda x: 2 * x})
GRADIENT = exercise(lambda x: 2 * x, numbers, grads=("x",), gradients_only=True)
OF_LIST = exercise(lambda x: sum(x), lambda: ([*numbers(), *numbers()],), grads=("x",))
MIXED = exercise(lambda x: {"sum": x.sum(), "list": [1, "a", True]}, numbers)
NOISY = exercise(lambda x: x + torch.rand(2, 2), numbers)
BROKEN = exercise(lambda x: _raise(RuntimeError("mine")), numbers)


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        (DOUBLE, lambda x: x + x),
        (DOUBLE, lambda x: (2 * x).tolist()),
        (DOUBLE, lambda x: (2 * x).numpy()),
        (DOUBLE, lambda x: list(2 * x)),
        (DOUBLE, lambda x: x @ torch.tensor([[2.0, 0], [0, 2]])),  # in single precision, as in the chapters
        (SUM, lambda x: x.sum().reshape(1)),
        (SMALL, lambda x: x.sum()),
        (OF_TEACHER, frozen),
        (DETACHED, lambda x: 2 * x.detach()),
        (GRADIENT, lambda x: 2 * x + 7),
        (OF_LIST, lambda x: x[0] + x[1]),
        (MIXED, lambda x: {"list": (1, "a", True), "sum": float(x.sum())}),
        (NOISY, lambda x: x + torch.rand(2, 2)),
    ],
)
def test_a_right_result_may_be_written_in_other_ways(task, answer):
    """The randomness of an answer is the judge's; a student's own is left alone."""
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert judge(task, answer).passed
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("task", "answer", "mistake", "said"),
    [
        (DOUBLE, lambda x: None, "not done", ""),
        (DOUBLE, lambda x: _raise(NotImplementedError()), "not done", ""),
        (DOUBLE, lambda x: print(2 * x), "not done", "return"),
        (DOUBLE, lambda x: x + x + x, "You took it three times.", "three times"),
        (DOUBLE, lambda x: 2 * x**2 + 2 * x, None, "expected 2, got 4 at (0, 1); 3 of 4 entries differ"),
        (DOUBLE, lambda x: _raise(KeyError("mine")), None, "KeyError: 'mine'"),
        (DOUBLE, lambda x: _raise(SystemExit(3)), None, "SystemExit"),
        (DOUBLE, lambda x: 2 * x[0], None, "expected the shape (2, 2), got (2,)"),
        (DOUBLE, lambda x: ["2x"], None, "expected a tensor, got a list"),
        (DOUBLE, lambda x: x * math.nan, None, "4 of 4 numbers are nan or infinite"),
        (DOUBLE, lambda x: x.mul_(2), None, "changed its arguments"),
        (DOUBLE, torch.zeros(2), None, "expected a function, got a Tensor"),
        (BROKEN, lambda x: 2 * x, "the check", "no mistake of yours"),
        # how a wrong result is related to the right one
        (DOUBLE, lambda x: -2 * x, None, "the sign is turned round"),
        (DOUBLE, lambda x: 2 * x / math.log(2), None, "not log2"),
        (DOUBLE, lambda x: 2 * x.mT, None, "transposed"),
        (MEAN, lambda x: x.sum(1), None, "the size of axis 1 of `x`: it is 4 times too large: a sum"),
        (MEAN, lambda x: x.mean(1) / 4, None, "it is 1/4 of the right one: a mean"),
        (ROWS, lambda p: p.exp() * p.softmax(-1), None, "the rows of your result do not sum to 1"),
        (ROWS, lambda p: 2 * p.softmax(-1) - 1 / 3, None, "expected"),  # they do, and are no shares
        (DOUBLE, lambda x: 2 * x + 5j, None, "got a complex tensor"),
        # gradients, sizes on the way, and results that are no tensors
        (DETACHED, lambda x: 2 * x, "Not that.", ""),
        (GRADIENT, lambda x: 3 * x, None, ""),
        (OF_LIST, lambda x: x[0] + x[1].detach(), None, "gradient of x: entry 1"),
        (SMALL, lambda x: x.expand(5, 2, 2).clone().sum() / 5, None, "(5, 2, 2)"),
        (MIXED, lambda x: {"sum": 6.0}, None, ""),
        (MIXED, lambda x: {"sum": 6.0, "list": [1, "b", True]}, None, ""),
        (MIXED, lambda x: {"sum": True, "list": [1, "a", True]}, None, ""),
    ],
)
def test_what_is_wrong_is_told(task, answer, mistake, said, capsys):
    verdict = judge(task, answer)
    assert not verdict.passed and verdict.mistake == mistake and said in verdict.says
    assert capsys.readouterr().out == ""


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


def test_an_unknown_number_lists_the_close_ones_and_a_verdict_is_printed(capsys):
    with pytest.raises(ValueError, match=r"6\.9"):
        find("6.9")
    check("6.9", print)  # never raises
    assert "'6.1'" in capsys.readouterr().out
    check("6.1", lambda *maps: None)
    assert capsys.readouterr().out.startswith("Exercise 6.1: not done yet")


# --- The command, on notebooks as students hand them in


RIGHT = """
def map_loss(s0, s1, t0, t1):
    return sum(-(t.detach() * s.log()).sum(-1).mean() for s, t in ((s0, t0), (s1, t1)))
"""
CHECK = 'from atbook.exercises import check\n\ncheck("6.{}", {})'


@pytest.mark.slow
def test_verdicts_of_what_is_right_unfinished_and_broken(tmp_path, capsys, monkeypatch):
    above = new_markdown_cell("### Exercise 6.1. Written by hand\n\n★ 10 minutes. Write it.")
    cells = [
        RIGHT,
        CHECK.format(1, "map_loss"),
        "def excess(students, teachers):\n    ...",
        CHECK.format(2, "excess"),
        CHECK.format(3, "never_defined"),
    ]
    path = tmp_path / "mine.ipynb"
    nbformat.write(new_notebook(cells=[above, *map(new_code_cell, cells)]), path)
    assert main(["exercises", str(path), "--json"]) == 1
    verdicts = {verdict["number"]: verdict for verdict in json.loads(capsys.readouterr().out)}
    assert [verdicts[f"6.{i}"]["right"] for i in (1, 2, 3)] == [True, False, False]
    assert "not done" in verdicts["6.2"]["says"] and "NameError" in verdicts["6.3"]["says"]
    assert verdicts["6.1"]["title"] == "Written by hand"
    monkeypatch.setattr(commands, "verdicts", lambda path: {"6.1": verdicts["6.1"]["says"]})
    assert main(["exercises", str(path)]) == 0
    assert "1 of 1 right" in capsys.readouterr().out
