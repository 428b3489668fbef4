"""From the weights of a teacher's file to the ViT that they are of."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.checkpoint import count, normalisation_said
from atlib.maps import Grid
from atlib.pair import Normalisation, image_size_of
from atlib.vit import Architecture, check_activation
from atrun.teachers.files import Weights, normalisation_beside
from atrun.teachers.layouts import Encoder, Layout, prefix_and_grid

OF_TIMM = ("model.safetensors", "pytorch_model.bin")  # as timm's `save_for_hf` calls a file of weights
AFTER_THE_BLOCKS = ("norm.", "fc_norm.", "attn_pool.")  # no attention map depends on these


class Teacher(NamedTuple):
    """A ViT that can teach, and how it was read. vit: in eval mode, without a class head; it says how images
    are normalised for it, where that is known (`atlib.pair.Normalisation.of`); name: the timm name or path;
    architecture: what builds `vit`; source: what kind of file; used: how many of the file's tensors are in
    `vit`; unused: the names of the others; resized: how positions were fitted to the image size, None where
    they were not; missing: weights of `vit` that the file lacks and no map needs, left as initialised;
    assumed: what weights do not show and was taken for granted; normalised: what says how its images are
    normalised, "" where nothing does; guessed: what decides maps and was guessed from its weights' sizes,
    "3 heads, usual at width 192", "" where nothing was.
    """

    vit: VisionTransformer | Eva
    name: str
    architecture: Architecture
    source: str
    used: int
    unused: Sequence[str]
    resized: str | None = None
    missing: Sequence[str] = ()
    assumed: Sequence[str] = ()
    normalised: str = ""
    guessed: str = ""

    @property
    def normalisation(self) -> Normalisation | None:
        """How images are normalised for it; None where that is not known."""
        return Normalisation.of(self.vit)

    def view(self) -> str:
        """What it sees, in a few words: size, mean and standard deviation of its images."""
        size = image_size_of(self.vit)
        at = "images of any size" if size is None else f"images of {size[0]} x {size[1]} px"
        if self.normalisation is None:
            return (
                f"{at}; it is not known how they were normalised, so it sees the student's as they are:"
                " normalisation=Normalisation(mean, std) says it"
            )
        return f"{at}, {self.normalisation} ({self.normalised})"


def normalisation_of(
    architecture: str | None, weights: Weights, layout: Normalisation | None, path: Path
) -> tuple[Normalisation | None, str]:
    """How images are normalised for a file's ViT, and what says so: its header, a JSON file beside it, the
    tag of the timm name that was given, or the code whose layout it has; (None, "") where nothing does."""
    tagged = architecture is not None and "." in architecture
    of_tag = Normalisation.of(on_meta(Architecture(architecture))) if tagged else None
    answers = (
        (normalisation_said(weights.header), "its file says so"),
        (*normalisation_beside(path),),
        (of_tag, f"as timm says of {architecture}"),
        (layout, "as the code that writes such files does"),
    )
    return next(((found, says) for found, says in answers if found is not None), (None, ""))


def architecture_said(weights: Weights, architecture: str | None, heads: int | None) -> Architecture | None:
    """The architecture that was named, or that atlib wrote into the file; None where neither says one."""
    if architecture is not None:
        return Architecture(architecture)
    if heads is not None or "architecture" not in weights.header:
        return None
    try:
        native = Architecture.read(weights.header["architecture"])
        native.require_numbers(count(weights.tensors))
        on_meta(native)
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError, ArithmeticError) as error:
        raise ValueError(f"its header names an architecture that cannot be built ({error})") from error
    return native


def architecture_beside(path: Path) -> Architecture | None:
    """The architecture that timm's `save_for_hf` wrote into a `config.json` beside its file of weights: name
    and arguments, such as heads and activation, which weights do not show; None without one, and for a file
    of another name.

    Raises `ValueError` for one that cannot be built, and for weights that were trained with QuickGELU where
    its model has the exact GELU.
    """
    file, said = path.parent / "config.json", _config_in(path.parent)
    name = said.get("architecture")
    if path.name not in OF_TIMM or not isinstance(name, str) or not timm.is_model(name):
        return None
    trained = said.get("pretrained_cfg")
    trained = trained if isinstance(trained, dict) else {}
    try:
        arguments = dict(said.get("model_args") or {})
        if trained.get("fixed_input_size") and "img_size" not in arguments:  # as timm takes it from there
            arguments["img_size"] = trained["input_size"][1:]
        native = Architecture.read({"name": name, "overrides": arguments})
        on_meta(native)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{file} names an architecture that cannot be built ({error})") from error
    try:
        check_activation(f"{name}.{trained.get('tag')}", arguments)
    except ValueError as error:
        raise ValueError(
            f"{file}: {error}, by its name as architecture=; for weights that were trained further with the"
            f" exact GELU, architecture={name!r}"
        ) from error
    return native


def by_timms_names(tensors: Mapping[str, Tensor], native: Architecture) -> Encoder | None:
    """The ViT among a file's tensors where their names are those of timm's model now, as `save_for_hf` writes
    them; None where the model needs others, such as those that published checkpoints have."""
    own = on_meta(headless(native, None)).state_dict().keys()
    if any(name not in tensors for name in own if not name.startswith(AFTER_THE_BLOCKS)):
        return None
    state = {name: value for name, value in tensors.items() if name in own}
    unused = [name for name in tensors if name not in own]
    return Encoder(Layout("timm's names", ""), state, {name: (name,) for name in state}, unused)


def weights_of_timm(folder: Path) -> Path | None:
    """The file of weights in a folder that timm's `save_for_hf` wrote, safetensors before a pickle, which is
    read with `weights_only=True`; None for another folder. Raises `OSError` for one without weights."""
    if not isinstance(_config_in(folder).get("architecture"), str):
        return None
    for name in OF_TIMM:
        if (folder / name).is_file():
            return folder / name
    raise OSError(f"{folder} has timm's config.json and no model.safetensors beside it: put it there")


def _config_in(folder: Path) -> dict[str, Any]:
    """What a `config.json` in a folder says; nothing without one, or where it is no JSON, which
    `normalisation_beside` tells of."""
    file = folder / "config.json"
    try:
        said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def headless(native: Architecture, image_size: int | None) -> Architecture:
    """The architecture without a class head, for images of `image_size` pixels (None: of its own size)."""
    sized = {} if image_size is None else {"img_size": image_size}
    return Architecture(native.name, {**native.overrides, "num_classes": 0, **sized})


def fill(
    native: Architecture, encoder: Encoder, image_size: int | None
) -> tuple[VisionTransformer | Eva, list[str], str | None]:
    """The ViT with the encoder's weights in it, positions resized; the names it misses; and how positions
    were resized (None: not at all).

    Only what comes after the blocks may be missing or left over. Raises `ValueError`, naming weights, for
    anything else that does not fit.
    """
    check_image_size(native, image_size)
    vit = on_meta(headless(native, image_size))  # weights are made once it is known that all fits
    own, state, resized = vit.state_dict(), dict(encoder.state), None
    if "pos_embed" in state and "pos_embed" in own:
        prefix = 0 if getattr(vit, "no_embed_class", False) else vit.num_prefix_tokens
        grid_from, grid_to = grid_of(native), tuple(vit.patch_embed.grid_size)
        # A named architecture may be of another size than the file.
        if state["pos_embed"].shape[1] != prefix + grid_from[0] * grid_from[1]:
            prefix_there, grid_from = prefix_and_grid(state)
            if prefix_there != prefix:
                positions = f"the weights have positions for {prefix_there} prefix tokens"
                raise ValueError(f"{positions}, and this architecture for {prefix}")
        if told(grid_from, grid_to) is not None:
            state["pos_embed"] = resized_positions(state["pos_embed"], prefix, grid_from, grid_to)
        resized = told(grid_from, grid_to)
    wrong = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(value.shape)}"
        for name, value in own.items()
        if name in state and state[name].shape != value.shape
    ]
    missing = [name for name in own if name not in state]
    left = [name for name in state if name not in own]
    wrong += [f"{name} is missing" for name in missing if not name.startswith(AFTER_THE_BLOCKS)]
    for name in left:
        if not name.startswith(AFTER_THE_BLOCKS):
            wrong.append(f"there is no place for {encoder.names[name][0]}")
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        what = "this architecture" if isinstance(native.name, str) else "a ViT that timm builds"
        raise ValueError(
            f"the weights ({encoder.layout.name}) do not fit {what}: {'; '.join(wrong[:4])}{more}. Name"
            " another with architecture="
        )
    vit = headless(native, image_size).build()
    vit.load_state_dict(state, strict=False)
    return vit, missing, resized


def resized_positions(positions: Tensor, prefix: int, grid_from: Grid, grid_to: Grid) -> Tensor:
    """Positions (1, prefix + patches, D) for another grid.

    As timm does it, with antialiasing, so that a file and a timm name give the same teacher at every image
    size (MAE's published code does not antialias), but by the grids: timm 1.0.20 goes by the number of
    patches and leaves 2 x 8 as they are where 4 x 4 are asked for (timm#2737). Bicubic as in DeiT (arXiv
    2012.12877, section 3), because bilinear interpolation shrinks the embeddings' norm.
    """
    grid = positions[:, prefix:].float().unflatten(1, grid_from).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, grid_to, mode="bicubic", antialias=True)
    patches = grid.flatten(2).mT.to(positions.dtype)
    return torch.cat([positions[:, :prefix], patches], 1)


def on_meta(architecture: Architecture) -> VisionTransformer | Eva:
    """The model that an architecture describes, without its weights (with them in older versions of timm)."""
    try:
        with torch.device("meta"):
            return architecture.build()
    except RuntimeError:
        return architecture.build()


def grid_of(architecture: Architecture) -> Grid:
    """Patches down and across of an architecture, without making its weights."""
    return tuple(on_meta(architecture).patch_embed.grid_size)


def check_image_size(architecture: Architecture, image_size: int | None) -> None:
    """Raise `ValueError` unless images of that size are whole patches."""
    if image_size is None:
        return
    down, across = on_meta(architecture).patch_embed.patch_size
    if image_size < 1 or image_size % down or image_size % across:
        raise ValueError(
            f"image_size={image_size}: images of this teacher are whole patches of {down} x {across} pixels,"
            f" such as {down * max(1, round(image_size / down))}"
        )


def told(grid_from: Grid, grid_to: Grid) -> str | None:
    """How positions came from one grid to another, in words; None where the grids are the same."""
    if tuple(grid_from) == tuple(grid_to):
        return None
    before, after = (f"{down} x {across}" for down, across in (grid_from, grid_to))
    return f"positions resized bicubically from {before} to {after} patches"


def not_finite(vit: VisionTransformer | Eva) -> list[str]:
    """The names of weights with NaN or infinity in them."""
    weights = vit.state_dict().items()
    return [name for name, value in weights if value.is_floating_point() and not value.isfinite().all()]
