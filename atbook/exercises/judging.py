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

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atlib._util import require_known

LIMIT = 30  # seconds that an answer may take for one case


def told(*answers: Callable) -> dict[str, Callable]:
    """Wrong answers under their docstrings, which say to the student what is wrong."""
    return {" ".join((answer.__doc__ or "").split()): answer for answer in answers}


@dataclass(frozen=True)
class Exercise:
    """One exercise of a chapter, or a variant of an assignment's task."""

    #: "6.1" is the first of chapter 6, "A1.2b" variant b of the second task of A1.
    number: str
    #: A right answer, with which others are compared.
    right: Callable
    #: {name: a function without arguments, which makes new arguments for each answer}.
    cases: dict[str, Callable[[], tuple]]
    #: {what is said to the student: a planted wrong answer}.
    wrong: dict[str, Callable]
    #: Right answers that are written differently.
    also_right: tuple[Callable, ...] = ()
    #: A word or two, for the page of all exercises.
    subject: str = ""
    #: The heading of the chapter under which a student finds help.
    see: str = ""
    #: The names of arguments (tensors, or lists of them) whose gradients are part of the answer.
    grads: tuple[str, ...] = ()
    #: Whether these arguments are maps, and their gradients are compared by the scores that they are made of.
    by_scores: bool = False
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
    #: What is said of the planted wrong answer that was recognised, or "not done".
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
    """The files of exercises: of chapters (ch01), pages of depth (d1), how-tos (h1) and cards (f1)."""
    here = Path(__file__).parent
    kinds = ("ch[0-9][0-9]", "d[0-9]", "h[0-9]", "f[0-9]", "f[0-9][0-9]")
    return [path.stem for kind in kinds for path in sorted(here.glob(f"{kind}.py"))]


def _exercises_of(page: str) -> list[Exercise]:
    return import_module(f"atbook.exercises.{page}").EXERCISES


def check(number: str, answer: Callable) -> None:
    """Print what is right or wrong with an answer; never raises."""
    _say(find, number, answer)


def checker(exercises: Sequence[Exercise]) -> Callable[[str, Callable], None]:
    """`check` for exercises that are in no chapter, such as those of a graded assignment."""
    by_number = {exercise.number: exercise for exercise in exercises}

    def find_among_these(number: str) -> Exercise:
        require_known("exercise", number, by_number)
        return by_number[number]

    return partial(_say, find_among_these)


def _say(find: Callable[[str], Exercise], number: str, answer: Callable) -> None:
    try:
        exercise = find(number)
    except ValueError as error:
        print(error)
    else:
        print(judge(exercise, answer))


# Answers are tried in the precision of the chapters first, and then in the one in which mistakes show best.
PRECISIONS = (torch.float32, torch.float64)


def judge(exercise: Exercise, answer: Callable) -> Verdict:
    """Compare an answer with the right one in all cases.

    It is right where it is so in single precision or in double. An answer that differs is compared with every
    planted wrong answer, and the first that does the same in all cases says what is wrong. If none does, the
    verdict says how the result is related to the right one, or names the first difference.
    """
    if not callable(answer):
        kind = type(answer).__name__
        says = f"not yet: expected a function, got a {kind}. Give the function itself, not what it returns."
        return Verdict(exercise.number, False, says)
    trials = []
    for dtype in PRECISIONS:
        try:
            trial = _tried(exercise, answer, dtype)
        except _NotDone as unfinished:
            return Verdict(exercise.number, False, str(unfinished), "not done")
        except _CheckFailed as failed:
            if dtype is PRECISIONS[-1]:
                return Verdict(exercise.number, False, str(failed), "the check")
            continue  # some exercises are about numbers that need double precision
        if not trial.failures:
            says = f"right, in {len(trial.got)} case{'s' * (len(trial.got) > 1)} ({', '.join(trial.got)})."
            return Verdict(exercise.number, True, says)
        trials.append(trial)
    for trial in reversed(trials):
        for mistake, wrong in exercise.wrong.items():
            if all(
                _alike(exercise, outcome(exercise, wrong, name, trial.dtype), got)
                for name, got in trial.got.items()
            ):
                see = f" See: {exercise.see}." if exercise.see else ""
                return Verdict(exercise.number, False, f"not yet. {mistake}{see}", mistake)
    for trial in reversed(trials):
        if relation := _related(exercise, trial):
            return Verdict(exercise.number, False, f"not yet: {relation}")
    trial = trials[-1] if "dtype" in str(trials[0].failures) else trials[0]
    name, first = next(iter(trial.failures.items()))
    right = len(trial.got) - len(trial.failures)
    says = f"not yet: in case '{name}' {first}. ({right} of {len(trial.got)} cases are right.)"
    return Verdict(exercise.number, False, says)


