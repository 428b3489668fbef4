"""Every exercise: its answers pass, and every planted mistake is told by its own name."""

from functools import cache

import pytest
import torch

from atbook.exercises import every, judge, judging
from atbook.exercises.judging import outcome
from tools.course import assignments, checks_of

ASSIGNED = {name: checks_of(name) for name in assignments()}
EXERCISES = [*every(), *(exercise for tasks in ASSIGNED.values() for exercise in tasks)]


def off_by_one_percent(value):
    """All numbers of an answer, a hundredth larger."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return 1.01 * value
    if isinstance(value, float):
        return 1.01 * value
    if isinstance(value, dict):
        return {key: off_by_one_percent(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [off_by_one_percent(part) for part in value]
    return value


def holds_floats(value) -> bool:
    if isinstance(value, dict):
        return any(holds_floats(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return any(holds_floats(part) for part in value)
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.number)
def test_right_answers_pass_and_every_mistake_has_its_own_message(exercise, monkeypatch):
    """A value off by one percent is wrong, and no known mistake."""
    run = cache(lambda answer, case, dtype: outcome(exercise, answer, case, dtype))  # each answer once
    monkeypatch.setattr(judging, "outcome", lambda exercise, *what: run(*what))
    assert len(exercise.wrong) >= 3 and exercise.cases  # a second right answer is the notebook's solution
    for answer in (exercise.right, *exercise.also_right):
        verdict = judge(exercise, answer)
        assert verdict.passed, verdict
    for mistake, answer in exercise.wrong.items():
        verdict = judge(exercise, answer)
        assert not verdict.passed and verdict.mistake == mistake, f"{mistake}: {verdict}"
        assert mistake and mistake in verdict.says
    given = []

    def answer(*arguments):
        given.append(exercise.right(*arguments))
        return off_by_one_percent(given[-1])

    verdict = judge(exercise, answer)
    if any(map(holds_floats, given)):
        assert not verdict.passed and verdict.mistake is None, verdict
