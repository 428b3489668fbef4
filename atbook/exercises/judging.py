"""Checks that name the mistake: an answer is compared with the right one and, where it differs, with wrong
ones that are known."""

import inspect
import io
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atlib._util import require_known

LIMIT = 30  # seconds that an answer may take for one case


class Wrong(NamedTuple):
    """A planted wrong answer, and what is said to a student whose answer does the same."""

    answer: Callable
    #: Left out where the docstring of `answer` says it.
    message: str = ""

    @property
    def says(self) -> str:
        """What is said to the student, on one line."""
        return self.message or " ".join((self.answer.__doc__ or "").split())


@dataclass(frozen=True)
class Exercise:
    """One exercise of a chapter, or a variant of an assignment's task."""

    #: "6.1" is the first of chapter 06, "A1.2b" variant b of the second task of A1.
    number: str
    #: What a reader sees beside the number.
    title: str
    #: How hard it is, from 1 to 3.
    stars: int
    #: How long it takes to solve it.
    minutes: int
    #: A word or two, for the page of all exercises.
    subject: str
    #: A right answer, with which others are compared.
    right: Callable
    #: {name: a function without arguments, which makes new arguments for each answer}.
    cases: dict[str, Callable[[], tuple]]
    #: Right answers that are written differently.
    also_right: tuple[Callable, ...]
    #: {name of the mistake: planted wrong answer}.
    wrong: dict[str, Wrong]
    #: The heading of the chapter under which a student finds help.
    see: str = ""
    #: The names of arguments (tensors, or lists of them) whose gradients are part of the answer.
    grads: tuple[str, ...] = ()
    #: Whether the gradients alone are compared, and not the value that the answer returns.
    gradients_only: bool = False
    #: How many elements the largest tensor may have that the answer makes.
    largest: int | None = None
    #: How far two numbers may be apart, relative to the right one.
    rtol: float = 1e-4
    #: How far two numbers may be apart besides.
    atol: float = 1e-6
    #: The part of a result that is compared.
    view: Callable[[Any], Any] = field(default=lambda result: result)


class Verdict(NamedTuple):
    """What a check says of an answer."""

    #: The number of the exercise.
    number: str
    #: Whether the answer is right.
    passed: bool
    #: What the student reads.
    says: str
    #: The name of the planted wrong answer that was recognised, or "not done".
    mistake: str | None = None

    def __str__(self) -> str:
        return f"Exercise {self.number}: {self.says}"


class Outcome(NamedTuple):
    """What came of an answer in one case."""

    # What the answer returned, with the gradients that count.
    value: Any = None
    # What went wrong, in words.
    error: str | None = None
    # The shape of the largest tensor that was made.
    largest: tuple[int, ...] = ()
    # Whether the answer changed its arguments.
    changed: bool = False


def find(number: str) -> Exercise:
    """The exercise of that number; no other chapter is imported. Raises `ValueError`, which lists the close
    ones, for an unknown one."""
    page = number.partition(".")[0]
    name = f"ch{page:0>2}" if page.isdecimal() else page.lower()
    exercises = _exercises_of(name) if name in _pages() else ()
    of_page = {exercise.number: exercise for exercise in exercises}
    if number not in of_page:
        require_known("exercise", number, [exercise.number for exercise in every()])
    return of_page[number]


def every() -> list[Exercise]:
    """All exercises, in the order of the book."""
    return [exercise for name in _pages() for exercise in _exercises_of(name)]


def _pages() -> list[str]:
    """The files of exercises: of chapters (ch01), of how-tos (h1) and of the family's cards (f1)."""
    here = Path(__file__).parent
    kinds = ("ch[0-9][0-9]", "h[0-9]", "f[0-9]", "f[0-9][0-9]")
    return [path.stem for kind in kinds for path in sorted(here.glob(f"{kind}.py"))]


def _exercises_of(page: str) -> list[Exercise]:
    return import_module(f"atbook.exercises.{page}").EXERCISES


def check(number: str, answer: Callable) -> None:
    """Print what is right or wrong with an answer; never raises."""
    _say(find, number, answer)


