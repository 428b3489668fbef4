"""The command line: `python -m atlib train` trains by a recipe, `resume` goes on, `evaluate`, `pretrain` and
`teacher` are about what it makes and takes, `look` shows where a model looks."""

import argparse
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from atlib import __version__
from atlib._util import INTERRUPTED, out_of_memory

# Where each command is, which is imported only when it is called, and its line of help.
COMMANDS = {
    "train": ("atrun.commands", "train a student by a recipe; also under accelerate launch and torchrun"),
    "transfer": ("atrun.one_call", "a small student of a teacher on photographs, by one or more methods"),
    "pretrain": ("atrun.commands", "make a teacher of images alone: by masking, or by contrast"),
    "resume": ("atrun.commands", "go on with a run that was stopped, from its newest good checkpoint"),
    "evaluate": ("atrun.measure", "accuracy of what a run has made, on any data"),
    "predict": ("atrun.predict", "classes of image files, with their probabilities, as CSV or JSON"),
    "export": ("atrun.export", "what a run has made, as a folder that timm reads or an ONNX file"),
    "compare": ("atrun.compare", "two runs on the same images: difference, interval, McNemar's test"),
    "controls": ("atrun.controls", "does a student follow its teacher's maps, or read them? a table"),
    "plot": ("atrun.plot", "losses and accuracies of runs as curves"),
    "teacher": ("atrun.teacher_command", "what a teacher is, and what of it can be transferred"),
    "look": ("atrun.looking.commands", "a page of where every token of a model looks on a picture"),
}

EXTRAS = {"pycocotools": "'attention-transfer[detection]'"}  # what brings a package


def main(arguments: list[str] | None = None) -> int:
    """Run a command of `python -m atlib`; returns what `dispatch` does."""
    return dispatch("atlib", __doc__, COMMANDS, arguments)


def dispatch(package: str, description: str, commands: Mapping, arguments: list[str] | None = None) -> int:
    """Run the command of a package that the arguments (None: those of this process) ask for.

    commands: {name: (the module that has `add_arguments(parser, name)`, which sets what is called as `run`,
    its line of help)}. Returns what that does, 2 for a wrong request, 1 for a training that failed, 75 for
    one that was stopped, 130 for one that was interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    program = f"python -m {package}"
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, (module, help_line) in commands.items():
        command = subparsers.add_parser(
            name, help=help_line, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if arguments[:1] == [name]:
            import_module(module).add_arguments(command, name)
    request, rest = parser.parse_known_args(arguments)
    if rest and not getattr(request, "takes_settings", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    request.settings = rest
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _as_sentence(program, warnings.showwarning)
            return request.run(request)
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        code, text = _explained(error)
        if text is None:
            raise
        print(f"{program}: {text}", file=sys.stderr)
        return code


def _explained(error: Exception) -> tuple[int, str | None]:
    """How a command ends on an error, and what is said of it; None where it is a fault of ours."""
    # imported here: `--help` needs none of it, and torch takes seconds
    from atlib.attention import Unwalkable
    from atlib.train import NonFiniteLoss
    from atlib.vit import WeightsUnavailable
    from atrun.data.decoding import CorruptImage

    if isinstance(error, CorruptImage):
        return 2, f"{error} (--on-corrupt skip leaves such images out)"
    if isinstance(error, (ValueError, OSError, WeightsUnavailable, Unwalkable)):
        return 2, str(error)
    if isinstance(error, ModuleNotFoundError):  # of an extra
        package = (error.name or "").partition(".")[0]
        return 2, f"{error}: pip install {EXTRAS.get(package, package)}" if package else str(error)
    if out_of_memory(error):
        ways = "--accumulate 4, --checkpoint_activations true or a smaller --batch_size needs less"
        return 1, f"out of memory ({error!r:.200}); in training, {ways}"
    return 1, str(error) if isinstance(error, NonFiniteLoss) else None


def _as_sentence(program: str, plain):
    """What shows a warning: ours as a sentence, those of other packages as Python does it."""
    folders = [Path(__file__).parents[1] / package for package in ("atlib", "atfamily", "atrun", "atbook")]

    def show(message, category, filename, lineno, file=None, line=None):
        if any(Path(filename).is_relative_to(folder) for folder in folders):
            print(f"{program}: {message}", file=sys.stderr)
        else:
            plain(message, category, filename, lineno, file, line)

    return show


if __name__ == "__main__":
    sys.exit(main())
