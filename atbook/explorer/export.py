"""Write the weights of the built-in worlds' models as a classic script, for the explorer's JavaScript.

A page that is opened from a folder may neither fetch a file nor import a module, but it may run a script, so
the weights are text in one. Each is rounded to one of 4,095 levels of its tensor, -2047 to 2047 times a
scale, and is two characters long: a third less than half floats in base64, with which the models of both
worlds would take 7.5 MB.
"""

import json
import string
from collections.abc import Collection
from pathlib import Path

import numpy as np
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from atbook.lab.study import Place, Sources, scale_of, untrained_maps
from atbook.lab.verdicts import accuracies
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import HUES, SHAPES, generate
from atlib._util import write_atomically
from atlib.checkpoint import load_vit

# {model: whose maps it was trained with}: its own, or those of another model.
STUDENTS = {
    "scratch": "own",
    "copy": "teacher",
    "distill": "own",
    "fine-tune": "own",
    "copy-untrained": "untrained",
}
WORLDS = ("find", "match")
DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"  # base64's, in its order
LEVELS = len(DIGITS) ** 2 // 2 - 1  # on either side of zero


def write_weights(path: Path, results: Path, seed: int = 0, students: Collection[str] = STUDENTS) -> Path:
    """Write a script that sets `ExplorerWeights`: models by world and name, and how pixels are prepared.

    results: the folder of records, whose `transfer/WORLD/NAME-seedSEED.safetensors` are read. A student
    that is not there is left out; the teachers of both worlds must be. `untrained` is the teacher of
    "copy-untrained", as the lab draws it for this seed. Every model is an object of `maps` (whose maps it
    was trained with: "own", "teacher" or "untrained"), `heads` (the number of heads) and `tensors`:
    timm's names, in its order, to {shape, scale, text}; a student's has `recorded` too, its method's mean
    accuracy over the recorded seeds. students: those of `STUDENTS` that are wanted. Returns the path.
    Raises `OSError` naming a file of weights that cannot be read.
    """
    content = as_content({world: _models(_sources(results, world, seed), students) for world in WORLDS})
    if "copy-untrained" in students:  # one teacher serves both worlds, because it has seen neither
        content["untrained"] = as_model(untrained_maps(_sources(results, WORLDS[0], seed)).teacher, "own")
    script = f"globalThis.ExplorerWeights = {json.dumps(content, separators=(',', ':'))};\n"
    return write_atomically(path, script.encode())


def as_content(worlds: dict[str, dict[str, dict]]) -> dict:
    """The data of the scripts: {world: {name: what `as_model` makes}}, with the names of shapes and hues, and
    how pixels are prepared."""
    images = glyph_images(generate("test", 1))
    pixels = {"mean": images.mean, "std": images.std}
    return {"shapes": list(SHAPES), "hues": list(HUES), "pixels": pixels, "worlds": worlds}


def as_model(vit: VisionTransformer, maps: str) -> dict:
    """A ViT as the scripts read it. maps: whose maps it was trained with, "own", "teacher" or "untrained"."""
    tensors = {name: as_text(value.cpu()) for name, value in vit.state_dict().items()}
    return {"maps": maps, "heads": vit.blocks[0].attn.num_heads, "tensors": tensors}


def as_text(tensor: Tensor) -> dict:
    """A tensor of any shape as {shape, scale, text}: two characters a value, the first the higher digit of
    its level plus 2048. Raises `ValueError` for values that are not finite."""
    values = tensor.detach().double().numpy()
    if not np.isfinite(values).all():
        raise ValueError("weights that are not finite cannot be written")
    largest = np.abs(values).max(initial=0.0)
    scale = float(np.float32(largest / LEVELS)) or 1.0
    level = np.rint(values / scale).astype(int).clip(-LEVELS, LEVELS).flatten() + LEVELS + 1
    digits = np.frombuffer(DIGITS.encode(), dtype=np.uint8)
    text = digits[np.stack([level // len(DIGITS), level % len(DIGITS)], axis=1)].tobytes().decode()
    return {"shape": list(tensor.shape), "scale": scale, "text": text}


def _sources(results: Path, world: str, seed: int) -> Sources:
    place = Place(world, None, results, results / "transfer" / world)
    return Sources(place, scale_of(place), seed)


def _models(sources: Sources, students: Collection[str]) -> dict[str, dict]:
    models = {"teacher": as_model(sources.teacher(), "own")}
    recorded = accuracies("transfer", sources.place.scale, results=sources.place.results)
    for name, maps in STUDENTS.items():
        weights = sources.place.work / f"{name}-seed{sources.seed}.safetensors"
        if name in students and weights.exists():
            models[name] = as_model(load_vit(weights), maps) | {"recorded": recorded[name].mean}
    return models