def checker(exercises: Sequence[Exercise]) -> Callable[[str, Callable], None]:
    """`check` for exercises that are in no chapter, such as those of a graded assignment."""
    known = {exercise.number: exercise for exercise in exercises}

    def find_among_these(number: str) -> Exercise:
        require_known("exercise", number, known)
        return known[number]

    return partial(_say, find_among_these)


def _say(find: Callable[[str], Exercise], number: str, answer: Callable) -> None:
    try:
        exercise = find(number)
    except ValueError as error:
        print(error)
    else:
        print(judge(exercise, answer))


def judge(exercise: Exercise, answer: Callable) -> Verdict:
    """Compare an answer with the right one in all cases.

    An answer that differs is compared with every planted wrong answer, and the first that does the same in
    all cases says what is wrong. If none does, the verdict names the first difference.
    """
    if not callable(answer):
        kind = type(answer).__name__
        says = f"not yet: expected a function, got a {kind}. Give the function itself, not what it returns."
        return Verdict(exercise.number, False, says)
    got, failures = {}, {}
    for name in exercise.cases:
        try:
            got[name] = outcome(exercise, answer, name)
        except _NotDone as unfinished:
            return Verdict(exercise.number, False, str(unfinished), "not done")
        if failure := _failure(exercise, outcome(exercise, exercise.right, name), got[name]):
            failures[name] = failure
    if not failures:
        says = f"right, in {len(got)} case{'s' * (len(got) > 1)} ({', '.join(got)})."
        return Verdict(exercise.number, True, says)
    for mistake, wrong in exercise.wrong.items():
        if all(_alike(exercise, outcome(exercise, wrong.answer, name), got[name]) for name in got):
            see = f" See: {exercise.see}." if exercise.see else ""
            return Verdict(exercise.number, False, f"not yet. {wrong.says}{see}", mistake)
    name, first = next(iter(failures.items()))
    says = f"not yet: in case '{name}' {first}. ({len(got) - len(failures)} of {len(got)} cases are right.)"
    return Verdict(exercise.number, False, says)


def outcome(exercise: Exercise, answer: Callable, case: str) -> Outcome:
    """Run an answer on a case, with new arguments and a fixed seed. What it prints is not shown."""
    arguments = exercise.cases[case]()
    names = list(inspect.signature(exercise.right).parameters)
    leaves = {name: _tensors(arguments[names.index(name)]) for name in exercise.grads}
    for leaf in (leaf for tensors in leaves.values() for leaf in tensors):
        leaf.requires_grad_()
    before = [tensor.detach().clone() for tensor in _tensors(arguments)]
    largest, printed = _Largest(), io.StringIO()
    with torch.random.fork_rng(devices=[]), redirect_stdout(printed):
        torch.manual_seed(0)
        try:
            with _time_limit(LIMIT), largest if exercise.largest is not None else nullcontext():
                result = answer(*arguments)
        except NotImplementedError:
            result = None
        except _TimeUp:
            return Outcome(error=f"did not end within {LIMIT} s")
        except (Exception, SystemExit) as error:  # the student reads it, with the name of the case
            return Outcome(error=f"raised {type(error).__name__}: {error}")
    if result is None or result is Ellipsis:
        if printed.getvalue():
            raise _NotDone("not yet: your function printed something and returned nothing. Use `return`.")
        raise _NotDone("not done yet. Fill in the starter, run its cell, then this one.")
    after = _tensors(arguments)
    changed = any(b.shape != a.shape or not torch.equal(b, a.detach()) for b, a in zip(before, after))
    try:
        value = _plain(exercise.view(result))
        if leaves:
            value = ({} if exercise.gradients_only else {"value": value}) | _gradients(result, leaves)
    except (Exception, SystemExit) as error:
        return Outcome(error=f"raised {type(error).__name__}: {error}")
    return Outcome(value, None, largest.shape, changed)


# --- What is compared ---


def _failure(exercise: Exercise, want: Outcome, got: Outcome) -> str | None:
    """What is wrong with an outcome, in words that follow "in case '...'"; None where nothing is wrong."""
    if got.error is not None:
        return f"your function {got.error}"
    if got.changed:
        return "your function changed its arguments in place; work on a copy (x.clone())"
    if difference := _difference(exercise, want.value, got.value):
        return difference
    if _too_large(exercise, got):
        return f"the numbers are right, but a tensor of shape {got.largest} was made"
    return None


