"""Any teacher: a timm model by name, or a file of weights as others publish them."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from timm.models.beit import Beit
from timm.models.eva import Eva, checkpoint_filter_fn
from torch import Tensor

from atlib.compatibility import sizes_of
from atlib.pair import Normalisation, attach
from atlib.vit import Architecture, WeightsUnavailable, check_activation, create_vit
from atrun.teachers.build import (
    Teacher,
    architecture_beside,
    architecture_said,
    by_timms_names,
    check_image_size,
    fill,
    grid_of,
    headless,
    normalisation_of,
    not_finite,
    on_meta,
    told,
    weights_of_timm,
)
from atrun.teachers.files import Weights, normalisation_beside, read_weights
from atrun.teachers.folders import is_pretrained_folder, read_folder
from atrun.teachers.layouts import Encoder, Layout, dinov3, find_encoder, infer_architecture

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

    A timm name (MAE, DINO, DINOv2, DINOv3, CLIP, SigLIP, AugReg, DeiT ...) is downloaded, or read from where
    `atlib.vit.weights_file` says. A path is a file of `atlib.checkpoint.save_vit`, safetensors or a `.pth`
    with timm's names, a folder of timm's `save_for_hf` or of transformers' `save_pretrained` (with the extra
    `transformers`), or a checkpoint of torchvision, DINOv3, MAE (with its decoder or without), MoCo-v3, DINO,
    DINOv2, DeiT, DeiT III or CLIP. No code in a file
    is run. The architecture is read off the weights, or timm's `config.json` beside them; `heads` where their
    number cannot be known, `architecture`, a timm name, where more cannot.

    The teacher says how images are normalised for it (`atlib.pair.Normalisation.of`): as `normalisation`, a
    file's header, a `preprocessor_config.json` or timm's `config.json` beside it, timm, or the code that
    writes such files says, in this order. One line is printed that tells size, mean and standard deviation,
    unless `quiet`.

    Raises `OSError` for a file that cannot be read or is of another kind, `ValueError` for weights that are
    no whole ViT, do not fit, are not finite, or leave something open, `Unwalkable` for a model that `walk`
    refuses, and `WeightsUnavailable` without a network.
    """
    teacher = _read(name_or_path, image_size, heads, architecture)
    if normalisation is not None:
        attach(teacher.vit, normalisation)
        teacher = teacher._replace(normalised="as was said")
    if bad := not_finite(teacher.vit):
        count = f"{len(bad)} of its weights are NaN or infinite"
        raise ValueError(f"{teacher.name}: {count}, first {bad[0]}. Take another checkpoint")
    sizes_of(teacher.vit)
    if not quiet and int(os.environ.get("RANK", 0)) == 0:
        guessed = f"; {teacher.guessed}: weights do not show it, heads= says another"
        print(f"teacher {teacher.name}: {teacher.view()}{guessed if teacher.guessed else ''}")
    return teacher


def report(
    name_or_path: str | Path,
    images: Sequence[str | Path] | Tensor | None = None,
    out: str | Path | None = None,
    *,
    image_size: int | None = None,
    heads: int | None = None,
    architecture: str | None = None,
) -> str:
    """What there is to know of a teacher before it teaches, as text; with `images`, a picture of its maps is
    written to the file `out`.

    images: image files, or pixels (n, 3, height, width), uint8; they are resized, cropped and normalised as
    the teacher's evaluation does it. The picture has a row for each: the image, and where the class token
    looks in the first, the middle and the last layer, mean over heads (without a class token: the mean of all
    queries). Other arguments and errors are those of `load_teacher`, but weights that are not finite and
    layers that cannot be walked are reported, without a picture, and not refused. `ValueError` for an `out`
    that cannot be a picture.
    """
    # imported here: code that only loads a teacher draws nothing
    from atrun.teachers.description import described, picture, picture_file

    if (images is None) != (out is None):
        raise ValueError("images= and out= belong together: images to look at, and the file for the picture")
    out = None if out is None else picture_file(out)
    teacher = _read(name_or_path, image_size, heads, architecture)
    lines = described(teacher)
    # What cannot be walked or computed has no maps.
    if images is not None and "components" in lines and "not finite" not in lines:
        out.parent.mkdir(parents=True, exist_ok=True)
        picture(teacher.vit, images).savefig(out)
        lines["picture"] = str(out)
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items())


def is_file(name_or_path: str | Path) -> bool:
    """Whether a teacher is meant by its path: there is such a file, or it could not be a timm name."""
    path = Path(name_or_path)
    return isinstance(name_or_path, Path) or path.exists() or path.suffix in SUFFIXES or len(path.parts) > 1


def _read(
    name_or_path: str | Path, image_size: int | None, heads: int | None, architecture: str | None
) -> Teacher:
    if heads is not None and architecture is not None:
        raise ValueError(f"heads={heads} and architecture={architecture!r}, which says it: leave heads= out")
    if (hub := _on_a_hub(name_or_path)) is not None:
        raise WeightsUnavailable(
            f"{name_or_path!r} names a model of a hub, and nothing is downloaded from there by itself. Fetch"
            " its config.json and model.safetensors into a folder, and give that folder: with"
            f" huggingface_hub, `hf download {hub} config.json model.safetensors --local-dir {hub}`. Many"
            " such models have a name in timm, which is downloaded: timm.list_pretrained() lists them"
        )
    name_or_path = _snapshot(name_or_path)
    if is_pretrained_folder(Path(name_or_path)):
        return _from_folder(Path(name_or_path), image_size)
    if (of_timm := weights_of_timm(Path(name_or_path))) is not None:
        return _from_file(of_timm, image_size, heads, architecture)
    if is_file(name_or_path):
        return _from_file(Path(name_or_path), image_size, heads, architecture)
    if heads is not None or architecture is not None:
        raise ValueError(
            f"{name_or_path!r} is a model's name, which says everything: heads= and architecture= are for"
            " files. Is there no file of that name?"
        )
    return _from_timm(name_or_path, image_size)


