"""The command line: `python -m atlib train` trains by a recipe, `resume` goes on, `evaluate`, `pretrain` and
`teacher` are about what it makes and takes; `experiments` lists the book's experiments, `experiment NAME`
repeats one."""

import argparse
import sys
import warnings
from importlib import import_module
from pathlib import Path

from atlib._util import memory_message, out_of_memory
from atlib.data.decoding import CorruptImage
from atlib.vit import WeightsUnavailable
from atlib.walking import Unwalkable

INTERRUPTED = 130  # as a shell says it of a command that Ctrl-C has ended
# Where each command is, which is imported only when it is called, and its line of help.
COMMANDS = {
    "experiments": (
        "atlib.lab.commands",
        "list the experiments of the book: what they show, their cost, which records are committed",
    ),
    "experiment": ("atlib.lab.commands", "repeat an experiment of the book and write its records"),
    "train": (
        "atlib.run.commands",
        "train a student by a recipe, in a folder of its own; also under accelerate launch and torchrun",
    ),
    "pretrain": (
        "atlib.run.commands",
        "make a teacher: retrieval on the built-in world, masked auto-encoding on any images",
    ),
    "resume": ("atlib.run.commands", "go on with a run that was stopped, from its newest good checkpoint"),
    "evaluate": ("atlib.run.commands", "accuracy of what a run has made, on any data"),
    "teacher": ("atlib.run.commands", "what a teacher is, and what of it can be transferred"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0, 2 after printing what was wrong with the request, 1 for a training that
    failed, 75 for one that was stopped, 130 for one that was interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m atlib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, says) in COMMANDS.items():
        command = commands.add_parser(
            name, help=says, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if arguments[:1] == [name]:
            import_module(module).add_arguments(command, name)
    given, given_too = parser.parse_known_args(arguments)
    if given_too and not getattr(given, "takes_settings", False):
        parser.error(f"unrecognized arguments: {' '.join(given_too)}")
    given.settings = given_too
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _as_sentence(warnings.showwarning)
            return given.run(given)
    except (ValueError, OSError, WeightsUnavailable, Unwalkable) as error:
        print(f"python -m atlib: {error}{_hint(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m atlib: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        print(f"python -m atlib: {memory_message(error)}", file=sys.stderr)
        return 1


def _hint(error: Exception) -> str:
    """How what an error names is set on the command line; nothing where it names no argument."""
    if isinstance(error, CorruptImage):
        return " (--on_corrupt skip leaves such images out; `python -m atlib resume DIR --on-corrupt skip`)"
    options = {
        "path": "--data_path FOLDER",
        "count": "--data_size NUMBER",
        "split": "--training_split NAME and --evaluation_split NAME",
        "image_column": "--image_column NAME",
        "label_column": "--label_column NAME",
    }
    option = options.get(getattr(error, "argument", ""))
    return f" ({option})" if option else ""


def _as_sentence(plain):
    """What shows a warning: ours as a sentence, those of other packages as Python does it."""

    def show(message, category, filename, lineno, file=None, line=None):
        if Path(filename).is_relative_to(Path(__file__).parent):
            print(f"python -m atlib: {message}", file=sys.stderr)
        else:
            plain(message, category, filename, lineno, file, line)

    return show


if __name__ == "__main__":
    sys.exit(main())
