"""`python -m atlib export`: what a run has made, as others read it: a folder of timm, or an ONNX file."""

import argparse
import contextlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from atlib._util import write_atomically
from atlib.checkpoint import read_header, save_vit
from atlib.objectives import outputs
from atlib.pair import Normalisation, Pair, attach, student_of
from atlib.vit import PRESETS, Architecture
from atrun.classes import class_names
from atrun.config import built_for, is_run
from atrun.looking.file_preparation import preparation_in
from atrun.runner import load_result, weights_of

TOLERANCE = 1e-4  # of outputs by another engine, which sums in another order, relative to the largest


class Exportable(NamedTuple):
    """A trained model with what others need to use it.

    model: a ViT, or a pair that needs its teacher or its stored maps, in eval mode; classes: their names, in
    the order of its outputs, None where they are unknown; preparation: of an image, as timm's data config
    has it; prepared: the same as a run's file says it.
    """

    model: nn.Module
    architecture: Architecture
    classes: tuple[str, ...] | None
    preparation: Mapping[str, Any]
    prepared: Mapping[str, Any]


def open_to_export(path: Path, normalisation: Normalisation | None = None) -> Exportable:
    """The model in a file that a run has left; normalisation: of its images, where the file says none."""
    header = read_header(path)
    if "detector" in header:
        raise ValueError(f"{path} holds a detector: export {path.with_name('student.safetensors')}, its ViT")
    described = header.get("architecture") or header.get("student")
    if described is None:
        raise OSError(f"{path} does not say its architecture: read it by load_teacher, write it by save_vit")
    model, architecture = load_result(path), Architecture.read(described)
    classes, count = None, student_of(model).num_classes
    if count and (header.get("classes") or is_run(path.parent)):
        classes = class_names(path) or None
    if classes is not None and len(classes) != count:
        raise ValueError(f"{path} has {count} outputs and {len(classes)} names of classes")
    prepared = {"augmentation": header["augmentation"]} if "augmentation" in header else {}
    return Exportable(model, architecture, classes, _preparation(path, model, normalisation), prepared)


def write_timm_folder(model: Exportable, folder: Path) -> Path:
    """Write a new folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` reads: config.json and
    model.safetensors, which is also a file of atlib's own. Nothing is left where timm reads it as another
    model: `ValueError`, as for a pair."""
    if isinstance(model.model, Pair):
        raise ValueError("this student needs maps for every image: export it to .onnx, or train by distill")
    name, arguments = _timm_call(model.architecture, model.model)
    distilled = isinstance(model.model, VisionTransformerDistilled)
    about = {
        "architecture": name,
        "num_classes": model.model.num_classes,
        "num_features": model.model.num_features,
        "global_pool": model.model.global_pool,
        **({"label_names": list(model.classes)} if model.classes else {}),
        "model_args": arguments,
        "pretrained_cfg": {
            **model.preparation,
            "fixed_input_size": True,
            "num_classes": model.model.num_classes,
            "pool_size": None,
            "first_conv": "stem.proj" if hasattr(model.model, "stem") else "patch_embed.proj",
            "classifier": ["head", "head_dist"] if distilled else "head",
        },
    }
    header = dict(model.prepared) | ({"classes": list(model.classes)} if model.classes else {})
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        save_vit(temporary / "model.safetensors", model.model, model.architecture, header)
        write_atomically(temporary / "config.json", (json.dumps(about, indent=2) + "\n").encode())
        _check_read_by_timm(temporary, model.model)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def write_onnx(model: Exportable, path: Path) -> Path:
    """Write an ONNX file: images (batch, 3, height, width), float32, normalised, to logits (batch, classes),
    or to features where there is no class head, for any batch; a pair has its teacher, or its stored maps, in
    it. Metadata, as JSON: "classes" and "preparation" (timm's data config). Nothing is written where onnx's
    reference evaluator computes something else. Raises `ImportError` without the extra `onnx`."""
    from onnx.reference import ReferenceEvaluator

    plain, height, width = _Logits(model.model), *model.preparation["input_size"][1:]
    output = "logits" if student_of(model.model).num_classes else "features"
    # torch advises on its own inner workings, which no code here can change
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        names = {"input_names": ["images"], "output_names": [output], "dynamic_shapes": ({0: "batch"},)}
        traced_with = (torch.zeros(2, 3, height, width),)
        program = torch.onnx.export(plain, traced_with, dynamo=True, verbose=False, **names)
    written = program.model_proto
    facts = {"classes": list(model.classes)} if model.classes else {}
    for name, value in (facts | {"preparation": model.preparation}).items():
        entry = written.metadata_props.add()
        entry.key, entry.value = name, json.dumps(value)
    # another number than it was traced with
    images = torch.randn(3, 3, height, width, generator=torch.Generator().manual_seed(0))
    (onnx_output,) = ReferenceEvaluator(written).run(None, {"images": images.numpy()})
    _require_same(plain, images, torch.from_numpy(onnx_output), TOLERANCE, "ONNX")
    return write_atomically(path, written.SerializeToString())