class _Trial(NamedTuple):
    """An answer in all cases, in one precision."""

    # The precision of the arguments.
    dtype: torch.dtype
    # {case: what the right answer made of it}.
    want: dict[str, Outcome]
    # {case: what the answer made of it}.
    got: dict[str, Outcome]
    # {case: what is wrong}; none where the answer is right.
    failures: dict[str, str]


def _tried(exercise: Exercise, answer: Callable, dtype: torch.dtype) -> _Trial:
    """Try an answer in all cases. Raises `_NotDone` for a starter, and `_CheckFailed` where the right answer
    itself fails."""
    want, got, failures = {}, {}, {}
    for name in exercise.cases:
        got[name] = outcome(exercise, answer, name, dtype)
        want[name] = outcome(exercise, exercise.right, name, dtype)
        if want[name].error is not None:
            raise _CheckFailed(
                f"this check itself failed in case '{name}' (it {want[name].error}). That is no mistake of"
                " yours: please report it."
            )
        if failure := _failure(exercise, want[name], got[name]):
            failures[name] = failure
    return _Trial(dtype, want, got, failures)


def outcome(exercise: Exercise, answer: Callable, case: str, dtype: torch.dtype = torch.float64) -> Outcome:
    """Run an answer on a case, with new arguments in a precision and a fixed seed. What it prints is not
    shown."""
    arguments = tuple(_in_precision(argument, dtype) for argument in exercise.cases[case]())
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
            value = ({} if exercise.gradients_only else {"value": value}) | _gradients(
                result, leaves, exercise.by_scores
            )
    except (Exception, SystemExit) as error:
        return Outcome(error=f"raised {type(error).__name__}: {error}")
    return Outcome(value, None, largest.shape, changed)