def _snapshot(name_or_path: str | Path) -> str | Path:
    """The folder of files that the branch `main` means in a hub's cache, models--OWNER--NAME; anything else
    as it is."""
    main = Path(name_or_path) / "refs" / "main"
    return Path(name_or_path) / "snapshots" / main.read_text().strip() if main.is_file() else name_or_path


def _on_a_hub(name_or_path: str | Path) -> str | None:
    """The repository that a hub's name means, such as facebook/dinov2-base; None for a path or timm name."""
    said = str(name_or_path)
    repository = said.removeprefix("hf-hub:").removeprefix("hf_hub:")
    if repository != said:
        return repository
    looks_so = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", said) and isinstance(name_or_path, str)
    path = Path(said)
    # a file that is missing in a folder that is there is a path, and so is what ends like a file
    return said if looks_so and not path.parent.exists() and path.suffix not in SUFFIXES else None


def _from_folder(path: Path, image_size: int | None) -> Teacher:
    folder = read_folder(path)
    encoder = Encoder(
        Layout(f"transformers' {folder.kind}, a folder of save_pretrained", ""),
        folder.state,
        {name: (name,) for name in folder.state},
        [],
    )
    vit, missing, resized = fill(folder.architecture, encoder, image_size)
    said, by_whom = normalisation_beside(path)
    attach(vit, said)
    taken = folder.state.keys() & vit.state_dict().keys()
    return Teacher(
        vit.eval(),
        str(path),
        headless(folder.architecture, image_size),
        encoder.layout.name,
        used=len(taken),
        unused=sorted(folder.state.keys() - taken),
        resized=resized,
        missing=missing,
        assumed=folder.assumed,
        normalised=by_whom,
    )


def _from_timm(name: str, image_size: int | None) -> Teacher:
    named = Architecture(name)
    own = grid_of(named)
    check_image_size(named, image_size)
    # With its head: without one, timm would not notice that weights are missing.
    vit = create_vit(name, pretrained=True, **({} if image_size is None else {"img_size": image_size}))
    before = set(vit.state_dict())
    vit.reset_classifier(0)
    state = vit.state_dict()
    return Teacher(
        vit.eval(),
        name,
        headless(named, image_size),
        "timm's published weights",
        used=len(state),
        unused=sorted(before - set(state)),
        resized=told(own, vit.patch_embed.grid_size) if vit.pos_embed is not None else None,
        normalised="as timm says of it",
    )


def _from_file(path: Path, image_size: int | None, heads: int | None, architecture: str | None) -> Teacher:
    if architecture is not None:
        check_activation(architecture)
    weights = read_weights(path)
    if "needs_teacher" in weights.header:
        raise ValueError(
            f"{path} is a bundle of a student, perhaps with its teacher, written by save_bundle: read it with"
            " atlib.checkpoint.load_bundle, and save the one that shall teach with save_vit (on the command"
            " line: name the teacher's own file, or the student of a run of distill)"
        )
    try:
        native, assumed, guessed = architecture_said(weights, architecture, heads), [], ""
        beside = architecture_beside(path) if native is None and heads is None else None
        native = native or beside
        if (name := dinov3(weights.tensors)) is not None:
            native = Architecture(name) if native is None else native
            encoder = _of_dinov3(weights.tensors, native)
        else:
            encoder = None if beside is None else by_timms_names(weights.tensors, beside)
            named = None if native is None else on_meta(native)
            if isinstance(named, Beit):
                encoder = by_timms_names(weights.tensors, native)
            is_eva = isinstance(named, Eva)
            encoder = encoder or find_encoder(weights.tensors, eva=is_eva)
        if native is None:
            native, assumed = infer_architecture(encoder, heads)
            guessed = assumed[0] if heads is None else ""
        vit, missing, resized = fill(native, encoder, image_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    said, by_whom = normalisation_of(architecture, weights, encoder.layout.normalisation, path)
    attach(vit, said)
    taken = encoder.names.keys() & vit.state_dict().keys()
    left = [each for name, each in encoder.names.items() if name not in taken]
    return Teacher(
        vit.eval(),
        str(path),
        headless(native, image_size),
        _source(weights, encoder),
        used=sum(len(encoder.names[name]) for name in taken),
        unused=[*encoder.unused, *chain.from_iterable(left)],
        resized=resized,
        missing=missing,
        assumed=assumed,
        normalised=by_whom,
        guessed=guessed,
    )


def _of_dinov3(tensors: Mapping[str, Tensor], native: Architecture) -> Encoder:
    """The ViT in Meta's checkpoint, by timm's own conversion."""
    with contextlib.redirect_stdout(None):  # it prints which biases it leaves out
        state = checkpoint_filter_fn(dict(tensors), on_meta(headless(native, None)))
    return Encoder(Layout("DINOv3, Meta's own", ""), state, {name: (name,) for name in state}, [])


def _source(weights: Weights, encoder: Encoder) -> str:
    if "architecture" in weights.header:
        return "written by atlib.checkpoint.save_vit"
    inside = f", in its entry {weights.container!r}" if weights.container else ""
    beside = f" (beside {', '.join(weights.beside)})" if weights.beside else ""
    return encoder.layout.name + inside + beside
