"""Any teacher: a timm model by name, or a file of weights as others publish them."""

import os
import re
from pathlib import Path
from typing import Any

from atlib.compatibility import sizes_of
from atlib.pair import Normalisation, attach
from atlib.vit import Architecture, WeightsUnavailable, check_activation, create_vit
from atrun.teachers import build
from atrun.teachers.build import Teacher
from atrun.teachers.description import described
from atrun.teachers.files import normalisation_beside, read_weights
from atrun.teachers.names import config_says, dinov3, find_encoder, infer_architecture, read_folder

# A name that ends like this is meant as a file, also when there is none.
SUFFIXES = (".pth", ".pt", ".tar", ".bin", ".ckpt", ".safetensors", ".zip", ".pkl")


def load_teacher(
    name_or_path: str | Path,
    *,
    image_size: int | None = None,
    heads: int | None = None,
    architecture: str | None = None,
    normalisation: Normalisation | None = None,
    quiet: bool = False,
) -> Teacher:
    """Read a pre-trained ViT, ready to teach images of `image_size` pixels a side (None: its own size).

    A timm name is downloaded, or read from where `atlib.vit.weights_file` says. A path is a file of
    `atlib.checkpoint.save_vit`, safetensors or a `.pth` with timm's names (as MAE, DINO, DINOv2, DeiT and
    DeiT III have them), torchvision's or Meta's DINOv3, and, with `architecture`, a timm name, whatever else
    timm converts, such as CLIP; or a folder of timm's `save_for_hf`, of transformers' `save_pretrained`, or
    of a hub's cache. No code in a file is run. heads: where their number cannot be known.

    The teacher says how images are normalised for it (`atlib.pair.Normalisation.of`): as `normalisation`, a
    file's header, a JSON file beside it, timm, or the code that writes such files says, in this order. One
    line is printed that tells it, unless `quiet`.
    """
    teacher = _read(name_or_path, image_size, heads, architecture)
    if normalisation is not None:
        attach(teacher.vit, normalisation)
        teacher = teacher._replace(normalised="as was said")
    if bad := build.not_finite(teacher.vit):
        raise ValueError(f"{teacher.name}: NaN or infinity in {', '.join(bad[:5])}: take another checkpoint")
    sizes_of(teacher.vit)
    if not quiet and int(os.environ.get("RANK", 0)) == 0:
        says = f"teacher {teacher.name}: {teacher.view()}"
        if teacher.normalisation is None:
            says += "; normalisation= says another"
        if teacher.guessed:
            says += f"; {teacher.guessed}: weights do not show it, heads= says another"
        print(says)
    return teacher


def report(name_or_path: str | Path, **options: Any) -> str:
    """What there is to know of a teacher, as text, also where it cannot teach. options: image_size, heads and
    architecture, as `load_teacher` has them, whose other errors it raises."""
    lines = described(_read(name_or_path, **options))
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items())


def is_file(name_or_path: str | Path) -> bool:
    """Whether a teacher is meant by its path: there is such a file, or it could not be a timm name."""
    path = Path(name_or_path)
    return isinstance(name_or_path, Path) or path.exists() or path.suffix in SUFFIXES or len(path.parts) > 1


def _read(
    name_or_path: str | Path,
    image_size: int | None = None,
    heads: int | None = None,
    architecture: str | None = None,
) -> Teacher:
    if heads is not None and architecture is not None:
        raise ValueError(f"heads={heads} and architecture={architecture!r}, which says it: leave heads= out")
    name = str(name_or_path)
    hub = re.sub("^hf[-_]hub:", "", name)
    looks_so = isinstance(name_or_path, str) and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", hub)
    # a file that is missing in a folder that is there is a path, and so is what ends like a file
    if hub != name or looks_so and not Path(name).parent.exists() and Path(name).suffix not in SUFFIXES:
        fetch = f"`hf download {hub} config.json model.safetensors --local-dir {hub}`, and name that folder"
        raise WeightsUnavailable(f"{name!r} is no file here: {fetch}")
    if is_file(name_or_path):
        path = weights_in(Path(name_or_path))
        folder = path if path.is_dir() else path.parent
        if config_says(folder, "model_type") and (path == folder or path.name.startswith("model")):
            native, encoder, assumed = read_folder(folder)
            return build.filled(folder, native, encoder, image_size, normalisation_beside(folder), assumed)
        return _from_file(path, image_size, heads, architecture)
    if heads is not None or architecture is not None:
        raise ValueError(f"{name!r} is no file here, and heads= and architecture= are for files")
    return _from_timm(name, image_size)


def weights_in(path: Path) -> Path:
    """The file of weights that a path means: itself, or the only one of a folder; a folder of transformers as
    it is; of the top folder in a hub's cache, models--OWNER--NAME, the branch `main`, or the only one."""
    if (main := path / "refs" / "main").is_file():
        path = path / "snapshots" / main.read_text().strip()
    elif (path / "snapshots").is_dir() and len(only := [*(path / "snapshots").iterdir()]) == 1:
        path = only[0]
    if not path.is_dir() or config_says(path, "model_type"):
        return path
    named = [path / name for name in build.OF_TIMM if (path / name).is_file()]
    files = named or [file for file in path.iterdir() if file.suffix in SUFFIXES]
    if named or len(files) == 1:
        return files[0]
    raise OSError(f"{path} holds {len(files)} files of weights, and no model.safetensors: name one")


def _from_timm(name: str, image_size: int | None) -> Teacher:
    named = Architecture(name)
    grid = build.grid_of(named)  # what is no ViT is refused before it is downloaded
    build.check_image_size(named, image_size)
    # With its head: without one, timm would not notice that weights are missing.
    vit = create_vit(name, pretrained=True, **({} if image_size is None else {"img_size": image_size}))
    before = set(vit.state_dict())
    vit.reset_classifier(0)
    state = vit.state_dict()
    return Teacher(
        vit.eval(),
        name,
        build.headless(named, image_size),
        "timm's published weights",
        used=len(state),
        unused=sorted(before - set(state)),
        resized=build.resizing(grid, vit.patch_embed.grid_size) if vit.pos_embed is not None else None,
        normalised="as timm says of it",
    )


def _from_file(path: Path, image_size: int | None, heads: int | None, architecture: str | None) -> Teacher:
    if architecture is not None:
        check_activation(architecture)
    weights = read_weights(path)
    if "needs_teacher" in weights.header:
        raise ValueError(f"{path} is a bundle, no teacher: save_vit writes the ViT that shall teach")
    try:
        native, assumed, guessed = None, [], ""
        if architecture is not None:
            native = Architecture(architecture)
        elif heads is None:
            native = build.architecture_in_file(weights, path) or dinov3(weights.tensors)
        encoder = find_encoder(weights) if native is None else build.encoder_for(weights, native)
        if native is None:
            native, assumed = infer_architecture(encoder, heads)
            guessed = assumed[0] if heads is None else ""
        normalisation = build.normalisation_of(architecture, weights, encoder, path)
        teacher = build.filled(path, native, encoder, image_size, normalisation, assumed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    inside = f", in its entry {weights.container!r}" if weights.container else ""
    beside = f" (beside {', '.join(weights.beside)})" if weights.beside else ""
    of_ours = "written by atlib.checkpoint.save_vit" if "architecture" in weights.header else None
    return teacher._replace(source=of_ours or teacher.source + inside + beside, guessed=guessed)
