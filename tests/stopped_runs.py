"""Runs of `python -m atlib train` that are killed and taken up again: `main`.

torch takes seconds to import, so one process imports it and forks the runs; nothing is computed before the
fork. What each command printed is in FOLDER/NAME.txt.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from atbook.worlds import glyphs
from atrun import __main__ as command
from atrun import runner
from atrun.configure import configure

# three steps a pass, the last of four images
SMALL = {"steps": 5, "batch_size": 8, "data_size": 20, "save_every": 2}
HELD_OUT = {"validation": 30, "test": 40}
SCRATCH = {"drop_path": 0.2, "model.depth": 2}  # the second layer is dropped at times


@pytest.fixture(autouse=True, scope="module")
def few_held_out():
    """A module that imports this evaluates runs on few images of the built-in world."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glyphs, "SIZES", glyphs.SIZES | HELD_OUT)
        yield


def sets(**values) -> list[str]:
    return [text for name, value in (SMALL | values).items() for text in (f"--{name}", str(value))]


def asked(recipe: str, out: Path, *more: str, **values) -> list[str]:
    """The command that trains a small run on the built-in world."""
    words = f"train --recipe {recipe} --data atbook.worlds:marked_glyphs --out".split()
    return [*words, str(out), *more, *sets(**values)]


def in_a_child(text: Path, arguments: list[str], step: int = 0, what=None) -> int:
    """Run a command in a process of its own, with `what` at that step; how it ended (-9: killed)."""
    number = os.fork()
    if number:
        return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    code = 70
    try:
        with open(text, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if what is not None:
            at_step(step, what, pytest.MonkeyPatch())
        code = command.main(arguments)
    finally:
        sys.stdout.flush()
        os._exit(code)


def at_step(step: int, what, patch) -> None:
    """Raise `what` or be sent that signal as soon as that step is logged."""
    plain = runner.RunLog.__call__

    def call(self, entry):
        plain(self, entry)
        if entry["step"] == step and entry["event"] == "step":
            if isinstance(what, BaseException):
                raise what
            os.kill(os.getpid(), what)

    patch.setattr(runner.RunLog, "__call__", call)


def main(folder: Path) -> dict[str, list[int]]:
    """How each command ended, in order."""
    glyphs.SIZES |= HELD_OUT
    configure("find-scratch", "atbook.worlds:marked_glyphs")  # what torch imports for it, the forks have then
    ended: dict[str, list[int]] = {}

    def do(name: str, arguments: list[str], step: int = 0, what=None) -> None:
        ended.setdefault(name, []).append(in_a_child(folder / f"{name}.txt", arguments, step, what))

    do("whole", asked("find-scratch", folder / "whole", **SCRATCH))
    for step in (1, 4, 5):
        out = folder / f"killed-{step}"
        do(out.name, asked("find-scratch", out, **SCRATCH), step, signal.SIGKILL)
        if step == 4:  # with a config that was changed it is refused
            good = (out / "config.json").read_text()
            (out / "config.json").write_text(json.dumps(json.loads(good) | {"drop_path": 0.1}))
            do(out.name, ["resume", str(out)])
            (out / "config.json").write_text(good)
        do(out.name, ["resume", str(out)])
    return ended