def _in_precision(value: Any, dtype: torch.dtype) -> Any:
    """An argument with its numbers of double precision in another one."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype == torch.float64 else value
    if isinstance(value, nn.Module):
        return value.to(dtype)
    if isinstance(value, dict):
        return {key: _in_precision(part, dtype) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_in_precision(part, dtype) for part in value)
    return value


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
        if isinstance(got, Tensor) and got.ndim:
            got = list(got)  # side by side in a tensor is as good
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
    g = _numbers(got)
    if g is None:
        return f"{where}expected {_kind(want)}, got {_kind(got)}"
    w = torch.as_tensor(want, dtype=torch.float64)
    if w.ndim == 0 and g.numel() == 1:
        g = g.reshape(())  # one number is one number
    if w.shape != g.shape:
        return f"{where}expected the shape {tuple(w.shape)}, got {tuple(g.shape)}"
    if not g.isfinite().all() and w.isfinite().all():
        return f"{where}{(~g.isfinite()).sum()} of {g.numel()} numbers are nan or infinite"
    off = ~torch.isclose(g, w, rtol=exercise.rtol, atol=exercise.atol, equal_nan=True)
    if not off.any():
        return None
    at = tuple(off.nonzero()[0].tolist())
    apart = (g - w).abs().nan_to_num(math.inf).max().item()
    place = (
        f" at {at}; {off.sum()} of {off.numel()} entries differ, the largest difference is {apart:.3g}"
        if at
        else ""
    )
    return f"{where}expected {w[at].item():.6g}, got {g[at].item():.6g}{place}"


def _numbers(value: Any) -> Tensor | None:
    """What was returned, as a tensor in double precision; None where it is none: a list will do."""
    if isinstance(value, bool):
        return None
    if isinstance(value, list):
        parts = [_numbers(part) for part in value]
        shapes = {None if part is None else part.shape for part in parts}
        return torch.stack(parts) if len(shapes) == 1 and None not in shapes else None
    if isinstance(value, (int, float)) or isinstance(value, Tensor) and not value.is_complex():
        return torch.as_tensor(value, dtype=torch.float64)
    return None


# --- How a wrong result is related to the right one ---

LN2 = math.log(2)
FACTORS = {
    -1.0: "the sign is turned round",
    100.0: "it is 100 times too large: a share is asked for, from 0 to 1, and no per cent",
    0.01: "it is a hundredth of the right one: per cent are asked for, from 0 to 100",
    1 / LN2: "it is 1 / ln 2 = 1.44 times too large: the logarithm is the natural one, and not log2",
    LN2: "it is ln 2 = 0.69 times the right one: a natural logarithm is taken for one to the base 2",
    2.0: "it is twice the right one",
    0.5: "it is half of the right one",
}


def _related(exercise: Exercise, trial: _Trial) -> str | None:
    """What is wrong in all cases in the same way: a factor, axes that are exchanged, rows that do not sum to
    1; None where nothing of this is so."""
    if any(got.error is not None or got.changed for got in trial.got.values()):
        return None
    pairs = {name: _leaves(trial.want[name].value, got.value) for name, got in trial.got.items()}
    if not all(pairs.values()):
        return None
    alike = partial(torch.allclose, rtol=1e-3, atol=10 * exercise.atol)
    everything = [pair for of_case in pairs.values() for pair in of_case]
    if all(w.ndim > 1 and g.ndim > 1 and g.mT.shape == w.shape and alike(g.mT, w) for w, g in everything):
        return "your result is transposed: its last two axes are exchanged."
    if any(w.shape != g.shape for w, g in everything):
        return None
    factors = {name: _factor(of_case, alike) for name, of_case in pairs.items()}
    if None not in factors.values():
        for factor, says in FACTORS.items():
            if all(math.isclose(ratio, factor, rel_tol=1e-3) for ratio in factors.values()):
                return f"your result is right but for a factor: {says}."
        return _size(exercise, factors)
    if all(_are_rows(w) and not _are_rows(g) for w, g in everything):
        sums = torch.cat([g.sum(-1).flatten() for _, g in everything])
        farthest = sums[(sums - 1).abs().argmax()].item()
        if 1e-3 < abs(farthest - 1) < math.inf:
            return f"the rows of your result do not sum to 1; one sums to {farthest:.4g}."
    return None


def _leaves(want: Any, got: Any) -> list[tuple[Tensor, Tensor]] | None:
    """Pairs of tensors of two results of the same build; None where they differ in it."""
    if isinstance(want, dict):
        parts = (
            [_leaves(want[key], got[key]) for key in want]
            if isinstance(got, dict) and want.keys() == got.keys()
            else [None]
        )
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        parts = [_leaves(w, g) for w, g in zip(want, got)]
    else:
        w, g = _numbers(want), _numbers(got)
        return None if w is None or g is None else [(w, g)]
    return None if any(part is None for part in parts) else [pair for part in parts for pair in part]


def _factor(pairs: Sequence[tuple[Tensor, Tensor]], alike: Callable[[Tensor, Tensor], bool]) -> float | None:
    """The one number by which results are too large; None where there is none."""
    w, g = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    if not w.isfinite().all() or not g.isfinite().all() or not w.abs().sum() > 0:
        return None
    factor = ((w * g).sum() / (w * w).sum()).item()
    return factor if factor and alike(g / factor, w) else None


def _size(exercise: Exercise, factors: dict[str, float]) -> str | None:
    """Where in every case the factor is the size of the same axis of the same argument: which that is."""
    names = list(inspect.signature(exercise.right).parameters)
    sizes: dict[tuple[str, int], list[float]] = {}
    for case, factor in factors.items():
        for name, argument in zip(names, exercise.cases[case]()):
            tensors = [] if isinstance(argument, nn.Module) else _tensors(argument)
            for axis, size in enumerate(tensors[0].shape if tensors else ()):
                sizes.setdefault((name, axis), []).append(factor / size if factor > 1 else factor * size)
    for (name, axis), shares in sizes.items():
        if len(shares) == len(factors) and all(math.isclose(share, 1, rel_tol=1e-3) for share in shares):
            times = next(iter(factors.values()))
            how = (
                f"it is {times:.4g} times too large: a sum where a mean is asked for"
                if times > 1
                else f"it is 1/{1 / times:.4g} of the right one: a mean where a sum is asked for"
            )
            return f"your result is right but for a factor, the size of axis {axis} of `{name}`: {how}."
    return None


def _are_rows(value: Tensor) -> bool:
    """Whether a tensor's rows are shares."""
    return (
        value.ndim > 1 and bool((value >= 0).all()) and torch.allclose(value.sum(-1), torch.ones(()).double())
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a complex tensor" if value.is_complex() else "a tensor"
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
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def _gradients(
    result: Any, leaves: dict[str, list[Tensor]], by_scores: bool = False
) -> dict[str, list[Tensor]]:
    """Gradients of the sum of all that was returned; zeros where there is none. by_scores: whether leaves are
    maps, and the gradients are those by the scores before their softmax."""
    flat = [leaf for tensors in leaves.values() for leaf in tensors]
    total = sum(tensor.sum() for tensor in _tensors(result) if tensor.requires_grad)
    if isinstance(total, Tensor):
        learning = [leaf for leaf in flat if leaf.requires_grad]  # an answer may freeze a teacher
        made = iter(torch.autograd.grad(total, learning, allow_unused=True) if learning else ())
        gradients = [next(made) if leaf.requires_grad else None for leaf in flat]
    else:
        gradients = [None] * len(flat)
    if by_scores:
        gradients = [
            grad if grad is None else (leaf * (grad - (leaf * grad).sum(-1, keepdim=True))).detach()
            for leaf, grad in zip(flat, gradients)
        ]
    in_order = iter(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(flat, gradients))
    return {f"gradient of {name}": [next(in_order) for _ in tensors] for name, tensors in leaves.items()}


# --- What an answer runs in ---


class _NotDone(Exception):
    pass


class _CheckFailed(Exception):
    """The right answer, or what it is tried on, failed."""


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
