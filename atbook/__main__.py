"""The book's command line: `experiments` lists its experiments, `experiment NAME` repeats one, `claims`
judges what its sentences say, `teacher` makes a teacher of a generated world, `exercises NOTEBOOK` lists
what its checks say, `hand-in NOTEBOOK` makes the file that an assignment asks for."""

import sys

from atrun.__main__ import dispatch

# The module of each command, which is imported only when the command is called, and its line of help.
COMMANDS = {
    "experiments": (
        "atbook.lab.commands",
        "list the experiments: what they show, their cost, which records are committed",
    ),
    "experiment": ("atbook.lab.commands", "repeat an experiment of the book and write its records"),
    "claims": ("atbook.lab.commands", "what the committed records say of every claim of the book"),
    "teacher": ("atbook.lab.commands", "pre-train a teacher of a generated world"),
    "exercises": (
        "atbook.exercises.commands",
        "run a notebook and list what the checks of its exercises say",
    ),
    "hand-in": (
        "atbook.exercises.hand_in",
        "say what the grader of an assignment would refuse, and make the file that is handed in",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command of `python -m atbook`, and return its exit status."""
    return dispatch("atbook", __doc__, COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main())
