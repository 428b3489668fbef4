"""The command `look`: a page, a picture or arrays of where models look on photographs."""

import argparse
from pathlib import Path

from torch import nn

from atlib.checkpoint import read_header
from atlib.pair import student_of
from atlib.vit import create_classifier
from atrun.config import is_run
from atrun.data.folders import picture_types
from atrun.looking.file_preparation import preparation_in
from atrun.looking.page import check_ending, look
from atrun.looking.preparation import Preparation, open_picture, preparation_of
from atrun.runner import load_result, weights_of
from atrun.teachers.load import is_file, load_teacher


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    given = (
        "models and pictures, in any order, one or several of each: a timm name (its published weights are"
        " taken), a file of weights, a run's folder, local-dir:FOLDER, and picture files"
    )
    parser.add_argument("given", nargs="+", metavar="MODEL|IMAGE", help=given)
    out = "the page, a .html; a .png or .svg; a .safetensors of all numbers (default: look-IMAGE.html)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    parser.add_argument("--size", type=int, metavar="PIXELS", help="a side (default: the model's own)")
    default = "(default: as the model's configuration or its file says, else ImageNet's)"
    for name in ("mean", "std"):
        says = f"of the three channels, of pixels in 0..1 {default}"
        parser.add_argument(f"--{name}", type=float, nargs=3, metavar=("R", "G", "B"), help=says)
    crop = "the picture is resized to size / CROP and its middle is taken; 1 keeps most of it"
    parser.add_argument("--crop", type=float, dest="crop_pct", metavar="CROP", help=crop)
    squash = {"action": "store_const", "const": "squash", "dest": "crop_mode"}
    parser.add_argument("--squash", **squash, help="squeeze all of the picture into the size")
    for name in ("layers", "only-heads"):
        says = f"which {name.removeprefix('only-')} the page keeps (default: all)"
        parser.add_argument(f"--{name}", type=int, nargs="+", metavar="NUMBER", help=says)
    room = "how large the rows may be (default: 10); what does not fit is kept as means over patches"
    parser.add_argument("--megabytes", type=float, default=10, help=room)
    parser.add_argument("--heads", type=int, help="of a file whose weights do not tell")
    parser.add_argument("--architecture", metavar="NAME", help="likewise, a timm name")
    parser.set_defaults(run=look_command)


def look_command(arguments: argparse.Namespace) -> int:
    pictures = [one for one in arguments.given if Path(one).suffix.lower() in picture_types()]
    models = [one for one in arguments.given if one not in pictures]
    if not pictures or not models:
        raise ValueError(f"{' '.join(arguments.given)}: name at least one model and one picture file")
    out = arguments.out or Path(f"look-{Path(pictures[0]).stem}.html")
    check_ending(out)
    names = [Path(name).stem if is_file(name) else name for name in models]
    if len(set(names)) < len(names):
        names = models
    if len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)}: the same model twice; name two")
    opened = {name: open_picture(name) for name in pictures}  # before weights are read
    vits, preparations = zip(*(_loaded(name, arguments) for name in models))
    options = {"layers": arguments.layers, "heads": arguments.only_heads, "megabytes": arguments.megabytes}
    shown = look(dict(zip(names, vits)), opened, preparation=dict(zip(names, preparations)), **options)
    path = shown.save(out)
    print(*shown.notes, f"{path}: {path.stat().st_size / 1e6:.1f} MB, needs no network", sep="\n")
    return 0


def _loaded(name: str, arguments: argparse.Namespace) -> tuple[nn.Module, Preparation]:
    """A model and how pictures are prepared for it."""
    path = Path(name.removeprefix("local-dir:"))
    if is_run(path):
        path = weights_of(path)
    header = read_header(path) if path.suffix == ".safetensors" and is_file(path) else {}
    read = {"image_size": arguments.size, "heads": arguments.heads, "architecture": arguments.architecture}
    whole = {"needs_teacher", "stored_maps"} & header.keys()
    if whole or "architecture" in header and not any(read.values()):
        model = load_result(path)  # with its head: the gradient is of its answer
    elif path.exists() or is_file(name):
        teacher = load_teacher(str(path), **read, quiet=True)
        if teacher.guessed:
            print(f"{name}: {teacher.guessed}: weights do not show it, --heads says another")
        model = teacher.vit
    else:
        size = {} if arguments.size is None else {"img_size": arguments.size}
        model = create_classifier(name, pretrained=True, **size)
    preparation = preparation_in(path, model)[0] if header else preparation_of(student_of(model))
    asked = {name: getattr(arguments, name) for name in ("mean", "std", "crop_pct", "crop_mode")}
    if asked := {name: value for name, value in asked.items() if value is not None}:
        asked["source"] = f"{', '.join(asked)} as asked, the rest as the model has it"
    if arguments.size is not None:
        asked["size"] = (arguments.size, arguments.size)
    return model, preparation._replace(**asked)