class _Logits(nn.Sequential):
    """A model as a function of images to one tensor."""

    def forward(self, images: Tensor) -> Tensor:
        return outputs(self[0], images).logits


def _preparation(path: Path, model: nn.Module, normalisation: Normalisation | None) -> dict[str, Any]:
    """How images are prepared for a file's model, as it says, or as its run's folder does."""
    preparation, stated = preparation_in(path, model)
    if stated is not None and normalisation not in (None, stated):
        raise ValueError(f"{path} says that its images have {stated}: leave --mean and --std out")
    stated = stated or normalisation
    if stated is None:
        raise ValueError(f"{path} does not say how its images are normalised: --mean and --std say it")
    if built_for(student := student_of(model)) is None:
        raise ValueError(f"{path} holds a {type(student).__name__}, which takes no one image size")
    how = {name: getattr(preparation, name) for name in ("interpolation", "crop_pct", "crop_mode")}
    return {"input_size": [3, *preparation.size], **stated.describe(), **how}


def _timm_call(architecture: Architecture, vit: nn.Module) -> tuple[str, dict[str, Any]]:
    """The name and the arguments with which timm builds a ViT. A preset's, or a plain mapping's, is a name
    whose own sizes are the defaults of the class."""
    name, overrides = architecture.name, dict(architecture.overrides)
    if isinstance(name, str) and name not in PRESETS:
        return name.partition(".")[0], {**overrides, "num_classes": vit.num_classes}
    arguments = {**(PRESETS[name] if isinstance(name, str) else name), **overrides}
    arguments.pop("distilled", None)
    distilled = isinstance(vit, VisionTransformerDistilled)
    return "deit_base_distilled_patch16_224" if distilled else "vit_base_patch16_224", arguments


def _check_read_by_timm(folder: Path, vit: nn.Module) -> None:
    """Raise `ValueError` unless timm reads the folder as the same ViT."""
    read = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    weights, again = vit.state_dict(), read.state_dict()
    if weights.keys() != again.keys() or not all(torch.equal(weights[name], again[name]) for name in weights):
        raise ValueError(f"timm reads other weights than this {type(vit).__name__}'s: export it to .onnx")
    images = torch.randn(3, *read.pretrained_cfg["input_size"], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = read(images)
    _require_same(vit, images, output, 0.0, "timm")


@torch.no_grad()
def _require_same(model: nn.Module, images: Tensor, output: Tensor, tolerance: float, by: str) -> None:
    expected = model(images)
    far = (output - expected).abs().max() / expected.abs().max() if output.shape == expected.shape else None
    if far is None or not far <= tolerance:
        raise ValueError(f"{by} computes other outputs, by {far} of the largest: nothing was written")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("path", type=Path, metavar="RUN|FILE", help="a finished run, or its weights")
    out = "a new folder, which timm.create_model('local-dir:FOLDER', pretrained=True) reads, or an .onnx"
    parser.add_argument("--out", type=Path, metavar="FOLDER|FILE.onnx", required=True, help=out)
    parser.add_argument("--averaged", action="store_true", help="the run's averaged weights")
    for name in ("mean", "std"):
        says = "of the images, where the file does not say it: one number, or three"
        parser.add_argument(f"--{name}", type=float, nargs="+", metavar="X", help=says)
    parser.set_defaults(run=export_command)


def export_command(arguments: argparse.Namespace) -> int:
    out, scales = arguments.out, (arguments.mean, arguments.std)
    numbers = [scale[0] if scale and len(scale) == 1 else scale for scale in scales]
    normalisation = None if numbers == [None, None] else Normalisation(*numbers)  # which refuses one alone
    model = open_to_export(weights_of(arguments.path, arguments.averaged), normalisation)
    if normalisation is not None:
        attach(student_of(model.model), normalisation)  # the written file says it too
    print((write_onnx if out.suffix.lower() == ".onnx" else write_timm_folder)(model, out))
    if model.classes is None:
        print("no names of classes: neither the file nor its run's folder says them")
    return 0