def _alike(exercise: Exercise, a: Outcome, b: Outcome) -> bool:
    """Whether two answers did the same on a case."""
    if a.error is not None or b.error is not None:
        return (a.error or "").split(":")[0] == (b.error or "").split(":")[0]
    if a.changed != b.changed or _too_large(exercise, a) != _too_large(exercise, b):
        return False
    return _difference(exercise, a.value, b.value) is None


def _too_large(exercise: Exercise, outcome: Outcome) -> bool:
    return exercise.largest is not None and math.prod(outcome.largest) > exercise.largest


def _difference(exercise: Exercise, want: Any, got: Any, where: str = "") -> str | None:
    """The first difference in words, None where there is none. nan equals nan."""
    if isinstance(want, dict):
        if not isinstance(got, dict) or want.keys() != got.keys():
            shown = list(got) if isinstance(got, dict) else _kind(got)
            return f"{where}expected a dict with {list(want)}, got {shown}"
        pairs = [(f"{where}{key}: ", want[key], got[key]) for key in want]
    elif isinstance(want, list):
        if not isinstance(got, list) or len(want) != len(got):
            shown = len(got) if isinstance(got, list) else _kind(got)
            return f"{where}expected {len(want)} entries, got {shown}"
        pairs = [(f"{where}entry {i}: ", w, g) for i, (w, g) in enumerate(zip(want, got))]
    elif isinstance(want, (bool, str)) or want is None:
        return None if want == got else f"{where}expected {want!r}, got {_shown(got)}"
    else:
        return _difference_of_numbers(exercise, want, got, where)
    return next((told for at, w, g in pairs if (told := _difference(exercise, w, g, at))), None)


def _difference_of_numbers(exercise: Exercise, want: Any, got: Any, where: str) -> str | None:
    if isinstance(got, bool) or not isinstance(got, (int, float, Tensor)):
        return f"{where}expected {_kind(want)}, got {_kind(got)}"
    w, g = (torch.as_tensor(value, dtype=torch.float64) for value in (want, got))
    if w.shape != g.shape:
        return f"{where}expected the shape {tuple(w.shape)}, got {tuple(g.shape)}"
    if not g.isfinite().all() and w.isfinite().all():
        return f"{where}{(~g.isfinite()).sum()} of {g.numel()} numbers are nan or infinite"
    off = ~torch.isclose(g, w, rtol=exercise.rtol, atol=exercise.atol, equal_nan=True)
    if not off.any():
        return None
    at = tuple(off.nonzero()[0].tolist())
    place = f" at {at}; {off.sum()} of {off.numel()} entries differ" if at else ""
    return f"{where}expected {w[at].item():.6g}, got {g[at].item():.6g}{place}"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else _kind(value)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _plain(value: Any) -> Any:
    """A copy that later changes do not reach; tuples become lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value  # a number of numpy's


def _gradients(result: Any, leaves: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Gradients of the sum of all that was returned; zeros where there is none."""
    flat = [leaf for tensors in leaves.values() for leaf in tensors]
    total = sum(tensor.sum() for tensor in _tensors(result) if tensor.requires_grad)
    if isinstance(total, Tensor):
        gradients = torch.autograd.grad(total, flat, allow_unused=True)
    else:
        gradients = [None] * len(flat)
    in_order = iter(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(flat, gradients))
    return {f"gradient of {name}": [next(in_order) for _ in tensors] for name, tensors in leaves.items()}


# --- What an answer runs in ---


class _NotDone(Exception):
    pass


class _TimeUp(BaseException):
    """It is no `Exception`, so that it also ends an answer that catches those."""


class _Largest(TorchDispatchMode):
    """Remembers the shape of the largest tensor that is made within it."""

    def __init__(self):
        super().__init__()
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.numel() > (math.prod(self.shape) if self.shape else 0):
                self.shape = tuple(tensor.shape)
        return result


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_TimeUp` in code that runs for longer. There is no limit where the system has no such signal
    (Windows), nor outside of the main thread."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_):
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
